//! Listening, connecting and accepting. Nothing here blocks: NCCL calls again until there is a communicator.
//!
//! A listener waits for one message, the hello, under a tag of its own. The connecting end dials the listener's worker
//! unless it is connected already, sends the hello, and has its communicator once that is delivered. The hello names
//! the sending worker, by which the accepting end finds the endpoint to receive from.

use std::sync::Arc;
use std::time::Instant;

use crossrail::{Endpoint, Request, Worker};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::comm::{Comm, DATA, LISTENER_BITS, tag};
use crate::handle::{self, Bytes, Handle};
use crate::log;
use crate::net::{Link, Net};

const HELLO: u64 = 1;
/// Room for a hello: one byte, and the name of a worker.
const HELLO_LEN: usize = 257;

/// A listener: one `listen`.
pub(crate) struct Listener {
    net: Arc<Net>,
    worker: Worker,
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
    name: String,
}

/// A `connect` that has not yet succeeded.
pub(crate) struct Attempt {
    link: Arc<Link>,
    listener: u32,
    serial: u8,
    hello: Option<(Request, Endpoint)>,
}

/// Starts to listen; the handle by which others connect.
///
/// # Errors
/// As [`Worker::new`].
pub(crate) fn listen(net: &Arc<Net>) -> Result<(Listener, Bytes)> {
    let worker = net.worker()?;
    let number = net.number() % (1 << LISTENER_BITS);
    let state = Mutex::new(Listening::Waiting(Some(expect_hello(&worker, number)?)));
    let (machine, addresses) = (net.device().machine, worker.control_addresses());
    let handle = Handle { machine, worker: net.id, listener: number, addresses };
    let bytes = handle.encode();
    Ok((Listener { net: net.clone(), worker, number, state }, bytes))
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
        let own = hello.name == self.worker.name();
        let found = if own { None } else { self.net.accepted(&self.worker, &hello.name) };
        if found.is_none() && !own {
            let timeout = self.net.settings().timeout;
            if since.elapsed() < timeout {
                return Ok(None);
            }
            let detail = "the connection of a rank that has said hello was lost";
            return Err(Error::new(ErrorKind::Timeout, "accept", detail)
                .with_peer(hello.name.clone())
                .with_waited(timeout));
        }
        log::info(format_args!("accepted a communicator of {}", hello.name));
        let tag = tag(DATA, hello.serial, self.number, 0);
        let comm = Comm::new(&self.worker, found, tag, hello.name.clone(), &self.net.pacer);
        *state = Listening::Waiting(Some(expect_hello(&self.worker, self.number)?));
        Ok(Some(comm))
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
        [&[self.serial], self.name.as_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Hello> {
        let parsed = bytes.split_first().and_then(|(serial, name)| Some((*serial, std::str::from_utf8(name).ok()?)));
        match parsed {
            Some((serial, name)) if !name.is_empty() => Ok(Hello { serial, name: name.to_owned() }),
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
            let Some(endpoint) = self.link.endpoint()? else { return Ok(None) };
            let hello = Hello { serial: self.serial, name: net.worker()?.name() };
            let request = endpoint.send(hello.encode(), tag(HELLO, 0, self.listener, 0))?;
            self.hello = Some((request, endpoint));
        }
        let Some((request, endpoint)) = &self.hello else { return Ok(None) };
        let Some(delivered) = request.test() else { return Ok(None) };
        delivered?;
        let tag = tag(DATA, self.serial, self.listener, 0);
        Ok(Some(Comm::new(&net.worker()?, Some(endpoint.clone()), tag, endpoint.peer(), &net.pacer)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_hellos_are_refused() {
        let hello = Hello { serial: 9, name: "host:1#a".to_owned() };
        let read = Hello::decode(&hello.encode()).expect("a hello");
        assert_eq!((read.serial, read.name), (9, hello.name));
        for bytes in [&[][..], &[1], &[1, 0xff]] {
            assert_eq!(Hello::decode(bytes).err().map(|error| error.kind), Some(ErrorKind::Protocol));
        }
    }
}
