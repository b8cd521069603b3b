//! Reasons of errors, more precise than their kinds.

use std::fmt;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why an operation failed, more precisely than its [`ErrorKind`](crate::ErrorKind). Programs branch on it; the
        /// text of an error is for people. `Display` gives the name that Python's exceptions have in `reason`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Reason {
            $($(#[$doc])* $name,)*
        }

        impl Reason {
            /// Every reason, in the order of their declaration.
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)*];

            /// The reason in one word, as Python has it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Reason::$name => $text,)*
                }
            }
        }
    };
}

reasons! {
    // Refused
    /// `Refused`: one end has a secret and the other has none.
    SecretMissing = "secret_missing",
    /// `Refused`: the two ends have different secrets.
    SecretWrong = "secret_wrong",
    /// `Refused`: the peer admits only holders of its worker address, and this end connected by `host:port`.
    TokenMissing = "token_missing",
    /// `Refused`: the token is another worker's, as of an address that is out of date.
    TokenWrong = "token_wrong",
    /// `Refused`: another user's process, or one without the user's token, and there is no secret.
    UserDenied = "user_denied",
    /// `Refused`: the peer has too many handshakes in progress; retrying may help.
    Busy = "busy",
    /// `Refused`: the session of a new lane is unknown to the peer; it may have been closed.
    SessionUnknown = "session_unknown",
    /// `Refused`: a message of the handshake was changed in transit.
    Tampered = "tampered",

    // Mismatch
    /// `Mismatch`: the two ends have no protocol version in common.
    Version = "version",
    /// `Mismatch`: the two ends disagree about chunk, window or channels.
    Parameters = "parameters",

    // Unreachable, Protocol
    /// `Unreachable`: no process listens at the address.
    NotListening = "not_listening",
    /// `Unreachable`: the host name has no address.
    NameUnknown = "name_unknown",
    /// `Unreachable` or `Timeout`: no response from the address; a firewall may drop the packets.
    NoResponse = "no_response",
    /// `Unreachable`: the peer ended the connection before it was established.
    ConnectionClosed = "connection_closed",
    /// `Unreachable`: another worker listens at the address now; the one sought has ended.
    Replaced = "replaced",
    /// `Protocol`: what listens at the address does not speak Crossrail's protocol.
    Foreign = "foreign",

    // PeerDead
    /// `PeerDead`: the peer closed the connection in good order, or left its group.
    Closed = "closed",
    /// `PeerDead`: the peer's process has ended, or the lease of its rank has run out.
    ProcessEnded = "process_ended",
    /// `PeerDead`: every lane to the peer has failed.
    LanesLost = "lanes_lost",

    // Exhausted
    /// `Exhausted`: the store, or the listening worker, admits no more clients.
    Full = "full",
    /// `Exhausted`: the limit on open file descriptors is reached (`ulimit -n`).
    Descriptors = "descriptors",
    /// `Exhausted`: memory has run out, on the host or on a GPU.
    Memory = "memory",

    // Usage, Config
    /// `Usage`: another socket listens on the port.
    PortInUse = "port_in_use",
    /// `Usage`: the address does not belong to this machine.
    AddressUnknown = "address_unknown",
    /// `Usage`: the system does not permit it, as ports below 1024.
    NotPermitted = "not_permitted",
    /// `Config`: listening beyond loopback needs a secret.
    SecretRequired = "secret_required",
    /// `Usage`: the object was made in another process, of which this one is a fork.
    OtherProcess = "other_process",
    /// `Usage`: the move is in flight, and is started again once its request is over.
    InFlight = "in_flight",

    // Unsupported
    /// `Unsupported`: the installed CUDA driver is too old.
    DriverTooOld = "driver_too_old",
    /// `Unsupported`: the GPU or its driver cannot do this.
    DeviceUnsupported = "device_unsupported",
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
