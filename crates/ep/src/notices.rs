//! Loss notices between ranks, sent over the buffer's connections. See [`View`].

use crossrail::{Endpoint, Receipt, Request, Worker};
use crossrail_types::{Error, ErrorKind, Result};

use crate::view::{Notice, View};

/// Tag of a [`Notice`].
const TAG: u64 = 0x4550_0000_0002_0004;

/// Begins to receive the next notice of the rank behind `endpoint`.
///
/// # Errors
/// As [`Worker::recv`]: the connection has ended.
pub fn receive(worker: &Worker, endpoint: &Endpoint) -> Result<Request> {
    worker.recv(vec![0; Notice::MAX], TAG, u64::MAX, Some(endpoint))
}

/// The notice that `request`, which is finished, has received.
///
/// # Errors
/// `Protocol`: the peer has sent something else.
pub fn received(request: Request, receipt: &Receipt) -> Result<Notice> {
    let bytes = request.into_vec().unwrap_or_default();
    Notice::decode(bytes.get(..receipt.bytes as usize).unwrap_or_default())
}

/// Sends `view` to all reachable ranks, including those removed from it. `stamp`: sequence number of this rank's last
/// operation.
pub fn send<'a>(view: &View, stamp: u64, endpoints: impl Iterator<Item = &'a Endpoint>) {
    let Ok(notice) = view.notice(stamp).encode() else { return };
    for endpoint in endpoints.filter(|endpoint| endpoint.is_alive()) {
        // A failure means that the connection has ended meanwhile, which is noticed elsewhere.
        let _ = endpoint.send(notice.clone(), TAG);
    }
}

/// The error of a rank that is out of the others' view, for the reason that [`View::evicted`] gives.
pub fn evicted(operation: &str, why: &str) -> Error {
    Error::new(ErrorKind::PeerDead, operation, why)
        .with_hint("the others continue without this rank; they disconnect it, and connect its next buffer")
}
