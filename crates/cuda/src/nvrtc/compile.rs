//! From source to machine code, through the cache.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossrail_types::{LogLevel, Result, Settings};
use sha2::{Digest, Sha256};

use crate::device::Arch;
use crate::nvrtc::cache::{Cache, Entry, Key};
use crate::nvrtc::library::{Library, Source};
use crate::nvrtc::log::Report;

/// Options that every kernel is compiled with: C++17, and a log that says what each kernel takes.
const OPTIONS: [&str; 3] = ["--std=c++17", "--ptxas-options=-v", "--device-as-default-execution-space"];

/// Where compiled code came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From the cache: compiled earlier, by this process or another.
    Cache,
    /// Compiled now, and kept.
    Compiled,
    /// Compiled now, and not kept; the reason, if there is a cache at all.
    NotKept(Option<String>),
}

/// Machine code of one architecture, and what the compiler said.
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

    /// The compiler's whole log.
    pub fn log(&self) -> &str {
        &self.entry.log
    }

    /// The warnings in the log, and what each kernel takes.
    pub fn report(&self) -> Report {
        Report::of(&self.entry.log)
    }

    /// Where it came from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }
}

/// NVRTC with a cache, or without one.
#[derive(Clone, Debug)]
pub struct Compiler {
    library: Library,
    cache: Option<Cache>,
    /// Whether somebody is to hear of it when a result cannot be kept.
    tells: bool,
}

impl Compiler {
    /// Compiles with `library`, and keeps results in `cache`.
    pub fn new(library: Library, cache: Option<Cache>) -> Compiler {
        Compiler { library, cache, tells: false }
    }

    /// Compiles with `library`, and keeps results where `settings` say. Where that cannot be done it says so, once in a
    /// process, on stderr.
    pub fn of(library: Library, settings: &Settings) -> Compiler {
        let (cache, why) = match Cache::of(settings) {
            Ok(cache) => (Some(cache), None),
            Err(why) => (None, Some(why)),
        };
        let compiler = Compiler { library, cache, tells: settings.log >= LogLevel::Warn };
        compiler.tell(why.as_deref());
        compiler
    }

    fn tell(&self, why: Option<&str>) {
        static TOLD: AtomicBool = AtomicBool::new(false);
        if let Some(why) = why
            && self.tells
            && !TOLD.swap(true, Ordering::Relaxed)
        {
            eprintln!("crossrail: compiled GPU kernels are not kept ({why}); every process compiles its own");
        }
    }

    /// The NVRTC it compiles with.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The code of `source` for `arch`: from the cache where it is there. Of several processes that need the same,
    /// one compiles and the others wait for it, at most `limit` long: then they compile for themselves.
    ///
    /// Whatever is wrong with the cache costs only the cache; [`Compiled::origin`] says what it was.
    ///
    /// # Errors
    /// `ErrorKind::Unsupported` with the log, when the source does not compile; nothing is kept then.
    pub fn compile(&self, source: &Source<'_>, arch: Arch, options: &[&str], limit: Duration) -> Result<Compiled> {
        let options: Vec<String> = OPTIONS
            .iter()
            .chain(options)
            .map(|option| (*option).to_owned())
            .chain([format!("--gpu-architecture={arch}")])
            .collect();
        let compile = || self.library.compile(source, &options).map(|(image, log)| Entry { image, log });
        let Some(cache) = &self.cache else {
            return Ok(Compiled { entry: compile()?, origin: Origin::NotKept(None) });
        };
        let key = self.key(source, &options);
        if let Some(entry) = cache.read(&key) {
            return Ok(Compiled { entry, origin: Origin::Cache });
        }
        let lock = match cache.lock(&key, limit) {
            Ok(lock) => lock,
            Err(why) => {
                self.tell(Some(&why));
                return Ok(Compiled { entry: compile()?, origin: Origin::NotKept(Some(why)) });
            }
        };
        if let Some(entry) = cache.read(&key) {
            return Ok(Compiled { entry, origin: Origin::Cache });
        }
        let entry = compile()?;
        let origin = match lock.write(&entry) {
            Ok(()) => Origin::Compiled,
            Err(why) => {
                self.tell(Some(&why));
                Origin::NotKept(Some(why))
            }
        };
        Ok(Compiled { entry, origin })
    }

    /// The hash of everything that the result depends on. Lengths stand before texts, so that none runs into the next.
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
