//! The engine's interface to transports.

use std::sync::Arc;
use std::time::Instant;

use crossrail_gpu::CudaState;
use crossrail_handshake::{Hello, Session};
use crossrail_topology::NetDevice;
use crossrail_types::{EndpointId, Error, ErrorKind, Filter, Result, Settings};

use super::Sessions;
use super::costs::EAGER_LIMIT;
use super::explain::Candidate;
use crate::environment::TcpLimits;

/// One way to reach peers.
///
/// A worker asks a transport about a peer in this order: [`Transport::obstacle`], then [`Transport::connect`] at the
/// connecting end; [`Transport::accept`] or [`Transport::announced`] at the other end; [`Transport::candidates`]
/// whenever an endpoint explains itself. Methods are called on any thread, without any lock of the worker's. A
/// transport keeps no state of a worker: what it needs it finds in [`Sessions`].
pub(crate) trait Transport: Send + Sync {
    /// Its name in `CROSSRAIL_TLS`, in `require` and in what `Endpoint.explain` says.
    fn name(&self) -> &'static str;

    /// Whether this process can use it at all, regardless of the transports that the settings select.
    fn availability(&self, local: &Local<'_>) -> Availability;

    /// Whether to offer it to peers, if the settings allow it: false if this process knows that it is of no use.
    fn is_offered(&self, _settings: &Settings) -> bool {
        true
    }

    /// The control connection that it needs with a peer.
    fn control(&self) -> Control {
        Control::Tcp
    }

    /// The transport whose endpoints it belongs to, if it makes none of its own.
    fn carrier(&self) -> Option<&'static str> {
        None
    }

    /// Why it cannot reach that peer, as far as both ends' hellos tell; `None`: [`Transport::connect`] is worth trying.
    fn obstacle(&self, _sessions: &Sessions, _peer: &Hello) -> Option<String> {
        None
    }

    /// Every way in which it could carry something to that peer, with its cost, or why not.
    fn candidates(&self, sessions: &Sessions, peer: &Hello) -> Vec<Candidate>;

    /// Makes an endpoint, over a session with the control connection that it asked for.
    ///
    /// # Errors
    /// Whatever kept it from doing so: the next transport is tried, and the error's text becomes the reason.
    fn connect(&self, sessions: &Arc<Sessions>, session: Session, attempt: &Attempt) -> Result<EndpointId> {
        let _ = (sessions, attempt);
        Err(unsupported(self.name(), &session.peer.name, "makes no endpoints"))
    }

    /// A peer has connected for this transport, over a Unix socket. Makes the endpoint and reports it
    /// ([`Sessions::arrived`]).
    ///
    /// # Errors
    /// What is logged; the connection is closed then.
    fn accept(&self, sessions: &Arc<Sessions>, session: Session) -> Result<()> {
        let _ = sessions;
        Err(unsupported(self.name(), &session.peer.name, "accepts no endpoints over a Unix socket"))
    }

    /// Whether peers dial its lanes at every rail of this worker, so that the worker listens there
    /// ([`super::over_rails::lane_arrived`]).
    fn listens_on_rails(&self) -> bool {
        false
    }

    /// The first byte of what its connecting end announces on a TCP control connection; `None`: it announces nothing.
    fn announcement(&self) -> Option<u8> {
        None
    }

    /// A peer has announced this transport on its control connection. Adds lanes to the endpoint, and reports it when
    /// all of them are up ([`Sessions::arrived`]).
    ///
    /// # Errors
    /// What ends the endpoint.
    fn announced(&self, sessions: &Arc<Sessions>, announcement: Announcement) -> Result<()> {
        let _ = sessions;
        Err(unsupported(self.name(), &announcement.peer.name, "announces nothing"))
    }
}

fn unsupported(name: &str, peer: &str, why: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "connect", format!("{name} {why}")).with_peer(peer)
}

/// The control connection of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// A Unix socket, over which descriptors can be passed.
    Unix,
    Tcp,
}

/// What a transport may query of this process before a worker exists.
pub(crate) struct Local<'a> {
    pub(crate) settings: &'a Settings,
    /// Network devices that carry data.
    pub(crate) rails: &'a [NetDevice],
    /// Connections and threads of TCP.
    pub(crate) tcp_limits: TcpLimits,
    /// What CUDA has here, if there is any sign of a GPU.
    pub(crate) cuda: Option<&'a CudaState>,
}

/// What a connecting end has announced on its control connection.
pub(crate) struct Announcement {
    /// The endpoint, which has no lanes yet.
    pub(crate) endpoint: EndpointId,
    pub(crate) peer: Hello,
    /// The id of the session, the same at both ends: what the two ends of a transport can find each other by.
    #[cfg_attr(not(test), expect(dead_code, reason = "the example uses it, and transports to come"))]
    pub(crate) session: [u8; 16],
    /// Two bytes of the transport's own.
    pub(crate) argument: [u8; 2],
}

/// Whether a transport can be used in this process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Availability {
    /// It can; what it offers.
    Usable(String),
    /// It cannot: why, and what would help.
    Unusable(String, Option<String>),
}

/// The place of an endpoint among several to one peer, between which a caller's messages take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Its number, from 0. Rails of one speed carry the messages of the endpoints by turns; otherwise the first rail
    /// carries those of all.
    pub index: usize,
    /// How many there are.
    pub of: usize,
    /// Largest message that this end sends with its first frame over TCP, in bytes, without asking the receiver first;
    /// all of it goes over one connection. More than 64 KiB has an effect only where the turns load all rails alike.
    pub eager_max: usize,
}

impl Default for Turn {
    /// The only endpoint.
    fn default() -> Turn {
        Turn { index: 0, of: 1, eager_max: EAGER_LIMIT }
    }
}

/// One attempt to connect.
pub(crate) struct Attempt {
    pub(crate) deadline: Instant,
    /// Why each transport that was tried before is not used.
    pub(crate) refused: Refused,
    /// The place of the endpoint among others to this peer.
    pub(crate) turn: Turn,
}

/// Why transports are not used, by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refused(Vec<(&'static str, String)>);

impl Refused {
    pub(crate) fn add(&mut self, name: &'static str, why: String) {
        self.0.push((name, why));
    }

    pub(crate) fn reason(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, why)| why.as_str())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(name, why)| (*name, why.as_str()))
    }
}

/// What an endpoint uses of a transport.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {
    /// What carries small messages.
    pub(crate) small: String,
    /// What carries large ones, from which size.
    pub(crate) large: String,
    /// The transport's rows, those that are used and those that are not.
    pub(crate) rows: Vec<Candidate>,
}

impl Choice {
    /// Another lane carries the messages from now on.
    pub(super) fn move_small(&mut self, lane: &str) {
        for way in self.rows.iter_mut().filter(|way| !way.chosen_for.is_empty()) {
            way.chosen_for.retain(|what| what != "small");
            if way.lane == lane {
                way.chosen_for.insert(0, "small".to_owned());
            }
        }
        lane.clone_into(&mut self.small);
    }
}

/// A table of transports.
#[derive(Clone)]
pub(crate) struct Transports(pub(super) Vec<Arc<dyn Transport>>);

impl Transports {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Transport>> {
        self.0.iter()
    }

    /// Those that the settings allow and that are of use, by name: what this worker tells its peers.
    pub(crate) fn allowed(&self, settings: &Settings) -> Vec<String> {
        let allowed = self.0.iter().filter(|transport| settings.tls.allows(transport.name()));
        let offered = allowed.filter(|transport| transport.is_offered(settings));
        offered.map(|transport| transport.name().to_owned()).collect()
    }

    /// The transport whose connecting end announces itself by that byte.
    pub(crate) fn by_announcement(&self, byte: u8) -> Option<&Arc<dyn Transport>> {
        self.0.iter().find(|transport| transport.announcement() == Some(byte))
    }

    /// The transport that peers choose by connecting over a Unix socket.
    pub(crate) fn over_unix(&self) -> Option<&Arc<dyn Transport>> {
        self.0.iter().find(|transport| transport.control() == Control::Unix && transport.carrier().is_none())
    }

    /// The transports that `require` names. A provider of libfabric or a list of UCX transports must be the same as that
    /// of the settings, with which the libraries are opened.
    ///
    /// # Errors
    /// `Usage` that lists the known ones, or says what the settings have.
    pub(crate) fn required(&self, require: Option<&str>, settings: &Settings) -> Result<Option<Vec<String>>> {
        let Some(list) = require else { return Ok(None) };
        let usage = |detail: String| Error::new(ErrorKind::Usage, "require", detail);
        let asked = Filter::parse_transports(list).map_err(|why| usage(format!("{list:?} {why}")))?;
        let known: Vec<_> = self.0.iter().map(|transport| transport.name()).collect();
        if let Some(unknown) = asked.unknown_transport(&known) {
            let detail = format!("no transport is called {unknown:?}");
            return Err(usage(detail).with_hint(format!("known: {}", known.join(", "))));
        }
        let Filter::Only(_) = asked else {
            return Err(usage(format!("{list:?} is no list of transports")).with_hint("`tcp,shm`, say"));
        };
        let (of_fabric, of_ucx) = (asked.of_fabric(), asked.of_ucx());
        if (of_fabric.is_some() && of_fabric != settings.tls.of_fabric())
            || (of_ucx.is_some() && of_ucx != settings.tls.of_ucx())
        {
            let detail = format!("{list:?} is not what the context uses: CROSSRAIL_TLS is {}", settings.tls);
            return Err(usage(detail).with_hint(format!("set CROSSRAIL_TLS={list} at both ends")));
        }
        let names = known.into_iter().filter(|name| asked.allows(name));
        Ok(Some(names.map(str::to_owned).collect()))
    }

    #[cfg(test)]
    pub(crate) fn with_first(mut self, transport: Arc<dyn Transport>) -> Transports {
        self.0.insert(0, transport);
        self
    }
}
