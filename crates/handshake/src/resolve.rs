use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Instant;

use crossrail_types::{Error, ErrorKind, Result};

/// The addresses of a host name. The system's resolver knows no deadline, so it runs on a thread of its own, which ends
/// with the look-up.
///
/// # Errors
/// `Unreachable`: the name has no address. `Timeout`: the look-up takes longer than `deadline`. `Io`: no thread.
pub fn resolve(operation: &str, host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>> {
    let (send, receive) = mpsc::sync_channel(1);
    let name = host.to_owned();
    std::thread::Builder::new()
        .name("crossrail-resolve".to_owned())
        .spawn(move || {
            let found = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            // This fails once the caller has stopped waiting.
            let _ = send.send(found);
        })
        .map_err(|e| Error::io(operation, "spawn a thread", &e))?;
    let started = Instant::now();
    let fail = |kind, detail: String| Err(Error::new(kind, operation, detail));
    match receive.recv_timeout(deadline.saturating_duration_since(started)) {
        Ok(Ok(found)) if !found.is_empty() => Ok(found),
        Ok(Ok(_)) => fail(ErrorKind::Unreachable, format!("{host} has no address")),
        Ok(Err(e)) => fail(ErrorKind::Unreachable, format!("look up {host}: {e}")),
        Err(_) => {
            let waited = started.elapsed().as_secs_f64();
            fail(ErrorKind::Timeout, format!("look up {host}: no answer in {waited:.1} s"))
        }
    }
}
