//! Sessions with peers: connecting, accepting, reconnecting; the transports, and which one is chosen.

mod accept;
mod carrier;
mod connect;
mod control;
mod costs;
mod crowd;
mod cuda_ipc;
mod dialling;
#[cfg(test)]
mod example;
mod explain;
mod fabric;
mod messages;
mod nics;
mod over_rails;
pub(crate) mod placing;
mod rail_pairs;
mod rails;
mod redial;
pub(crate) mod registry;
mod self_transport;
mod shm;
mod tcp;
pub(crate) mod transport;
mod ucx;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossrail_handshake as handshake;
use crossrail_locks::Mutex;
use crossrail_types::{EndpointId, Error, ErrorKind, Log, Result};

use self::connect::Grounds;
use self::control::ControlConnections;
pub use self::explain::{Candidate, Explain};
use self::placing::Placings;
use self::redial::Redialer;
use self::transport::Transports;
pub use self::transport::Turn;
use crate::core::{Claim, gone};
use crate::environment::Environment;
use crate::progress::{Awaited, Progress};

/// The number of a peer's worker, as it states it.
fn generation_of(peer: &handshake::Hello) -> u64 {
    crate::memory::description::generation(&peer.worker)
}

/// How a worker listens.
#[derive(Clone, Debug)]
pub(crate) struct ListenOptions {
    /// The worker's name in messages; `host:pid` by default.
    pub(crate) name: Option<String>,
    /// Where it accepts connections; loopback with a free port by default.
    pub(crate) addresses: Option<Vec<SocketAddr>>,
    /// Whether it accepts connections over a Unix socket.
    pub(crate) unix: bool,
    /// Peers that connect are not handed to `accept`.
    pub(crate) admit: bool,
}

/// The sessions of one worker: its listener, its control connections, and what every endpoint uses and why.
///
/// Any thread may use it. Its locks are taken before that of the worker's core, never after.
pub(crate) struct Sessions {
    me: Weak<Sessions>,
    progress: Arc<Progress>,
    environment: Arc<Environment>,
    log: Log,
    options: ListenOptions,
    secret: handshake::Secret,
    /// `None` before the worker listens and after it was closed.
    listener: Mutex<Option<handshake::Listener>>,
    identity: Mutex<Option<handshake::Identity>>,
    control: ControlConnections,
    redialer: Redialer,
    placings: Placings,
    transports: Transports,
    grounds: Mutex<HashMap<EndpointId, Arc<Grounds>>>,
    /// Endpoints that peers have created, for `accept`. A lock of its own, taken last.
    arrived: Mutex<VecDeque<Claim>>,
    /// Whether the lack of single copies (CMA) has been logged. It is the same with every peer, as a rule.
    warned_of_cma: AtomicBool,
}

impl Sessions {
    /// Starts listening for peers.
    ///
    /// # Errors
    /// `Config`: a device that is not there, listening beyond loopback without a secret; `Io` and `Exhausted` when the
    /// system refuses descriptors, threads or the port.
    pub(crate) fn start(
        progress: &Arc<Progress>,
        options: ListenOptions,
        transports: Transports,
    ) -> Result<Arc<Sessions>> {
        let (environment, log) = (progress.environment().clone(), progress.log());
        let settings = environment.settings();
        let (secret, warnings) =
            handshake::Secret::load(settings.secret.as_ref().map(|s| s.expose()), settings.secret_file.as_deref())?;
        for warning in warnings {
            log.warn(format_args!("{warning}"));
        }
        let sessions = Arc::new_cyclic(|me| Sessions {
            me: me.clone(),
            progress: progress.clone(),
            environment: environment.clone(),
            log,
            options,
            secret,
            listener: Mutex::new(None),
            identity: Mutex::new(None),
            control: ControlConnections::default(),
            transports,
            redialer: Redialer::default(),
            placings: Placings::default(),
            grounds: Mutex::default(),
            arrived: Mutex::default(),
            warned_of_cma: AtomicBool::new(false),
        });
        // While the process has one thread this costs nothing; later it takes long, and nobody should wait for it.
        if settings.tls.allows("shm") && !crossrail_shm::prepare_if_quick() {
            progress.spawn("crossrail-prepare", crossrail_shm::prepare)?;
        }
        sessions.listen()?;
        Ok(sessions)
    }

    /// How others reach this worker, as opaque bytes; empty once it is closed.
    pub(crate) fn address(&self) -> Vec<u8> {
        self.listener.lock().as_ref().map_or_else(Vec::new, |listener| listener.address().encode())
    }

    /// Where it accepts connections over TCP.
    pub(crate) fn control_addresses(&self) -> Vec<SocketAddr> {
        self.listener.lock().as_ref().map_or_else(Vec::new, |listener| listener.address().control)
    }

    /// The worker's name in messages.
    pub(crate) fn name(&self) -> String {
        self.identity.lock().as_ref().map_or_else(String::new, |me| me.hello.name.clone())
    }

    /// The next endpoint that a peer has created.
    ///
    /// # Errors
    /// `Timeout`, and `Closed` when the worker is closed.
    pub(crate) fn accept(&self, timeout: Duration) -> Result<Claim> {
        let found = self.progress.wait_for(
            timeout,
            |_| Awaited::reported(),
            |core| {
                if core.is_closed() { Some(None) } else { self.arrived.lock().pop_front().map(Some) }
            },
        );
        match found {
            Some(Some(claim)) => {
                crowd::check(self);
                Ok(claim)
            }
            Some(None) => Err(gone("accept")),
            None => {
                let detail = format!("no peer has connected to {}", self.name());
                Err(Error::new(ErrorKind::Timeout, "accept", detail).with_waited(timeout))
            }
        }
    }

    /// True while an endpoint waits to be accepted.
    pub(crate) fn has_arrivals(&self) -> bool {
        !self.arrived.lock().is_empty()
    }

    /// Has `accept` return an endpoint that a peer has created.
    fn arrived(&self, endpoint: EndpointId) {
        let mut core = self.progress.core();
        if !self.options.admit {
            let claim = core.peers().claim(endpoint);
            self.arrived.lock().push_back(claim);
        }
        core.operations().report();
        self.progress.after(core);
        crowd::check(self);
    }

    /// What an endpoint could have used, and why it uses what it does.
    pub(crate) fn explain(&self, endpoint: EndpointId) -> Option<Explain> {
        let grounds = self.grounds.lock().get(&endpoint).cloned()?;
        Some(grounds.explain(self))
    }

    /// Messages to a peer are carried by another lane of its rails from now on.
    fn explain_moved(&self, endpoint: EndpointId, lane: &str) {
        let mut all = self.grounds.lock();
        if let Some(grounds) = all.get_mut(&endpoint).filter(|grounds| grounds.choice.small != lane) {
            Arc::make_mut(grounds).choice.move_small(lane);
        }
    }

    /// Admits no further peer, and tells each why.
    pub(crate) fn refuse(&self, why: &str) {
        if let Some(listener) = self.listener.lock().as_ref() {
            listener.refuse(why);
        }
    }

    /// Accepts and dials no more.
    pub(crate) fn stop(&self) {
        self.redialer.stop();
        // Not with the lock: its threads may wait for that.
        let listener = self.listener.lock().take();
        drop(listener);
    }

    /// Closes all control connections.
    pub(crate) fn clear(&self) {
        self.placings.end(|_| true, "the worker was closed");
        self.control.clear();
    }
}
