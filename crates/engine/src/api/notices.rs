//! Notices: short bytes for a peer's queue, alone or behind the data of a move.

use std::time::Duration;

use crossrail_types::{Error, ErrorKind, Result};

use super::{Endpoint, Request, Worker};
use crate::core::Core;
use crate::core::rows::wire;

/// Longest notice, in bytes.
pub const NOTICE_MAX: usize = wire::NOTICE_MAX;

/// Of this many fruitless calls, one also polls epoll for events that lanes do not report, and runs deferred tasks.
const WHOLE_EVERY: u64 = 32;

/// A notice received from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The peer's name.
    pub peer: String,
    /// The endpoint's number ([`Endpoint::id`]).
    pub endpoint: u32,
    /// The number of the peer's worker ([`Endpoint::generation`]).
    pub generation: u64,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Endpoint {
    /// Enqueues `bytes` in the peer's queue of notices ([`Worker::notices`]). Finished once they are there. None is
    /// dropped: while the peer takes none, the request waits for credit. Notices of one endpoint keep their order;
    /// those of moves arrive when their move is complete. Once sent, it cannot be cancelled.
    ///
    /// # Errors
    /// `Usage`: more than [`NOTICE_MAX`] bytes; here and in the request `PeerDead` and `Closed`.
    pub fn notify(&self, bytes: &[u8]) -> Result<Request> {
        let progress = self.worker.progress_handle();
        progress.check_origin("notify")?;
        check_len("notify", bytes)?;
        let mut core = progress.core();
        let op = core.notify(self.id, bytes.to_vec());
        progress.after(core);
        Ok(Request::new(progress, op?))
    }
}

/// Fails for a notice that is too long.
pub(super) fn check_len(what: &str, bytes: &[u8]) -> Result<()> {
    if bytes.len() <= NOTICE_MAX {
        return Ok(());
    }
    let detail = format!("a notice of {} bytes; at most {NOTICE_MAX}", bytes.len());
    Err(Error::new(ErrorKind::Usage, what, detail).with_hint("send what is longer as a message"))
}

impl Worker {
    /// Makes progress once and takes at most `limit` notices of all peers, in the order in which they came. Never
    /// blocks. [`Worker::event_fd`] becomes readable when there are new ones.
    pub fn notices(&self, limit: usize) -> Vec<Notice> {
        let progress = self.progress_handle();
        if progress.check_origin("notices").is_err() {
            return Vec::new();
        }
        let mut core = progress.core();
        if !core.has_notices() {
            let whole = core.wake_ups().caller_passes().is_multiple_of(WHOLE_EVERY);
            if whole || !progress.options.has_background {
                drop(core);
                progress.step();
                core = progress.core();
            } else {
                core.wake_ups().count_pass();
                core = progress.pass_for(core, false, |core| core.has_notices());
            }
        }
        let taken = core.take_notices(limit);
        let named = taken.into_iter().map(|raised| Notice {
            peer: raised.from.name.to_string(),
            endpoint: raised.from.endpoint.0,
            generation: raised.from.generation,
            bytes: raised.bytes,
        });
        let notices = named.collect();
        progress.after(core);
        notices
    }

    /// Waits until there are notices, at most `timeout`; whether there are.
    pub fn wait_notice(&self, timeout: Duration) -> bool {
        let progress = self.progress_handle();
        progress.check_origin("wait_notice").is_ok()
            && progress.wait_until(timeout, |core: &mut Core| core.has_notices().then_some(())).is_some()
    }
}
