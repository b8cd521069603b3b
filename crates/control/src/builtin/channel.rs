use std::fmt;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use crossrail_handshake::Secret;
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use super::calls::{Call, Connection};
use super::dial::{StoreAddress, dial};
use super::frames::{Answer, Item, Request, decode_answer};
use crate::store::{Entry, Revision};

/// The connection of a client, its leases and its watches to the store; re-established on demand.
pub(super) struct Channel {
    store: StoreAddress,
    secret: Secret,
    connection: Mutex<Option<Arc<Connection>>>,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.store.address())
    }
}

impl Channel {
    /// A channel over a connection that is established.
    ///
    /// # Errors
    /// `Io`: no descriptor.
    pub(super) fn new(store: StoreAddress, secret: Secret, stream: TcpStream) -> Result<Channel> {
        let channel = Channel { store, secret, connection: Mutex::new(None) };
        *channel.connection.lock() = Some(channel.adopt(stream)?);
        Ok(channel)
    }

    /// The store's address, with its scheme.
    pub(super) fn address(&self) -> String {
        self.store.address()
    }

    fn adopt(&self, stream: TcpStream) -> Result<Arc<Connection>> {
        Connection::new(stream, self.store.address()).map(Arc::new)
    }

    /// The connection, re-established if it has ended.
    fn connection(&self, operation: &str, deadline: Instant) -> Result<Arc<Connection>> {
        let Some(mut connection) = self.connection.try_lock_until(deadline) else {
            let detail = "the store was not reached in time";
            return Err(Error::new(ErrorKind::Timeout, operation, detail).with_peer(self.store.address()));
        };
        if let Some(known) = connection.as_ref().filter(|known| known.is_alive()) {
            return Ok(Arc::clone(known));
        }
        *connection = None;
        let stream = dial(&self.store, &self.secret, operation, deadline)?;
        let new = self.adopt(stream)?;
        *connection = Some(Arc::clone(&new));
        Ok(new)
    }

    /// Sends a request; the answers come by [`answer`].
    pub(super) fn begin(&self, operation: &'static str, request: &Request<'_>, deadline: Instant) -> Result<Call> {
        self.connection(operation, deadline)?.begin(operation, request, deadline)
    }

    /// Makes a call that has one answer.
    pub(super) fn call<T>(
        &self,
        operation: &'static str,
        request: &Request<'_>,
        deadline: Instant,
        read: impl FnOnce(Answer<'_>) -> Option<T>,
    ) -> Result<T> {
        let call = self.begin(operation, request, deadline)?;
        answer(&call, operation, deadline, read)
    }

    /// Makes a call whose answer is entries, in one or more frames.
    pub(super) fn entries(
        &self,
        operation: &'static str,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Result<Option<(Vec<Entry>, Revision)>> {
        let call = self.begin(operation, request, deadline)?;
        let mut found = Vec::new();
        loop {
            let last = answer(&call, operation, deadline, |answer| match answer {
                Answer::Entries { items, revision, more } => {
                    found.extend(items.iter().map(entry));
                    Some((!more).then_some(Some(Revision(revision))))
                }
                Answer::Not => Some(Some(None)),
                _ => None,
            })?;
            if let Some(revision) = last {
                return Ok(revision.map(|revision| (found, revision)));
            }
        }
    }
}

/// The next answer of a call, decoded by `read`.
pub(super) fn answer<T>(
    call: &Call,
    operation: &'static str,
    deadline: Instant,
    read: impl FnOnce(Answer<'_>) -> Option<T>,
) -> Result<T> {
    let body = call.next(deadline)?;
    let answer = decode_answer(&body).map_err(|why| call.connection.protocol(operation, &why))?.body;
    if let Answer::Failed(failure) = &answer {
        return Err(failure.error(operation));
    }
    read(answer).ok_or_else(|| call.connection.protocol(operation, "the store sent an unexpected kind of answer"))
}

pub(super) fn entry(item: &Item<'_>) -> Entry {
    Entry { key: item.key.to_owned(), value: item.value.0.to_vec(), revision: Revision(item.revision) }
}
