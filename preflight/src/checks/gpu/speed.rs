//! Whether the device can be as fast as it should.

use super::verdict::Verdict;
use super::{Finding, Scope};
use crate::facts::Reading;
use crate::facts::gpu::{DeviceState, NvmlOutcome, PciKind, PcieLink, ThrottleReason};

pub(super) const THROTTLE: &str = "gpu.throttle";
pub(super) const POWER: &str = "gpu.power";
pub(super) const LINKS: &str = "gpu.links";
pub(super) const FABRIC: &str = "gpu.fabric";
pub(super) const PERSISTENCE: &str = "gpu.persistence";

pub(super) fn throttle(scope: &Scope<'_>) -> Finding {
    scope.each_device(THROTTLE, |state| {
        let temperature = match (&state.temperature_celsius, &state.slowdown_celsius) {
            (Reading::Known(now), Reading::Known(Some(limit))) => format!("{now} °C of {limit} °C"),
            (Reading::Known(now), _) => format!("{now} °C"),
            (Reading::Unknown(reason), _) => {
                return Verdict::unknown(format!("its temperature: {reason}"));
            }
        };
        let reasons = match &state.throttle_reasons {
            Reading::Known(reasons) => reasons,
            Reading::Unknown(reason) => {
                return Verdict::unknown(format!("what holds its clocks down: {reason}"));
            }
        };
        let held: Vec<(&str, &str)> = reasons
            .iter()
            .filter_map(|reason| what_and_remedy(*reason))
            .collect();
        let words: Vec<&str> = held.iter().map(|(what, _)| *what).collect();
        let mut remedies: Vec<&str> = held.iter().map(|(_, remedy)| *remedy).collect();
        remedies.dedup();
        if held.is_empty() {
            Verdict::pass(format!("nothing holds its clocks down; {temperature}"))
        } else {
            Verdict::warn(
                format!(
                    "its clocks are held down by {}; {temperature}",
                    words.join(", ")
                ),
                remedies.join("; "),
            )
        }
    })
}

/// What holds clocks down, and what helps; `None` for what a healthy device does by itself.
fn what_and_remedy(reason: ThrottleReason) -> Option<(&'static str, &'static str)> {
    let heat = "see to fans, air flow and the temperature of the room before load comes";
    let supply = "check the power supplies and cables of the machine, and the limit of its rack";
    match reason {
        // A device that works reaches its limit of power, and one of a group waits for the slowest.
        ThrottleReason::GpuIdle | ThrottleReason::SwPowerCap | ThrottleReason::SyncBoost => None,
        ThrottleReason::ApplicationsClocksSetting => Some((
            "a setting of the clocks",
            "take the setting back: `nvidia-smi -i N -rac`, and `nvidia-smi -i N -rgc` for locked clocks",
        )),
        ThrottleReason::DisplayClockSetting => {
            Some(("a display", "use a device without a display"))
        }
        ThrottleReason::HwSlowdown => Some(("the hardware, to half or less", heat)),
        ThrottleReason::SwThermalSlowdown => Some(("heat", heat)),
        ThrottleReason::HwThermalSlowdown => Some(("heat, to half or less", heat)),
        ThrottleReason::HwPowerBrakeSlowdown => Some(("the power supply, to half or less", supply)),
    }
}

pub(super) fn power(scope: &Scope<'_>) -> Finding {
    scope.each_device(POWER, |state| {
        let power = match &state.power {
            Reading::Known(Some(power)) => power,
            Reading::Known(None) => return Verdict::skip("it does not measure its power"),
            Reading::Unknown(reason) => return Verdict::unknown(reason),
        };
        let (draw, limit, default) = (power.draw_mw / 1000, power.limit_mw / 1000, power.default_limit_mw / 1000);
        let evidence = format!("{draw} W of {limit} W, {default} W by default");
        if power.limit_mw < power.default_limit_mw {
            Verdict::warn(
                evidence,
                format!("raise the limit (`nvidia-smi -i N -pl {default}`) unless the machine's supply or cooling needs it: under load it costs speed"),
            )
        } else {
            Verdict::pass(evidence)
        }
    })
}

pub(super) fn links(scope: &Scope<'_>) -> Finding {
    scope.each_device(LINKS, |state| {
        Verdict::sum(vec![judge_pcie(state), judge_nvlinks(state)])
    })
}

fn judge_pcie(state: &DeviceState) -> Verdict {
    let PcieLink {
        generation,
        max_generation,
        width,
        max_width,
    } = match &state.pcie {
        Reading::Known(Some(link)) => *link,
        Reading::Known(None) => return Verdict::skip("no PCI Express"),
        Reading::Unknown(reason) => return Verdict::unknown(format!("PCI Express: {reason}")),
    };
    let evidence =
        format!("PCI Express {generation} of {max_generation} with {width} of {max_width} lanes");
    // An idle link falls back to a lower generation; one with work does not.
    let is_busy = matches!(&state.utilisation_percent, Reading::Known(Some(samples)) if samples.iter().all(|percent| *percent > 0) && !samples.is_empty());
    if width < max_width || (generation < max_generation && is_busy) {
        Verdict::warn(
            evidence,
            "seat the device or its riser anew, and check the slot's settings in the firmware: loading a model and each copy to the device takes longer",
        )
    } else {
        Verdict::pass(evidence)
    }
}

fn judge_nvlinks(state: &DeviceState) -> Verdict {
    let links = match &state.nvlinks_up {
        Reading::Known(Some(links)) if !links.is_empty() => links,
        Reading::Known(_) => return Verdict::skip("no NVLink"),
        Reading::Unknown(reason) => return Verdict::unknown(format!("NVLink: {reason}")),
    };
    let up = links.iter().filter(|up| **up).count();
    let evidence = format!("{up} of {} NVLinks are up", links.len());
    // A card without a bridge has all of them down.
    if up > 0 && up < links.len() {
        Verdict::warn(
            evidence,
            "look for Xid 74 in `dmesg`, check bridge or baseboard, and reset the device",
        )
    } else {
        Verdict::pass(evidence)
    }
}

pub(super) fn fabric(scope: &Scope<'_>) -> Finding {
    let switches = match &scope.gpu.pci_functions {
        Reading::Known(functions) => functions
            .iter()
            .filter(|function| function.kind == PciKind::NvSwitch)
            .count(),
        Reading::Unknown(reason) => {
            return Finding::unknown(
                FABRIC,
                format!("whether there are NVSwitches: {reason}"),
                "run `lspci -d 10de::0680`",
            );
        }
    };
    if switches == 0 {
        return Finding::skip(FABRIC, "there is no NVSwitch");
    }
    let start = "start it: `systemctl enable --now nvidia-fabricmanager`; it must be of the very release of the driver";
    let manager = match &scope.gpu.fabric_manager {
        Reading::Known(Some(manager)) => manager,
        Reading::Known(None) => {
            return match &scope.gpu.container {
                Some(container) => Finding::unknown(
                    FABRIC,
                    format!(
                        "{switches} NVSwitches, and no fabric manager is seen from this container ({container})"
                    ),
                    "run `systemctl status nvidia-fabricmanager` on the machine itself",
                ),
                None => Finding::fail(
                    FABRIC,
                    format!(
                        "{switches} NVSwitches, and no fabric manager runs: CUDA will say `system not yet initialized` (802)"
                    ),
                    start,
                ),
            };
        }
        Reading::Unknown(reason) => {
            return Finding::unknown(
                FABRIC,
                format!("{switches} NVSwitches; whether the fabric manager runs: {reason}"),
                "run `systemctl status nvidia-fabricmanager`",
            );
        }
    };
    let driver = match &scope.gpu.nvml.outcome {
        NvmlOutcome::Read(system) => system.driver_version.known(),
        NvmlOutcome::NotAsked(_) | NvmlOutcome::Failed(_) => None,
    };
    let pid = manager.pid;
    match (&manager.version, driver) {
        (Reading::Known(version), Some(driver)) if version != driver => Finding::fail(
            FABRIC,
            format!(
                "{switches} NVSwitches; the fabric manager (process {pid}) is {version}, the driver {driver}"
            ),
            "install the fabric manager of the driver's release, and start it anew",
        ),
        // It ends by itself when its release is not the driver's.
        (Reading::Unknown(reason), _) => Finding::pass(
            FABRIC,
            format!(
                "{switches} NVSwitches; the fabric manager runs (process {pid}), its release is not told: {reason}"
            ),
        ),
        (Reading::Known(version), _) => Finding::pass(
            FABRIC,
            format!("{switches} NVSwitches; the fabric manager {version} runs (process {pid})"),
        ),
    }
}

pub(super) fn persistence(scope: &Scope<'_>) -> Finding {
    scope.each_device(PERSISTENCE, |state| match &state.persistence {
        Reading::Known(true) => Verdict::pass("the driver keeps it ready"),
        Reading::Known(false) => Verdict::warn(
            "persistence mode is off",
            "run nvidia-persistenced (`systemctl enable --now nvidia-persistenced`), or `nvidia-smi -pm 1`",
        ),
        Reading::Unknown(reason) => Verdict::unknown(reason),
    })
}
