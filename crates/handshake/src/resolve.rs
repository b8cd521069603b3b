use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Instant;

use crossrail_locks::signals_blocked;
use crossrail_types::{Error, ErrorKind, Reason, Result};

/// The addresses of a host name. The system's resolver knows no deadline, so it runs on a thread of its own, which ends
/// with the look-up.
///
/// # Errors
/// `Unreachable`: the name has no address. `Timeout`: the look-up takes longer than `deadline`. `Io`: no thread.
pub fn resolve(operation: &str, host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>> {
    let (send, receive) = mpsc::sync_channel(1);
    let name = host.to_owned();
    let look_up = move || {
        let found = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        // This fails once the caller has stopped waiting.
        let _ = send.send(found);
    };
    let builder = std::thread::Builder::new().name("crossrail-resolve".to_owned());
    signals_blocked(|| builder.spawn(look_up)).map_err(|e| Error::io(operation, "spawn a thread", &e))?;
    let started = Instant::now();
    let unknown =
        |detail: String| Error::new(ErrorKind::Unreachable, operation, detail).with_reason(Reason::NameUnknown);
    match receive.recv_timeout(deadline.saturating_duration_since(started)) {
        Ok(Ok(found)) if !found.is_empty() => Ok(found),
        Ok(Ok(_)) => Err(unknown(format!("{host} has no address"))),
        Ok(Err(e)) => Err(unknown(format!("look up {host}: {e}")).with_io(&e)),
        Err(_) => {
            let error = Error::new(ErrorKind::Timeout, operation, format!("look up {host}: no answer"));
            Err(error.with_reason(Reason::NoResponse).with_waited(started.elapsed()))
        }
    }
}
