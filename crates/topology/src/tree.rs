//! Reading sysfs and procfs.

use std::fs;
use std::path::{Path, PathBuf};

/// The mount points of sysfs and procfs: `/sys` and `/proc`, or a copy of another machine's.
#[derive(Clone, Debug)]
pub struct Tree {
    /// The root of sysfs.
    pub sys: PathBuf,
    /// The root of procfs.
    pub proc: PathBuf,
}

impl Default for Tree {
    fn default() -> Tree {
        Tree { sys: PathBuf::from("/sys"), proc: PathBuf::from("/proc") }
    }
}

/// The trimmed text of a file; `None` if it cannot be read or is empty.
pub(crate) fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// The number in a file, decimal or with the prefix 0x.
pub(crate) fn number(path: &Path) -> Option<i64> {
    let text = text(path)?;
    match text.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A non-negative number; `None` for negative ones, which sysfs uses for unknown values.
pub(crate) fn natural(path: &Path) -> Option<u32> {
    number(path).and_then(|number| u32::try_from(number).ok())
}

/// The last component of a symbolic link's target.
pub(crate) fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// The sorted names in a folder; empty if the folder does not exist.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut names: Vec<String> =
        entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
    names.sort();
    names
}

/// The PCI components of a device's real path, host bridge first: `pci0000:00`, `0000:00:01.0`, `0000:01:00.0`.
pub(crate) fn pci_path(device: &Path) -> Vec<String> {
    let Ok(real) = fs::canonicalize(device) else {
        return Vec::new();
    };
    real.components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .filter(|part| is_pci_address(part) || part.strip_prefix("pci").is_some_and(|rest| rest.contains(':')))
        .collect()
}

/// Whether `text` is `domain:bus:device.function` in hexadecimal.
pub(crate) fn is_pci_address(text: &str) -> bool {
    let mut parts = text.split([':', '.']);
    let widths = [4..=8, 2..=2, 2..=2, 1..=1];
    let hex = |part: &str| part.bytes().all(|byte| byte.is_ascii_hexdigit());
    widths.into_iter().all(|width| parts.next().is_some_and(|part| width.contains(&part.len()) && hex(part)))
        && parts.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses() {
        assert!(is_pci_address("0000:00:03.0") && is_pci_address("10000:e1:00.1"));
        for other in ["", "0000:00:03", "pci0000:00", "virtio2", "0000:00:03.0.1", "zzzz:00:03.0"] {
            assert!(!is_pci_address(other), "{other}");
        }
    }
}
