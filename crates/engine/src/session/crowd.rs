//! Bound on peers that have connected and wait to be accepted, or for their lanes: each takes descriptors and memory,
//! even where the program never accepts.

use crossrail_handshake::share_of_descriptors;

use super::Sessions;
use crate::core::Claim;

/// Minimum and maximum of peers that may wait; in between, a quarter of the descriptors that the process may have.
const WAITING: (usize, usize) = (16, 4096);

fn limit() -> usize {
    share_of_descriptors(4).clamp(WAITING.0, WAITING.1)
}

fn waiting(sessions: &Sessions) -> usize {
    sessions.arrived.lock().len() + sessions.control.unformed()
}

/// Refuses further peers as long as too many wait.
pub(super) fn check(sessions: &Sessions) {
    let most = limit();
    let mut count = waiting(sessions);
    if count >= most {
        // Those that have left make room.
        let mut core = sessions.progress.core();
        let is_alive = |claim: &Claim| core.peers().get(claim.id).is_some_and(|peer| peer.is_alive());
        sessions.arrived.lock().retain(is_alive);
        drop(core);
        count = waiting(sessions);
    }
    if let Some(listener) = sessions.listener.lock().as_ref() {
        let why = || format!("{count} peers wait to be accepted, the limit of this worker");
        listener.set_crowded((count >= most).then(why));
    }
}

/// True if handshakes that were in progress at the limit have doubled the number of waiting peers.
pub(super) fn is_overrun(sessions: &Sessions) -> bool {
    waiting(sessions) >= 2 * limit()
}
