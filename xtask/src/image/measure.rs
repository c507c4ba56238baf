//! `cargo xtask image measure`: what the documentation says of the builder's speed and memory.
//!
//! A file becomes a layer on disk, and for comparison the same file is hashed by `sha256sum` and copied by `cp`, in turns; both end with the data on the disk.
//! With `--sparse` a file of any size takes no place: its layer is hashed and not kept, as in a build with `--no-store`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use indicatif::{HumanBytes, HumanDuration};
use outrider_image::layer::{Compression, write};
use outrider_image::tree::{Content, Mode, Node, Tree};

use crate::machine::peak_resident_bytes;
use crate::workspace::Workspace;

/// Arguments of `cargo xtask image measure`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Size of the file
    #[arg(long, default_value_t = 1 << 30, value_name = "BYTES")]
    file_bytes: u64,
    /// Take a file of holes and keep nothing, to measure memory alone
    #[arg(long)]
    sparse: bool,
    /// Turns, of which the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
}

/// Measures and prints.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let workspace = Workspace::find()?;
    let images_dir = workspace.home("images");
    fs::create_dir_all(&images_dir)
        .with_context(|| format!("cannot make {}", images_dir.display()))?;
    let scratch = tempfile::tempdir_in(&images_dir)
        .with_context(|| format!("cannot write to {}", images_dir.display()))?;
    let file = scratch.path().join("weights");
    if args.sparse {
        let file = File::create(&file).and_then(|file| file.set_len(args.file_bytes));
        file.context("cannot make the file")?;
    } else {
        fill_file(&file, args.file_bytes).context("cannot make the file")?;
    }
    let tree = tree(&file)?;
    if args.sparse {
        let began = Instant::now();
        let written = write(&tree, Compression::None, 0, io::sink())?;
        let passed = began.elapsed();
        println!(
            "layer of {} bytes in {}, {} a second",
            written.blob.size_bytes,
            HumanDuration(passed),
            rate(args.file_bytes, passed)
        );
    } else {
        compare(args, &tree, &file, scratch.path())?;
    }
    let peak_bytes = peak_resident_bytes(std::process::id())?;
    println!(
        "peak memory {} ({peak_bytes} bytes)",
        HumanBytes(peak_bytes)
    );
    Ok(())
}

fn tree(file: &Path) -> anyhow::Result<Tree> {
    let mut tree = Tree::default();
    let content = Content::Path(file.to_owned(), None);
    tree.insert("weights", Node::File(content, Mode::ReadOnly))?;
    Ok(tree)
}

/// Bytes that no file system can leave out, the same on every run.
fn fill(state: &mut u64, chunk: &mut [u8]) {
    // A linear congruential generator (Knuth's MMIX).
    for word in chunk.chunks_exact_mut(8) {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        word.copy_from_slice(&state.to_le_bytes());
    }
}

fn fill_file(path: &Path, file_bytes: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut chunk = vec![0; 1 << 20];
    let mut state = 1;
    let mut left = file_bytes;
    while left > 0 {
        fill(&mut state, &mut chunk);
        let count = left.min(chunk.len() as u64);
        file.write_all(&chunk[..count as usize])?;
        left -= count;
    }
    file.sync_all()
}

fn compare(args: &Args, tree: &Tree, file: &Path, scratch: &Path) -> anyhow::Result<()> {
    let (layer, copy) = (scratch.join("layer"), scratch.join("copy"));
    let mut layer_times = Vec::new();
    let mut tool_times = Vec::new();
    for _ in 0..args.turns {
        let began = Instant::now();
        let mut out = File::create(&layer).context("cannot make the layer")?;
        write(tree, Compression::None, 0, &mut out)?;
        out.sync_all().context("cannot write the layer")?;
        layer_times.push(began.elapsed());
        fs::remove_file(&layer).context("cannot remove the layer")?;
        let began = Instant::now();
        let paths = |paths: &[&Path]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        tool("sha256sum", &paths(&[file]))?;
        tool("cp", &paths(&[file, &copy]))?;
        tool("sync", &paths(&[&copy]))?;
        tool_times.push(began.elapsed());
        fs::remove_file(&copy).context("cannot remove the copy")?;
    }
    let (layer, tools) = (median(layer_times), median(tool_times));
    println!(
        "layer           {:8.3} s, {} a second",
        layer.as_secs_f64(),
        rate(args.file_bytes, layer)
    );
    println!(
        "sha256sum + cp  {:8.3} s, {} a second",
        tools.as_secs_f64(),
        rate(args.file_bytes, tools)
    );
    println!(
        "throughput      {:8.0} % of sha256sum + cp, median of {} turns",
        100.0 * tools.as_secs_f64() / layer.as_secs_f64(),
        args.turns
    );
    Ok(())
}

fn tool(program: &str, arguments: &[PathBuf]) -> anyhow::Result<()> {
    let status = Command::new(program)
        .args(arguments)
        .stdout(Stdio::null())
        .status()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(status.success(), "{program} failed: {status}");
    Ok(())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn rate(bytes: u64, time: Duration) -> HumanBytes {
    HumanBytes((bytes as f64 / time.as_secs_f64()) as u64)
}
