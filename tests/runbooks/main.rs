//! Runs the commands of every page in `runbooks/`, in their order, against real processes on loopback.
//!
//! The `sh` blocks of a page are one script: what one of them defines the next one may use, and the first command that fails fails the page.

mod page;
mod scene;

use std::collections::BTreeSet;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use outrider_server::config::KEYS;
use outrider_tests::fixtures;

use scene::Scene;

/// Pages for one server that runs.
const INCIDENTS: [&str; 10] = [
    "acceptance-drops",
    "block-size",
    "capacity-planning",
    "out-of-gpu-memory",
    "output-differs",
    "rotate-keys",
    "speed-up-missing",
    "start-up-fails",
    "throughput-falls",
    "upgrade",
];

/// From nothing to a second version and back: pages, each with the sections that are run.
const JOURNEY: [(&str, &[&str]); 4] = [
    ("first-deployment", &["Check", "Do"]),
    ("staged-rollout", &["Check", "Do"]),
    ("rollback", &["Check", "Do", "Undo"]),
    ("first-deployment", &["Undo"]),
];

fn main() -> ExitCode {
    let mut trials = vec![
        Trial::test("every_page_has_one_shape_and_all_its_commands_run", || {
            report(pages_have_one_shape())
        }),
        Trial::test("a_page_of_another_shape_is_refused", || {
            report(other_shapes_are_refused())
        }),
        Trial::test(
            "every_key_alert_and_metric_that_a_page_names_exists",
            || report(names_exist()),
        ),
        Trial::test("first_deployment_then_a_rollout_and_back", || {
            report(journey())
        }),
    ];
    for name in INCIDENTS {
        trials.push(Trial::test(name, move || report(incident(name))));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn report(result: anyhow::Result<()>) -> Result<(), Failed> {
    result.map_err(|error| Failed::from(format!("{error:#}")))
}

fn incident(name: &str) -> anyhow::Result<()> {
    Scene::with_a_server()?.run(&script(name, &page::SECTIONS)?)
}

fn journey() -> anyhow::Result<()> {
    let mut whole = String::new();
    for (name, sections) in JOURNEY {
        whole.push_str(&script(name, sections)?);
    }
    let mut scene = Scene::empty()?;
    scene.run(&whole)?;
    scene.ensure_nothing_is_left()
}

/// What of a page is run.
fn script(name: &str, sections: &[&str]) -> anyhow::Result<String> {
    let text = page::text(name)?;
    let blocks = page::blocks(&text).with_context(|| name.to_owned())?;
    Ok(blocks
        .iter()
        .filter(|block| sections.contains(&block.section))
        .map(|block| format!("# {name}: {}\n{}\n", block.section, block.commands))
        .collect())
}

fn pages_have_one_shape() -> anyhow::Result<()> {
    let names = page::names()?;
    let index = page::text("README")?;
    for name in &names {
        let blocks = page::blocks(&page::text(name)?).with_context(|| name.clone())?;
        ensure!(
            index.contains(&format!("({name}.md)")),
            "runbooks/README.md does not list {name}"
        );
        for block in blocks {
            let of_journey = JOURNEY
                .iter()
                .any(|(page, sections)| page == name && sections.contains(&block.section));
            ensure!(
                INCIDENTS.contains(&name.as_str()) || of_journey,
                "{name}: the commands of {} are not run",
                block.section
            );
        }
    }
    let run: BTreeSet<&str> = INCIDENTS
        .into_iter()
        .chain(JOURNEY.map(|(page, _)| page))
        .collect();
    let missing: Vec<_> = run
        .iter()
        .filter(|&&name| !names.iter().any(|page| page == name))
        .collect();
    ensure!(missing.is_empty(), "there are no pages {missing:?}");
    Ok(())
}

fn names_exist() -> anyhow::Result<()> {
    let read = |file: &str| std::fs::read_to_string(fixtures::data("..").join(file));
    let alerts = read("configs/prometheus/outrider.alerts.yml")?;
    let metrics = read("docs/metrics.md")?;
    let exists = |name: &str| -> bool {
        if name.starts_with("serving.") {
            KEYS.iter().any(|key| key.path == name)
        } else if name.starts_with("outrider_") {
            metrics.contains(&format!("| `{name}` |"))
        } else {
            alerts.contains(&format!("alert: {name}"))
        }
    };
    let mut seen = 0;
    for page in page::names()? {
        for name in names_in(&page::text(&page)?) {
            ensure!(exists(name), "{page}: there is no {name}");
            seen += 1;
        }
    }
    ensure!(seen > 20, "only {seen} names were found");
    for name in ["serving.listem", "outrider_redy", "OutriderDowm"] {
        ensure!(!exists(name), "{name} is taken for one that exists");
    }
    Ok(())
}

/// Keys, metrics and alerts that a page names in backticks.
fn names_in(text: &str) -> impl Iterator<Item = &str> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(|quoted| quoted.split(['{', ':', ' ']).next().unwrap_or_default())
        .filter(|name| {
            ["serving.", "outrider_", "Outrider"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
        })
        // The beginning of the names of several.
        .filter(|&name| name != "OutriderCanary")
}

fn other_shapes_are_refused() -> anyhow::Result<()> {
    let page = |undo: &str, fence: &str| {
        format!(
            "# A\n\n## When\n\n## Check\n\n{fence}\ntrue\n```\n\n## Do\n\n## {undo}\n\n## Who to tell\n"
        )
    };
    ensure!(page::blocks(&page("Undo", "```sh"))?.len() == 1);
    for (text, expected) in [
        (page("Undone", "```sh"), "Undone is none of"),
        (page("Do", "```sh"), "the sections are"),
        (page("Undo", "```bash"), "```bash is not ```sh"),
        (page("Undo", ""), "is not ```sh"),
    ] {
        let error = page::blocks(&text).expect_err("another shape");
        ensure!(format!("{error:#}").contains(expected), "{error:#}");
    }
    Ok(())
}
