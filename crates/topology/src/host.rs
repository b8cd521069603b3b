//! Processors, NUMA nodes and memory of this machine, with the limits of control groups.

use std::path::{Path, PathBuf};

use crossrail_types::{Error, ErrorKind, Result};
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::{Pid, SysconfVar, sysconf};

use crate::tree::{Tree, names, number, text};

/// The processors available to this process.
#[derive(Clone, Debug, PartialEq)]
pub struct Cpus {
    /// The number of processors in its CPU affinity.
    pub allowed: usize,
    /// The CPU time quota of the control group in processors, if there is one.
    pub quota: Option<f64>,
    /// The processor's model name.
    pub model: Option<String>,
    /// The NUMA nodes with processors.
    pub numa_nodes: Vec<NumaNode>,
}

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// The node number.
    pub node: u32,
    /// Its processor numbers.
    pub cpus: Vec<u32>,
}

/// The machine and its memory; sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The host name.
    pub hostname: String,
    /// The kernel's boot id, random at every boot: processes with equal ids run on the same machine.
    pub boot_id: String,
    /// The kernel release.
    pub kernel: String,
    /// The page size.
    pub page_size: u64,
    /// Total memory.
    pub memory_total: u64,
    /// Memory available to this process without swapping, within the limits of its control groups.
    pub memory_available: u64,
    /// The memory limit of the control group, if it is below the total.
    pub memory_limit: Option<u64>,
}

impl Tree {
    /// The processors this process may run on.
    ///
    /// # Errors
    /// `Io` if the operating system does not report the CPU affinity.
    pub fn cpus(&self) -> Result<Cpus> {
        let set = sched_getaffinity(Pid::from_raw(0))
            .map_err(|errno| Error::io("query CPU affinity", "sched_getaffinity", &errno.into()))?;
        let info = text(&self.proc.join("cpuinfo")).unwrap_or_default();
        Ok(Cpus {
            allowed: (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).count(),
            quota: self.cpu_quota(),
            model: info.lines().find_map(|line| field(line, "model name")).map(str::to_owned),
            numa_nodes: self.numa_nodes(),
        })
    }

    /// The NUMA nodes with processors, by number.
    pub(crate) fn numa_nodes(&self) -> Vec<NumaNode> {
        let nodes = self.sys.join("devices/system/node");
        let node = |name: &String| {
            let node = name.strip_prefix("node")?.parse().ok()?;
            let cpus = cpu_list(&text(&nodes.join(name).join("cpulist"))?)?;
            Some(NumaNode { node, cpus })
        };
        let mut found: Vec<NumaNode> = names(&nodes).iter().filter_map(node).collect();
        found.sort_by_key(|node| node.node);
        found
    }

    /// The machine and its memory.
    ///
    /// # Errors
    /// `Io` if `/proc` cannot be read.
    pub fn machine(&self) -> Result<Machine> {
        let required = |name: &str| {
            let path = self.proc.join(name);
            text(&path).ok_or_else(|| {
                Error::new(ErrorKind::Io, "describe the machine", format!("cannot read {}", path.display()))
                    .with_hint("mount procfs at /proc")
            })
        };
        let meminfo = required("meminfo")?;
        let memory = |name: &str| {
            let line = meminfo.lines().find_map(|line| field(line, name))?;
            Some(line.strip_suffix("kB")?.trim().parse::<u64>().ok()?.saturating_mul(1024))
        };
        let page_size = sysconf(SysconfVar::PAGE_SIZE)
            .map_err(|errno| Error::io("describe the machine", "sysconf(PAGE_SIZE)", &errno.into()))?;
        let memory_total = memory("MemTotal").unwrap_or(0);
        Ok(Machine {
            hostname: required("sys/kernel/hostname")?,
            boot_id: required("sys/kernel/random/boot_id")?,
            kernel: required("sys/kernel/osrelease")?,
            page_size: page_size.and_then(|size| u64::try_from(size).ok()).unwrap_or(4096),
            memory_total,
            memory_available: self.host_memory().map_or(memory_total, |memory| memory.available),
            memory_limit: self.memory_limit(memory_total),
        })
    }

    pub(crate) fn cpu_quota(&self) -> Option<f64> {
        let v2 = self.groups(None).into_iter().filter_map(|group| {
            let line = text(&group.join("cpu.max"))?;
            let (quota, period) = line.split_once(' ')?;
            Some((quota.parse().ok()?, period.parse().ok()?))
        });
        let v1 = self.groups(Some("cpu")).into_iter().filter_map(|group| {
            Some((number(&group.join("cpu.cfs_quota_us"))?, number(&group.join("cpu.cfs_period_us"))?))
        });
        let limits = v2.chain(v1).filter(|(quota, period): &(i64, i64)| *quota > 0 && *period > 0);
        limits.map(|(quota, period)| quota as f64 / period as f64).min_by(f64::total_cmp)
    }

    /// The folders of this process's control group and its ancestors, for a v1 controller or (`None`) for v2.
    pub(crate) fn groups(&self, controller: Option<&str>) -> Vec<PathBuf> {
        let mount = match controller {
            Some(controller) => self.sys.join("fs/cgroup").join(controller),
            None => self.sys.join("fs/cgroup"),
        };
        let own = text(&self.proc.join("self/cgroup")).unwrap_or_default();
        let path = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let ours = match controller {
                Some(controller) => controllers.split(',').any(|name| name == controller),
                None => number == "0" && controllers.is_empty(),
            };
            ours.then(|| path.trim_start_matches('/').to_owned())
        });
        let path = PathBuf::from(path.unwrap_or_default());
        path.ancestors().map(|part: &Path| mount.join(part)).collect()
    }
}

/// The value of a `name : value` line.
pub(crate) fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (key, value) = line.split_once(':')?;
    (key.trim() == name).then(|| value.trim())
}

/// Parses a CPU list such as `0-3,8`.
fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.trim().parse::<u32>().ok()?..=last.trim().parse::<u32>().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use crate::testing::Fake;

    #[test]
    fn this_machine() {
        let machine = crate::machine().unwrap();
        assert!(!machine.hostname.is_empty() && !machine.kernel.is_empty());
        assert_eq!(machine.boot_id.len(), 36);
        assert!(machine.page_size.is_power_of_two());
        assert!(machine.memory_total >= machine.memory_available && machine.memory_available > 0);
        assert_eq!(machine.boot_id, crate::machine().unwrap().boot_id);
        assert!(crate::cpus().unwrap().allowed >= 1);
    }

    #[test]
    fn numa_nodes_and_model() {
        let fake = Fake::new();
        for (node, cpus) in [("node0", "0-3,8"), ("node1", "4-7"), ("node10", "9"), ("node2", "")] {
            fake.file(&format!("devices/system/node/{node}/cpulist"), cpus);
        }
        fake.file("devices/system/node/online", "0-2");
        fake.proc_file("cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 9654\n");
        let cpus = fake.tree().cpus().unwrap();
        assert_eq!(cpus.model.as_deref(), Some("AMD EPYC 9654"));
        let nodes: Vec<_> = cpus.numa_nodes.iter().map(|node| (node.node, node.cpus.clone())).collect();
        assert_eq!(nodes, [(0, vec![0, 1, 2, 3, 8]), (1, vec![4, 5, 6, 7]), (10, vec![9])]);
    }

    fn with_memory() -> Fake {
        let fake = Fake::new();
        fake.proc_file("meminfo", "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:   8000000 kB\n");
        fake.proc_file("sys/kernel/hostname", "node7");
        fake.proc_file("sys/kernel/random/boot_id", "41620232-b951-4e03-9345-e3839a356ba4");
        fake.proc_file("sys/kernel/osrelease", "6.8.0");
        fake
    }

    #[test]
    fn memory_is_in_bytes() {
        let machine = with_memory().tree().machine().unwrap();
        assert_eq!((machine.memory_total, machine.memory_available), (16_384_000_000, 8_192_000_000));
        assert_eq!(machine.memory_limit, None);
    }

    #[test]
    fn the_lowest_group_limit_applies() {
        let fake = with_memory();
        fake.proc_file("self/cgroup", "0::/pod/box\n");
        fake.file("fs/cgroup/pod/memory.max", "4000000000");
        fake.file("fs/cgroup/pod/box/memory.max", "max");
        fake.file("fs/cgroup/pod/cpu.max", "150000 100000");
        fake.file("fs/cgroup/pod/box/cpu.max", "max 100000");
        assert_eq!(fake.tree().machine().unwrap().memory_limit, Some(4_000_000_000));
        assert_eq!(fake.tree().cpus().unwrap().quota, Some(1.5));
    }

    #[test]
    fn version_1_groups_apply_too() {
        let fake = with_memory();
        fake.proc_file("self/cgroup", "4:memory:/pod\n3:cpu,cpuacct:/pod\n0::/\n");
        fake.file("fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
        fake.file("fs/cgroup/memory/pod/memory.limit_in_bytes", "1000000000");
        fake.file("fs/cgroup/cpu/pod/cpu.cfs_quota_us", "-1");
        fake.file("fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000");
        assert_eq!(fake.tree().machine().unwrap().memory_limit, Some(1_000_000_000));
        assert_eq!(fake.tree().cpus().unwrap().quota, None);
    }

    #[test]
    fn without_procfs_the_error_names_the_file() {
        let error = Fake::new().tree().machine().unwrap_err();
        assert!(error.to_string().contains("meminfo"), "{error}");
    }
}
