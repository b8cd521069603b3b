//! Compilation through the cache.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossrail_types::{Log, LogLevel, Result, Settings};
use sha2::{Digest, Sha256};

use crate::device::Arch;
use crate::nvrtc::cache::{Cache, Entry, Key};
use crate::nvrtc::library::{Library, Source};
use crate::nvrtc::log::Report;

/// Options for all kernels: C++17, and a log with the resource usage of each kernel.
const OPTIONS: [&str; 3] = ["--std=c++17", "--ptxas-options=-v", "--device-as-default-execution-space"];

/// The origin of compiled code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The cache: compiled earlier, by this process or another.
    Cache,
    /// Compiled now, and cached.
    Compiled,
    /// Compiled now, and not cached; the reason if there is a cache.
    NotCached(Option<String>),
}

/// Machine code for one architecture, and the compiler's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    entry: Entry,
    origin: Origin,
}

impl Compiled {
    /// The machine code (a cubin).
    pub fn image(&self) -> &[u8] {
        &self.entry.image
    }

    /// The compiler's complete log.
    pub fn log(&self) -> &str {
        &self.entry.log
    }

    /// The warnings and the resource usage of each kernel, parsed from the log.
    pub fn report(&self) -> Report {
        Report::of(&self.entry.log)
    }

    /// The origin of the code.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }
}

/// NVRTC, with or without a cache. May be used from any thread.
#[derive(Clone, Debug)]
pub struct Compiler {
    library: Library,
    cache: Option<Cache>,
    /// Where a warning goes if a result cannot be cached.
    log: Log,
}

impl Compiler {
    /// A compiler with the given cache.
    pub fn new(library: Library, cache: Option<Cache>) -> Compiler {
        Compiler { library, cache, log: Log(LogLevel::Off) }
    }

    /// A compiler with the cache that `settings` name. If results cannot be cached, it logs one warning per
    /// process.
    pub fn of(library: Library, settings: &Settings) -> Compiler {
        let (cache, why) = match Cache::of(settings) {
            Ok(cache) => (Some(cache), None),
            Err(why) => (None, Some(why)),
        };
        let compiler = Compiler { library, cache, log: Log(settings.log) };
        compiler.warn(why.as_deref());
        compiler
    }

    fn warn(&self, why: Option<&str>) {
        static WARNED: AtomicBool = AtomicBool::new(false);
        if let Some(why) = why
            && self.log.0 >= LogLevel::Warn
            && !WARNED.swap(true, Ordering::Relaxed)
        {
            self.log.warn(format_args!("compiled GPU kernels are not cached ({why}); every process compiles its own"));
        }
    }

    /// The NVRTC library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Compiles `source` for `arch`, or reads the result from the cache. If several processes need the same kernel, one
    /// compiles it and the others wait for at most `limit`; after that they compile it themselves.
    ///
    /// A problem with the cache never fails the compilation; [`Compiled::origin`] reports it.
    ///
    /// # Errors
    /// `ErrorKind::Unsupported` with the log if the source does not compile; nothing is cached then.
    pub fn compile(&self, source: &Source<'_>, arch: Arch, options: &[&str], limit: Duration) -> Result<Compiled> {
        let options: Vec<String> = OPTIONS
            .iter()
            .chain(options)
            .map(|option| (*option).to_owned())
            .chain([format!("--gpu-architecture={arch}")])
            .collect();
        let compile = || self.library.compile(source, &options).map(|(image, log)| Entry { image, log });
        let Some(cache) = &self.cache else {
            return Ok(Compiled { entry: compile()?, origin: Origin::NotCached(None) });
        };
        let key = self.key(source, &options);
        if let Some(entry) = cache.read(&key) {
            return Ok(Compiled { entry, origin: Origin::Cache });
        }
        let lock = match cache.lock(&key, limit) {
            Ok(lock) => lock,
            Err(why) => {
                self.warn(Some(&why));
                return Ok(Compiled { entry: compile()?, origin: Origin::NotCached(Some(why)) });
            }
        };
        if let Some(entry) = cache.read(&key) {
            return Ok(Compiled { entry, origin: Origin::Cache });
        }
        let entry = compile()?;
        let origin = match lock.write(&entry) {
            Ok(()) => Origin::Compiled,
            Err(why) => {
                self.warn(Some(&why));
                Origin::NotCached(Some(why))
            }
        };
        Ok(Compiled { entry, origin })
    }

    /// The hash of everything that the result depends on. Texts are prefixed with their lengths, so that the hash input
    /// is unambiguous.
    fn key(&self, source: &Source<'_>, options: &[String]) -> Key {
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        let (major, minor) = self.library.version();
        add(&format!("NVRTC {major}.{minor}, {} options, {} headers", options.len(), source.headers.len()));
        options.iter().for_each(|option| add(option));
        add(source.name);
        add(source.text);
        for (name, text) in source.headers {
            add(name);
            add(text);
        }
        Key(hash.finalize().into())
    }
}
