//! The process's one ONNX Runtime: loading the shared library and the environment every session is built in.
//!
//! ONNX Runtime allows one environment per process, and `ort` loads one library per process.
//! Both are made here, once, and kept until the process ends.
//! This module refuses libraries that are too old for the operators our graphs use, and to load one that would report to its makers;
//! it knows nothing of models or sessions.

#![expect(
    unsafe_code,
    reason = "reading the version of a shared library before it is trusted, and an environment variable that it reads"
)]

use std::{
    ffi::{CStr, OsString, c_char},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock},
};

use ort::{
    environment::{Environment, GlobalThreadPoolOptions},
    logging::LogLevel,
};

/// Oldest ONNX Runtime (major, minor) whose CPU operators are known to be right for our graphs:
/// before it, `Attention` with `nonpad_kv_seqlen` aligns the causal mask differently.
pub const MINIMUM_VERSION: (u32, u32) = (1, 31);

/// Environment variable with which ONNX Runtime reports nothing, see "Privacy" in its documentation.
///
/// Official builds for Linux report what is loaded and how fast it runs to their makers, and keep what they could not send in the home directory.
/// The switch in the library's interface comes too late: the environment that it is a part of has reported its own beginning by then.
pub const TELEMETRY_VARIABLE: &str = "ORT_DISABLE_TELEMETRY";

/// The value of [`TELEMETRY_VARIABLE`] that turns it off.
pub const NO_TELEMETRY: &str = "1";

/// Environment variable that names the ONNX Runtime library the tests use.
pub const TEST_LIBRARY_VARIABLE: &str = "OUTRIDER_ONNXRUNTIME_LIBRARY";

/// Has an entry for each thread of the process that reads it, see proc_pid_task(5).
const TASKS: &str = "/proc/self/task";

/// Where `cargo xtask fetch` puts the library, relative to the workspace root.
const STORE_LIBRARY: &str = ".outrider/store/onnxruntime-1.31.1/libonnxruntime.so.1.31.1";

/// Why ONNX Runtime could not be made ready.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// There is no such file.
    #[error("the onnxruntime library {} does not exist or is not a file", path.display())]
    Missing {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// The file is not a shared library that can be loaded.
    #[error("the onnxruntime library {} cannot be loaded", path.display())]
    Unloadable {
        /// The path that was asked for.
        path: PathBuf,
        /// What the loader said.
        source: libloading::Error,
    },
    /// The file is a shared library, but not ONNX Runtime.
    #[error("{} is not an onnxruntime library: {reason}", path.display())]
    NotOnnxRuntime {
        /// The path that was asked for.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The library is older than the operators our graphs need.
    #[error("the onnxruntime library {} has version {version}; at least {}.{} is needed", path.display(), MINIMUM_VERSION.0, MINIMUM_VERSION.1)]
    TooOld {
        /// The path that was asked for.
        path: PathBuf,
        /// The version it reports.
        version: String,
    },
    /// The library would report to its makers.
    #[error(
        "{TELEMETRY_VARIABLE} is {}; onnxruntime is loaded only where it is {NO_TELEMETRY}, since it sends reports to its makers otherwise",
        value.as_ref().map_or("not set".into(), |value| value.to_string_lossy())
    )]
    Telemetry {
        /// The value of the environment variable.
        value: Option<OsString>,
    },
    /// The environment can't be changed any more, since other threads may read it.
    #[error("{TELEMETRY_VARIABLE} can't be set in a process with {threads} threads")]
    TooLate {
        /// How many there are.
        threads: usize,
    },
    /// The number of this process's threads can't be read.
    #[error("cannot count the threads of this process in {TASKS}")]
    Threads(#[source] std::io::Error),
    /// Another library was loaded earlier in this process.
    #[error("this process already uses the onnxruntime library {}; {} cannot be loaded as well", loaded.display(), path.display())]
    OtherLibraryLoaded {
        /// The path that was asked for.
        path: PathBuf,
        /// The path in use.
        loaded: PathBuf,
    },
    /// The thread pool was made earlier in this process with another size.
    #[error(
        "this process already computes with {in_use} threads; {asked} cannot be had as well (0 is one per core)"
    )]
    OtherThreads {
        /// The number that was asked for.
        asked: usize,
        /// The number in use.
        in_use: usize,
    },
    /// `ort` refused the library.
    #[error("the onnxruntime library {} was refused", path.display())]
    Refused {
        /// The path that was asked for.
        path: PathBuf,
        /// Its reason.
        source: ort::LoadDynamicError,
    },
    /// ONNX Runtime could not create its environment.
    #[error("onnxruntime cannot create its environment")]
    Environment(#[source] ort::Error),
}

struct Loaded {
    path: PathBuf,
    intra_op_threads: usize,
    environment: Environment,
}

/// Has ONNX Runtime report nothing to its makers, whatever the environment says. To be called before there is a second thread.
///
/// # Errors
///
/// There is one already.
pub fn disable_telemetry() -> Result<(), RuntimeError> {
    let threads = std::fs::read_dir(TASKS)
        .map_err(RuntimeError::Threads)?
        .count();
    if threads != 1 {
        return Err(RuntimeError::TooLate { threads });
    }
    // SAFETY: the environment must not be changed while another thread reads it, and there is no other thread.
    unsafe { std::env::set_var(TELEMETRY_VARIABLE, NO_TELEMETRY) };
    Ok(())
}

/// The file that a path of a library leads to; nothing of it is read.
///
/// # Errors
///
/// There is no such file.
pub fn locate(library: &Path) -> Result<PathBuf, RuntimeError> {
    match library.canonicalize() {
        Ok(path) if path.is_file() => Ok(path),
        _ => Err(RuntimeError::Missing {
            path: library.to_owned(),
        }),
    }
}

/// The environment of this process, loaded from `library` at the first call, with one thread pool of `intra_op_threads` (0 is one per core) for all sessions.
///
/// Sessions that take turns must not have pools of their own: the threads of the one that rests spin for a while, on the cores that the other one needs.
///
/// Later calls return the same environment; they fail when they name another file or number.
/// A failed first call leaves nothing behind: it can be repeated with another path.
pub fn environment(
    library: &Path,
    intra_op_threads: usize,
) -> Result<&'static Environment, RuntimeError> {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    // Held while loading, so that two first calls do not build two environments.
    static LOADING: Mutex<()> = Mutex::new(());

    let path = locate(library)?;
    let _loading = LOADING
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let loaded = match LOADED.get() {
        Some(loaded) => loaded,
        None => {
            let loaded = load(path.clone(), intra_op_threads)?;
            LOADED.get_or_init(|| loaded)
        }
    };
    if loaded.path != path {
        return Err(RuntimeError::OtherLibraryLoaded {
            path,
            loaded: loaded.path.clone(),
        });
    }
    if loaded.intra_op_threads != intra_op_threads {
        return Err(RuntimeError::OtherThreads {
            asked: intra_op_threads,
            in_use: loaded.intra_op_threads,
        });
    }
    Ok(&loaded.environment)
}

/// Held while a session with custom operators is made.
///
/// ONNX Runtime keeps one list of operator domains for the process and adds to it without a lock of its own:
/// of two sessions that bring the same new domain at the same moment, one fails.
pub fn registration() -> MutexGuard<'static, ()> {
    static REGISTRATION: Mutex<()> = Mutex::new(());
    REGISTRATION
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The ONNX Runtime library for tests: `OUTRIDER_ONNXRUNTIME_LIBRARY`, else the one in the store of this workspace.
///
/// # Panics
/// When it is in neither place: a test that cannot run has to fail.
pub fn library_for_tests() -> PathBuf {
    if let Some(path) = std::env::var_os(TEST_LIBRARY_VARIABLE) {
        let path = PathBuf::from(path);
        assert!(
            path.is_file(),
            "{TEST_LIBRARY_VARIABLE} names {}, which is not a file",
            path.display()
        );
        return path;
    }
    // Cargo sets this when it runs a test; asking at run time keeps build paths out of the binary.
    let manifest_dir =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from("."), PathBuf::from);
    let path = manifest_dir.join("..").join(STORE_LIBRARY);
    assert!(
        path.is_file(),
        "no onnxruntime library at {STORE_LIBRARY} and {TEST_LIBRARY_VARIABLE} is not set; run `cargo xtask fetch`"
    );
    path
}

fn load(path: PathBuf, intra_op_threads: usize) -> Result<Loaded, RuntimeError> {
    let value = std::env::var_os(TELEMETRY_VARIABLE);
    if value.as_deref() != Some(NO_TELEMETRY.as_ref()) {
        return Err(RuntimeError::Telemetry { value });
    }
    let version = library_version(&path)?;
    if !is_supported(&version) {
        return Err(RuntimeError::TooOld { path, version });
    }
    let builder = ort::init_from(&path).map_err(|source| RuntimeError::Refused {
        path: path.clone(),
        source,
    })?;
    let threads = GlobalThreadPoolOptions::default()
        .with_inter_threads(1)
        .and_then(|options| options.with_intra_threads(intra_op_threads))
        .map_err(RuntimeError::Environment)?;
    let environment = builder
        .with_name("outrider")
        .with_telemetry(false)
        .with_global_thread_pool(threads)
        .build()
        .map_err(RuntimeError::Environment)?;
    // `ort` creates the environment with everything logged, which costs time even where nobody listens.
    environment.set_log_level(LogLevel::Warning);
    Ok(Loaded {
        path,
        intra_op_threads,
        environment,
    })
}

/// Reads the version from the library itself. `ort` checks less strictly, and only when it is too late to choose another file.
fn library_version(path: &Path) -> Result<String, RuntimeError> {
    let not_onnxruntime = |reason: &str| RuntimeError::NotOnnxRuntime {
        path: path.to_owned(),
        reason: reason.to_owned(),
    };
    // SAFETY: loading runs the library's initialisers; that is what the caller asked for, and `ort` would do the same.
    let library =
        unsafe { libloading::Library::new(path) }.map_err(|source| RuntimeError::Unloadable {
            path: path.to_owned(),
            source,
        })?;
    // SAFETY: this is the type of the only symbol of the C API with this name, unchanged since it exists.
    let api_base = unsafe {
        library.get::<unsafe extern "system" fn() -> *const ort::sys::OrtApiBase>(b"OrtGetApiBase")
    };
    let api_base = api_base.map_err(|_| not_onnxruntime("it does not export OrtGetApiBase"))?;
    // SAFETY: the function takes no arguments and returns a pointer to a static table, or null.
    let base = unsafe { api_base() };
    if base.is_null() {
        return Err(not_onnxruntime("OrtGetApiBase returned nothing"));
    }
    // SAFETY: `base` is not null and points to the static table that the C API promises.
    let version: *const c_char = unsafe { ((*base).GetVersionString)() };
    if version.is_null() {
        return Err(not_onnxruntime("it has no version"));
    }
    // SAFETY: a static string that ends in a zero byte, by the C API's promise.
    let version = unsafe { CStr::from_ptr(version) };
    let version = version
        .to_str()
        .map_err(|_| not_onnxruntime("its version is not text"))?;
    Ok(version.to_owned())
}

fn is_supported(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    let (Some(Some(major)), Some(Some(minor))) = (parts.next(), parts.next()) else {
        return false;
    };
    (major, minor) >= MINIMUM_VERSION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_below_the_minimum_are_refused() {
        for version in ["1.31.0", "1.31.1", "1.32.0-dev", "1.100.2", "2.0.0"] {
            assert!(is_supported(version), "{version}");
        }
        for version in ["1.30.9", "1.4.0", "0.99.0", "1", "", "one.two", "1.x.3"] {
            assert!(!is_supported(version), "{version}");
        }
    }

    #[test]
    fn a_second_thread_pool_in_one_process_is_refused() {
        let library = library_for_tests();
        environment(&library, 0).unwrap();
        let error = environment(&library, 3).unwrap_err();
        assert_eq!(
            error.to_string(),
            "this process already computes with 0 threads; 3 cannot be had as well (0 is one per core)"
        );
    }

    #[test]
    fn a_second_library_in_one_process_is_refused() {
        let library = library_for_tests();
        let first = environment(&library, 0).unwrap();
        let again = environment(&library, 0).unwrap();
        assert!(std::ptr::eq(first, again));

        let other = tempfile::NamedTempFile::new().unwrap();
        let error = environment(other.path(), 0).unwrap_err();
        assert!(
            matches!(error, RuntimeError::OtherLibraryLoaded { .. }),
            "{error}"
        );
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = environment(Path::new("no/such/library.so"), 0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the onnxruntime library no/such/library.so does not exist or is not a file"
        );
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"text").unwrap();
        assert!(matches!(
            library_version(file.path()),
            Err(RuntimeError::Unloadable { .. })
        ));
    }
}
