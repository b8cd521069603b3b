//! Log lines on stderr.

use std::fmt;

use crate::settings::LogLevel;

/// Writes log lines (`crossrail: ...`) to stderr if their level is enabled. Any thread.
#[derive(Clone, Copy, Debug)]
pub struct Log(pub LogLevel);

impl Log {
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
            eprintln!("crossrail: {line}");
        }
    }
}
