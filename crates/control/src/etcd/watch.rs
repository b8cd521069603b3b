//! Changes as etcd streams them, one line of JSON each. The waiting caller reads them; there is no thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};

use super::client::Client;
use super::http::{Connection, Content, Failure, remaining};
use super::messages::{Change, Kind, Line, Number, Range, WatchCreate, WatchLine, WatchRequest};
use super::{entry, name};
use crate::store::{Event, Revision, Watch};

const OPERATION: &str = "store watch";

/// See [`Watch`].
#[derive(Debug)]
pub(super) struct EtcdWatch {
    client: Arc<Client>,
    connection: Connection,
    content: Content,
    /// Received bytes of an incomplete line; there is no line end before `seen`.
    text: Vec<u8>,
    seen: usize,
    /// Why the watch has ended.
    ended: Option<Error>,
}

impl EtcdWatch {
    /// Watches `range` after the revision `after`. Returns once etcd has started to watch.
    pub(super) fn open(client: &Arc<Client>, range: Range, after: Revision, deadline: Instant) -> Result<EtcdWatch> {
        let start_revision = Number::from(after.0.saturating_add(1));
        let request = WatchRequest { create_request: WatchCreate { range, start_revision } };
        let (connection, content) = client.stream(OPERATION, "/v3/watch", &request, deadline)?;
        let client = Arc::clone(client);
        let mut watch = EtcdWatch { client, connection, content, text: Vec::new(), seen: 0, ended: None };
        let Some(line) = watch.line(deadline)? else {
            let what = format!("{} did not begin to watch in time", watch.client.address());
            return Err(Error::new(ErrorKind::Timeout, OPERATION, what));
        };
        match watch.parse(&line)? {
            first if first.created => Ok(watch),
            _ => Err(watch.client.foreign(OPERATION, "a watch that does not begin")),
        }
    }

    /// The next line, waiting until `deadline`, with one check if that has passed; `None` if there is none.
    fn line(&mut self, deadline: Instant) -> Result<Option<Vec<u8>>> {
        let mut looked = false;
        loop {
            // The first lines may have arrived with the head of the answer.
            let taken = self.connection.take(&mut self.content, &mut self.text);
            if let Some(line) = self.whole_line() {
                return Ok(Some(line));
            }
            if self.content.is_done() {
                return Err(self.client.gone(OPERATION, "the watch was ended"));
            }
            let wait = match remaining(deadline) {
                Some(time) => time,
                None if !looked => Duration::ZERO,
                None => return Ok(None),
            };
            looked = true;
            match taken.and_then(|()| self.connection.fill(wait)) {
                Ok(()) => {}
                Err(Failure::Late) => return Ok(None),
                Err(Failure::Unreached(why) | Failure::Broken(why)) => return Err(self.client.gone(OPERATION, &why)),
                Err(Failure::Foreign(what)) => return Err(self.client.foreign(OPERATION, &what)),
            }
        }
    }

    fn whole_line(&mut self) -> Option<Vec<u8>> {
        let Some(at) = self.text.iter().skip(self.seen).position(|byte| *byte == b'\n') else {
            self.seen = self.text.len();
            return None;
        };
        let rest = self.text.split_off(self.seen + at + 1);
        self.seen = 0;
        Some(std::mem::replace(&mut self.text, rest))
    }

    /// Parses a line; an error if it ends the watch.
    fn parse(&self, line: &[u8]) -> Result<WatchLine> {
        let line = serde_json::from_slice(line)
            .map_err(|e| self.client.foreign(OPERATION, &format!("a change that cannot be read: {e}")))?;
        let line = match line {
            Line::<WatchLine>::Result(line) => line,
            Line::Error(fault) => return Err(self.client.refused(OPERATION, &fault)),
        };
        if line.compact_revision != Number(0) {
            let what = format!(
                "{} has forgotten the changes before revision {}",
                self.client.address(),
                line.compact_revision.unsigned()
            );
            return Err(
                Error::new(ErrorKind::Unreachable, OPERATION, what).with_hint("list again, and watch from there")
            );
        }
        if line.canceled {
            return Err(self.client.canceled(OPERATION, &line.cancel_reason));
        }
        Ok(line)
    }

    fn advance(&mut self, deadline: Instant) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        while events.is_empty() {
            let Some(line) = self.line(deadline)? else {
                let what = format!("nothing changed at {} in time", self.client.address());
                return Err(Error::new(ErrorKind::Timeout, OPERATION, what));
            };
            events.extend(self.parse(&line)?.events.into_iter().filter_map(event));
        }
        while let Some(line) = self.whole_line() {
            match self.parse(&line) {
                Ok(line) => events.extend(line.events.into_iter().filter_map(event)),
                Err(error) => {
                    self.ended = Some(error);
                    break;
                }
            }
        }
        Ok(events)
    }
}

impl Watch for EtcdWatch {
    fn next(&mut self, deadline: Instant) -> Result<Vec<Event>> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        let came = self.advance(deadline);
        if let Err(error) = &came
            && error.kind != ErrorKind::Timeout
        {
            self.ended = Some(error.clone());
        }
        came
    }
}

/// `None` for a key that is not one of ours, such as one that is not UTF-8.
fn event(change: Change) -> Option<Event> {
    match change.kind {
        Kind::Put => entry(change.kv).map(Event::Put),
        Kind::Delete => {
            Some(Event::Gone { key: name(change.kv.key)?, revision: Revision(change.kv.mod_revision.unsigned()) })
        }
    }
}
