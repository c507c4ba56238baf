//! The report's charts as inline SVG: no script, no file beside the page. Colours are the page's, which stay apart for colour-blind readers
//! (Okabe and Ito), and every figure of a chart is also in the page's tables.

use std::fmt::Write;

use crate::perf::report::{Cell, Effect, Report as Perf};
use crate::soak::Memory;

const WIDTH: f64 = 860.0;
/// Room for names at the left and figures at the right.
const LEFT: f64 = 210.0;
const RIGHT: f64 = 170.0;
const ROW: f64 = 30.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 34.0;
/// Room for the label of a scale's line.
const LABEL_WIDTH: f64 = 40.0;

struct Svg {
    text: String,
    height: f64,
}

impl Svg {
    fn new(height: f64, title: &str) -> Self {
        let title = escaped(title);
        Self {
            text: format!(
                r#"<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}"><title>{title}</title>"#
            ),
            height,
        }
    }

    fn put(&mut self, element: std::fmt::Arguments<'_>) {
        self.text
            .write_fmt(element)
            .expect("a string takes whatever is written");
    }

    fn label(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let text = escaped(text);
        self.put(format_args!(
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{text}</text>"#
        ));
    }

    fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        self.put(format_args!(
            r#"<line class="{class}" x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}"/>"#,
            from.0, from.1, to.0, to.1
        ));
    }

    fn bar(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64) {
        self.put(format_args!(
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{:.1}" height="{height:.1}" rx="2"/>"#,
            width.max(0.0)
        ));
    }

    fn done(mut self) -> String {
        self.text.push_str("</svg>");
        self.text
    }
}

/// Speed with drafting as a multiple of that without: a point and its interval for each scenario and concurrency.
pub fn ratios(perf: &Perf) -> Option<String> {
    let rows: Vec<(&Cell, f64, f64, f64)> = perf
        .cells
        .iter()
        .filter_map(|cell| Some((cell, cell.ratio?.mean, cell.ratio?.low, cell.ratio?.high)))
        .collect();
    if rows.is_empty() {
        return None;
    }
    // One wild interval must not flatten the others.
    let least = rows.iter().map(|row| row.2).fold(0.9, f64::min).max(0.25);
    let most = rows.iter().map(|row| row.3).fold(1.1, f64::max).min(8.0);
    let (first, last) = (least.ln() - 0.03, most.ln() + 0.03);
    let x = |ratio: f64| {
        let share = (ratio.clamp(least, most).ln() - first) / (last - first);
        LEFT + share * (WIDTH - LEFT - RIGHT)
    };
    let height = TOP + rows.len() as f64 * ROW + BOTTOM;
    let mut svg = Svg::new(height, "Speed with drafting as a multiple of that without");
    let end = height - BOTTOM;
    let mut labelled = f64::NEG_INFINITY;
    for tick in [
        0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0,
    ] {
        if !(least..=most).contains(&tick) {
            continue;
        }
        let class = if tick == 1.0 { "axis" } else { "grid" };
        svg.line(class, (x(tick), TOP - 6.0), (x(tick), end));
        // On a wide scale the labels around 1 would lie over each other.
        let crowded = (x(tick) - x(1.0)).abs() < LABEL_WIDTH || x(tick) - labelled < LABEL_WIDTH;
        if tick == 1.0 || !crowded {
            labelled = x(tick);
            svg.label("soft middle", x(tick), end + 18.0, &format!("{tick}×"));
        }
    }
    for (index, (cell, mean, low, high)) in rows.into_iter().enumerate() {
        let y = TOP + (index as f64 + 0.5) * ROW;
        let class = effect_class(cell.effect);
        svg.label("ink end", LEFT - 14.0, y + 4.0, &name(cell));
        svg.line(&format!("whisker {class}"), (x(low), y), (x(high), y));
        svg.put(format_args!(
            r#"<circle class="dot {class}" cx="{:.1}" cy="{y:.1}" r="5.5"/>"#,
            x(mean)
        ));
        let figure = format!("{mean:.2} ({low:.2} to {high:.2})");
        svg.label("soft", WIDTH - RIGHT + 14.0, y + 4.0, &figure);
    }
    Some(svg.done())
}

/// Tokens per second without and with drafting.
pub fn speeds(perf: &Perf) -> Option<String> {
    let fastest = perf
        .cells
        .iter()
        .flat_map(|cell| [cell.off.tokens_per_second, cell.on.tokens_per_second])
        .fold(0.0, f64::max);
    if fastest <= 0.0 {
        return None;
    }
    let height = TOP + perf.cells.len() as f64 * ROW + BOTTOM;
    let mut svg = Svg::new(height, "Tokens per second without and with drafting");
    let scale = (WIDTH - LEFT - RIGHT) / fastest;
    svg.line("axis", (LEFT, TOP - 6.0), (LEFT, height - BOTTOM));
    for (index, cell) in perf.cells.iter().enumerate() {
        let y = TOP + index as f64 * ROW;
        svg.label("ink end", LEFT - 14.0, y + ROW / 2.0 + 4.0, &name(cell));
        svg.bar(
            "off",
            LEFT,
            y + 4.0,
            cell.off.tokens_per_second * scale,
            10.0,
        );
        svg.bar(
            "on",
            LEFT,
            y + 16.0,
            cell.on.tokens_per_second * scale,
            10.0,
        );
        let figure = format!(
            "{:.1} off, {:.1} on",
            cell.off.tokens_per_second, cell.on.tokens_per_second
        );
        svg.label("soft", WIDTH - RIGHT + 14.0, y + ROW / 2.0 + 4.0, &figure);
    }
    let legend = svg.height - 12.0;
    svg.bar("off", LEFT, legend - 10.0, 12.0, 12.0);
    svg.label("soft", LEFT + 18.0, legend, "without drafting");
    svg.bar("on", LEFT + 150.0, legend - 10.0, 12.0, 12.0);
    svg.label("soft", LEFT + 168.0, legend, "with drafting");
    Some(svg.done())
}

/// Tokens that a target pass with drafted tokens brought, by scenario.
pub fn acceptance<'a>(rows: impl Iterator<Item = (&'a str, Option<f64>)>) -> Option<String> {
    let rows: Vec<(&str, f64)> = rows
        .filter_map(|(scenario, length)| Some((scenario, length?)))
        .collect();
    let longest = rows.iter().map(|row| row.1).fold(0.0, f64::max);
    if longest <= 0.0 {
        return None;
    }
    let height = TOP + rows.len() as f64 * ROW + BOTTOM;
    let mut svg = Svg::new(height, "Acceptance length by scenario");
    let scale = (WIDTH - LEFT - RIGHT) / longest;
    svg.line("axis", (LEFT, TOP - 6.0), (LEFT, height - BOTTOM));
    let one = LEFT + scale;
    svg.line("grid", (one, TOP - 6.0), (one, height - BOTTOM));
    svg.label(
        "soft middle",
        one,
        height - BOTTOM + 18.0,
        "1 without drafting",
    );
    for (index, (scenario, length)) in rows.into_iter().enumerate() {
        let y = TOP + index as f64 * ROW;
        svg.label(
            "ink end",
            LEFT - 14.0,
            y + 20.0,
            &scenario.replace('_', " "),
        );
        svg.bar("on", LEFT, y + 7.0, length * scale, 16.0);
        svg.label(
            "soft",
            WIDTH - RIGHT + 14.0,
            y + 20.0,
            &format!("{length:.2}"),
        );
    }
    Some(svg.done())
}

/// Resident memory over time.
pub fn memory(memory: &Memory) -> Option<String> {
    let last = memory.samples.last()?.at_s.max(1e-9);
    let most = memory
        .samples
        .iter()
        .map(|sample| sample.bytes)
        .fold(0.0, f64::max);
    let mebibytes = |bytes: f64| bytes / f64::from(1 << 20);
    let height = 220.0;
    let (top, bottom) = (TOP, height - BOTTOM);
    let mut svg = Svg::new(height, "Resident memory over the run");
    let x = |at_s: f64| 80.0 + at_s / last * (WIDTH - 100.0);
    let y = |bytes: f64| bottom - bytes / most.max(1.0) * (bottom - top);
    for share in [0.0, 0.5, 1.0] {
        let bytes = most * share;
        let class = if share == 0.0 { "axis" } else { "grid" };
        svg.line(class, (80.0, y(bytes)), (WIDTH - 20.0, y(bytes)));
        svg.label(
            "soft end",
            72.0,
            y(bytes) + 4.0,
            &format!("{:.0} MiB", mebibytes(bytes)),
        );
    }
    let points: Vec<String> = memory
        .samples
        .iter()
        .map(|sample| format!("{:.1},{:.1}", x(sample.at_s), y(sample.bytes)))
        .collect();
    svg.put(format_args!(
        r#"<polyline class="curve" points="{}"/>"#,
        points.join(" ")
    ));
    svg.label(
        "soft middle",
        WIDTH / 2.0,
        height - 10.0,
        &format!("{last:.0} s"),
    );
    Some(svg.done())
}

fn name(cell: &Cell) -> String {
    format!(
        "{}, {} in flight",
        cell.scenario.replace('_', " "),
        cell.concurrency
    )
}

/// The class of an effect, which is also its name in the report.
pub fn effect_class(effect: Effect) -> &'static str {
    match effect {
        Effect::WorthIt => "good",
        Effect::Neutral => "plain",
        Effect::Harmful => "bad",
        Effect::Unclear => "open",
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
