//! What the numbers of NVIDIA's catalogue of faults mean for a server that is to start.

use crate::facts::gpu::Fault;

/// How bad a fault in the past is for a start now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    /// It says nothing of the device as it is now.
    Note,
    /// The device runs, and should be looked after.
    Warn,
    /// The device can't be relied on before something is done.
    Fail,
}

/// What a fault means.
pub(super) struct Meaning {
    pub(super) what: &'static str,
    pub(super) severity: Severity,
    pub(super) remedy: &'static str,
}

const PROGRAM: &str = "look for the program that was at fault; if several programs or only this device have it, run the vendor's diagnostics";
const RESET: &str = "drain the device and reset it (`nvidia-smi --gpu-reset -i N`), and have it checked if it happens again";
const RESTART: &str =
    "drain the machine, turn it off and on, and have the device checked if it happens again";
const DRIVER: &str = "update the driver, and have the device checked if it happens again";
const FIRMWARE: &str = "drain the device, reset it (`nvidia-smi --gpu-reset -i N`) and update the driver; have it checked if it happens again";
const DIAGNOSE: &str =
    "drain the device, reset it and run the vendor's diagnostics; have it replaced if they fail";
const CABLES: &str = "turn the machine off and connect the cable";
const LINK: &str = "check the NVLinks (`nvidia-smi nvlink -s`, `nvidia-smi nvlink -e`) and reset the devices on them";
const WATCH: &str =
    "watch the device: reset it when convenient, and have it checked if the number grows";

/// Number, meaning, severity and remedy, after NVIDIA's catalogue for Ampere and later: what it wants reset or restarted is a failure, what concerns
/// the program of that time or asks for a look is a warning, and what it lets pass is a note.
const XIDS: [(u32, &str, Severity, &str); 65] = [
    (8, "the device stopped processing", Severity::Warn, PROGRAM),
    (11, "a corrupted push buffer", Severity::Warn, PROGRAM),
    (
        13,
        "an exception of the graphics engine",
        Severity::Warn,
        PROGRAM,
    ),
    (25, "an illegal push buffer", Severity::Warn, PROGRAM),
    (31, "a fault of the memory unit", Severity::Warn, PROGRAM),
    (32, "a corrupted push buffer", Severity::Warn, PROGRAM),
    (37, "an error of the firmware", Severity::Note, PROGRAM),
    (38, "an error of the firmware", Severity::Warn, DRIVER),
    (39, "an exception of a copy engine", Severity::Warn, PROGRAM),
    (40, "an exception of a copy engine", Severity::Warn, PROGRAM),
    (41, "an exception of a copy engine", Severity::Warn, PROGRAM),
    (
        43,
        "a program was stopped by a fault of its own",
        Severity::Note,
        PROGRAM,
    ),
    (
        44,
        "a fault of the graphics engine in a change of context",
        Severity::Note,
        PROGRAM,
    ),
    (
        45,
        "a program's channels were taken down",
        Severity::Note,
        PROGRAM,
    ),
    (46, "the device stopped processing", Severity::Fail, RESET),
    (48, "a double-bit memory error", Severity::Fail, DIAGNOSE),
    (
        54,
        "the power cable of the device is not connected",
        Severity::Fail,
        CABLES,
    ),
    (
        61,
        "a breakpoint of the internal controller",
        Severity::Fail,
        RESET,
    ),
    (
        62,
        "a halt of the internal controller",
        Severity::Fail,
        RESET,
    ),
    (
        63,
        "a page was retired or a row remapped",
        Severity::Note,
        PROGRAM,
    ),
    (
        64,
        "a page could not be retired or a row not be remapped",
        Severity::Fail,
        DIAGNOSE,
    ),
    (
        66,
        "an illegal access of the driver",
        Severity::Note,
        DRIVER,
    ),
    (
        67,
        "an illegal access of the driver",
        Severity::Warn,
        DRIVER,
    ),
    (
        68,
        "an exception of the video processor",
        Severity::Warn,
        PROGRAM,
    ),
    (
        69,
        "an error of a class of the graphics engine",
        Severity::Warn,
        PROGRAM,
    ),
    (74, "an error of an NVLink", Severity::Warn, LINK),
    (79, "the device fell off the bus", Severity::Fail, RESTART),
    (
        80,
        "corrupted data was sent to the device",
        Severity::Warn,
        PROGRAM,
    ),
    (92, "many single-bit memory errors", Severity::Warn, WATCH),
    (
        93,
        "the store of settings was written to too often",
        Severity::Warn,
        WATCH,
    ),
    (
        94,
        "an uncorrected memory error that only its program suffered from",
        Severity::Warn,
        "restart the program that was hit; a row that waits to be remapped is a finding of its own",
    ),
    (
        95,
        "an uncorrected memory error that other programs may have suffered from",
        Severity::Fail,
        DIAGNOSE,
    ),
    (
        109,
        "a change of context took too long",
        Severity::Fail,
        RESET,
    ),
    (110, "a security fault", Severity::Fail, RESET),
    (
        119,
        "the GSP firmware did not answer",
        Severity::Fail,
        FIRMWARE,
    ),
    (
        120,
        "an error of the GSP firmware",
        Severity::Fail,
        FIRMWARE,
    ),
    (
        121,
        "a corrected error of the link to the processor",
        Severity::Warn,
        WATCH,
    ),
    (
        122,
        "the device's flash memory could not be read",
        Severity::Warn,
        DIAGNOSE,
    ),
    (
        123,
        "the device's flash memory could not be written",
        Severity::Warn,
        DIAGNOSE,
    ),
    (
        124,
        "the device's flash memory could not be erased",
        Severity::Warn,
        DIAGNOSE,
    ),
    (
        125,
        "an error of the store of settings",
        Severity::Warn,
        DIAGNOSE,
    ),
    (136, "an NVLink could not be trained", Severity::Fail, LINK),
    (
        137,
        "a remote access over NVLink was refused",
        Severity::Warn,
        PROGRAM,
    ),
    (140, "an unrecovered memory error", Severity::Fail, DIAGNOSE),
    (
        141,
        "an error of a fast path of CUDA",
        Severity::Warn,
        PROGRAM,
    ),
    (
        143,
        "the device could not be initialised",
        Severity::Fail,
        RESET,
    ),
    (144, "an error of an NVLink", Severity::Warn, LINK),
    (145, "an error of an NVLink", Severity::Warn, LINK),
    (146, "an error of an NVLink", Severity::Warn, LINK),
    (147, "an error of an NVLink", Severity::Warn, LINK),
    (148, "an error of an NVLink", Severity::Warn, LINK),
    (149, "an error of an NVLink", Severity::Warn, LINK),
    (150, "an error of an NVLink", Severity::Warn, LINK),
    (
        151,
        "keys of confidential computing could not be changed",
        Severity::Fail,
        RESTART,
    ),
    (
        155,
        "an NVLink was taken down by software",
        Severity::Fail,
        RESET,
    ),
    (
        156,
        "a part of the device was retired",
        Severity::Fail,
        RESET,
    ),
    (
        157,
        "a part of the device could not be retired",
        Severity::Warn,
        DIAGNOSE,
    ),
    (158, "a fatal time-out of the device", Severity::Fail, RESET),
    (
        160,
        "a channel of the memory was retired",
        Severity::Warn,
        WATCH,
    ),
    (
        161,
        "a channel of the memory could not be retired",
        Severity::Warn,
        DIAGNOSE,
    ),
    (
        167,
        "a fatal time-out of PCI Express",
        Severity::Fail,
        RESTART,
    ),
    (
        168,
        "the device has less memory than it should",
        Severity::Warn,
        DIAGNOSE,
    ),
    (
        169,
        "a halt of the security controller",
        Severity::Fail,
        RESET,
    ),
    (
        171,
        "the uncorrected memory error was one of DRAM",
        Severity::Fail,
        DIAGNOSE,
    ),
    (
        172,
        "the uncorrected memory error was one of SRAM",
        Severity::Fail,
        DIAGNOSE,
    ),
];

/// The fault in which the driver says what would recover the device.
const RECOVERY_ACTION: u32 = 154;

/// What `fault` means; a number that is not in the table is at least worth a look.
pub(super) fn meaning(fault: &Fault) -> Meaning {
    if fault.of_switch {
        return of_switch(fault);
    }
    if fault.number == RECOVERY_ACTION {
        return recovery_action(fault);
    }
    XIDS.iter()
        .find(|(number, ..)| *number == fault.number)
        .map_or(
            Meaning {
                what: "which is not in the table here",
                severity: Severity::Warn,
                remedy: "look it up in NVIDIA's catalogue of Xid errors",
            },
            |&(_, what, severity, remedy)| Meaning {
                what,
                severity,
                remedy,
            },
        )
}

/// The text says what the action was and what it is now.
fn recovery_action(fault: &Fault) -> Meaning {
    let severity = if fault.text.ends_with("(None)") {
        Severity::Note
    } else {
        Severity::Fail
    };
    Meaning {
        what: "what recovers the device has changed",
        severity,
        remedy: "do what the line names: reset the device, or drain and restart the machine",
    }
}

/// The text of a switch's fault says whether it is fatal.
fn of_switch(fault: &Fault) -> Meaning {
    if fault.text.starts_with("Fatal") {
        Meaning {
            what: "a fatal fault of a switch",
            severity: Severity::Fail,
            remedy: "drain the machine, reset all its devices and switches together or restart it, and then start the fabric manager",
        }
    } else {
        Meaning {
            what: "a fault of a switch",
            severity: Severity::Warn,
            remedy: LINK,
        }
    }
}
