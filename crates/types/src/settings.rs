//! The settings of Crossrail. Each is declared once, in the table at the end of this file; the struct, the environment
//! variables, their checks and the reference page (`docs/settings.md`, written by `cargo xtask docs`) derive from it.

use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::checksum::Checksum;
use crate::counts::{Affinity, Channels, IoThreads};
use crate::error::{Error, ErrorKind, Result};
use crate::ports::Ports;
use crate::unpack::Unpack;
use service_links::is_service_link;

mod codecs;
mod service_links;
#[cfg(test)]
mod tests;

use codecs::{
    AFFINITY, BOUNCE, CHANNELS, CHECKSUM, CHUNK, DEVICE, IO_THREADS, LOG, METRICS, NODE, PAGES, PATH, PORTS, RAILS,
    SECRET, STORE, TIMEOUT, TRANSPORT_FILTER, UNPACK, count,
};

const PREFIX: &str = "CROSSRAIL_";

/// The available transports, by their names in `CROSSRAIL_TLS`.
pub const TRANSPORTS: [&str; 6] = ["self", "shm", "cuda_ipc", "fabric", "ucx", "tcp"];

/// A filter on names: `all`, `shm,tcp` (only these), `^tcp` (all but these).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Filter {
    /// Everything.
    #[default]
    All,
    /// Only these, in the given order.
    Only(Vec<String>),
    /// Everything but these.
    Except(Vec<String>),
}

impl Filter {
    /// Whether `name` may be used.
    pub fn allows(&self, name: &str) -> bool {
        match self {
            Filter::All => true,
            Filter::Only(names) => names.iter().any(|known| is_named(known, name)),
            Filter::Except(names) => !names.iter().any(|known| is_named(known, name)),
        }
    }

    /// The names listed in the filter, included or excluded.
    pub fn names(&self) -> &[String] {
        match self {
            Filter::All => &[],
            Filter::Only(names) | Filter::Except(names) => names,
        }
    }

    fn parse(text: &str) -> Parsed<Filter> {
        let text = text.trim();
        if text == "all" {
            return Ok(Filter::All);
        }
        let (except, list) = match text.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let mut names: Vec<String> = Vec::new();
        for name in list.split(',').map(str::trim) {
            match name {
                "" => return Err("has an empty name".to_owned()),
                "all" => return Err("combines `all` with other names".to_owned()),
                _ if name.starts_with('^') => {
                    return Err("has a misplaced `^`: write it once, in front of the list".to_owned());
                }
                _ if names.iter().any(|known| known == name) => return Err(format!("lists {name} twice")),
                _ => names.push(name.to_owned()),
            }
        }
        Ok(if except { Filter::Except(names) } else { Filter::Only(names) })
    }
}

/// The name in front of UCX's own transports, as in `ucx:rc,ud`.
const UCX: &str = "ucx:";

/// The name in front of a provider of libfabric, as in `fabric:efa`.
const FABRIC: &str = "fabric:";

/// Whether an entry of a filter is that name, perhaps with UCX's transports or a provider of libfabric behind it.
fn is_named(entry: &str, name: &str) -> bool {
    let has = |prefix: &str| entry.len() > prefix.len() && entry.starts_with(prefix);
    entry == name || (name == "ucx" && entry.starts_with(UCX)) || (name == "fabric" && has(FABRIC))
}

impl Filter {
    /// Parses a filter on transports, as `CROSSRAIL_TLS` has one. Everything after `ucx:` names UCX's transports.
    ///
    /// # Errors
    /// The predicate of an error message whose subject is the name of the setting or argument.
    pub fn parse_transports(text: &str) -> std::result::Result<Filter, String> {
        let text = text.trim();
        let mut places = text.match_indices(UCX).map(|(at, _)| at);
        let at = places.find(|at| *at == 0 || text[..*at].ends_with(','));
        let Some(at) = at else { return Filter::parse(text) };
        let (ours, theirs) = (text[..at].trim_end_matches(','), &text[at..]);
        let names: Vec<&str> = theirs[UCX.len()..].split(',').map(str::trim).collect();
        let is_name =
            |name: &&str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if !names.iter().all(is_name) {
            return Err("lists no names of UCX's transports after `ucx:`".to_owned());
        }
        let theirs = format!("{UCX}{}", names.join(","));
        if ours.is_empty() {
            return Ok(Filter::Only(vec![theirs]));
        }
        match Filter::parse(ours)? {
            Filter::Only(names) if names.iter().any(|name| name == "ucx") => Err("lists ucx twice".to_owned()),
            Filter::Only(mut names) => {
                names.push(theirs);
                Ok(Filter::Only(names))
            }
            _ => Err("combines `ucx:` with `all` or `^`".to_owned()),
        }
    }

    /// The first entry that names none of the `known` transports.
    pub fn unknown_transport(&self, known: &[&str]) -> Option<&str> {
        let is_known = |entry: &str| known.iter().any(|name| is_named(entry, name));
        self.names().iter().map(String::as_str).find(|entry| !is_known(entry))
    }

    /// The provider of libfabric, named after `fabric:`.
    pub fn of_fabric(&self) -> Option<&str> {
        match self {
            Filter::Only(names) => names.iter().find_map(|name| name.strip_prefix(FABRIC)),
            Filter::All | Filter::Except(_) => None,
        }
    }

    /// UCX's own transports, listed after `ucx:`; `None` without a list.
    pub fn of_ucx(&self) -> Option<Vec<String>> {
        let entry = self.names().iter().find_map(|name| name.strip_prefix(UCX))?;
        Some(entry.split(',').map(str::to_owned).collect())
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Filter::All => write!(f, "all"),
            Filter::Only(names) => write!(f, "{}", names.join(",")),
            Filter::Except(names) => write!(f, "^{}", names.join(",")),
        }
    }
}

/// The selection of network devices to use as rails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rails {
    /// The devices that pass the filter.
    Named(Filter),
    /// The devices nearest to the GPU with this CUDA ordinal; `None`: to the first GPU.
    Near(Option<u32>),
}

impl Default for Rails {
    fn default() -> Rails {
        Rails::Named(Filter::All)
    }
}

impl Rails {
    fn parse(text: &str) -> Parsed<Rails> {
        let text = text.trim();
        if text == "near" {
            return Ok(Rails::Near(None));
        }
        match text.strip_prefix("near:").map(|gpu| gpu.trim_start_matches("cuda:")) {
            Some(gpu) => {
                gpu.parse().map(|gpu| Rails::Near(Some(gpu))).map_err(|_| "has no GPU number after `near:`".to_owned())
            }
            None => Filter::parse(text).map(Rails::Named),
        }
    }
}

impl fmt::Display for Rails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rails::Named(filter) => filter.fmt(f),
            Rails::Near(None) => f.write_str("near"),
            Rails::Near(Some(gpu)) => write!(f, "near:{gpu}"),
        }
    }
}

/// The log level; each level includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// Failures.
    Error,
    /// Fallbacks and degraded operation, with the reason.
    #[default]
    Warn,
    /// The lanes that were available, and those selected.
    Info,
    /// Every lane event.
    Debug,
}

impl LogLevel {
    const NAMES: [(&'static str, LogLevel); 5] = [
        ("off", LogLevel::Off),
        ("error", LogLevel::Error),
        ("warn", LogLevel::Warn),
        ("info", LogLevel::Info),
        ("debug", LogLevel::Debug),
    ];
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = LogLevel::NAMES.iter().find(|(_, level)| level == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// A shared secret. Neither its `Debug` output nor rendered settings reveal it.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Wraps the bytes of a secret.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if it is empty: an empty secret protects nothing.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Secret> {
        let bytes = bytes.into();
        if bytes.is_empty() {
            return Err(Error::new(ErrorKind::Config, "CROSSRAIL_SECRET", "is empty")
                .with_hint("set it to any text, the same at both ends"));
        }
        Ok(Secret(bytes))
    }

    /// The bytes of the secret, to be used as the key of a MAC. Compare MACs in constant time; never compare secrets.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// One row of the settings reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingInfo {
    /// The environment variable.
    pub name: &'static str,
    /// The field of [`Settings`], and the keyword in Python.
    pub field: &'static str,
    /// The accepted values.
    pub accepts: &'static str,
    /// The default value as text; `None` if it is unset.
    pub default: Option<String>,
    /// The description.
    pub doc: String,
}

/// A parsed value, or a reason that completes the sentence `NAME: "VALUE" ...`.
type Parsed<T> = std::result::Result<T, String>;

/// How a setting is parsed and displayed. `show` returns `None` if the setting is unset, and never reveals a secret.
struct Codec<T> {
    parse: fn(&str) -> Parsed<T>,
    show: fn(&T) -> Option<String>,
}

macro_rules! settings {
    ($( $(#[doc = $doc:literal])+ $field:ident: $type:ty = $default:expr, $name:literal accepts $accepts:literal as $form:expr; )+) => {
        /// The settings of a context, read from the environment, set in code, or both.
        #[derive(Clone, Debug)]
        pub struct Settings {
            $( $(#[doc = $doc])+ #[doc = ""] #[doc = concat!("Environment: `", $name, "`, ", $accepts, ".")] pub $field: $type, )+
        }

        impl Default for Settings {
            fn default() -> Settings {
                Settings { $( $field: $default, )+ }
            }
        }

        impl Settings {
            /// The names of all environment variables.
            pub const NAMES: &'static [&'static str] = &[$( $name, )+];

            /// Their fields, which are the keywords in Python, in the same order.
            pub const FIELDS: &'static [&'static str] = &[$( stringify!($field), )+];

            /// Sets a setting from text. `name` is the variable (`CROSSRAIL_CHUNK`) or the field (`chunk`).
            ///
            /// # Errors
            /// [`ErrorKind::Config`] for an unknown name or an invalid value. The settings are then unchanged.
            pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
                match name {
                    $( $name | stringify!($field) => {
                        let form: Codec<$type> = $form;
                        self.$field = (form.parse)(value).map_err(|why| bad_value($name, value, &why, $accepts))?;
                    } )+
                    _ => return Err(unknown(name)),
                }
                Ok(())
            }

            /// Checks values set in code as strictly as values from the environment.
            ///
            /// # Errors
            /// [`ErrorKind::Config`], with the setting, its value and the accepted values.
            pub fn check(&self) -> Result<()> {
                $( {
                    let form: Codec<$type> = $form;
                    if let Some(text) = (form.show)(&self.$field) {
                        (form.parse)(&text).map_err(|why| bad_value($name, &text, &why, $accepts))?;
                    }
                } )+
                self.check_together()
            }

            /// Every variable with its current value (`None`: unset), secrets hidden. `crossrail info` prints this.
            pub fn shown(&self) -> Vec<(&'static str, Option<String>)> {
                vec![$( { let form: Codec<$type> = $form; ($name, (form.show)(&self.$field)) }, )+]
            }

            /// The settings reference, in the order of declaration.
            pub fn reference() -> Vec<SettingInfo> {
                let defaults = Settings::default();
                vec![$( SettingInfo {
                    name: $name,
                    field: stringify!($field),
                    accepts: $accepts,
                    default: { let form: Codec<$type> = $form; (form.show)(&defaults.$field) },
                    doc: [$( $doc.trim() ),+].join(" "),
                }, )+]
            }
        }
    };
}

impl Settings {
    /// The defaults, overridden by the environment of the process.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for an unknown `CROSSRAIL_` variable (a setting without effect is a mistake), a value that
    /// is invalid or not UTF-8, or settings that contradict each other.
    pub fn from_env() -> Result<Settings> {
        Settings::from_os(std::env::vars_os())
    }

    /// The defaults, overridden by name and value pairs. Names that do not start with `CROSSRAIL_` are ignored, and what
    /// Kubernetes and Docker set for a Service or a linked container whose name begins with `crossrail`.
    ///
    /// # Errors
    /// As [`Settings::from_env`].
    pub fn from_pairs<N: AsRef<str>, V: AsRef<str>>(pairs: impl IntoIterator<Item = (N, V)>) -> Result<Settings> {
        let pairs = pairs.into_iter().map(|(name, value)| (name.as_ref().into(), value.as_ref().into()));
        Settings::from_os(pairs)
    }

    fn from_os(pairs: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Settings> {
        let mut settings = Settings::default();
        for (name, value) in pairs {
            let name = name.to_string_lossy();
            if !name.starts_with(PREFIX) || is_service_link(&name, &value.to_string_lossy()) {
                continue;
            }
            let Some(value) = value.to_str() else {
                // The value may be a secret, and errors end up in logs.
                let detail = format!("its value of {} bytes is not UTF-8", value.len());
                return Err(Error::new(ErrorKind::Config, name, detail));
            };
            if !Settings::NAMES.contains(&name.as_ref()) {
                return Err(unknown(&name));
            }
            settings.set(&name, value)?;
        }
        settings.check_together()?;
        Ok(settings)
    }

    /// The ports that a listener at `address` may use; `None`: any. Loopback is not restricted: no firewall filters it.
    pub fn ports_at(&self, address: IpAddr) -> Option<Ports> {
        self.ports.filter(|_| !address.to_canonical().is_loopback())
    }

    fn check_together(&self) -> Result<()> {
        if self.secret.is_some() && self.secret_file.is_some() {
            return Err(Error::new(
                ErrorKind::Config,
                "CROSSRAIL_SECRET",
                "is set together with CROSSRAIL_SECRET_FILE",
            )
            .with_hint("unset one of them"));
        }
        Ok(())
    }
}

fn bad_value(name: &str, value: &str, why: &str, accepts: &str) -> Error {
    let shown: String = if name == "CROSSRAIL_SECRET" { "value".to_owned() } else { format!("{value:?}") };
    Error::new(ErrorKind::Config, name, format!("{shown} {why}")).with_hint(format!("accepted: {accepts}"))
}

fn unknown(name: &str) -> Error {
    // In code, settings are named by their keywords.
    let known = if name.starts_with(PREFIX) { Settings::NAMES } else { Settings::FIELDS };
    let nearest = nearest(name).and_then(|at| known.get(at));
    let hint = match nearest {
        Some(nearest) => format!("did you mean {nearest}? `crossrail info` lists all settings"),
        None => "`crossrail info` lists all settings".to_owned(),
    };
    Error::new(ErrorKind::Config, name, "is not a known setting").with_hint(hint)
}

/// Index of the setting that `name` probably means: one is a prefix of the other, or at most one letter in three is
/// wrong, missing, or transposed.
fn nearest(name: &str) -> Option<usize> {
    let bare = |name: &str| name.to_ascii_uppercase().trim_start_matches("CROSSRAIL_").to_owned();
    let wanted = bare(name);
    let begins = |known: &str| {
        wanted.len() > 2 && known.len() > 2 && (wanted.starts_with(known) || known.starts_with(wanted.as_str()))
    };
    let candidates = Settings::NAMES.iter().enumerate().map(|(at, name)| (edits(&wanted, &bare(name)), at, name));
    let close = candidates.filter(|(far, _, name)| *far <= 1.max(wanted.len() / 3) || begins(&bare(name)));
    close.min().map(|(_, at, _)| at)
}

/// Damerau-Levenshtein distance (optimal string alignment): swapping two neighbours is one edit.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && (a[i - 1], a[i - 2]) == (b[j - 2], b[j - 1]) {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

settings! {
    /// Transports that may be used.
    tls: Filter = Filter::All,
        "CROSSRAIL_TLS" accepts "`all`, a list such as `shm,tcp`, or all but some such as `^tcp` (known: self, shm, cuda_ipc, fabric, ucx, tcp); `fabric:efa`: libfabric with this provider; `ucx:rc,ud` at the end of a list: UCX with these transports of its own" as TRANSPORT_FILTER;
    /// Network devices that carry data; each is one rail. A local address such as 127.0.0.2 counts as a device.
    net_devices: Rails = Rails::Named(Filter::All),
        "CROSSRAIL_NET_DEVICES" accepts "`all`, a list such as `eth1,eth2` or `127.0.0.1,127.0.0.2`, all but some such as `^eth0`, or `near` (`near:1`): the devices nearest to the first GPU (to GPU 1)" as RAILS;
    /// Network device for control traffic; unset: the one with the route to the peer's address.
    control_device: Option<String> = None,
        "CROSSRAIL_CONTROL_DEVICE" accepts "the name of one interface or one local address" as DEVICE;
    /// Ports for listeners beyond loopback that specify none: workers and their rails, stores, the command; unset: any
    /// free port.
    ports: Option<Ports> = None,
        "CROSSRAIL_PORTS" accepts "a port, or a range such as `18180-18199`" as PORTS;
    /// Chunk size in bytes: how much of a transfer one lane carries at a time.
    chunk: usize = 2 << 20,
        "CROSSRAIL_CHUNK" accepts "a size from 4K to 1G" as CHUNK;
    /// Maximum number of outstanding chunks per lane.
    window: u32 = 16,
        "CROSSRAIL_WINDOW" accepts "a number from 1 to 1024" as count::<1, 1024>();
    /// Number of connections per rail.
    channels: Channels = Channels::Auto,
        "CROSSRAIL_CHANNELS" accepts "a number from 1 to 64, or `auto`: one, and where there are cores for more as many as gain something" as CHANNELS;
    /// Pinned host memory for staging transfers between the network and one GPU, half of it for each direction;
    /// allocated on first use.
    bounce: usize = 128 << 20,
        "CROSSRAIL_BOUNCE" accepts "a size from 1M to 256G" as BOUNCE;
    /// How data received over the network is moved to its destination in GPU memory.
    unpack: Unpack = Unpack::Kernel,
        "CROSSRAIL_UNPACK" accepts "`kernel`: one launch for many fragments, `d2d`: one copy per fragment, `host`: gathered by the CPU, then one copy" as UNPACK;
    /// Maximum number of multiprocessors that the kernel occupies which moves rows between GPU memory of processes; 0:
    /// copy engines move them, one by one.
    gpu_sms: u32 = 24,
        "CROSSRAIL_GPU_SMS" accepts "a number from 0 to 1024" as count::<0, 1024>();
    /// Number of network I/O threads.
    io_threads: IoThreads = IoThreads::Auto,
        "CROSSRAIL_IO_THREADS" accepts "`auto`, or a number from 1 to 256" as IO_THREADS;
    /// Whether threads that serve connections or GPUs are pinned to the processors of their device's NUMA node.
    affinity: Affinity = Affinity::Auto,
        "CROSSRAIL_AFFINITY" accepts "`auto`: on machines with several nodes, `off`" as AFFINITY;
    /// Timeout of any wait for which the call specifies none.
    timeout: Duration = Duration::from_secs(30),
        "CROSSRAIL_TIMEOUT" accepts "a duration from 1ms to 24h: seconds such as `1.5`, or `500ms`, `30s`, `2m`" as TIMEOUT;
    /// Secret shared by both ends; required to listen beyond this machine.
    secret: Option<Secret> = None,
        "CROSSRAIL_SECRET" accepts "any non-empty text" as SECRET;
    /// File that contains the secret (one trailing newline is ignored); replaces CROSSRAIL_SECRET.
    secret_file: Option<PathBuf> = None,
        "CROSSRAIL_SECRET_FILE" accepts "a path" as PATH;
    /// Checksum of TCP traffic between workers; the stricter setting of the two ends applies. A lane with a mismatch is
    /// closed and redialled.
    checksum: Checksum = Checksum::Off,
        "CROSSRAIL_CHECKSUM" accepts "`off`, or `crc`: CRC-32C" as CHECKSUM;
    /// Store that the ranks of a job share; unset: rank 0 runs one at an address derived from the launcher's variables.
    store: Option<String> = None,
        "CROSSRAIL_STORE" accepts "`tcp://host:port`, or `etcd://host:port[,host:port]`" as STORE;
    /// Name of the node that this process belongs to. Processes of one machine with different names, or of which one has
    /// none, share no memory: they reach each other as processes of two machines do.
    node: Option<String> = None,
        "CROSSRAIL_NODE" accepts "up to 64 letters, digits, `.`, `_` and `-`" as NODE;
    /// UCX's library libucp.so.0, or the folder that contains it; unset: where the dynamic linker finds it.
    ucx_library: Option<PathBuf> = None,
        "CROSSRAIL_UCX_LIBRARY" accepts "a path" as PATH;
    /// The library libfabric.so.1, or the folder that contains it; unset: where the dynamic linker finds it.
    fabric_library: Option<PathBuf> = None,
        "CROSSRAIL_FABRIC_LIBRARY" accepts "a path" as PATH;
    /// Folder that caches compiled GPU kernels; unset: `crossrail` in the user's cache folder (`$XDG_CACHE_HOME` or
    /// `~/.cache`).
    cache_dir: Option<PathBuf> = None,
        "CROSSRAIL_CACHE_DIR" accepts "a path" as PATH;
    /// Folder in shared memory where this process keeps the page of counters that `crossrail top` reads.
    pages: Option<PathBuf> = Some(PathBuf::from("/dev/shm")),
        "CROSSRAIL_PAGES" accepts "a path, or `off`" as PAGES;
    /// Where the counters of the pages are exported for Prometheus: over HTTP, on loopback unless the address says
    /// otherwise, or into files for node_exporter.
    metrics: Option<String> = None,
        "CROSSRAIL_METRICS" accepts "`:9400`, `host:port`, or `file:FOLDER`" as METRICS;
    /// Folder where each worker writes its Perfetto trace when it is closed; unset: no tracing.
    trace: Option<PathBuf> = None,
        "CROSSRAIL_TRACE" accepts "a path" as PATH;
    /// Log level of messages on stderr.
    log: LogLevel = LogLevel::Warn,
        "CROSSRAIL_LOG" accepts "`off`, `error`, `warn`, `info` or `debug`" as LOG;
}
