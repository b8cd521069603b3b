//! Direct copies of GPU memory between processes of one machine, beside the shared-memory lane of an endpoint.

use crossrail_gpu::CudaState;
use crossrail_handshake::Hello;

use super::Sessions;
use super::costs::Cost;
use super::explain::{self, Candidate};
use super::transport::{Availability, Local, Refused, Transport};

/// See the module.
pub(super) struct CudaIpc;

impl Transport for CudaIpc {
    fn name(&self) -> &'static str {
        "cuda_ipc"
    }

    fn availability(&self, local: &Local<'_>) -> Availability {
        match local.cuda {
            None => return Availability::Unusable("no GPU".to_owned(), None),
            Some(CudaState::Absent { reason, fix }) => return Availability::Unusable(reason.clone(), fix.clone()),
            Some(CudaState::Present(_)) => {}
        }
        let tls = &local.settings.tls;
        if !tls.allows("shm") && tls.allows(self.name()) {
            let reason = format!("it needs shm's Unix socket, and CROSSRAIL_TLS={tls} leaves shm out");
            return Availability::Unusable(reason, Some("add shm to CROSSRAIL_TLS".to_owned()));
        }
        Availability::Usable("one copy between GPUs of this machine; tried with each peer".to_owned())
    }

    fn carrier(&self) -> Option<&'static str> {
        Some("shm")
    }

    fn obstacle(&self, sessions: &Sessions, peer: &Hello) -> Option<String> {
        let known = peer.transports.iter().any(|name| name == self.name());
        let theirs = || (!known).then(|| "the peer's CROSSRAIL_TLS leaves it out".to_owned());
        sessions.environment.no_cuda_ipc().or_else(theirs)
    }

    fn candidates(&self, sessions: &Sessions, peer: &Hello) -> Vec<Candidate> {
        let row = explain::candidate("cuda_ipc", "cuda_ipc", None, &Cost::CUDA_IPC);
        vec![match self.obstacle(sessions, peer) {
            Some(why) => row.out(&why),
            None => row.chosen(&["GPU memory"]),
        }]
    }
}

/// Why GPU memory of a peer over shm cannot be copied directly, if so.
pub(super) fn reason(sessions: &Sessions, peer: &Hello, refused: &Refused) -> Option<String> {
    CudaIpc.obstacle(sessions, peer).or_else(|| refused.reason(CudaIpc.name()).map(str::to_owned))
}
