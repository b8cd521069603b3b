//! What `init` creates: a worker on first use, and the connections to other ranks' workers.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossrail::{ConnectOptions, Context, Endpoint, Settings, Worker, WorkerOptions};
use crossrail_types::{Channels, Error, ErrorKind, Filter, Rails, Result};
use parking_lot::Mutex;
use slab::Slab;

use crate::comm::Pacer;
use crate::connecting::Attempt;
use crate::device::Device;
use crate::handle::Handle;
use crate::log;

/// Bytes of a chunk, unless the user says otherwise.
const CHUNK: usize = 128 << 10;
/// Connections to a peer over all rails, unless the user says otherwise.
const CONNECTIONS: u32 = 4;

/// The process's devices and settings, read once.
pub(crate) struct Process {
    context: Context,
    pub(crate) device: Device,
}

static PROCESS: OnceLock<Result<Process>> = OnceLock::new();

impl Process {
    /// The process's devices and settings.
    ///
    /// # Errors
    /// `Config` for invalid settings, `Io` when the system does not list its devices.
    pub(crate) fn get() -> Result<&'static Process> {
        PROCESS.get_or_init(Process::discover).as_ref().map_err(Clone::clone)
    }

    fn discover() -> Result<Process> {
        let mut settings = Settings::from_env()?;
        // NCCL hands over host memory only; direct copies between GPUs are its own.
        settings.tls = without(&settings.tls, "cuda_ipc");
        tune(&mut settings, |name| std::env::var_os(name).is_some());
        let context = Context::new(settings)?;
        let device = Device::describe(&context)?;
        log::info(format_args!("rails: {}", device.rails));
        if !device.addresses.is_empty() && !has_secret(context.settings()) {
            log::info(format_args!(
                "CROSSRAIL_SECRET is not set, so only ranks on {} can connect; set it on all ranks to reach others",
                device.host
            ));
        }
        Ok(Process { context, device })
    }
}

fn has_secret(settings: &Settings) -> bool {
    settings.secret.is_some() || settings.secret_file.is_some()
}

/// Defaults for NCCL's traffic, which is many pieces of 128 to 512 KiB at a time: each is split over several
/// connections, which as many threads serve. What the user has set stays.
fn tune(settings: &mut Settings, is_set: impl Fn(&str) -> bool) {
    if !is_set("CROSSRAIL_CHUNK") {
        settings.chunk = CHUNK;
    }
    if !is_set("CROSSRAIL_CHANNELS") {
        let rails = match &settings.net_devices {
            Rails::Named(Filter::Only(names)) => names.len() as u32,
            _ => 1,
        };
        settings.channels = Channels::Count((CONNECTIONS / rails.max(1)).max(1));
    }
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
    /// Distinguishes this worker from all others.
    pub(crate) id: u64,
    worker: Mutex<Option<Worker>>,
    numbers: AtomicU32,
    links: Mutex<HashMap<u64, Arc<Link>>>,
    /// Endpoints that other ranks' workers have made.
    accepted: Mutex<Vec<Endpoint>>,
    pub(crate) attempts: Mutex<Slab<Attempt>>,
    pub(crate) pacer: Pacer,
}

/// The connection to another rank's worker, shared by all communicators to it.
pub(crate) struct Link(Mutex<Option<Result<Endpoint>>>);

impl Link {
    /// The endpoint; `None` while it is being made.
    ///
    /// # Errors
    /// Why it could not be made.
    pub(crate) fn endpoint(&self) -> Result<Option<Endpoint>> {
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
        let mut id = [0; 8];
        getrandom::fill(&mut id).map_err(|error| Error::new(ErrorKind::Io, "init", error.to_string()))?;
        Ok(Arc::new(Net {
            process,
            id: u64::from_le_bytes(id),
            worker: Mutex::new(None),
            numbers: AtomicU32::new(0),
            links: Mutex::default(),
            accepted: Mutex::default(),
            attempts: Mutex::default(),
            pacer: Pacer::default(),
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

    /// The worker, started on first use: a communicator whose ranks share memory never needs one.
    ///
    /// # Errors
    /// As [`Worker::new`].
    pub(crate) fn worker(&self) -> Result<Worker> {
        let mut worker = self.worker.lock();
        if let Some(worker) = &*worker {
            return Ok(worker.clone());
        }
        let device = self.device();
        let settings = self.settings();
        let listens = has_secret(settings) && settings.control_device.is_none() && !device.addresses.is_empty();
        let listen = listens.then(|| device.addresses.iter().map(|ip| SocketAddr::new(*ip, 0)).collect());
        // Unique, since the accepting end finds its endpoint by this name.
        let name = Some(format!("{}:{}#{:016x}", device.host, std::process::id(), self.id));
        let options = WorkerOptions { name, listen, ..WorkerOptions::default() };
        let started = Worker::new(&self.process.context, options)?;
        *worker = Some(started.clone());
        Ok(started)
    }

    /// The connection to the worker behind `handle`, begun if there is none yet.
    ///
    /// # Errors
    /// `Unreachable`: the worker is on another machine and listens on loopback only; `Io` when the system refuses a
    /// thread.
    pub(crate) fn link(&self, handle: Handle) -> Result<Arc<Link>> {
        if let Some(link) = self.links.lock().get(&handle.worker) {
            return Ok(link.clone());
        }
        if handle.machine != self.device().machine && handle.addresses.iter().all(|address| address.ip().is_loopback())
        {
            let detail = "the peer is on another machine and accepts connections on its loopback interface only";
            return Err(Error::new(ErrorKind::Unreachable, "connect", detail)
                .with_hint("set CROSSRAIL_SECRET to the same text on all ranks"));
        }
        let worker = self.worker()?;
        let link = Arc::new(Link(Mutex::new(None)));
        let target = link.clone();
        self.links.lock().insert(handle.worker, link.clone());
        let timeout = self.settings().timeout;
        let dial = move || {
            let made = connect(&worker, &handle.addresses, timeout);
            if let Ok(endpoint) = &made {
                let lanes: Vec<String> = endpoint.lanes().into_iter().map(|lane| lane.name).collect();
                log::info(format_args!("connected to {} over {}", endpoint.peer(), lanes.join(", ")));
            }
            *target.0.lock() = Some(made);
        };
        std::thread::Builder::new()
            .name("crossrail-connect".to_owned())
            .spawn(dial)
            .map_err(|error| Error::io("connect", "pthread_create", &error))?;
        Ok(link)
    }

    /// The endpoint that the worker called `name` has made to this one; `None`: it is not there yet.
    pub(crate) fn accepted(&self, worker: &Worker, name: &str) -> Option<Endpoint> {
        let mut accepted = self.accepted.lock();
        while let Ok(endpoint) = worker.accept(Some(std::time::Duration::ZERO)) {
            accepted.push(endpoint);
        }
        accepted.retain(Endpoint::is_alive);
        accepted.iter().find(|endpoint| endpoint.peer() == name).cloned()
    }

    /// Ends the worker: its connections close, its threads end.
    pub(crate) fn close(&self) {
        self.attempts.lock().clear();
        self.links.lock().clear();
        self.accepted.lock().clear();
        if let Some(worker) = self.worker.lock().take() {
            worker.close();
        }
    }
}

fn connect(worker: &Worker, addresses: &[SocketAddr], timeout: std::time::Duration) -> Result<Endpoint> {
    let deadline = Instant::now() + timeout;
    let mut failure = Error::new(ErrorKind::Unreachable, "connect", "the handle has no address");
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        let options = ConnectOptions { require: None, timeout: Some(left) };
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
        let tuned = |devices: &str, set: &[&str]| {
            let mut settings = Settings::from_pairs([("CROSSRAIL_NET_DEVICES", devices)]).expect("settings");
            tune(&mut settings, |name| set.contains(&name));
            (settings.chunk, settings.channels)
        };
        let usual = Settings::default();
        assert_eq!(tuned("all", &[]), (CHUNK, Channels::Count(4)));
        assert_eq!(tuned("eth1,eth2", &[]), (CHUNK, Channels::Count(2)));
        assert_eq!(tuned("eth1,eth2,eth3,eth4,eth5", &["CROSSRAIL_CHUNK"]), (usual.chunk, Channels::Count(1)));
        assert_eq!(tuned("all", &["CROSSRAIL_CHANNELS"]), (CHUNK, usual.channels));
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
