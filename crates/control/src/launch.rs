//! Which launcher started this process, by the variables that it sets.

use crossrail_types::{Error, ErrorKind, Result};

/// Returns the value of an environment variable.
pub(crate) type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The variables of one launcher.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Launcher {
    pub(crate) name: &'static str,
    pub(crate) rank: &'static str,
    /// Variables with the number of ranks, in order of precedence.
    sizes: &'static [&'static str],
    local_ranks: &'static [&'static str],
    local_sizes: &'static [&'static str],
    /// Variables with an id of the job.
    pub(crate) jobs: &'static [&'static str],
}

pub(crate) const TORCHRUN: Launcher = Launcher {
    name: "torchrun",
    rank: "RANK",
    sizes: &["WORLD_SIZE"],
    local_ranks: &["LOCAL_RANK"],
    local_sizes: &["LOCAL_WORLD_SIZE"],
    jobs: &[],
};
const OPEN_MPI: Launcher = Launcher {
    name: "Open MPI",
    rank: "OMPI_COMM_WORLD_RANK",
    sizes: &["OMPI_COMM_WORLD_SIZE"],
    local_ranks: &["OMPI_COMM_WORLD_LOCAL_RANK"],
    local_sizes: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    jobs: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
};
const FLUX: Launcher = Launcher {
    name: "Flux",
    rank: "FLUX_TASK_RANK",
    sizes: &["FLUX_JOB_SIZE"],
    local_ranks: &["FLUX_TASK_LOCAL_ID"],
    local_sizes: &[],
    jobs: &["FLUX_JOB_ID"],
};
const JSM: Launcher = Launcher {
    name: "jsrun",
    rank: "JSM_NAMESPACE_RANK",
    sizes: &["JSM_NAMESPACE_SIZE"],
    local_ranks: &["JSM_NAMESPACE_LOCAL_RANK"],
    local_sizes: &["JSM_NAMESPACE_LOCAL_SIZE"],
    jobs: &["LSB_JOBID"],
};
/// mpiexec of MPICH, Intel MPI and Cray's PALS.
const PMI: Launcher = Launcher {
    name: "PMI",
    rank: "PMI_RANK",
    sizes: &["PMI_SIZE"],
    local_ranks: &["MPI_LOCALRANKID", "PALS_LOCAL_RANKID"],
    local_sizes: &["MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"],
    jobs: &["PALS_APID"],
};
/// A step may have fewer tasks than its job.
pub(crate) const SLURM: Launcher = Launcher {
    name: "Slurm",
    rank: "SLURM_PROCID",
    sizes: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_ranks: &["SLURM_LOCALID"],
    local_sizes: &[],
    jobs: &[],
};

/// All launchers. One that is started by another comes before that: torchrun and mpirun run inside Slurm's jobs, and
/// their processes have its variables, too.
pub(crate) const LAUNCHERS: [&Launcher; 6] = [&TORCHRUN, &OPEN_MPI, &FLUX, &JSM, &PMI, &SLURM];

/// The launcher that gives this process a rank.
pub(crate) fn launcher(vars: Variables<'_>) -> Option<&'static Launcher> {
    let gives_rank = |launcher: &&Launcher| vars(launcher.rank).is_some() && !launcher.is_batch_script(vars);
    let mut giving = LAUNCHERS.into_iter().filter(gives_rank);
    let first = giving.next()?;
    // Other launchers that started several processes, the innermost first.
    let mut others = giving.filter(|other| other.place(vars).is_none_or(|(_, size)| size > 1));
    if *first == TORCHRUN {
        let other = others.next();
        let is_outer =
            TORCHRUN.local_rank(vars).is_none() || other.is_some_and(|other| started_by_torchrun(other, vars));
        return other.filter(|_| is_outer).or(Some(first));
    }
    // Slurm's own PMI has the numbers of Slurm, which knows its nodes as well.
    let same = |other: &&Launcher| **other == SLURM && other.place(vars) == first.place(vars);
    if *first == PMI { others.find(same).or(Some(first)) } else { Some(first) }
}

/// One of torchrun's processes started this launcher; else torchrun runs once below each process of the launcher, or both
/// have the same processes.
fn started_by_torchrun(inner: &Launcher, vars: Variables<'_>) -> bool {
    let here = TORCHRUN.local_sizes.iter().find_map(|name| vars(name)).and_then(|size| size.parse::<u32>().ok());
    let ((Some((rank, all)), Some((inner_rank, size))), Some(here)) = ((TORCHRUN.place(vars), inner.place(vars)), here)
    else {
        return false;
    };
    *inner != SLURM && size.checked_mul(here) != Some(all) && (inner_rank, size) != (rank, all)
}

impl Launcher {
    /// The variable of the number of ranks.
    pub(crate) fn size_name(&self, vars: Variables<'_>) -> &'static str {
        let found = self.sizes.iter().find(|name| vars(name).is_some());
        found.or(self.sizes.last()).copied().unwrap_or_default()
    }

    /// The number of ranks, as text.
    pub(crate) fn size(&self, vars: Variables<'_>) -> Option<String> {
        self.sizes.iter().find_map(|name| vars(name))
    }

    /// The variable of the rank on its machine, if one is set.
    pub(crate) fn local_rank(&self, vars: Variables<'_>) -> Option<&'static str> {
        self.local_ranks.iter().find(|name| vars(name).is_some()).copied()
    }

    /// The variable of the number of ranks on its machine, if one is set.
    pub(crate) fn local_size(&self, vars: Variables<'_>) -> Option<&'static str> {
        self.local_sizes.iter().find(|name| vars(name).is_some()).copied()
    }

    /// True if ranks are, or may be, on several machines.
    pub(crate) fn is_spread(&self, vars: Variables<'_>) -> bool {
        match self.local_size(vars) {
            Some(name) => vars(name) != self.size(vars),
            None if *self == FLUX => vars("FLUX_JOB_NNODES").is_some_and(|nodes| nodes != "1"),
            None => *self != OPEN_MPI,
        }
    }

    /// The rank and the number of ranks, if both are numbers.
    fn place(&self, vars: Variables<'_>) -> Option<(u32, u32)> {
        Some((vars(self.rank)?.parse().ok()?, self.size(vars)?.parse().ok()?))
    }

    /// This process is the batch script of a Slurm job, which runs once, and not a task of srun.
    fn is_batch_script(&self, vars: Variables<'_>) -> bool {
        let batch = vars("ENVIRONMENT").as_deref() == Some("BATCH") && vars("SLURM_STEP_ID").is_none();
        *self == SLURM && batch
    }
}

/// This process among those that a launcher started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The launcher.
    pub launcher: &'static str,
    /// The number of this process.
    pub rank: u32,
    /// The number of processes.
    pub size: u32,
    /// Its number on its machine.
    pub local_rank: u32,
    /// The number of processes on its machine.
    pub local_size: u32,
}

impl Launch {
    /// The launch that this process belongs to, by `vars`, which returns the value of an environment variable; `None`:
    /// no launcher gives it a rank.
    ///
    /// # Errors
    /// `Config`, naming the variable: it is not set or not a number; or the variables contradict each other.
    pub fn detect(vars: Variables<'_>) -> Result<Option<Launch>> {
        let vars = |name: &str| vars(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let vars: Variables<'_> = &vars;
        let Some(launcher) = launcher(vars) else { return Ok(None) };
        let number = |name: &str| -> Result<Option<u32>> {
            let Some(value) = vars(name) else { return Ok(None) };
            let bad = |_| Error::new(ErrorKind::Config, name, format!("{value:?} is not a whole number"));
            value.parse().map(Some).map_err(bad)
        };
        let missing = |name: &str| Error::new(ErrorKind::Config, name, format!("not set by {}", launcher.name));
        let rank = number(launcher.rank)?.unwrap_or_default();
        let local_rank = launcher.local_rank(vars).map(number).transpose()?.flatten();
        // Ranks that are set by hand, one for each node: the command starts the processes there itself.
        if *launcher == TORCHRUN && local_rank.is_none() {
            return Ok(None);
        }
        let name = launcher.size_name(vars);
        let size = number(name)?.ok_or_else(|| missing(name))?;
        let local_size = match launcher.local_size(vars).map(number).transpose()?.flatten() {
            None if *launcher == SLURM => tasks_here(vars, size, number("SLURM_NODEID")?, number("SLURM_NNODES")?),
            None if *launcher == FLUX => size.div_ceil(number("FLUX_JOB_NNODES")?.unwrap_or(1).max(1)),
            known => known.unwrap_or(size),
        };
        let local_rank = local_rank.unwrap_or(if *launcher == SLURM { 0 } else { rank % local_size.max(1) });
        if rank >= size || local_rank >= local_size {
            let text = format!("process {rank} of {size}, {local_rank} of {local_size} on this machine");
            return Err(Error::new(ErrorKind::Config, launcher.rank, text)
                .with_hint(format!("the variables of {} contradict each other", launcher.name)));
        }
        Ok(Some(Launch { launcher: launcher.name, rank, size, local_rank, local_size }))
    }
}

/// The number of a step's tasks on node `node`, from a list such as `4(x2),1`; without one, an even share.
fn tasks_here(vars: Variables<'_>, size: u32, node: Option<u32>, nodes: Option<u32>) -> u32 {
    let lists = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let listed = lists.into_iter().find_map(vars).and_then(|list| {
        let mut left = node.unwrap_or(0);
        for part in list.split(',') {
            let (count, times) = match part.split_once("(x") {
                Some((count, times)) => (count, times.strip_suffix(')')?),
                None => (part, "1"),
            };
            let (count, times): (u32, u32) = (count.parse().ok()?, times.parse().ok()?);
            match left.checked_sub(times) {
                Some(rest) => left = rest,
                None => return Some(count),
            }
        }
        None
    });
    listed.unwrap_or_else(|| size.div_ceil(nodes.unwrap_or(1).max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vars: &[(&str, &str)]) -> Result<Option<Launch>> {
        Launch::detect(&|name| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_innermost_launcher_that_gives_a_rank_counts() {
        let slurm =
            [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_NNODES", "1")];
        let launch = |launcher, rank, size, local_rank, local_size| {
            Some(Launch { launcher, rank, size, local_rank, local_size })
        };
        assert_eq!(of(&slurm).unwrap(), launch("Slurm", 1, 2, 0, 2), "a step of the job");
        let exported = [("WORLD_SIZE", "9"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")];
        assert_eq!(of(&[&slurm[..], &exported].concat()).unwrap(), launch("Slurm", 1, 2, 0, 2), "none is a rank");
        let mpi = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4")];
        assert_eq!(of(&[&slurm[..], &mpi].concat()).unwrap(), launch("Open MPI", 3, 4, 3, 4), "mpirun in a job");
        let torch = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")];
        assert_eq!(of(&[&slurm[..], &torch].concat()).unwrap(), launch("torchrun", 5, 8, 1, 4), "torchrun in a job");
        assert_eq!(of(&exported).unwrap(), None);
        assert_eq!(of(&torch[..2]).unwrap(), None, "nodes, by hand");
        let left = [&slurm[..], &[("RANK", "0"), ("WORLD_SIZE", "1")]].concat();
        assert_eq!(of(&left).unwrap(), launch("Slurm", 1, 2, 0, 2), "RANK was left over");
        let shell = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("RANK", "1"), ("WORLD_SIZE", "2")];
        assert_eq!(of(&shell).unwrap(), None, "nodes, by hand, from a shell of srun's");
        let below = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
        assert_eq!(of(&[&torch[..], &below].concat()).unwrap(), launch("torchrun", 5, 8, 1, 4), "one for each node");
        let worker = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
        assert_eq!(of(&[&worker[..], &below].concat()).unwrap(), launch("Open MPI", 1, 2, 1, 2), "mpirun by a worker");
        let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("ENVIRONMENT", "BATCH")];
        assert_eq!(of(&script).unwrap(), None, "the script of the job");
    }

    #[test]
    fn ranks_of_other_launchers_are_found() {
        let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_STEP_ID", "0"), ("SLURM_NNODES", "2")];
        let hydra = [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        let srun = [("PMI_RANK", "1"), ("PMI_SIZE", "2")];
        let pals = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PALS_LOCAL_RANKID", "1")];
        let flux = [("FLUX_TASK_RANK", "3"), ("FLUX_JOB_SIZE", "4"), ("FLUX_JOB_NNODES", "2"), ("PMI_RANK", "3")];
        let jsrun = [("JSM_NAMESPACE_RANK", "1"), ("JSM_NAMESPACE_SIZE", "2"), ("JSM_NAMESPACE_LOCAL_RANK", "1")];
        for (vars, launcher, [rank, size, local_rank, local_size]) in [
            (hydra.to_vec(), "PMI", [3, 4, 1, 2]),
            ([&slurm[..], &hydra].concat(), "PMI", [3, 4, 1, 2]),
            ([&slurm[..], &srun].concat(), "Slurm", [1, 2, 0, 1]),
            (pals.to_vec(), "PMI", [1, 2, 1, 2]),
            (flux.to_vec(), "Flux", [3, 4, 1, 2]),
            (jsrun.to_vec(), "jsrun", [1, 2, 1, 2]),
        ] {
            let launch = Launch { launcher, rank, size, local_rank, local_size };
            assert_eq!(of(&vars).unwrap(), Some(launch), "{vars:?}");
        }
    }

    #[test]
    fn tasks_on_this_node_are_those_of_the_list() {
        let here = |node: &str, list: &str| {
            let vars = [
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "9"),
                ("SLURM_NODEID", node),
                ("SLURM_NNODES", "3"),
                ("SLURM_STEP_TASKS_PER_NODE", list),
            ];
            of(&vars).unwrap().unwrap().local_size
        };
        assert_eq!((here("0", "4(x2),1"), here("1", "4(x2),1"), here("2", "4(x2),1")), (4, 4, 1));
        assert_eq!((here("5", "4(x2),1"), here("0", "what")), (3, 3), "an even share");
    }

    #[test]
    fn variables_that_contradict_are_named() {
        for (vars, text) in [
            (&[("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")][..], "process 2 of 2"),
            (&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK: \"x\" is not a whole number"),
            (&[("RANK", "0"), ("LOCAL_RANK", "0")], "WORLD_SIZE: not set by torchrun"),
        ] {
            let error = of(vars).unwrap_err();
            assert!(error.to_string().contains(text), "{error} lacks {text}");
        }
    }
}
