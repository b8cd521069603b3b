//! The export of metrics: a thread that answers HTTP requests, or one that writes files for node_exporter.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossrail_locks::{Mutex, PerProcess, signals_blocked};
use crossrail_types::{Error, Log, Result, Settings, loopback};

use crate::read::{Found, PageSnapshot};
use crate::{metrics, now_ns, pages, process};

/// How often the files are written: node_exporter is asked four times a minute as a rule.
const WRITE_EVERY: Duration = Duration::from_secs(15);
/// How often to check whether the page exists, before the first write.
const FIRST_EVERY: Duration = Duration::from_millis(250);
/// How often to retry a port that another process holds: this process takes over when that one exits.
const RETRY_EVERY: Duration = Duration::from_secs(5);
/// How long a client may take for its request, or to take the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);
/// Clients that are answered at a time.
const CLIENTS_MAX: usize = 32;
/// Longest request that is read.
const REQUEST_MAX: usize = 8 << 10;
/// How the files are called: this, process id, start, and the suffix that node_exporter looks for.
const PREFIX: &str = "crossrail-";
const SUFFIX: &str = ".prom";

/// Whether this process exports, and the file that it writes.
static EXPORTING: PerProcess<Mutex<Option<Option<PathBuf>>>> = PerProcess::new();

/// Exports metrics as the settings say, for as long as the process lives. Only the first call of a process has an
/// effect. What goes wrong later is logged: a program must not fail because nobody can watch it.
///
/// # Errors
/// `Config`: the address does not resolve, or there are no pages to export.
pub fn export(settings: &Settings) -> Result<()> {
    let Some(to) = &settings.metrics else { return Ok(()) };
    let fail = |why: String, hint: &str| {
        Error::new(crossrail_types::ErrorKind::Config, "CROSSRAIL_METRICS", why).with_hint(hint)
    };
    let Some(folder) = settings.pages.clone() else {
        return Err(fail("exports the pages, and CROSSRAIL_PAGES=off".to_owned(), "unset one of them"));
    };
    let log = Log(settings.log);
    let mut exporting = EXPORTING.lock();
    if exporting.is_some() {
        return Ok(());
    }
    let (file, body): (_, Box<dyn FnOnce() + Send>) = match to.strip_prefix("file:") {
        Some(target) => {
            let target = PathBuf::from(target);
            let file = target.join(own_file());
            let (of_thread, target) = (file.clone(), target);
            (Some(file), Box::new(move || write_files(&folder, &target, &of_thread, log)))
        }
        None => {
            let address =
                resolve(to).ok_or_else(|| fail(format!("{to:?} does not resolve"), "write :9400 or host:9400"))?;
            (None, Box::new(move || serve(&folder, address, log)))
        }
    };
    let started = signals_blocked(|| std::thread::Builder::new().name("crossrail-metrics".to_owned()).spawn(body));
    if let Err(error) = started {
        log.warn(format_args!("CROSSRAIL_METRICS: cannot start the export thread ({error}); nothing is exported"));
        return Ok(());
    }
    if file.is_some() {
        // SAFETY: the function stays where it is, and touches nothing that an ending process may not touch.
        #[allow(unsafe_code)]
        unsafe {
            nix::libc::atexit(remove_at_exit);
        }
    }
    *exporting = Some(file);
    Ok(())
}

extern "C" fn remove_at_exit() {
    if let Some(exporting) = EXPORTING.try_lock()
        && let Some(Some(file)) = exporting.as_ref()
    {
        let _ = std::fs::remove_file(file);
    }
}

/// `:9400` is loopback.
fn resolve(text: &str) -> Option<SocketAddr> {
    if let Some(port) = text.strip_prefix(':') {
        return Some(SocketAddr::new(loopback(), port.parse().ok()?));
    }
    text.to_socket_addrs().ok()?.next()
}

/// Answers requests with the metrics of all processes of this user on this machine: one process of them has the port.
fn serve(folder: &Path, address: SocketAddr, log: Log) {
    let mut reported = false;
    let listener = loop {
        match TcpListener::bind(address) {
            Ok(listener) => break listener,
            Err(error) => {
                if !std::mem::replace(&mut reported, true) {
                    log.warn(format_args!(
                        "CROSSRAIL_METRICS: {address}: {error}; if another process of this user holds the port, \
                         it also exports this process's counters"
                    ));
                }
                std::thread::sleep(RETRY_EVERY);
            }
        }
    };
    answer_all(&listener, folder);
}

/// Answers each client on a thread of its own, so that a silent client blocks no other. Beyond `CLIENTS_MAX`, the
/// oldest connection is closed.
fn answer_all(listener: &TcpListener, folder: &Path) {
    let mut answering: VecDeque<(TcpStream, JoinHandle<()>)> = VecDeque::new();
    for client in listener.incoming().flatten() {
        answering.retain(|(_, thread)| !thread.is_finished());
        if answering.len() >= CLIENTS_MAX
            && let Some((oldest, _)) = answering.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let Ok(handle) = client.try_clone() else { continue };
        let folder = folder.to_owned();
        let scrape = move || {
            let _ = answer(&client, &folder, CLIENT_TIMEOUT);
            // The other handle would keep it open.
            let _ = client.shutdown(Shutdown::Both);
        };
        let builder = std::thread::Builder::new().name("crossrail-scrape".to_owned());
        let thread = signals_blocked(|| builder.spawn(scrape));
        // Without a thread the client is closed; the next scrape makes up for it.
        answering.extend(thread.ok().map(|thread| (handle, thread)));
    }
}

/// Reads a request and answers it, each within `limit`, however few bytes at a time the client gives or takes.
fn answer(mut client: &TcpStream, folder: &Path, limit: Duration) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    let deadline = Instant::now() + limit;
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < REQUEST_MAX {
        client.set_read_timeout(Some(left(deadline)?))?;
        match client.read(&mut buffer)? {
            0 => break,
            got => request.extend_from_slice(&buffer[..got]),
        }
    }
    let path = request.strip_prefix(b"GET ").and_then(|rest| rest.split(|byte| b" ?".contains(byte)).next());
    let (status, body) = match path {
        Some(b"/metrics" | b"/") => ("200 OK", metrics::text(&seen(folder, |_| true), now_ns())),
        Some(_) => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        None => ("400 Bad Request", "GET /metrics\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    let answer = [head, body].concat();
    let (mut rest, deadline) = (answer.as_bytes(), Instant::now() + limit);
    while !rest.is_empty() {
        client.set_write_timeout(Some(left(deadline)?))?;
        match client.write(rest)? {
            0 => return Err(ErrorKind::WriteZero.into()),
            written => rest = &rest[written..],
        }
    }
    Ok(())
}

/// The time until the deadline, as a socket's timeout.
fn left(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn seen(folder: &Path, which: impl Fn(&Found) -> bool) -> Vec<PageSnapshot> {
    pages(folder).unwrap_or_default().into_iter().filter(which).filter_map(|found| found.page.ok()).collect()
}

/// Writes this process's metrics into a file of its own, in place of the one before.
fn write_files(folder: &Path, target: &Path, file: &Path, log: Log) {
    let mut reported = false;
    remove_stale(target);
    let own = std::process::id();
    loop {
        let page = seen(folder, |found| found.pid == own);
        if page.is_empty() {
            // There is no worker yet.
            std::thread::sleep(FIRST_EVERY);
            continue;
        }
        let text = metrics::text(&page, now_ns());
        // node_exporter reads only what ends in .prom, and a rename is atomic.
        let made = file.with_extension("tmp");
        let written = replace(&made, &text).and_then(|()| std::fs::rename(&made, file));
        if let Err(error) = written
            && !std::mem::replace(&mut reported, true)
        {
            log.warn(format_args!("CROSSRAIL_METRICS: {}: {error}; will retry", file.display()));
        }
        std::thread::sleep(WRITE_EVERY);
    }
}

/// Atomically replaces the file `path` by one with `text`; never follows a link that another user created at that name.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        return Err(error);
    }
    File::options().write(true).create_new(true).open(path)?.write_all(text.as_bytes())
}

fn own_file() -> String {
    let pid = std::process::id();
    format!("{PREFIX}{pid}-{}{SUFFIX}", process::started(pid).unwrap_or_default())
}

/// Removes the files of dead processes, which would otherwise be exported forever.
fn remove_stale(target: &Path) {
    let Ok(entries) = std::fs::read_dir(target) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let named =
            name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX)).and_then(|rest| rest.split_once('-'));
        let Some((Ok(pid), Ok(start))) = named.map(|(pid, start)| (pid.parse::<u32>(), start.parse::<u64>())) else {
            continue;
        };
        if process::started(pid) != Some(start) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_say_nothing_keep_no_scrape_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("its address");
        std::thread::spawn(move || answer_all(&listener, Path::new("/nonexistent")));
        let _idle: Vec<_> = (0..4 * CLIENTS_MAX).map(|_| TcpStream::connect(address).expect("connected")).collect();
        let mut client = TcpStream::connect(address).expect("connected");
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("sent");
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("answered");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }

    #[test]
    fn a_client_that_drips_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let mut client = TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
        let (server, _) = listener.accept().expect("accepted");
        let dripping = std::thread::spawn(move || {
            // Until the other end closes, which the drops that come before it must not put off.
            (0..REQUEST_MAX)
                .take_while(|_| {
                    std::thread::sleep(Duration::from_millis(1));
                    client.write_all(b"G").is_ok()
                })
                .count()
        });
        let outcome = answer(&server, Path::new("/nonexistent"), Duration::from_millis(20));
        drop(server);
        assert!(outcome.is_err(), "the whole request was read");
        assert!(dripping.join().expect("no panic") < REQUEST_MAX);
    }

    #[test]
    fn metrics_are_not_written_through_a_link() {
        let folder = std::env::temp_dir().join(format!("crossrail-serve-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let (victim, made) = (folder.join("victim"), folder.join("made"));
        std::fs::write(&victim, "precious").expect("written");
        std::os::unix::fs::symlink(&victim, &made).expect("linked");
        replace(&made, "metrics").expect("written");
        let read = |path| std::fs::read_to_string(path).expect("read");
        assert_eq!((read(&victim), read(&made)), ("precious".to_owned(), "metrics".to_owned()));
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
