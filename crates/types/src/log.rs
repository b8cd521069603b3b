//! Log lines on stderr with their time (UTC) and level, or passed to the sink that the host program installed.

use std::fmt;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::settings::LogLevel;

/// Receives log lines in place of stderr. May be called by any thread, with locks held: it must not call back.
pub type Sink = fn(LogLevel, fmt::Arguments<'_>);

static SINK: OnceLock<Sink> = OnceLock::new();

/// Writes log lines (`crossrail: 12:34:56.789Z warn: ...`) to stderr if their level is enabled. Any thread.
#[derive(Clone, Copy, Debug)]
pub struct Log(pub LogLevel);

impl Log {
    /// Passes the log lines of this process to `sink` instead of stderr. Only the first call has an effect.
    pub fn redirect(sink: Sink) {
        let _ = SINK.set(sink);
    }

    /// Something failed, and the caller may not learn of it otherwise.
    pub fn error(self, line: fmt::Arguments<'_>) {
        self.line(LogLevel::Error, line);
    }

    /// Something works, but not as well as it should.
    pub fn warn(self, line: fmt::Arguments<'_>) {
        self.line(LogLevel::Warn, line);
    }

    /// Decisions worth knowing, such as which lanes were chosen.
    pub fn info(self, line: fmt::Arguments<'_>) {
        self.line(LogLevel::Info, line);
    }

    /// Details for debugging.
    pub fn debug(self, line: fmt::Arguments<'_>) {
        self.line(LogLevel::Debug, line);
    }

    fn line(self, level: LogLevel, line: fmt::Arguments<'_>) {
        if self.0 >= level {
            match SINK.get() {
                Some(sink) => sink(level, line),
                None => {
                    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                    write(&format!("crossrail: {} {level}: {line}\n", TimeOfDay(since_1970)));
                }
            }
        }
    }
}

/// Writes to stderr without the standard library's lock: if a thread of the parent held it at the fork, a child would
/// block on it forever.
fn write(line: &str) {
    // Without descriptors, nothing else works either.
    if let Ok(stderr) = std::io::stderr().as_fd().try_clone_to_owned() {
        let _ = std::fs::File::from(stderr).write_all(line.as_bytes());
    }
}

/// The time of day in UTC, to compare logs of several machines, from the time since 1970.
struct TimeOfDay(Duration);

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs() % 86_400;
        let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        write!(f, "{hours:02}:{minutes:02}:{seconds:02}.{:03}Z", self.0.subsec_millis())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_day_is_utc_to_the_millisecond() {
        let shown = |ms| TimeOfDay(Duration::from_millis(ms)).to_string();
        assert_eq!(shown(0), "00:00:00.000Z");
        assert_eq!(shown(1_700_000_000_042), "22:13:20.042Z");
        assert_eq!(shown(86_399_999), "23:59:59.999Z");
    }
}
