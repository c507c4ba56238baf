//! A benchmark as an SVG picture: one panel for each kind of prompts, bars for drafting off and on at each concurrency.
//!
//! The picture brings its own background, light or dark as the reader's system asks for, and colours that stay apart for colour-blind readers
//! (Okabe and Ito). All panels share one scale.

use std::fmt::Write;

use super::decode::{Cell, Report};

const PANEL_WIDTH: f64 = 290.0;
const PANEL_HEIGHT: f64 = 230.0;
const PANELS_IN_ROW: usize = 3;
const MARGIN: f64 = 24.0;
/// Above the panels: title, what was measured, legend.
const HEAD_HEIGHT: f64 = 86.0;
/// Around the bars of a panel.
const PLOT_LEFT: f64 = 46.0;
const PLOT_TOP: f64 = 44.0;
const PLOT_BOTTOM: f64 = 42.0;
/// Lines of the scale above zero.
const TICKS: usize = 4;

const STYLE: &str = "
    .card { fill: #ffffff; stroke: #c3ccd8; }
    .ink { fill: #1d2733; } .soft { fill: #4a5766; }
    .grid { stroke: #d9dfe7; } .axis { stroke: #5b6b7f; }
    .off { fill: #8c99a8; } .on { fill: #0072b2; }
    .title { font-size: 17px; font-weight: 600; } .heading { font-size: 14px; font-weight: 600; }
    .gain { stroke: #ffffff; stroke-width: 3px; paint-order: stroke; }
    .small { font-size: 12px; } .middle { text-anchor: middle; } .end { text-anchor: end; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; stroke: #3d4754; }
      .gain { stroke: #161b22; }
      .ink { fill: #e6edf3; } .soft { fill: #a5b1bf; }
      .grid { stroke: #2c3540; } .axis { stroke: #8c99a8; }
      .off { fill: #7d8895; } .on { fill: #56b4e9; }
    }
  ";

/// Draws the report.
pub fn draw(report: &Report) -> String {
    let mut kinds: Vec<&str> = Vec::new();
    for cell in &report.cells {
        if !kinds.contains(&cell.kind.as_str()) {
            kinds.push(&cell.kind);
        }
    }
    // One panel alone would be too narrow for the title.
    let columns = kinds.len().clamp(2, PANELS_IN_ROW);
    let rows = kinds.len().div_ceil(PANELS_IN_ROW).max(1);
    let width = 2.0 * MARGIN + columns as f64 * PANEL_WIDTH;
    let height = HEAD_HEIGHT + rows as f64 * PANEL_HEIGHT + MARGIN;
    let fastest = report
        .cells
        .iter()
        .flat_map(|cell| [cell.off.speed(), cell.on.speed()])
        .fold(0.0, f64::max);
    let step = tick_step(fastest);

    let mut svg = String::new();
    let title = format!("{}: decoding with drafting off and on", report.model);
    put(
        &mut svg,
        format_args!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="13" role="img" aria-labelledby="title desc">
  <title id="title">{}</title>
  <desc id="desc">{}</desc>
  <style>{STYLE}</style>
  <rect class="card" x="0.5" y="0.5" width="{}" height="{}" rx="10"/>
"#,
            escaped(&title),
            escaped(&description(report)),
            width - 1.0,
            height - 1.0
        ),
    );
    text(&mut svg, "ink title", MARGIN, 32.0, &title);
    text(&mut svg, "soft small", MARGIN, 52.0, &subtitle(report));
    let mut x = MARGIN;
    for (class, label) in [
        ("off", "drafting off"),
        ("on", "drafting on, with its gain"),
    ] {
        put(
            &mut svg,
            format_args!(
                "  <rect class=\"{class}\" x=\"{x}\" y=\"63\" width=\"12\" height=\"12\" rx=\"2\"/>\n"
            ),
        );
        text(&mut svg, "soft small", x + 18.0, 73.5, label);
        x += 120.0;
    }
    for (index, kind) in kinds.iter().enumerate() {
        let left = MARGIN + (index % PANELS_IN_ROW) as f64 * PANEL_WIDTH;
        let top = HEAD_HEIGHT + (index / PANELS_IN_ROW) as f64 * PANEL_HEIGHT;
        let cells: Vec<&Cell> = report
            .cells
            .iter()
            .filter(|cell| cell.kind == *kind)
            .collect();
        panel(&mut svg, left, top, kind, &cells, step);
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, left: f64, top: f64, kind: &str, cells: &[&Cell], step: f64) {
    let (x0, x1) = (left + PLOT_LEFT, left + PANEL_WIDTH - 8.0);
    let (y0, y1) = (top + PANEL_HEIGHT - PLOT_BOTTOM, top + PLOT_TOP);
    let y = |speed: f64| y0 - (y0 - y1) * speed / (step * TICKS as f64);
    text(svg, "ink heading", x0, top + 20.0, &kind.replace('_', " "));
    text(svg, "soft small", x0, top + 36.0, "tokens per second");
    for tick in 0..=TICKS {
        let speed = step * tick as f64;
        let class = if tick == 0 { "axis" } else { "grid" };
        put(
            svg,
            format_args!(
                "  <line class=\"{class}\" x1=\"{x0}\" y1=\"{0:.1}\" x2=\"{x1}\" y2=\"{0:.1}\"/>\n",
                y(speed)
            ),
        );
        text(
            svg,
            "soft small end",
            x0 - 6.0,
            y(speed) + 4.0,
            &speed.to_string(),
        );
    }
    let slot = (x1 - x0) / cells.len().max(1) as f64;
    let bar = (slot * 0.36).min(26.0);
    for (index, cell) in cells.iter().enumerate() {
        let middle = x0 + slot * (index as f64 + 0.5);
        for (class, speed, x) in [
            ("off", cell.off.speed(), middle - bar - 1.0),
            ("on", cell.on.speed(), middle + 1.0),
        ] {
            put(
                svg,
                format_args!(
                    "  <rect class=\"{class}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{bar:.1}\" height=\"{:.1}\" rx=\"2\"/>\n",
                    y(speed),
                    y0 - y(speed)
                ),
            );
        }
        let above = y(cell.off.speed().max(cell.on.speed())) - 5.0;
        text(
            svg,
            "ink small middle gain",
            middle,
            above,
            &format!("{:.2}×", cell.ratio()),
        );
        text(
            svg,
            "soft small middle",
            middle,
            y0 + 16.0,
            &cell.concurrency.to_string(),
        );
    }
    text(
        svg,
        "soft small middle",
        f64::midpoint(x0, x1),
        y0 + 32.0,
        "requests in flight",
    );
}

/// The distance of the lines of a scale that reaches a little above `fastest`: a number that is easy to count in.
fn tick_step(fastest: f64) -> f64 {
    // The label above the highest bar needs room.
    let least = (fastest * 1.08 / TICKS as f64).max(1e-3);
    let power = 10f64.powf(least.log10().floor());
    let factors = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];
    let factor = factors.into_iter().find(|factor| factor * power >= least);
    factor.unwrap_or(10.0) * power
}

fn subtitle(report: &Report) -> String {
    format!(
        "{}, sha256 {}… · {} · {} processors · {} build · medians of {} rounds",
        report.bundle,
        report
            .bundle_digest
            .get(..12)
            .unwrap_or(&report.bundle_digest),
        report.machine.processor,
        report.machine.processors,
        report.profile,
        report.rounds
    )
}

/// The figures in words, for readers who can't see the bars.
fn description(report: &Report) -> String {
    let cells = report.cells.iter().map(|cell| {
        format!(
            "{} with {} in flight: {:.1} tokens per second off, {:.1} on",
            cell.kind.replace('_', " "),
            cell.concurrency,
            cell.off.speed(),
            cell.on.speed()
        )
    });
    cells.collect::<Vec<_>>().join("; ")
}

fn text(svg: &mut String, class: &str, x: f64, y: f64, content: &str) {
    let content = escaped(content);
    put(
        svg,
        format_args!("  <text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{content}</text>\n"),
    );
}

fn put(svg: &mut String, content: std::fmt::Arguments<'_>) {
    svg.write_fmt(content)
        .expect("a string takes whatever is written");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::decode::report::tests::report;

    #[test]
    fn scales_are_round_and_leave_room_above_the_highest_bar() {
        for (fastest, step) in [
            (0.0, 0.001),
            (9.0, 2.5),
            (36.0, 10.0),
            (92.0, 25.0),
            (93.0, 30.0),
        ] {
            assert_eq!(tick_step(fastest), step, "{fastest}");
        }
    }

    #[test]
    fn a_chart_has_a_panel_for_each_kind_and_two_bars_for_each_concurrency() {
        let mut report = report("model-int8", 64, 0.5);
        let cell = report.cells.remove(0);
        for (kind, gain) in [
            ("chat", 1.8),
            ("code", 2.2),
            ("structured", 2.6),
            ("long_context", 0.9),
        ] {
            for concurrency in [1, 2, 4, 8] {
                let mut cell = cell.clone();
                cell.kind = kind.to_owned();
                cell.concurrency = concurrency;
                let speed = 30.0 * (concurrency as f64).sqrt();
                cell.off.decode_tokens_per_second = vec![speed];
                cell.on.decode_tokens_per_second = vec![speed * gain];
                report.cells.push(cell);
            }
        }
        insta::assert_snapshot!(draw(&report));
    }

    #[test]
    fn names_can_hold_what_xml_uses_itself() {
        assert_eq!(escaped("a<b>&c"), "a&lt;b&gt;&amp;c");
    }
}
