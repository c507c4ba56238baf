//! Whether the device's memory is sound and the driver had nothing to complain of.

use super::verdict::Verdict;
use super::{Finding, Scope, xid};
use crate::facts::Reading;
use crate::facts::gpu::{DeviceState, Fault};

pub(super) const ECC: &str = "gpu.ecc";
pub(super) const ROW_REMAP: &str = "gpu.row_remap";
pub(super) const XID: &str = "gpu.xid";

/// Retired pages from which NVIDIA takes a device back.
const MOST_RETIRED_PAGES: u32 = 60;

/// What to do where only a reset helps.
const RESET: &str =
    "drain the device and reset it (`nvidia-smi --gpu-reset -i N`), or restart the machine";

pub(super) fn ecc(scope: &Scope<'_>) -> Finding {
    scope.each_device(ECC, |state| {
        let mode = match &state.ecc_mode {
            Reading::Known(Some(mode)) => mode,
            Reading::Known(None) => return Verdict::skip("its memory has no error correction"),
            Reading::Unknown(reason) => return Verdict::unknown(reason),
        };
        if !mode.current {
            let then = if mode.pending { ", from the next reset on it is on" } else { "" };
            return Verdict::warn(
                format!("error correction is off{then}"),
                "turn it on (`nvidia-smi -i N -e 1`) and reset the device: without it a flipped bit changes answers, and nobody is told",
            );
        }
        if !mode.pending {
            return Verdict::warn("error correction is on, and off from the next reset on", "turn it on: `nvidia-smi -i N -e 1`");
        }
        match &state.ecc_errors {
            Reading::Known(Some(errors)) if errors.uncorrected > 0 => Verdict::fail(
                format!("{} uncorrected and {} corrected errors since the driver was loaded", errors.uncorrected, errors.corrected),
                format!("{RESET}; if errors come back, run the diagnostics of the vendor and have the device replaced"),
            ),
            Reading::Known(Some(errors)) => Verdict::pass(format!(
                "error correction is on; no uncorrected and {} corrected errors since the driver was loaded",
                errors.corrected
            )),
            Reading::Known(None) => Verdict::unknown("error correction is on, and errors are not counted"),
            Reading::Unknown(reason) => Verdict::unknown(reason),
        }
    })
}

pub(super) fn row_remap(scope: &Scope<'_>) -> Finding {
    scope.each_device(ROW_REMAP, |state| {
        match (&state.row_remap, &state.retired_pages) {
            (Reading::Known(None), Reading::Known(None)) => {
                Verdict::skip("it replaces neither rows nor pages")
            }
            (Reading::Known(None), _) => judge_pages(state),
            (Reading::Known(Some(rows)), _) => {
                let evidence = format!(
                    "{} rows remapped after corrected and {} after uncorrected errors",
                    rows.corrected, rows.uncorrected
                );
                if rows.failed {
                    Verdict::fail(
                        format!("{evidence}; one could not be, for want of spare rows"),
                        "take the device out of service and have it replaced",
                    )
                } else if rows.pending {
                    Verdict::warn(format!("{evidence}; some wait for the next reset"), RESET)
                } else {
                    Verdict::pass(evidence)
                }
            }
            (Reading::Unknown(reason), _) => Verdict::unknown(reason),
        }
    })
}

/// Pages, on devices from before rows were remapped.
fn judge_pages(state: &DeviceState) -> Verdict {
    let pages = match &state.retired_pages {
        Reading::Known(Some(pages)) => pages,
        Reading::Known(None) => return Verdict::skip("it retires no pages"),
        Reading::Unknown(reason) => return Verdict::unknown(reason),
    };
    let evidence = format!(
        "{} pages retired after single-bit and {} after double-bit errors",
        pages.single_bit, pages.double_bit
    );
    if pages.single_bit.saturating_add(pages.double_bit) >= MOST_RETIRED_PAGES {
        Verdict::fail(
            format!("{evidence}, of at most {MOST_RETIRED_PAGES}"),
            "take the device out of service and have it replaced",
        )
    } else if pages.pending {
        Verdict::warn(format!("{evidence}; some wait for the next reset"), RESET)
    } else {
        Verdict::pass(evidence)
    }
}

pub(super) fn xid(scope: &Scope<'_>) -> Finding {
    let log = match &scope.gpu.kernel_log {
        Reading::Known(log) => log,
        Reading::Unknown(reason) => {
            return Finding::unknown(
                XID,
                format!("the kernel log can't be read: {reason}"),
                "look yourself (`sudo dmesg | grep -E 'Xid|SXid'`), or let the service user read it (`sysctl kernel.dmesg_restrict=0`, or CAP_SYSLOG)",
            );
        }
    };
    let since = format!(
        "the kernel log since {} s after the start of the machine",
        log.begins_at_seconds
    );
    if log.faults.is_empty() {
        return Finding::pass(XID, format!("{since} has no fault of a GPU or a switch"));
    }
    let verdicts = log
        .faults
        .iter()
        .map(|fault| judge_fault(scope, fault, log.read_at_seconds))
        .collect();
    Verdict::sum(verdicts).into_finding(XID)
}

fn judge_fault(scope: &Scope<'_>, fault: &Fault, now_seconds: u64) -> Verdict {
    let kind = if fault.of_switch { "SXid" } else { "Xid" };
    let xid::Meaning {
        what,
        severity,
        remedy,
    } = xid::meaning(fault);
    let minutes_ago = now_seconds.saturating_sub(fault.last_at_seconds) / 60;
    let times = match fault.count {
        1 => "once".to_owned(),
        count => format!("{count} times"),
    };
    let evidence = format!(
        "{kind} {}, {what}, {times}, last {minutes_ago} min ago: {}",
        fault.number, fault.text
    );
    let verdict = match severity {
        xid::Severity::Note => Verdict::pass(evidence),
        xid::Severity::Warn => Verdict::warn(evidence, remedy),
        xid::Severity::Fail => Verdict::fail(
            evidence,
            format!(
                "{remedy}; what was done since can't be seen in the log, so leave this check out (`--skip {XID}`) until the machine is restarted"
            ),
        ),
    };
    // A switch serves every device.
    if fault.of_switch || at_selected(scope, &fault.pci_address) {
        verdict.of(&fault.pci_address)
    } else {
        verdict.of_another(&fault.pci_address)
    }
}

/// Whether the server may use the device at `address`; a device whose address is not known may be at any.
fn at_selected(scope: &Scope<'_>, address: &str) -> bool {
    let mut used = scope
        .gpu
        .devices()
        .iter()
        .filter(|device| scope.may_use(device))
        .peekable();
    used.peek().is_none()
        || used.any(|device| {
            let known = device
                .state
                .known()
                .and_then(|state| state.pci_address.known());
            known.is_none_or(|known| known == address)
        })
}
