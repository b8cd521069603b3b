//! Log lines on stderr with their time (UTC) and level, or passed to the sink that the host program installed.

use std::fmt;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::settings::LogLevel;

/// Receives log lines in place of stderr. May be called by any thread, with locks held: it must not call back.
pub type Sink = fn(LogLevel, fmt::Arguments<'_>);

static SINK: OnceLock<Sink> = OnceLock::new();

/// Writes log lines (`crossrail: 12:34:56.789Z warn: ...`) to stderr if their level is enabled. Any thread.
#[derive(Clone, Copy, Debug)]
pub struct Log(pub LogLevel);

impl Log {
    /// Passes the log lines of this process to `sink` instead of stderr. Only the first call has an effect, and returns
    /// true.
    pub fn redirect(sink: Sink) -> bool {
        SINK.set(sink).is_ok()
    }

    /// Something failed, and the caller may not learn of it otherwise.
    pub fn error(self, line: fmt::Arguments<'_>) {
        self.line(LogLevel::Error, line);
    }

    /// Something works, but not as well as it should.
    /// One that repeats itself is limited: [`Repeats`].
    pub fn warn(self, line: fmt::Arguments<'_>) {
        if self.0 < LogLevel::Warn {
            return;
        }
        let text = line.to_string();
        // Where another thread is here, or held the lock at the fork, the line is not limited.
        let passes = REPEATS.try_lock().map_or(Some(0), |mut repeats| repeats.pass(&text, Instant::now()));
        match passes {
            None => {}
            Some(0) => self.line(LogLevel::Warn, line),
            Some(left_out) => {
                self.line(
                    LogLevel::Warn,
                    format_args!("{text} (and {left_out} times more since it was last reported)"),
                );
            }
        }
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

static REPEATS: Mutex<Repeats> = Mutex::new(Repeats { known: Vec::new() });

/// Times that one line is written in a row.
const BURST: u32 = 3;
/// Time for which a repeated line is suppressed after that.
const PAUSE: Duration = Duration::from_secs(10);
/// Lines that are remembered.
const KNOWN_MAX: usize = 64;

/// Lines that were written lately: what is tried again and again fails with the same words each time.
#[derive(Debug)]
struct Repeats {
    known: Vec<Known>,
}

#[derive(Debug)]
struct Known {
    line: String,
    since: Instant,
    /// Times that it was written, and left out, since then.
    written: u32,
    left_out: u32,
}

impl Repeats {
    /// Number of times that the line was suppressed since it was last written. `None`: it is suppressed again.
    fn pass(&mut self, line: &str, now: Instant) -> Option<u32> {
        let Some(known) = self.known.iter_mut().find(|known| known.line == line) else {
            if self.known.len() >= KNOWN_MAX {
                self.known.remove(0);
            }
            self.known.push(Known { line: line.to_owned(), since: now, written: 1, left_out: 0 });
            return Some(0);
        };
        if now.saturating_duration_since(known.since) >= PAUSE {
            (known.since, known.written) = (now, 0);
        }
        if known.written >= BURST {
            known.left_out += 1;
            return None;
        }
        known.written += 1;
        Some(std::mem::take(&mut known.left_out))
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
    fn a_warning_that_repeats_itself_is_limited() {
        let (mut repeats, start) = (Repeats { known: Vec::new() }, Instant::now());
        let at = |tenths: u32| start + Duration::from_millis(100) * tenths;
        let written: Vec<u32> = (0..300).filter(|tenths| repeats.pass("no rail", at(*tenths)).is_some()).collect();
        assert_eq!(written, [0, 1, 2, 100, 101, 102, 200, 201, 202]);
        assert_eq!(repeats.pass("no rail", at(300)), Some(97), "what was left out is counted");
        assert_eq!(repeats.pass("another", at(300)), Some(0));
        for other in 0..2 * KNOWN_MAX {
            assert_eq!(repeats.pass(&other.to_string(), at(301)), Some(0));
        }
        assert!(repeats.known.len() <= KNOWN_MAX);
    }

    #[test]
    fn the_time_of_day_is_utc_to_the_millisecond() {
        let shown = |ms| TimeOfDay(Duration::from_millis(ms)).to_string();
        assert_eq!(shown(0), "00:00:00.000Z");
        assert_eq!(shown(1_700_000_000_042), "22:13:20.042Z");
        assert_eq!(shown(86_399_999), "23:59:59.999Z");
    }
}
