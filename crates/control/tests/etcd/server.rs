//! A real etcd for one test: free ports, a directory of its own, gone with the object.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use crossrail_control::EtcdStore;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

static STARTED: AtomicU32 = AtomicU32::new(0);

/// A moment by which anything that works has happened.
pub(crate) fn soon() -> Instant {
    within(2 * PATIENCE)
}

/// What waits for no deadline has happened after this, on a machine that does many other things.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A moment `time` from now.
pub(crate) fn within(time: Duration) -> Instant {
    Instant::now() + time
}

/// One etcd server.
pub(crate) struct Etcd {
    child: Option<Child>,
    directory: PathBuf,
    port: u16,
    peer_port: u16,
    options: Vec<String>,
}

impl Etcd {
    /// Starts one; `None`, and says so, when there is no etcd on this machine. With `CI=true` that fails.
    pub(crate) fn start(options: &[&str]) -> Option<Etcd> {
        if let Err(e) = Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status() {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI=true, but there is no etcd here: {e}");
            eprintln!("SKIPPED: no etcd here ({e}); Debian's package is etcd-server");
            return None;
        }
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("crossrail-etcd-{}-{number}", std::process::id()));
        std::fs::create_dir(&directory).expect("a new directory");
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let mut etcd = Etcd { child: None, directory, port: 0, peer_port: 0, options };
        // Somebody else may take a port between its choice and its use.
        let ready = (0..5).any(|_| {
            (etcd.port, etcd.peer_port) = free_ports();
            etcd.launch()
        });
        assert!(ready, "etcd does not start");
        Some(etcd)
    }

    /// Its address as a store.
    pub(crate) fn address(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.port)
    }

    /// A client of it.
    pub(crate) fn open(&self) -> EtcdStore {
        EtcdStore::open(&self.address(), soon()).expect("etcd runs")
    }

    /// Kills it; its data stay.
    pub(crate) fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("it can be killed");
            child.wait().expect("it ends");
        }
    }

    /// Starts it again where it was.
    pub(crate) fn restart(&mut self) {
        self.stop();
        assert!(self.launch(), "etcd does not start again");
    }

    /// Lets it stand still, or go on.
    pub(crate) fn freeze(&self, still: bool) {
        let id = self.child.as_ref().expect("it runs").id();
        let signal = if still { Signal::SIGSTOP } else { Signal::SIGCONT };
        let id = Pid::from_raw(i32::try_from(id).expect("a process id"));
        kill(id, signal).expect("a signal");
        if still {
            // On a busy machine it goes on for a while after the signal was sent.
            waitid(Id::Pid(id), WaitPidFlag::WSTOPPED | WaitPidFlag::WNOWAIT).expect("it stops");
        }
    }

    /// Whether it came up.
    fn launch(&mut self) -> bool {
        let (client, peer) =
            (format!("http://127.0.0.1:{}", self.port), format!("http://127.0.0.1:{}", self.peer_port));
        let mut command = Command::new("etcd");
        command
            .args(["--name", "one", "--logger", "zap", "--data-dir"])
            .arg(&self.directory)
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}")])
            .args(&self.options)
            .env("ETCD_UNSAFE_NO_FSYNC", "true")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if cfg!(target_arch = "aarch64") {
            command.env("ETCD_UNSUPPORTED_ARCH", "arm64");
        }
        let mut child = command.spawn().expect("etcd starts");
        let ready = log_of(&mut child).recv_timeout(Duration::from_secs(20)).is_ok();
        self.child = Some(child);
        if !ready {
            self.stop();
        }
        ready
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Reads its log, so that it never waits for a reader; says when it is ready.
fn log_of(child: &mut Child) -> Receiver<()> {
    let (ready, when_ready) = mpsc::channel();
    let log = BufReader::new(child.stderr.take().expect("it was asked for"));
    std::thread::spawn(move || {
        for line in log.lines().map_while(Result::ok) {
            // Versions differ in their words.
            if ["ready to serve client", "serving client traffic"].iter().any(|words| line.contains(words)) {
                // Nobody waits after the first time.
                let _ = ready.send(());
            }
        }
    });
    when_ready
}

/// Two ports that nobody listens at.
pub(crate) fn free_ports() -> (u16, u16) {
    let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    let [one, two] = listeners.map(|listener| listener.local_addr().expect("it has one").port());
    (one, two)
}
