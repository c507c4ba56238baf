//! Which libraries a shared library needs and which files the loader would take, read from files: nothing is loaded.
//!
//! The search follows ld.so(8): `DT_RPATH` where there is no `DT_RUNPATH`, `LD_LIBRARY_PATH`, `DT_RUNPATH`, the loader's cache, the default directories.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use object::elf;
use object::read::ReadCache;
use object::read::elf::{ElfFile64, FileHeader as _};
use object::{Endianness, ReadRef};

use crate::facts::runtime::{Library, Needed};

/// Most libraries that are looked at below one.
const MAX_LIBRARIES: usize = 128;

/// Directories that the loader looks in at last; Debian's has those of the architecture among them.
fn default_dirs() -> Vec<PathBuf> {
    let of_arch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    let dirs = [of_arch.as_str(), "lib64", "lib"];
    let dirs = dirs.iter();
    dirs.flat_map(|dir| ["/", "/usr"].map(|root| Path::new(root).join(dir)))
        .collect()
}

/// Where the loader looks beside what a library names itself.
#[derive(Clone, Debug, Default)]
pub struct Search {
    library_path: Vec<PathBuf>,
    cache: BTreeMap<String, PathBuf>,
    defaults: Vec<PathBuf>,
}

impl Search {
    /// The search of this machine and environment.
    pub fn of_machine() -> Self {
        let library_path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
        Self {
            library_path: std::env::split_paths(&library_path)
                .filter(|dir| !dir.as_os_str().is_empty())
                .collect(),
            cache: read_cache(&cache),
            defaults: default_dirs(),
        }
    }

    /// The file that the loader takes for a library that is asked for by name while a program runs.
    pub fn by_name(&self, name: &str) -> Option<PathBuf> {
        let program = Own {
            arch: std::env::consts::ARCH.to_owned(),
            ..Default::default()
        };
        self.find(name, &program)
    }

    fn find(&self, name: &str, own: &Own) -> Option<PathBuf> {
        if name.contains('/') {
            return Some(PathBuf::from(name)).filter(|path| path.is_file());
        }
        let first = if own.run_path.is_empty() {
            &own.rpath
        } else {
            &Vec::new()
        };
        let dirs = first.iter().chain(&self.library_path).chain(&own.run_path);
        let is_fit =
            |path: &PathBuf| path.is_file() && read(path).is_ok_and(|found| found.arch == own.arch);
        dirs.map(|dir| dir.join(name))
            .chain(self.cache.get(name).cloned())
            .chain(self.defaults.iter().map(|dir| dir.join(name)))
            .find(is_fit)
    }
}

/// What a file says of itself.
#[derive(Clone, Debug, Default)]
struct Own {
    arch: String,
    needed: Vec<String>,
    rpath: Vec<PathBuf>,
    run_path: Vec<PathBuf>,
    defined_versions: Vec<String>,
    needed_versions: Vec<String>,
}

/// Reads a library and everything that it needs; `at_run_time` are libraries that it loads by itself when it first uses them.
///
/// # Errors
///
/// The file can't be read, or is no 64-bit ELF file.
pub fn library(path: &Path, search: &Search, at_run_time: &[&str]) -> Result<Library, String> {
    let real_path = path
        .canonicalize()
        .map_err(|error| format!("{}: {error}", path.display()))?;
    let size_bytes = fs::metadata(&real_path).map_or(0, |metadata| metadata.len());
    let own = read(&real_path)?;
    let name = file_name(&real_path);
    let later = at_run_time.iter().map(|name| ((*name).to_owned(), true));
    let needed = own.needed.iter().map(|name| (name.clone(), false));
    let mut queue: VecDeque<_> = needed
        .chain(later)
        .map(|(needed, late)| (needed, late, name.clone(), own.clone()))
        .collect();
    let mut seen = BTreeSet::new();
    let mut result = Vec::new();
    while let Some((needed, late, by, own)) = queue.pop_front() {
        if !seen.insert(needed.clone()) || result.len() >= MAX_LIBRARIES {
            continue;
        }
        let found = search.find(&needed, &own);
        if let Some(below) = found.as_deref().and_then(|path| read(path).ok()) {
            let by = needed.clone();
            let next = below.needed.iter();
            queue.extend(next.map(|name| (name.clone(), false, by.clone(), below.clone())));
        }
        let real_path = found.as_ref().and_then(|path| path.canonicalize().ok());
        result.push(Needed {
            name: needed,
            by,
            real_path: real_path.map(|path| path.display().to_string()),
            found: found.map(|path| path.display().to_string()),
            at_run_time: late,
        });
    }
    Ok(Library {
        path: path.display().to_string(),
        real_path: real_path.display().to_string(),
        size_bytes,
        arch: own.arch.clone(),
        version: own
            .defined_versions
            .iter()
            .find_map(|name| name.strip_prefix("VERS_"))
            .map(str::to_owned),
        c_library_version: highest(&own.needed_versions, "GLIBC_"),
        run_paths: own
            .rpath
            .iter()
            .chain(&own.run_path)
            .map(|dir| dir.display().to_string())
            .collect(),
        needed: result,
    })
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// The highest of the versions with a prefix, by their numbers.
fn highest(versions: &[String], prefix: &str) -> Option<String> {
    let numbers = |version: &str| -> Option<Vec<u32>> {
        version.split('.').map(|part| part.parse().ok()).collect()
    };
    versions
        .iter()
        .filter_map(|version| version.strip_prefix(prefix))
        .filter(|version| numbers(version).is_some())
        .max_by_key(|version| numbers(version))
        .map(str::to_owned)
}

fn read(path: &Path) -> Result<Own, String> {
    let fault = |error: object::Error| format!("{} is no shared library: {error}", path.display());
    // Opening a pipe would wait for somebody who writes to it.
    if !path.is_file() {
        return Err(format!("{} is no file", path.display()));
    }
    let file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    // Only the parts that are looked at are read: a CUDA provider has hundreds of megabytes.
    let cache = ReadCache::new(file);
    own(&cache, path).map_err(fault)
}

fn own<'data, R: ReadRef<'data>>(data: R, path: &Path) -> object::Result<Own> {
    let file = ElfFile64::<Endianness, R>::parse(data)?;
    let endian = file.endian();
    let table = file.elf_dynamic_table()?;
    let origin = path.parent().unwrap_or(Path::new("/"));
    let mut own = Own {
        arch: match file.elf_header().e_machine(endian) {
            elf::EM_X86_64 => "x86_64".to_owned(),
            elf::EM_AARCH64 => "aarch64".to_owned(),
            other => format!("machine {other}"),
        },
        ..Own::default()
    };
    for entry in table.iter() {
        let text = || {
            let bytes = entry.string(table.strings())?;
            Ok::<_, object::Error>(String::from_utf8_lossy(bytes).into_owned())
        };
        match entry.tag {
            elf::DT_NEEDED => own.needed.push(text()?),
            elf::DT_RPATH => own.rpath = directories(&text()?, origin),
            elf::DT_RUNPATH => own.run_path = directories(&text()?, origin),
            _ => {}
        }
    }
    let sections = file.elf_section_table();
    if let Some((definitions, link)) = sections.gnu_verdef(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        for definition in definitions {
            for name in definition?.1 {
                let name = name?.name(endian, strings)?;
                own.defined_versions
                    .push(String::from_utf8_lossy(name).into_owned());
            }
        }
    }
    if let Some((needs, link)) = sections.gnu_verneed(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        for need in needs {
            for name in need?.1 {
                let name = name?.name(endian, strings)?;
                own.needed_versions
                    .push(String::from_utf8_lossy(name).into_owned());
            }
        }
    }
    Ok(own)
}

fn directories(list: &str, origin: &Path) -> Vec<PathBuf> {
    let origin = origin.display().to_string();
    list.split(':')
        .filter(|dir| !dir.is_empty())
        .map(|dir| {
            let dir = dir
                .replace("$ORIGIN", &origin)
                .replace("${ORIGIN}", &origin);
            PathBuf::from(dir)
        })
        .collect()
}

/// The libraries in `ld.so.cache`, by name; of several with one name the first, which the loader prefers.
///
/// The form is `struct cache_file_new` of glibc: a header of 48 bytes, and entries of 24 that hold the offsets of a name and a path.
/// Older caches have another form in front of it.
fn read_cache(bytes: &[u8]) -> BTreeMap<String, PathBuf> {
    const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
    const HEADER_BYTES: usize = 48;
    const ENTRY_BYTES: usize = 24;
    let mut libraries = BTreeMap::new();
    let start = bytes
        .windows(MAGIC.len())
        .position(|window| window == MAGIC);
    let Some(cache) = start.and_then(|start| bytes.get(start..)) else {
        return libraries;
    };
    let number = |at: usize| -> Option<usize> {
        let bytes = cache.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_ne_bytes(bytes)).ok()
    };
    let text = |at: usize| -> Option<&str> {
        let bytes = cache.get(at..)?;
        let end = bytes.iter().position(|&byte| byte == 0)?;
        std::str::from_utf8(&bytes[..end]).ok()
    };
    let count = number(MAGIC.len()).unwrap_or(0);
    for entry in 0..count {
        let at = HEADER_BYTES + entry * ENTRY_BYTES;
        let (Some(name_at), Some(path_at)) = (number(at + 4), number(at + 8)) else {
            break;
        };
        if let (Some(name), Some(path)) = (text(name_at), text(path_at)) {
            libraries
                .entry(name.to_owned())
                .or_insert_with(|| PathBuf::from(path));
        }
    }
    libraries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_cache_is_read_and_damage_is_no_panic() {
        let mut cache = b"ld.so-1.7.0\0old form".to_vec();
        let names = b"libx.so.1\0/opt/libx.so.1\0";
        cache.extend(b"glibc-ld.so.cache1.1");
        for number in [1u32, names.len() as u32, 0, 0, 0, 0, 0] {
            cache.extend(number.to_ne_bytes());
        }
        for number in [0u32, 72, 82, 0, 0, 0] {
            cache.extend(number.to_ne_bytes());
        }
        cache.extend(names);
        let libraries = read_cache(&cache);
        assert_eq!(libraries["libx.so.1"], Path::new("/opt/libx.so.1"));
        for length in 0..cache.len() {
            read_cache(&cache[..length]);
        }
    }

    #[test]
    fn a_program_says_what_it_needs_and_where_it_is() {
        let program = std::env::current_exe().unwrap();
        let found = library(
            &program,
            &Search::of_machine(),
            &["libno-such-library.so.9"],
        )
        .unwrap();
        assert_eq!(found.arch, std::env::consts::ARCH);
        let c_library = found
            .needed
            .iter()
            .find(|needed| needed.name.starts_with("libc.so"))
            .unwrap();
        assert!(c_library.found.is_some(), "{c_library:?}");
        assert!(found.c_library_version.is_some());
        let missing: Vec<_> = found.missing().collect();
        assert_eq!(missing.len(), 1, "{missing:?}");
        assert_eq!(missing[0].name, "libno-such-library.so.9");
        assert!(missing[0].at_run_time);
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "text").unwrap();
        let error = library(file.path(), &Search::default(), &[]).unwrap_err();
        assert!(error.contains("is no shared library"), "{error}");
    }

    #[test]
    fn the_highest_version_is_chosen_by_number() {
        let versions = ["GLIBC_2.9", "GLIBC_2.27", "GLIBC_PRIVATE", "GCC_4.0"].map(str::to_owned);
        assert_eq!(highest(&versions, "GLIBC_").as_deref(), Some("2.27"));
    }

    #[test]
    fn the_libraries_own_directories_are_beside_it() {
        let dirs = directories("$ORIGIN/../lib::/opt/${ORIGIN}", Path::new("/a/b"));
        assert_eq!(dirs, ["/a/b/../lib", "/opt//a/b"].map(PathBuf::from));
    }
}
