//! Rank, size and store address of this process, from arguments, the settings, or a launcher's variables.

use std::net::SocketAddr;

use crossrail_types::{Error, ErrorKind, Result, Settings, loopback};

use crate::launch::{self, LAUNCHERS, Launcher, Variables};

/// Ports for stores derived from a job's id: below the ephemeral range.
const PORTS: std::ops::Range<u16> = 15_000..30_000;

/// The caller's arguments, which take precedence over everything else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// This process's rank.
    pub rank: Option<u32>,
    /// The maximum number of ranks.
    pub size: Option<u32>,
    /// This process's index on its node.
    pub local_rank: Option<u32>,
    /// The store's address.
    pub store: Option<String>,
}

/// This process's rank, size and store, and their source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bootstrap {
    /// Its rank; `None`: the lowest free one.
    pub rank: Option<u32>,
    /// The maximum number of ranks; `None`: that of the current members.
    pub size: Option<u32>,
    /// Its index on its node; `None`: the lowest free one.
    pub local_rank: Option<u32>,
    /// The store's address.
    pub store: String,
    /// True if this process starts the store if no process listens there: it is rank 0, and the address may be its own.
    pub host_store: bool,
    /// Distinguishes this job from others on the same store; may be empty.
    pub job: String,
    /// One line for people: source, values used, store.
    pub summary: String,
}

/// A launcher's variables, and the values found in them.
struct Launched {
    name: &'static str,
    /// The variables used, with their values.
    taken: Vec<(&'static str, String)>,
    rank: Option<u32>,
    size: Option<u32>,
    local_rank: Option<u32>,
}

impl Bootstrap {
    /// Reads `given`, then `CROSSRAIL_STORE`, then the variables of the launcher that gives this process a rank:
    /// torchrun (RANK, WORLD_SIZE, LOCAL_RANK), mpirun or mpiexec, Flux, jsrun or Slurm. MASTER_ADDR and MASTER_PORT, which scripts export for
    /// any launcher, only place the store. `vars` returns the value of an environment variable.
    ///
    /// torchrun's own store listens on MASTER_PORT, ours on the port after it, or on one of `CROSSRAIL_PORTS`.
    ///
    /// # Errors
    /// `Config`: a launcher's variable is missing or not a number, or no store is configured. `Usage`: a rank not below
    /// the size, or a size of 0.
    pub fn detect(vars: Variables<'_>, settings: &Settings, given: &Overrides) -> Result<Bootstrap> {
        let vars = |name: &str| vars(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let vars: Variables<'_> = &vars;
        let found = if let Some(store) = &given.store {
            settings.clone().set("store", store)?;
            with_store("arguments", "", store, vars, given)?
        } else if let Some(store) = &settings.store {
            with_store("CROSSRAIL_STORE", "CROSSRAIL_STORE", store, vars, given)?
        } else {
            match launch::launcher(vars) {
                Some(launcher) if *launcher == launch::SLURM => slurm(vars, settings, given)?,
                Some(launcher) if *launcher == launch::TORCHRUN => torchrun(vars, settings, given)?,
                Some(launcher) => by_job(launcher, vars, settings, given)?,
                None if torchrun_is_meant(vars) => torchrun(vars, settings, given)?,
                None => alone(given)?,
            }
        };
        found.checked()
    }

    fn checked(self) -> Result<Bootstrap> {
        match (self.rank, self.size) {
            (_, Some(0)) => Err(Error::new(ErrorKind::Usage, "join", "a size of 0").with_hint("1 or more")),
            (Some(rank), Some(size)) if rank >= size => {
                Err(Error::new(ErrorKind::Usage, "join", format!("rank {rank} of {size}"))
                    .with_hint(format!("ranks go from 0 to {}", size - 1)))
            }
            _ => Ok(self),
        }
    }

    fn new(launched: &Launched, given: &Overrides, store: String, job: String, why: &str) -> Bootstrap {
        let rank = given.rank.or(launched.rank);
        let size = given.size.or(launched.size);
        let local_rank = given.local_rank.or(launched.local_rank);
        let taken: Vec<String> = launched.taken.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mut parts = vec![taken.join(" "), arguments(given)];
        if rank.is_none() {
            parts.push("rank from the store's rank server".to_owned());
        }
        parts.push(format!("store {store}{why}"));
        parts.retain(|part| !part.is_empty());
        let summary = format!("{}: {}", launched.name, parts.join(", "));
        let host_store = rank == Some(0) && store.starts_with("tcp://");
        Bootstrap { rank, size, local_rank, store, host_store, job, summary }
    }
}

/// The arguments used, as text.
fn arguments(given: &Overrides) -> String {
    let number = |name: &str, value: Option<u32>| value.map(|value| format!("{name}={value}"));
    let parts = [number("rank", given.rank), number("size", given.size), number("local_rank", given.local_rank)];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// With a known store: rank and size may still come from a launcher's variables.
fn with_store(
    name: &'static str,
    variable: &'static str,
    store: &str,
    vars: Variables<'_>,
    given: &Overrides,
) -> Result<Bootstrap> {
    let mut launched = Launched { name, taken: Vec::new(), rank: None, size: None, local_rank: None };
    if !variable.is_empty() {
        launched.taken.push((variable, store.to_owned()));
    }
    if given.rank.is_none() {
        // One that gives this process a rank, or else a size alone: ranks are then assigned.
        let sized = || LAUNCHERS.into_iter().find(|launcher| launcher.size(vars).is_some());
        if let Some(launcher) = launch::launcher(vars).or_else(sized) {
            let mut reader = Reader { launcher: launcher.name, vars, taken: launched.taken };
            let ranked = vars(launcher.rank).is_some();
            launched.rank = if ranked { Some(reader.number(launcher.rank)?) } else { None };
            launched.size = reader.needed_unless(given.size, launcher.size_name(vars))?;
            let local_rank = launcher.local_rank(vars).filter(|_| ranked);
            launched.local_rank = local_rank.map(|name| reader.number(name)).transpose()?;
            launched.taken = reader.taken;
        }
    }
    Ok(Bootstrap::new(&launched, given, store.to_owned(), String::new(), ""))
}

/// Reads variables and records which were used.
struct Reader<'a> {
    launcher: &'static str,
    vars: Variables<'a>,
    taken: Vec<(&'static str, String)>,
}

impl Reader<'_> {
    fn text(&mut self, name: &'static str) -> Result<String> {
        let value = (self.vars)(name).ok_or_else(|| self.missing(name))?;
        self.taken.push((name, value.clone()));
        Ok(value)
    }

    fn number(&mut self, name: &'static str) -> Result<u32> {
        let value = self.text(name)?;
        value.parse().map_err(|_| {
            Error::new(ErrorKind::Config, name, format!("{value:?} is not a whole number"))
                .with_hint(format!("{} sets it; or pass rank, size and store as arguments", self.launcher))
        })
    }

    fn optional(&mut self, name: &'static str) -> Result<Option<u32>> {
        if (self.vars)(name).is_some() { self.number(name).map(Some) } else { Ok(None) }
    }

    /// Not read if the caller has given the value.
    fn needed_unless(&mut self, given: Option<u32>, name: &'static str) -> Result<Option<u32>> {
        if given.is_some() { Ok(None) } else { self.number(name).map(Some) }
    }

    fn missing(&self, name: &str) -> Error {
        let with: Vec<String> = self.taken.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let beside = if with.is_empty() { String::new() } else { format!(", while {} is", with.join(" ")) };
        let hint = match name {
            "MASTER_ADDR" | "MASTER_PORT" if self.launcher != launch::TORCHRUN.name => {
                "export it for all ranks, or CROSSRAIL_STORE=tcp://host:port".to_owned()
            }
            _ => format!("{} sets it; or pass rank, size and store as arguments", self.launcher),
        };
        Error::new(ErrorKind::Config, "join", format!("{name} is not set{beside}")).with_hint(hint)
    }

    fn done(self, rank: Option<u32>, size: Option<u32>, local_rank: Option<u32>) -> Launched {
        Launched { name: self.launcher, taken: self.taken, rank, size, local_rank }
    }

    /// True if the variables `here` and `all` are equal: then all ranks are on this machine.
    fn all_here(&self, here: &str, all: &str) -> bool {
        match ((self.vars)(here), (self.vars)(all)) {
            (Some(here), Some(all)) => here == all,
            _ => false,
        }
    }
}

/// Variables of torchrun are set although no launcher gives this process a rank.
fn torchrun_is_meant(vars: Variables<'_>) -> bool {
    vars("WORLD_SIZE").is_some() || (vars("MASTER_ADDR").is_some() && vars("MASTER_PORT").is_some())
}

fn torchrun(vars: Variables<'_>, settings: &Settings, given: &Overrides) -> Result<Bootstrap> {
    let mut reader = Reader { launcher: "torchrun", vars, taken: Vec::new() };
    let rank = reader.needed_unless(given.rank, "RANK")?;
    let size = reader.needed_unless(given.size, "WORLD_SIZE")?;
    let local_rank = if given.rank.is_none() { reader.optional("LOCAL_RANK")? } else { None };
    let host = reader.text("MASTER_ADDR")?;
    let port = permitted(settings, after(reader.text("MASTER_PORT")?)?);
    let here = reader.all_here("LOCAL_WORLD_SIZE", "WORLD_SIZE");
    let (host, why) = place(&host, here);
    let job = [vars("TORCHELASTIC_RUN_ID"), vars("TORCHELASTIC_RESTART_COUNT")].into_iter().flatten();
    let job = job.collect::<Vec<_>>().join("/");
    Ok(Bootstrap::new(&reader.done(rank, size, local_rank), given, format!("tcp://{host}:{port}"), job, why))
}

fn slurm(vars: Variables<'_>, settings: &Settings, given: &Overrides) -> Result<Bootstrap> {
    let mut reader = Reader { launcher: "Slurm", vars, taken: Vec::new() };
    let rank = reader.needed_unless(given.rank, "SLURM_PROCID")?;
    let size = reader.needed_unless(given.size, launch::SLURM.size_name(vars))?;
    let local_rank = if given.rank.is_none() { reader.optional("SLURM_LOCALID")? } else { None };
    let step_list = vars("SLURM_STEP_NODELIST").is_some();
    let list = reader.text(if step_list { "SLURM_STEP_NODELIST" } else { "SLURM_JOB_NODELIST" })?;
    let first = first_host(&list).ok_or_else(|| {
        Error::new(ErrorKind::Config, "join", format!("Slurm's list of nodes {list:?} begins with no host"))
            .with_hint("pass rank, size and store as arguments")
    })?;
    let mut job = reader.text("SLURM_JOB_ID")?;
    if vars("SLURM_STEP_ID").is_some() {
        job = format!("{job}.{}", reader.text("SLURM_STEP_ID")?);
    }
    let here = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"].into_iter().find_map(vars).is_some_and(|nodes| nodes == "1");
    // A host that was named is meant, though all ranks are here.
    let named = vars("MASTER_ADDR").is_some();
    let (host, why) = if named { (bracketed(&reader.text("MASTER_ADDR")?), "") } else { place(&first, here) };
    let port = match vars("MASTER_PORT") {
        Some(_) if named => after(reader.text("MASTER_PORT")?)?,
        _ => port_of(&job),
    };
    let store = format!("tcp://{host}:{}", permitted(settings, port));
    Ok(Bootstrap::new(&reader.done(rank, size, local_rank), given, store, job, why))
}

/// Of a launcher that names no host: MASTER_ADDR does, unless all ranks are on this machine.
fn by_job(
    launcher: &'static Launcher,
    vars: Variables<'_>,
    settings: &Settings,
    given: &Overrides,
) -> Result<Bootstrap> {
    let mut reader = Reader { launcher: launcher.name, vars, taken: Vec::new() };
    let rank = reader.needed_unless(given.rank, launcher.rank)?;
    let size = reader.needed_unless(given.size, launcher.size_name(vars))?;
    let local_rank = launcher.local_rank(vars).filter(|_| given.rank.is_none());
    let local_rank = local_rank.map(|name| reader.number(name)).transpose()?;
    let (host, why) = if launcher.is_spread(vars) || vars("MASTER_ADDR").is_some() {
        (bracketed(&reader.text("MASTER_ADDR")?), "")
    } else {
        place("", true)
    };
    let job = launcher.jobs.iter().copied().find(|name| vars(name).is_some());
    let job = job.map(|name| reader.text(name)).transpose()?;
    let port = match (&job, vars("MASTER_PORT")) {
        (_, Some(port)) => after(port)?,
        (Some(job), None) => port_of(job),
        (None, None) if launcher.name == "Open MPI" => return Err(reader.missing("PMIX_NAMESPACE")),
        (None, None) => return Err(reader.missing("MASTER_PORT")),
    };
    let store = format!("tcp://{host}:{}", permitted(settings, port));
    Ok(Bootstrap::new(&reader.done(rank, size, local_rank), given, store, job.unwrap_or_default(), why))
}

fn alone(given: &Overrides) -> Result<Bootstrap> {
    if given.size == Some(1) && given.rank.is_none_or(|rank| rank == 0) {
        let launched = Launched { name: "alone", taken: Vec::new(), rank: Some(0), size: None, local_rank: Some(0) };
        let why = " (any free port: nobody else can join)";
        return Ok(Bootstrap::new(
            &launched,
            given,
            format!("tcp://{}", SocketAddr::new(loopback(), 0)),
            String::new(),
            why,
        ));
    }
    let detail = match arguments(given).as_str() {
        "" => "no launcher variables are set and no store is configured".to_owned(),
        arguments => format!("{arguments}, but no store is configured"),
    };
    Err(Error::new(ErrorKind::Config, "join", detail).with_hint(
        "start the processes with torchrun, srun or mpirun; or set CROSSRAIL_STORE=tcp://host:port, RANK and \
         WORLD_SIZE; or pass store, rank and size as arguments; size=1 is a group of this process alone",
    ))
}

fn place(host: &str, here: bool) -> (String, &'static str) {
    if here { (bracketed(&loopback().to_string()), " (all ranks are on this machine)") } else { (bracketed(host), "") }
}

fn bracketed(host: &str) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() }
}

/// The port after MASTER_PORT, on which torchrun's own store listens.
fn after(master_port: String) -> Result<u16> {
    let bad = |why: &str| {
        Error::new(ErrorKind::Config, "MASTER_PORT", format!("{master_port:?} {why}"))
            .with_hint("a port from 1 to 65534; the store listens on the one after it")
    };
    let port: u16 = master_port.parse().map_err(|_| bad("is not a port"))?;
    if port == 0 { Err(bad("is not a port")) } else { port.checked_add(1).ok_or_else(|| bad("has no port after it")) }
}

/// `port`, or, if the settings restrict ports and it is not among them, one of those; the same at all ranks.
fn permitted(settings: &Settings, port: u16) -> u16 {
    settings.ports.map_or(port, |ports| ports.nearest(port))
}

/// The port that all ranks of a job derive from its id.
fn port_of(job: &str) -> u16 {
    let span = u64::from(PORTS.end - PORTS.start);
    PORTS.start + u16::try_from(hash(job.as_bytes()) % span).unwrap_or(0)
}

/// FNV-1a: equal in every process, independent of compiler and release.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// The first host of a Slurm list such as `gpu[01-04,7],login`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim().chars();
    while let Some(letter) = rest.next() {
        match letter {
            ',' => break,
            '[' => {
                let mut first = true;
                loop {
                    match rest.next()? {
                        ']' => break,
                        ',' | '-' => first = false,
                        digit if first => host.push(digit),
                        _ => {}
                    }
                }
            }
            letter => host.push(letter),
        }
    }
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
#[path = "bootstrap_tests.rs"]
mod tests;
