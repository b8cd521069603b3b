//! What `init` creates: workers on first use, and the connections to other ranks' workers.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossrail::{ConnectOptions, Context, Endpoint, Settings, Turn, Worker};
use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::{Error, ErrorKind, Filter, IoThreads, Result};
use slab::Slab;

use crate::connecting::Attempt;
use crate::device::Device;
use crate::handle::Handle;
use crate::log;
use crate::workers::{self, Workers};

/// Bytes of a chunk, unless the user says otherwise: NCCL's pieces are no longer.
const CHUNK: usize = 512 << 10;

/// The process's devices and settings, read once.
pub(crate) struct Process {
    context: Context,
    /// How many workers a network has.
    workers: usize,
    pub(crate) device: Device,
}

static PROCESS: PerProcess<OnceLock<Result<Process>>> = PerProcess::new();

impl Process {
    /// The process's devices and settings.
    ///
    /// # Errors
    /// `Config` for invalid settings, `Io` when the system does not list its devices.
    pub(crate) fn get() -> Result<&'static Process> {
        let discover = || Process::of(Settings::from_env()?, |name| std::env::var_os(name).is_some());
        PROCESS.get_or_init(discover).as_ref().map_err(Clone::clone)
    }

    /// With these settings, of which the user has set those that `is_set` says.
    ///
    /// # Errors
    /// As [`Process::get`].
    pub(crate) fn of(mut settings: Settings, is_set: impl Fn(&str) -> bool) -> Result<Process> {
        // NCCL hands over host memory only; direct copies between GPUs are its own.
        settings.tls = without(&settings.tls, "cuda_ipc");
        let workers = tune(&mut settings, is_set);
        let context = Context::new(settings)?;
        let device = Device::describe(&context)?;
        let threads = if workers == 1 { String::new() } else { format!("; {workers} threads") };
        log::info(format_args!("rails: {}{threads}", device.rails));
        if !device.addresses.is_empty() && !has_secret(context.settings()) {
            log::info(format_args!(
                "CROSSRAIL_SECRET is not set, so only ranks on {} can connect; set it on all ranks to reach others",
                device.host
            ));
        }
        Ok(Process { context, workers, device })
    }

    /// The devices and settings, for workers.
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// Addresses for workers to listen on; `None`: loopback, without a secret, or those of the settings.
    pub(crate) fn listens(&self) -> Option<Vec<SocketAddr>> {
        let (device, settings) = (&self.device, self.context.settings());
        let listens = has_secret(settings) && settings.control_device.is_none() && !device.addresses.is_empty();
        listens.then(|| device.addresses.iter().map(|ip| SocketAddr::new(*ip, 0)).collect())
    }
}

/// A unique random number.
///
/// # Errors
/// `Io` without random numbers.
pub(crate) fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| Error::new(ErrorKind::Io, "init", error.to_string()))?;
    Ok(u64::from_le_bytes(bytes))
}

fn has_secret(settings: &Settings) -> bool {
    settings.secret.is_some() || settings.secret_file.is_some()
}

/// Defaults for NCCL's traffic, which is many pieces of 128 to 512 KiB at a time. What the user has set stays, except
/// that the threads are the workers': each serves all connections of one. How many workers there are.
fn tune(settings: &mut Settings, is_set: impl Fn(&str) -> bool) -> usize {
    if !is_set("CROSSRAIL_CHUNK") {
        settings.chunk = CHUNK;
    }
    let workers = workers::count(settings.io_threads);
    settings.io_threads = IoThreads::Count(1);
    workers
}

fn without(filter: &Filter, name: &str) -> Filter {
    let others = |names: &[String]| names.iter().filter(|other| *other != name).cloned().collect::<Vec<_>>();
    match filter {
        Filter::All => Filter::Except(vec![name.to_owned()]),
        Filter::Only(names) => Filter::Only(others(names)),
        Filter::Except(names) => Filter::Except([others(names), vec![name.to_owned()]].concat()),
    }
}

/// One communicator's network, or the process's for tables before version 11. Any thread may use it.
pub(crate) struct Net {
    process: &'static Process,
    /// Distinguishes this network from all others.
    pub(crate) id: u64,
    /// How many workers it starts.
    count: usize,
    /// The workers' threads start transfers, not NCCL's.
    pub(crate) hands_over: bool,
    workers: Mutex<Option<Arc<Workers>>>,
    numbers: AtomicU32,
    links: Mutex<HashMap<u64, Arc<Link>>>,
    pub(crate) attempts: Mutex<Slab<Attempt>>,
}

/// The connections to another rank's workers, shared by all communicators to it.
pub(crate) struct Link(Mutex<Option<Result<Vec<Endpoint>>>>);

impl Link {
    /// The endpoints, one for each pair of workers; `None` while they are being made.
    ///
    /// # Errors
    /// Why one could not be made.
    pub(crate) fn endpoints(&self) -> Result<Option<Vec<Endpoint>>> {
        self.0.lock().clone().transpose()
    }
}

impl Net {
    /// A network without a worker yet.
    ///
    /// # Errors
    /// As [`Process::get`]; `Io` without random numbers.
    pub(crate) fn new() -> Result<Arc<Net>> {
        let process = Process::get()?;
        Net::of(process, process.workers, workers::hand_over())
    }

    /// A network that will have `count` workers. `hands_over`: their threads start transfers.
    ///
    /// # Errors
    /// `Io` without random numbers.
    pub(crate) fn of(process: &'static Process, count: usize, hands_over: bool) -> Result<Arc<Net>> {
        Ok(Arc::new(Net {
            process,
            id: random()?,
            count,
            hands_over,
            workers: Mutex::new(None),
            numbers: AtomicU32::new(0),
            links: Mutex::default(),
            attempts: Mutex::default(),
        }))
    }

    /// The device that this network uses.
    pub(crate) fn device(&self) -> &'static Device {
        &self.process.device
    }

    /// The settings.
    pub(crate) fn settings(&self) -> &'static Settings {
        self.process.context.settings()
    }

    /// The next number for a listener or a connection.
    pub(crate) fn number(&self) -> u32 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// The workers, started on first use: a communicator whose ranks share memory never needs any.
    ///
    /// # Errors
    /// As [`Worker::new`].
    pub(crate) fn workers(&self) -> Result<Arc<Workers>> {
        let mut workers = self.workers.lock();
        if let Some(workers) = &*workers {
            return Ok(workers.clone());
        }
        let listen = self.process.listens();
        // Unique, since the accepting end finds its endpoints by this name.
        let name = format!("{}:{}#{:016x}", self.device().host, std::process::id(), self.id);
        let started = Arc::new(Workers::start(&self.process.context, self.count, &name, listen)?);
        *workers = Some(started.clone());
        Ok(started)
    }

    /// The connections to the workers behind `handle`, begun if there are none yet.
    ///
    /// # Errors
    /// `Unreachable`: they are on another machine and listen on loopback only; `Io` when the system refuses a
    /// thread.
    pub(crate) fn link(&self, handle: Handle) -> Result<Arc<Link>> {
        if let Some(link) = self.links.lock().get(&handle.network) {
            return Ok(link.clone());
        }
        if handle.machine != self.device().machine && handle.ips.iter().all(IpAddr::is_loopback) {
            let detail = "the peer is on another machine and accepts connections on its loopback interface only";
            return Err(Error::new(ErrorKind::Unreachable, "connect", detail)
                .with_hint("set CROSSRAIL_SECRET to the same text on all ranks"));
        }
        let workers = self.workers()?;
        let link = Arc::new(Link(Mutex::new(None)));
        let target = link.clone();
        self.links.lock().insert(handle.network, link.clone());
        let (timeout, hands_over) = (self.settings().timeout, self.hands_over);
        let dial = move || {
            let count = workers.len().min(handle.ports.len());
            let connect = |index| {
                let turn = workers::turn(index, count, hands_over);
                connect(workers.worker(index), &handle.worker(index), timeout, turn)
            };
            let made = (0..count).map(connect).collect::<Result<Vec<_>>>();
            if let Ok(endpoints @ [first, ..]) = made.as_deref() {
                log::info(format_args!("connected to {} over {}", first.peer(), lanes_of(endpoints)));
            }
            *target.0.lock() = Some(made);
        };
        std::thread::Builder::new()
            .name("crossrail-connect".to_owned())
            .spawn(dial)
            .map_err(|error| Error::io("connect", "pthread_create", &error))?;
        Ok(link)
    }

    /// The endpoints of all links that have come up.
    #[cfg(test)]
    pub(crate) fn endpoints(&self) -> Vec<Endpoint> {
        let links = self.links.lock();
        links.values().filter_map(|link| link.endpoints().ok()?).flatten().collect()
    }

    /// Ends the workers: their connections close, their threads end.
    ///
    /// # Errors
    /// `Timeout`: a peer may still access memory; the workers are closed all the same.
    pub(crate) fn close(&self) -> Result<()> {
        self.attempts.lock().clear();
        self.links.lock().clear();
        self.workers.lock().take().map_or(Ok(()), |workers| workers.close())
    }
}

/// The lanes of a link, for the log: `tcp/eth1, tcp/eth2, tcp/eth1:messages (2 times), tcp/eth2:messages (2 times)`.
fn lanes_of(endpoints: &[Endpoint]) -> String {
    let lanes = endpoints.iter().flat_map(Endpoint::lanes).map(|lane| lane.name);
    counted(lanes).join(", ")
}

/// Each name once, and how often there is more than one.
fn counted(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut found: Vec<(String, usize)> = Vec::new();
    for name in names {
        match found.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => found.push((name, 1)),
        }
    }
    let text = |(name, count)| if count == 1 { name } else { format!("{name} ({count} times)") };
    found.into_iter().map(text).collect()
}

fn connect(worker: &Worker, addresses: &[SocketAddr], timeout: std::time::Duration, turn: Turn) -> Result<Endpoint> {
    let deadline = Instant::now() + timeout;
    let mut failure = Error::new(ErrorKind::Unreachable, "connect", "the handle has no address");
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        let options = ConnectOptions { require: None, timeout: Some(left), turn };
        match worker.connect(address.to_string().as_bytes(), &options) {
            Ok(endpoint) => return Ok(endpoint),
            Err(error) if matches!(error.kind, ErrorKind::Unreachable | ErrorKind::Timeout) => failure = error,
            Err(error) => return Err(error),
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_user_has_set_is_not_tuned() {
        let tuned = |threads: &str, set: &[&str]| {
            let mut settings = Settings::from_pairs([("CROSSRAIL_IO_THREADS", threads)]).expect("settings");
            let workers = tune(&mut settings, |name| set.contains(&name));
            assert_eq!(settings.io_threads, IoThreads::Count(1));
            (settings.chunk, workers)
        };
        assert_eq!(tuned("3", &[]), (CHUNK, 3));
        assert_eq!(tuned("auto", &["CROSSRAIL_CHUNK"]).0, Settings::default().chunk);
    }

    #[test]
    fn lanes_of_several_workers_are_logged_once() {
        let names = ["tcp/eth1", "tcp/eth1:messages", "tcp/eth1", "tcp/eth2:messages"].map(str::to_owned);
        let shown = counted(names.into_iter());
        assert_eq!(shown, ["tcp/eth1 (2 times)", "tcp/eth1:messages", "tcp/eth2:messages"]);
    }

    #[test]
    fn a_transport_is_left_out_of_any_filter() {
        let text = |filter: &Filter| without(filter, "cuda_ipc").to_string();
        let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(text(&Filter::All), "^cuda_ipc");
        assert_eq!(text(&Filter::Only(named(&["shm", "cuda_ipc"]))), "shm");
        assert_eq!(text(&Filter::Except(named(&["shm", "cuda_ipc"]))), "^shm,cuda_ipc");
    }
}
