//! The modes of unpacking received data into GPU memory.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};

/// How data received over the network is moved from bounce slots to its destination in GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unpack {
    /// One kernel launch for many fragments.
    #[default]
    Kernel,
    /// One copy-engine copy per fragment.
    D2d,
    /// Gathered by the CPU, then one copy.
    Host,
}

impl Unpack {
    const NAMES: [(&'static str, Unpack); 3] =
        [("kernel", Unpack::Kernel), ("d2d", Unpack::D2d), ("host", Unpack::Host)];
}

impl fmt::Display for Unpack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Unpack::NAMES.iter().find(|(_, mode)| mode == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl FromStr for Unpack {
    type Err = Error;

    /// Parses one of the names.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for any other text, listing the names.
    fn from_str(text: &str) -> Result<Unpack> {
        let found = Unpack::NAMES.iter().find(|(name, _)| *name == text.trim());
        found.map(|(_, mode)| *mode).ok_or_else(|| {
            let names = Unpack::NAMES.map(|(name, _)| name);
            Error::new(ErrorKind::Usage, "unpack", format!("{text:?} is not an unpack mode"))
                .with_hint(format!("known: {}", names.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_as_they_are_displayed() {
        for mode in [Unpack::Kernel, Unpack::D2d, Unpack::Host] {
            assert_eq!(format!(" {mode}").parse::<Unpack>().unwrap(), mode);
        }
        let error = "magic".parse::<Unpack>().unwrap_err();
        assert_eq!((error.kind, error.operation.as_str()), (ErrorKind::Usage, "unpack"));
        assert_eq!(error.detail, "\"magic\" is not an unpack mode");
        assert_eq!(error.hint.as_deref(), Some("known: kernel, d2d, host"));
    }
}
