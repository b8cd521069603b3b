//! Every setting of Crossrail, declared once: the struct, the environment variables, their checks and the
//! reference page (`docs/settings.md`, written by `cargo xtask docs`) all come from the table at the end of this page.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::size::{format_duration, format_size, parse_duration, parse_size};
use crate::{Error, ErrorKind, GpuCopy, Result, Unpack};

const PREFIX: &str = "CROSSRAIL_";

/// The transports of this release, as `CROSSRAIL_TLS` names them.
pub const TRANSPORTS: [&str; 4] = ["self", "shm", "cuda_ipc", "tcp"];

/// Which of several named things may be used: `all`, `shm,tcp`, `^tcp`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Filter {
    /// Everything there is.
    #[default]
    All,
    /// These and nothing else, in the order given.
    Only(Vec<String>),
    /// Everything but these.
    Except(Vec<String>),
}

impl Filter {
    /// Whether `name` may be used.
    pub fn allows(&self, name: &str) -> bool {
        match self {
            Filter::All => true,
            Filter::Only(names) => names.iter().any(|known| known == name),
            Filter::Except(names) => !names.iter().any(|known| known == name),
        }
    }

    /// The names written in it, included or excluded.
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
                "all" => return Err("has `all` among other names".to_owned()),
                _ if name.starts_with('^') => return Err("has `^` inside: it belongs in front, once".to_owned()),
                _ if names.iter().any(|known| known == name) => return Err(format!("names {name} twice")),
                _ => names.push(name.to_owned()),
            }
        }
        Ok(if except { Filter::Except(names) } else { Filter::Only(names) })
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

/// Which network devices are rails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rails {
    /// Those that the filter leaves.
    Named(Filter),
    /// Those nearest to that GPU, by its number in CUDA's order; `None`: to the first.
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
            Some(gpu) => gpu
                .parse()
                .map(|gpu| Rails::Near(Some(gpu)))
                .map_err(|_| "names no GPU after `near:`, whose number it wants".to_owned()),
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

/// How many threads move bytes over the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoThreads {
    /// As many as rails and cores justify.
    #[default]
    Auto,
    /// So many, at least 1.
    Count(u32),
}

/// How much Crossrail says on stderr; each level includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// What failed.
    Error,
    /// What is slower or fewer than it could be, and why.
    #[default]
    Warn,
    /// Which lanes were available and which were chosen.
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

/// A shared secret. Its `Debug` and the settings' rendering never show it.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Wraps a secret's bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when it is empty: an empty secret protects nothing.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Secret> {
        let bytes = bytes.into();
        if bytes.is_empty() {
            return Err(Error::new(ErrorKind::Config, "CROSSRAIL_SECRET", "is empty")
                .with_hint("any string of your choice, the same at both ends"));
        }
        Ok(Secret(bytes))
    }

    /// The secret itself, to key a MAC with. Compare MACs in constant time, never secrets.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// One line of the reference: what a setting is called, accepts, and does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingInfo {
    /// The environment variable.
    pub name: &'static str,
    /// The field of [`Settings`], and the keyword in Python.
    pub field: &'static str,
    /// The accepted form.
    pub accepts: &'static str,
    /// The default as text; `None`: unset.
    pub default: Option<String>,
    /// What it does.
    pub doc: String,
}

/// Text to value, with the reason where it cannot be: `NAME=VALUE` is put in front.
type Parsed<T> = std::result::Result<T, String>;

/// How a setting is read and shown. `show` gives `None` for unset, and never a secret.
struct Form<T> {
    parse: fn(&str) -> Parsed<T>,
    show: fn(&T) -> Option<String>,
}

macro_rules! settings {
    ($( $(#[doc = $doc:literal])+ $field:ident: $type:ty = $default:expr, $name:literal accepts $accepts:literal as $form:expr; )+) => {
        /// All settings of one context. Read them from the environment, build them in code, or both.
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
            /// Every environment variable of Crossrail.
            pub const NAMES: &'static [&'static str] = &[$( $name, )+];

            /// Sets one setting from text; `name` is the variable (`CROSSRAIL_CHUNK`) or the field (`chunk`).
            ///
            /// # Errors
            /// [`ErrorKind::Config`] for an unknown name, or a value that does not parse. The settings are then unchanged.
            pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
                match name {
                    $( $name | stringify!($field) => {
                        let form: Form<$type> = $form;
                        self.$field = (form.parse)(value).map_err(|why| bad_value($name, value, &why, $accepts))?;
                    } )+
                    _ => return Err(unknown(name)),
                }
                Ok(())
            }

            /// Checks values that were set in code as strictly as those from the environment.
            ///
            /// # Errors
            /// [`ErrorKind::Config`] naming the setting, its value and the accepted form.
            pub fn check(&self) -> Result<()> {
                $( {
                    let form: Form<$type> = $form;
                    if let Some(text) = (form.show)(&self.$field) {
                        (form.parse)(&text).map_err(|why| bad_value($name, &text, &why, $accepts))?;
                    }
                } )+
                self.check_together()
            }

            /// Each variable with its present value (`None`: unset), secrets hidden: what `crossrail info` prints.
            pub fn shown(&self) -> Vec<(&'static str, Option<String>)> {
                vec![$( { let form: Form<$type> = $form; ($name, (form.show)(&self.$field)) }, )+]
            }

            /// The reference, in the order of declaration.
            pub fn reference() -> Vec<SettingInfo> {
                let defaults = Settings::default();
                vec![$( SettingInfo {
                    name: $name,
                    field: stringify!($field),
                    accepts: $accepts,
                    default: { let form: Form<$type> = $form; (form.show)(&defaults.$field) },
                    doc: [$( $doc.trim() ),+].join(" "),
                }, )+]
            }
        }
    };
}

impl Settings {
    /// The defaults, changed by what the process's environment says.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for an unknown `CROSSRAIL_` variable (a setting without effect is a mistake), a
    /// value that does not parse or is not UTF-8, or settings that contradict each other.
    pub fn from_env() -> Result<Settings> {
        Settings::from_os(std::env::vars_os())
    }

    /// The defaults, changed by name and value pairs. Names that do not begin with `CROSSRAIL_` are not ours and
    /// are passed over.
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
            if !name.starts_with(PREFIX) {
                continue;
            }
            let Some(value) = value.to_str() else {
                return Err(Error::new(ErrorKind::Config, name, format!("{value:?} is not UTF-8")));
            };
            if !Settings::NAMES.contains(&name.as_ref()) {
                return Err(unknown(&name));
            }
            settings.set(&name, value)?;
        }
        settings.check_together()?;
        Ok(settings)
    }

    fn check_together(&self) -> Result<()> {
        if self.secret.is_some() && self.secret_file.is_some() {
            return Err(Error::new(ErrorKind::Config, "CROSSRAIL_SECRET", "given together with CROSSRAIL_SECRET_FILE")
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
    let nearest = Settings::NAMES.iter().min_by_key(|known| edits(name, known)).copied().unwrap_or_default();
    Error::new(ErrorKind::Config, name, "is not a setting of Crossrail")
        .with_hint(format!("did you mean {nearest}? Known: {}", Settings::NAMES.join(", ")))
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

const TRANSPORT_FILTER: Form<Filter> = Form {
    parse: |text| {
        let filter = Filter::parse(text)?;
        match filter.names().iter().find(|name| !TRANSPORTS.contains(&name.as_str())) {
            Some(name) => Err(format!("names {name}, which is no transport; known: {}", TRANSPORTS.join(", "))),
            None => Ok(filter),
        }
    },
    show: |filter| Some(filter.to_string()),
};

const RAILS: Form<Rails> = Form { parse: Rails::parse, show: |rails| Some(rails.to_string()) };

const DEVICE: Form<Option<String>> = Form {
    parse: |text| match text.trim() {
        "" => Err("is empty".to_owned()),
        name if name.contains([',', '^']) => Err("is not one device".to_owned()),
        name => Ok(Some(name.to_owned())),
    },
    show: Clone::clone,
};

const CHUNK: Form<usize> = Form {
    parse: |text| match parse_size(text) {
        Err(error) => Err(why(&error)),
        Ok(bytes @ 0x1000..=0x4000_0000) => usize::try_from(bytes).map_err(|_| "does not fit".to_owned()),
        Ok(_) => Err("is out of range".to_owned()),
    },
    show: |bytes| Some(format_size(*bytes as u64)),
};

const BOUNCE: Form<usize> = Form {
    parse: |text| match parse_size(text) {
        Err(error) => Err(why(&error)),
        Ok(bytes @ 0x10_0000..=0x40_0000_0000) => usize::try_from(bytes).map_err(|_| "does not fit".to_owned()),
        Ok(_) => Err("is out of range".to_owned()),
    },
    show: |bytes| Some(format_size(*bytes as u64)),
};

const UNPACK: Form<Unpack> = Form {
    parse: |text| text.parse().map_err(|_| "is no way to unpack".to_owned()),
    show: |way| Some(way.to_string()),
};

const GPU_COPY: Form<GpuCopy> =
    Form { parse: |text| text.parse().map_err(|_| "is no way to copy".to_owned()), show: |way| Some(way.to_string()) };

const TIMEOUT: Form<Duration> = Form {
    parse: |text| match parse_duration(text) {
        Err(error) => Err(why(&error)),
        Ok(time) if time < Duration::from_millis(1) || time > Duration::from_secs(86_400) => {
            Err("is out of range".to_owned())
        }
        Ok(time) => Ok(time),
    },
    show: |time| Some(format_duration(*time)),
};

const IO_THREADS: Form<IoThreads> = Form {
    parse: |text| match text.trim() {
        "auto" => Ok(IoThreads::Auto),
        number => (count_form::<1, 256>().parse)(number).map(IoThreads::Count),
    },
    show: |threads| {
        Some(match threads {
            IoThreads::Auto => "auto".to_owned(),
            IoThreads::Count(count) => count.to_string(),
        })
    },
};

const SECRET: Form<Option<Secret>> = Form {
    parse: |text| Secret::new(text).map(Some).map_err(|error| error.detail),
    show: |secret| secret.as_ref().map(|_| "(hidden)".to_owned()),
};

const PATH: Form<Option<PathBuf>> = Form {
    parse: |text| if text.is_empty() { Err("is empty".to_owned()) } else { Ok(Some(PathBuf::from(text))) },
    show: |path| path.as_ref().map(|path| path.display().to_string()),
};

const LOG: Form<LogLevel> = Form {
    parse: |text| {
        let found = LogLevel::NAMES.iter().find(|(name, _)| *name == text.trim());
        found.map(|(_, level)| *level).ok_or_else(|| "is not a level".to_owned())
    },
    show: |level| Some(level.to_string()),
};

const STORE: Form<Option<String>> = Form {
    parse: |text| {
        let text = text.trim();
        let Some((scheme, places)) = text.split_once("://") else {
            return Err("has no scheme".to_owned());
        };
        if !["tcp", "etcd"].contains(&scheme) {
            return Err(format!("has the scheme {scheme}, which is no store; known: tcp, etcd"));
        }
        if scheme == "tcp" && places.contains(',') {
            return Err("names several places: only etcd has those".to_owned());
        }
        for place in places.split(',') {
            match place.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) => {}
                _ => return Err(format!("has {place:?}, which is no host:port")),
            }
        }
        Ok(Some(text.to_owned()))
    },
    show: Clone::clone,
};

const fn count_form<const MIN: u32, const MAX: u32>() -> Form<u32> {
    Form {
        parse: |text| match text.trim().parse::<u32>() {
            Ok(count) if (MIN..=MAX).contains(&count) => Ok(count),
            Ok(_) => Err("is out of range".to_owned()),
            Err(_) => Err("is not a whole number".to_owned()),
        },
        show: |count| Some(count.to_string()),
    }
}

/// The reason alone: the setting's own error repeats the value.
fn why(error: &Error) -> String {
    error.detail.rsplit_once("\" ").map_or(error.detail.as_str(), |(_, why)| why).to_owned()
}

settings! {
    /// Which transports may be used.
    tls: Filter = Filter::All,
        "CROSSRAIL_TLS" accepts "`all`, a list such as `shm,tcp`, or all but some: `^tcp` (known: self, shm, cuda_ipc, tcp)" as TRANSPORT_FILTER;
    /// Which network devices carry data; each is one rail. A local address such as 127.0.0.2 is a device too.
    net_devices: Rails = Rails::Named(Filter::All),
        "CROSSRAIL_NET_DEVICES" accepts "`all`, a list such as `eth1,eth2` or `127.0.0.1,127.0.0.2`, all but some: `^eth0`, or `near` (`near:1`): those nearest to the first GPU (to GPU 1)" as RAILS;
    /// The device that carries control traffic; unset: the one the peer's address is reached through.
    control_device: Option<String> = None,
        "CROSSRAIL_CONTROL_DEVICE" accepts "the name of one interface, or one local address" as DEVICE;
    /// How many bytes one lane carries at a time.
    chunk: usize = 2 << 20,
        "CROSSRAIL_CHUNK" accepts "a size from 4K to 1G" as CHUNK;
    /// How many chunks a lane may have outstanding.
    window: u32 = 16,
        "CROSSRAIL_WINDOW" accepts "a number from 1 to 1024" as count_form::<1, 1024>();
    /// Connections per rail.
    channels: u32 = 1,
        "CROSSRAIL_CHANNELS" accepts "a number from 1 to 64" as count_form::<1, 64>();
    /// Pinned host memory through which the network reaches one GPU's memory, half of it each way; taken when that is
    /// first used.
    bounce: usize = 128 << 20,
        "CROSSRAIL_BOUNCE" accepts "a size from 1M to 256G" as BOUNCE;
    /// How what came over the network gets to its place in GPU memory.
    unpack: Unpack = Unpack::Kernel,
        "CROSSRAIL_UNPACK" accepts "`kernel`: one launch for many pieces, `d2d`: a copy for each piece, `host`: gathered by a processor, then one copy" as UNPACK;
    /// What copies from GPU to GPU within one machine, from 512 KiB on. Copy engines write to one GPU after the other; a
    /// kernel writes to several at once, which was slower, and takes some of the multiprocessors.
    gpu_copy: GpuCopy = GpuCopy::Auto,
        "CROSSRAIL_GPU_COPY" accepts "`auto` (engines), `engine`, `kernel`" as GPU_COPY;
    /// Threads that move bytes over the network.
    io_threads: IoThreads = IoThreads::Auto,
        "CROSSRAIL_IO_THREADS" accepts "`auto`, or a number from 1 to 256" as IO_THREADS;
    /// The longest any wait may take, where the call names no limit of its own.
    timeout: Duration = Duration::from_secs(30),
        "CROSSRAIL_TIMEOUT" accepts "a duration from 1ms to 24h: seconds such as `1.5`, or `500ms`, `30s`, `2m`" as TIMEOUT;
    /// The secret that both ends share; needed to listen beyond this machine.
    secret: Option<Secret> = None,
        "CROSSRAIL_SECRET" accepts "any text but the empty one" as SECRET;
    /// A file that holds the secret (one trailing newline is not part of it); instead of CROSSRAIL_SECRET.
    secret_file: Option<PathBuf> = None,
        "CROSSRAIL_SECRET_FILE" accepts "a path" as PATH;
    /// The store that the ranks of a job share; unset: the launcher's variables say where rank 0 has one.
    store: Option<String> = None,
        "CROSSRAIL_STORE" accepts "`tcp://host:port`, or `etcd://host:port[,host:port]`" as STORE;
    /// The folder that keeps compiled GPU kernels; unset: `crossrail` in the user's cache folder (`$XDG_CACHE_HOME`,
    /// or `~/.cache`).
    cache_dir: Option<PathBuf> = None,
        "CROSSRAIL_CACHE_DIR" accepts "a path" as PATH;
    /// What is said on stderr.
    log: LogLevel = LogLevel::Warn,
        "CROSSRAIL_LOG" accepts "`off`, `error`, `warn`, `info` or `debug`" as LOG;
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
