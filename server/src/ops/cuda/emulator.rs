//! Runs kernels on the CPU: the same sources, compiled as C++ with `host.h` in the place of a device.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, OnceLock},
};

use super::{Launch, compile::Source};

/// A source compiled for the CPU.
struct Library {
    library: libloading::Library,
    /// A kernel has the whole emulator to itself.
    running: Mutex<()>,
}

type RunGrid = unsafe extern "C" fn(*const (), u32, u32, u32, u32, *const u64, u32) -> i32;

/// Runs launches one after the other; returns when they have run.
///
/// # Safety
/// The arguments are what the kernels expect, with addresses of memory of this process.
pub unsafe fn run(launches: &[Launch]) {
    for launch in launches {
        let library = library(launch.source);
        let _alone = library
            .running
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let [grid_x, grid_y] = launch.grid.map(|blocks| blocks as u32);
        // SAFETY: the signature is that of host.h; the caller vouches for the arguments.
        let code = unsafe {
            let run_grid = library.library.get::<RunGrid>(b"run_grid").unwrap();
            let kernel = library
                .library
                .get::<*const ()>(launch.kernel.as_bytes())
                .unwrap();
            run_grid(
                *kernel,
                grid_x,
                grid_y,
                launch.threads as u32,
                launch.shared_bytes as u32,
                launch.arguments.as_ptr(),
                launch.arguments.len() as u32,
            )
        };
        assert_eq!(code, 0, "{} has too many arguments", launch.kernel);
    }
}

fn library(source: Source) -> &'static Library {
    static LIBRARIES: [OnceLock<Library>; 3] = [const { OnceLock::new() }; 3];
    LIBRARIES[source as usize].get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let object = build(source, dir.path());
        // SAFETY: the library has no initialisers beyond those of C++ globals.
        let library = unsafe { libloading::Library::new(object) }.unwrap();
        Library {
            library,
            running: Mutex::new(()),
        }
    })
}

fn build(source: Source, dir: &Path) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops/cuda");
    let main = dir.join("main.cpp");
    std::fs::write(
        &main,
        format!("#include \"host.h\"\n#include \"{}\"\n", source.name()),
    )
    .unwrap();
    let object = dir.join("kernels.so");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let output = Command::new(&compiler)
        // Products and sums that are to be rounded one by one must not be fused.
        .args(["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared"])
        .args(["-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-I"])
        .arg(sources)
        .arg(&main)
        .arg("-o")
        .arg(&object)
        .output()
        .unwrap_or_else(|error| {
            panic!("cannot run the C++ compiler {compiler:?} ({error}); install one or set CXX")
        });
    assert!(
        output.status.success(),
        "{} does not compile:\n{}",
        source.name(),
        String::from_utf8_lossy(&output.stderr)
    );
    object
}
