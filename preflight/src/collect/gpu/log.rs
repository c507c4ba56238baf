//! What the driver wrote to the kernel log: Xids of GPUs and SXids of switches.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::kernel::pci_address;
use crate::facts::gpu::{Fault, KernelLog};

/// More than the kernel keeps; where records come faster than they are read, it is the end.
const MAX_LOG_BYTES: usize = 64 << 20;

/// Longest record that the kernel gives.
const RECORD_BYTES: usize = 8192;

/// Reads what is in the kernel log now.
pub(super) fn read(root: &Path) -> io::Result<KernelLog> {
    let log = records(root)
        .map_err(|error| io::Error::new(error.kind(), format!("/dev/kmsg: {error}")))?;
    let uptime = std::fs::read_to_string(root.join("proc/uptime"))?;
    let read_at_seconds = uptime
        .split(['.', ' '])
        .next()
        .and_then(|seconds| seconds.parse().ok())
        .ok_or_else(|| io::Error::other(format!("/proc/uptime is {uptime:?}")))?;
    Ok(parse(&log, read_at_seconds))
}

/// A read gives one record; at the end of the log it would block.
fn records(root: &Path) -> io::Result<String> {
    let mut log = Vec::new();
    let mut record = [0; RECORD_BYTES];
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(root.join("dev/kmsg"))?;
    while log.len() < MAX_LOG_BYTES {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(bytes) => log.extend_from_slice(&record[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            // The record was overwritten while it was waited for; the next read takes the oldest one that is left.
            Err(error) if error.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&log).into_owned())
}

/// Takes the faults from records of the form `priority,sequence,microseconds,flags;text`.
fn parse(log: &str, read_at_seconds: u64) -> KernelLog {
    let mut begins_at_seconds = None;
    let mut faults: Vec<Fault> = Vec::new();
    for record in log.lines() {
        let Some((head, text)) = record.split_once(';') else {
            continue;
        };
        let Some(at_seconds) = head
            .split(',')
            .nth(2)
            .and_then(|micros| micros.parse::<u64>().ok())
            .map(|micros| micros / 1_000_000)
        else {
            continue;
        };
        begins_at_seconds.get_or_insert(at_seconds);
        let Some(fault) = fault(text, at_seconds) else {
            continue;
        };
        let same = faults.iter_mut().find(|known| {
            known.number == fault.number
                && known.pci_address == fault.pci_address
                && known.of_switch == fault.of_switch
        });
        match same {
            Some(known) => {
                *known = Fault {
                    count: known.count + 1,
                    ..fault
                }
            }
            None => faults.push(fault),
        }
    }
    KernelLog {
        begins_at_seconds: begins_at_seconds.unwrap_or(read_at_seconds),
        read_at_seconds,
        faults,
    }
}

/// Takes apart `NVRM: Xid (PCI:0000:1b:00): 79, text` and `nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, text`.
fn fault(text: &str, at_seconds: u64) -> Option<Fault> {
    let of_switch = text.starts_with("nvidia-nvswitch");
    if !of_switch && !text.starts_with("NVRM:") {
        return None;
    }
    let mark = if of_switch { "SXid (PCI:" } else { "Xid (PCI:" };
    let (_, rest) = text.split_once(mark)?;
    let (address, rest) = rest.split_once("): ")?;
    let (number, text) = rest.split_once(',').unwrap_or((rest, ""));
    Some(Fault {
        of_switch,
        pci_address: pci_address(address),
        number: number.trim().parse().ok()?,
        count: 1,
        last_at_seconds: at_seconds,
        text: text.trim().to_owned(),
    })
}
