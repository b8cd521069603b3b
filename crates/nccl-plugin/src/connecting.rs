//! Listening, connecting and accepting. Nothing here blocks: NCCL calls again until there is a communicator.
//!
//! A listener waits for one message, the hello, under a tag of its own. The connecting end dials the listener's worker
//! unless it is connected already, sends the hello, and has its communicator once that is delivered. The hello names
//! the sending network, by which the accepting end finds the endpoints to receive from: one per worker, of which the
//! end that has fewer has all connected. Hellos travel between the first workers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use crossrail::{Endpoint, Request, Worker};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::comm::{Comm, DATA, LISTENER_BITS, Path, tag};
use crate::handle::{self, Bytes, Handle};
use crate::log;
use crate::net::{Link, Net};
use crate::workers::Workers;

const HELLO: u64 = 1;
/// Room for a hello: two bytes, and the name of a network.
const HELLO_LEN: usize = 258;

/// A listener: one `listen`.
pub(crate) struct Listener {
    net: Arc<Net>,
    workers: Arc<Workers>,
    number: u32,
    state: Mutex<Listening>,
}

/// The hello that a listener waits for, or one that has arrived before the endpoint that it names.
enum Listening {
    Waiting(Option<Request>),
    Arrived(Hello, Instant),
}

struct Hello {
    serial: u8,
    /// How many workers have connected.
    workers: u8,
    name: String,
}

/// A `connect` that has not yet succeeded.
pub(crate) struct Attempt {
    link: Arc<Link>,
    listener: u32,
    serial: u8,
    hello: Option<(Request, Vec<Endpoint>)>,
}

/// Starts to listen; the handle by which others connect.
///
/// # Errors
/// As [`Worker::new`].
pub(crate) fn listen(net: &Arc<Net>) -> Result<(Listener, Bytes)> {
    let workers = net.workers()?;
    let number = net.number() % (1 << LISTENER_BITS);
    let state = Mutex::new(Listening::Waiting(Some(expect_hello(workers.worker(0), number)?)));
    let ips = workers.worker(0).control_addresses().iter().map(SocketAddr::ip).collect();
    let machine = net.device().machine;
    let handle = Handle { machine, network: net.id, listener: number, ips, ports: workers.ports() };
    let bytes = handle.encode();
    Ok((Listener { net: net.clone(), workers, number, state }, bytes))
}

fn expect_hello(worker: &Worker, number: u32) -> Result<Request> {
    worker.recv(vec![0; HELLO_LEN], tag(HELLO, 0, number, 0), u64::MAX, None)
}

impl Listener {
    /// The next connection; `None`: call again.
    ///
    /// # Errors
    /// What the engine reports; `Protocol` for a hello that is malformed, `Timeout` if its sender is not found.
    pub(crate) fn accept(&self) -> Result<Option<Arc<Comm>>> {
        let mut state = self.state.lock();
        if let Listening::Waiting(request) = &mut *state {
            let Some(outcome) = request.as_ref().and_then(Request::test) else { return Ok(None) };
            let bytes = outcome?.bytes as usize;
            let payload = request.take().and_then(Request::into_vec).unwrap_or_default();
            let hello = Hello::decode(payload.get(..bytes).unwrap_or_default())?;
            *state = Listening::Arrived(hello, Instant::now());
        }
        let Listening::Arrived(hello, since) = &*state else { return Ok(None) };
        let Some(paths) = self.paths(hello)? else {
            let timeout = self.net.settings().timeout;
            if since.elapsed() < timeout {
                return Ok(None);
            }
            let detail = "the connection of a rank that has said hello was lost";
            return Err(Error::new(ErrorKind::Timeout, "accept", detail)
                .with_peer(hello.name.clone())
                .with_waited(timeout));
        };
        log::info(format_args!("accepted a communicator of {}", hello.name));
        let tag = tag(DATA, hello.serial, self.number, 0);
        let comm = Comm::new(paths, tag, hello.name.clone(), self.net.hands_over);
        *state = Listening::Waiting(Some(expect_hello(self.workers.worker(0), self.number)?));
        Ok(Some(comm))
    }

    /// The ways by which the messages of that network arrive; `None`: not all are there yet.
    fn paths(&self, hello: &Hello) -> Result<Option<Vec<Path>>> {
        let (count, own) = (usize::from(hello.workers), hello.name == self.workers.name());
        if count == 0 || count > self.workers.len() {
            let detail = format!("the peer has connected {count} workers to our {}", self.workers.len());
            return Err(Error::new(ErrorKind::Protocol, "accept", detail).with_peer(hello.name.clone()));
        }
        let path = |index| {
            let endpoint = if own { None } else { Some(self.workers.accepted(index, &hello.name)?) };
            Some(Path { worker: self.workers.worker(index).clone(), endpoint })
        };
        Ok((0..count).map(path).collect())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listening::Waiting(Some(request)) = &*self.state.lock() {
            request.cancel();
        }
    }
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        [&[self.serial, self.workers], self.name.as_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Hello> {
        let parsed = bytes.split_first_chunk().and_then(|(head, name)| Some((*head, std::str::from_utf8(name).ok()?)));
        match parsed {
            Some(([serial, workers], name)) if !name.is_empty() => Ok(Hello { serial, workers, name: name.to_owned() }),
            _ => Err(Error::new(ErrorKind::Protocol, "accept", "a rank's first message is malformed")),
        }
    }
}

/// Connects to the listener behind the handle; `None`: call again with the same handle.
///
/// # Errors
/// `Usage` for a handle that is not this plugin's; else what connecting and sending report. The next call begins anew.
pub(crate) fn connect(net: &Arc<Net>, bytes: &mut Bytes) -> Result<Option<Arc<Comm>>> {
    let key = match handle::state(bytes) {
        Some(key) => key,
        None => {
            let handle = Handle::decode(bytes)?;
            let listener = handle.listener % (1 << LISTENER_BITS);
            let attempt = Attempt { link: net.link(handle)?, listener, serial: net.number() as u8, hello: None };
            let key = net.attempts.lock().insert(attempt);
            handle::set_state(bytes, Some(key));
            key
        }
    };
    let mut attempts = net.attempts.lock();
    let Some(attempt) = attempts.get_mut(key) else {
        return Err(Error::new(ErrorKind::Usage, "connect", "the handle belongs to another communicator's attempt"));
    };
    let outcome = attempt.advance(net);
    if !matches!(outcome, Ok(None)) {
        attempts.remove(key);
        handle::set_state(bytes, None);
    }
    outcome
}

impl Attempt {
    fn advance(&mut self, net: &Net) -> Result<Option<Arc<Comm>>> {
        if self.hello.is_none() {
            let Some(endpoints) = self.link.endpoints()? else { return Ok(None) };
            let Some(first) = endpoints.first() else { return Ok(None) };
            let hello = Hello { serial: self.serial, workers: endpoints.len() as u8, name: net.workers()?.name() };
            let request = first.send(hello.encode(), tag(HELLO, 0, self.listener, 0))?;
            self.hello = Some((request, endpoints));
        }
        let Some((request, endpoints)) = &self.hello else { return Ok(None) };
        let Some(delivered) = request.test() else { return Ok(None) };
        delivered?;
        let (tag, workers) = (tag(DATA, self.serial, self.listener, 0), net.workers()?);
        let peer = endpoints.first().map(Endpoint::peer).unwrap_or_default();
        let path = |(index, endpoint): (usize, &Endpoint)| Path {
            worker: workers.worker(index).clone(),
            endpoint: Some(endpoint.clone()),
        };
        let paths = endpoints.iter().enumerate().map(path).collect();
        Ok(Some(Comm::new(paths, tag, peer, net.hands_over)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_hellos_are_refused() {
        let hello = Hello { serial: 9, workers: 4, name: "host:1#a".to_owned() };
        let read = Hello::decode(&hello.encode()).expect("a hello");
        assert_eq!((read.serial, read.workers, read.name), (9, 4, hello.name));
        for bytes in [&[][..], &[1], &[1, 1], &[1, 1, 0xff]] {
            assert_eq!(Hello::decode(bytes).err().map(|error| error.kind), Some(ErrorKind::Protocol));
        }
    }
}
