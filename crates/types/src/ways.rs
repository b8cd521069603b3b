//! Ways to do something, of which a setting names one.

use std::fmt;

use crate::{Error, ErrorKind, Result};

/// An enum whose values have names, in a setting and in what is shown.
macro_rules! ways {
    (
        $(#[$meta:meta])+
        $what:literal $name:ident { $( $(#[$of_value:meta])+ $value:ident = $word:literal, )+ }
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

            /// One of the names; [`ErrorKind::Usage`] for anything else.
            fn from_str(text: &str) -> Result<$name> {
                match text.trim() {
                    $( $word => Ok($name::$value), )+
                    _ => Err(unknown($what, text, &[$( $word ),+])),
                }
            }
        }
    };
}

ways! {
    /// How bytes that came over the network get from their bounce slots to where they belong in GPU memory.
    "to unpack" Unpack {
        /// One kernel launch for many pieces.
        #[default]
        Kernel = "kernel",
        /// A copy for each piece, by a copy engine.
        D2d = "d2d",
        /// Gathered by a processor first, then one copy.
        Host = "host",
    }
}

ways! {
    /// What copies between GPUs of one machine that reach each other.
    "to copy" GpuCopy {
        /// What was the fastest where it was measured: copy engines.
        #[default]
        Auto = "auto",
        /// A copy engine: the multiprocessors are the user's alone.
        Engine = "engine",
        /// A kernel, for all long copies.
        Kernel = "kernel",
    }
}

fn unknown(what: &str, text: &str, known: &[&str]) -> Error {
    let operation = what.trim_start_matches("to ");
    Error::new(ErrorKind::Usage, operation, format!("{text:?} is no way {what}"))
        .with_hint(format!("known: {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_shown() {
        for way in [Unpack::Kernel, Unpack::D2d, Unpack::Host] {
            assert_eq!(format!(" {way}").parse::<Unpack>().unwrap(), way);
        }
        for way in [GpuCopy::Auto, GpuCopy::Engine, GpuCopy::Kernel] {
            assert_eq!(way.to_string().parse::<GpuCopy>().unwrap(), way);
        }
        let error = "magic".parse::<GpuCopy>().unwrap_err();
        assert_eq!((error.kind, error.operation.as_str()), (ErrorKind::Usage, "copy"));
        assert_eq!(error.detail, "\"magic\" is no way to copy");
        assert_eq!(error.hint.as_deref(), Some("known: auto, engine, kernel"));
    }
}
