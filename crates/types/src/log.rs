//! Log lines on stderr, or wherever the program that loaded this library wants them.

use std::fmt;
use std::sync::OnceLock;

use crate::settings::LogLevel;

/// Receives log lines in place of stderr. May be called by any thread, with locks held: it must not call back.
pub type Sink = fn(LogLevel, fmt::Arguments<'_>);

static SINK: OnceLock<Sink> = OnceLock::new();

/// Writes log lines (`crossrail: ...`) to stderr if their level is enabled. Any thread.
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
                None => eprintln!("crossrail: {line}"),
            }
        }
    }
}
