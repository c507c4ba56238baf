//! What a scenario says.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::OnceLock;

use nvml_wrapper_sys::bindings::nvmlReturn_t;
use serde::Deserialize;

/// A machine.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Scenario {
    pub(crate) driver_version: String,
    /// A thousand times the major version, and ten times the minor one.
    pub(crate) cuda_version: i32,
    pub(crate) fate: Fate,
    pub(crate) devices: Vec<Device>,
}

/// What calls come to that do not just answer, by symbol.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fate {
    /// Codes of NVML that they return.
    #[serde(default)]
    errors: HashMap<String, nvmlReturn_t>,
    /// The one that never returns.
    hangs: Option<String>,
    /// The one that takes the process down.
    crashes: Option<String>,
}

impl Fate {
    /// What the call of `symbol` comes to; `None` when it answers.
    pub(crate) fn of(&self, symbol: &str) -> Option<nvmlReturn_t> {
        if self.crashes.as_deref() == Some(symbol) {
            std::process::abort();
        }
        while self.hangs.as_deref() == Some(symbol) {
            std::thread::park();
        }
        self.errors.get(symbol).copied()
    }
}

/// A GPU. Pairs are of what is and what will or may be.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Device {
    pub(crate) fate: Fate,
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) bus_id: String,
    pub(crate) minor: u32,
    pub(crate) compute_capability: [i32; 2],
    pub(crate) memory: Memory,
    pub(crate) processes: Vec<(u32, u64)>,
    pub(crate) ecc: [bool; 2],
    /// Corrected and uncorrected.
    pub(crate) ecc_errors: [u64; 2],
    /// After corrected errors, after uncorrected ones, pending, failed.
    pub(crate) remapped_rows: [u32; 4],
    pub(crate) throttle_reasons: u64,
    /// Draw, limit, default limit.
    pub(crate) power_mw: [u32; 3],
    pub(crate) temperature_celsius: [u32; 2],
    pub(crate) pcie_generation: [u32; 2],
    pub(crate) pcie_width: [u32; 2],
    pub(crate) nvlinks: Vec<bool>,
    pub(crate) mig: [bool; 2],
    pub(crate) most_instances: u32,
    pub(crate) instances: Vec<Instance>,
    pub(crate) compute_mode: u32,
    pub(crate) persistence: bool,
    pub(crate) utilisation_percent: u32,
}

/// An instance of a divided GPU.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Instance {
    pub(crate) uuid: String,
    pub(crate) memory: Memory,
}

/// Bytes of memory; what is neither free nor used is reserved.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// The scenario of this process.
pub(crate) fn scenario() -> &'static Scenario {
    static SCENARIO: OnceLock<Scenario> = OnceLock::new();
    SCENARIO.get_or_init(|| {
        let path = own_path().with_file_name("scenario.json");
        let text = std::fs::read(&path)
            .unwrap_or_else(|error| panic!("{} can't be read: {error}", path.display()));
        serde_json::from_slice(&text)
            .unwrap_or_else(|error| panic!("{} is no scenario: {error}", path.display()))
    })
}

/// The file that this library was loaded from: the one whose mapping holds this function.
fn own_path() -> PathBuf {
    let address = own_path as fn() -> PathBuf as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux shows a process its maps");
    maps.lines()
        .find_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let bound = |text| usize::from_str_radix(text, 16).ok();
            let path = &rest[rest.find('/')?..];
            (bound(start)?..bound(end)?)
                .contains(&address)
                .then(|| PathBuf::from(path))
        })
        .expect("code that runs is mapped from a file")
}
