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
    pub(crate) local_rank: &'static str,
    local_sizes: &'static [&'static str],
}

const TORCHRUN: Launcher = Launcher {
    name: "torchrun",
    rank: "RANK",
    sizes: &["WORLD_SIZE"],
    local_rank: "LOCAL_RANK",
    local_sizes: &["LOCAL_WORLD_SIZE"],
};
const OPEN_MPI: Launcher = Launcher {
    name: "Open MPI",
    rank: "OMPI_COMM_WORLD_RANK",
    sizes: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_sizes: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
};
/// A step may have fewer tasks than its job.
pub(crate) const SLURM: Launcher = Launcher {
    name: "Slurm",
    rank: "SLURM_PROCID",
    sizes: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    local_sizes: &[],
};

/// All launchers. One that is started by another comes before that: torchrun and mpirun run inside Slurm's jobs, and
/// their processes have its variables, too.
pub(crate) const LAUNCHERS: [&Launcher; 3] = [&TORCHRUN, &OPEN_MPI, &SLURM];

/// The launcher that gives this process a rank.
pub(crate) fn launcher(vars: Variables<'_>) -> Option<&'static Launcher> {
    let gives_rank = |launcher: &&&Launcher| vars(launcher.rank).is_some() && !launcher.is_batch_script(vars);
    LAUNCHERS.iter().find(gives_rank).copied()
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
        let local_rank = number(launcher.local_rank)?;
        // Ranks that are set by hand, one for each node: the command starts the processes there itself.
        if *launcher == TORCHRUN && local_rank.is_none() {
            return Ok(None);
        }
        let name = launcher.size_name(vars);
        let size = number(name)?.ok_or_else(|| missing(name))?;
        let local_size = launcher.local_sizes.iter().find_map(|name| number(name).transpose()).transpose()?;
        let local_size = match local_size {
            None if *launcher == SLURM => tasks_here(vars, size, number("SLURM_NODEID")?, number("SLURM_NNODES")?),
            known => known.unwrap_or(size),
        };
        let local_rank = local_rank.unwrap_or(if *launcher == SLURM { 0 } else { rank });
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
        let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("ENVIRONMENT", "BATCH")];
        assert_eq!(of(&script).unwrap(), None, "the script of the job");
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
