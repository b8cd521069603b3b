//! Processes: which one this is, and whether another one still runs.

/// The machine's name.
pub(crate) fn host() -> String {
    text("/proc/sys/kernel/hostname")
}

/// The command line of this process, as far as it is needed to recognise it.
pub(crate) fn command() -> String {
    let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty()).map(String::from_utf8_lossy);
    let program = words.next().map(|path| path.rsplit('/').next().unwrap_or_default().to_owned());
    program.into_iter().chain(words.map(std::borrow::Cow::into_owned)).collect::<Vec<_>>().join(" ")
}

/// The number of this process's namespace of process ids.
pub(crate) fn space() -> u64 {
    let link = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let digits: String = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_default()
}

/// When a process started, in ticks since the machine booted; `None` if there is none, or it has ended.
pub(crate) fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // State is field 3, the start is field 22.
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

fn text(path: &str) -> String {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}
