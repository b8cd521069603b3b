use std::fmt;

use crossrail_types::LogLevel;

/// One line on stderr, `crossrail: ...`, if the level is on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Log(pub(crate) LogLevel);

impl Log {
    pub(crate) fn warn(self, line: fmt::Arguments<'_>) {
        self.line(LogLevel::Warn, line);
    }

    pub(crate) fn info(self, line: fmt::Arguments<'_>) {
        self.line(LogLevel::Info, line);
    }

    fn line(self, level: LogLevel, line: fmt::Arguments<'_>) {
        if self.0 >= level {
            eprintln!("crossrail: {line}");
        }
    }
}
