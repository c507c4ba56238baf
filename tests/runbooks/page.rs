//! What a page of `runbooks/` is: its sections, and the commands in them.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, ensure};

/// The sections of each page, in their order.
pub const SECTIONS: [&str; 5] = ["When", "Check", "Do", "Undo", "Who to tell"];

/// Commands of a page, with the section that they stand in.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    /// One of [`SECTIONS`].
    pub section: &'static str,
    /// Lines of shell.
    pub commands: String,
}

/// The names of all pages, sorted.
pub fn names() -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory())? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str());
        let name = name.with_context(|| format!("{} has no name", path.display()))?;
        if name != "README" {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// The text of a page.
pub fn text(name: &str) -> anyhow::Result<String> {
    let path = directory().join(format!("{name}.md"));
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// The commands of a page. Its shape is checked on the way.
pub fn blocks(text: &str) -> anyhow::Result<Vec<Block>> {
    let mut sections = Vec::new();
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(title) = line.strip_prefix("## ") {
            let section = SECTIONS.iter().find(|&&section| section == title);
            let section = section.with_context(|| format!("{title} is none of {SECTIONS:?}"))?;
            sections.push(*section);
        } else if line.starts_with("```") {
            // Nothing that looks like a command goes unrun.
            ensure!(line == "```sh", "{line} is not ```sh");
            let commands: Vec<&str> = lines.by_ref().take_while(|&line| line != "```").collect();
            blocks.push(Block {
                section: sections
                    .last()
                    .context("commands before the first section")?,
                commands: commands.join("\n"),
            });
        }
    }
    ensure!(
        sections == SECTIONS,
        "the sections are {sections:?}, and not {SECTIONS:?}"
    );
    ensure!(!blocks.is_empty(), "there are no commands");
    Ok(blocks)
}

fn directory() -> PathBuf {
    outrider_tests::fixtures::data("../runbooks")
}
