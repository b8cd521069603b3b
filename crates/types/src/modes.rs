//! Enums that a setting selects by name.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};

/// Declares an enum whose values are parsed from and displayed as names.
macro_rules! modes {
    (
        $(#[$meta:meta])+
        $operation:literal $name:ident { $( $(#[$of_value:meta])+ $value:ident = $word:literal, )+ }
    ) => {
        $(#[$meta])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum $name {
            $( $(#[$of_value])+ $value, )+
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $( $name::$value => $word, )+
                })
            }
        }

        impl std::str::FromStr for $name {
            type Err = Error;

            /// Parses one of the names.
            ///
            /// # Errors
            /// [`ErrorKind::Usage`] for any other text, listing the names.
            fn from_str(text: &str) -> Result<$name> {
                match text.trim() {
                    $( $word => Ok($name::$value), )+
                    _ => Err(unknown($operation, text, &[$( $word ),+])),
                }
            }
        }
    };
}

modes! {
    /// How data received over the network is moved from bounce slots to its destination in GPU memory.
    "unpack" Unpack {
        /// One kernel launch for many fragments.
        #[default]
        Kernel = "kernel",
        /// One copy-engine copy per fragment.
        D2d = "d2d",
        /// Gathered by the CPU, then one copy.
        Host = "host",
    }
}

fn unknown(operation: &str, text: &str, known: &[&str]) -> Error {
    Error::new(ErrorKind::Usage, operation, format!("{text:?} is not a mode of {operation}"))
        .with_hint(format!("known: {}", known.join(", ")))
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
        assert_eq!(error.detail, "\"magic\" is not a mode of unpack");
        assert_eq!(error.hint.as_deref(), Some("known: kernel, d2d, host"));
    }
}
