//! Memory that this process may use: the machine's, within the limits of its control groups.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::host::field;
use crate::tree::{Tree, number, text};

/// Memory that this process shares with all others of its machine or of its control group; sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Available now without swapping, and without triggering the out-of-memory killer.
    pub available: u64,
    /// Upper bound of what could ever be available: the machine's memory, or the lowest limit of a control group.
    pub capacity: u64,
    /// The control group that determines `available`, by the file with its limit, and that limit; `None`: the machine
    /// does.
    pub limited_by: Option<(PathBuf, u64)>,
    /// Processes of this control group, or of the machine where none counts them, that the kernel's out-of-memory
    /// killer has ended so far.
    pub oom_kills: Option<u64>,
}

/// How much is free, and what limits it.
impl fmt::Display for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes are free", self.available)?;
        match &self.limited_by {
            Some((file, limit)) => write!(f, " in this control group, which may use {limit} ({})", file.display()),
            None => Ok(()),
        }
    }
}

/// Free memory within one control group.
struct Room {
    limit: u64,
    free: u64,
    file: PathBuf,
}

impl Tree {
    /// The memory that this process may use; `None` if procfs does not report any.
    pub fn host_memory(&self) -> Option<HostMemory> {
        let meminfo = text(&self.proc.join("meminfo"))?;
        let total = bytes_of(&meminfo, "MemTotal")?;
        let free = bytes_of(&meminfo, "MemAvailable").unwrap_or(total);
        let rooms = self.rooms();
        let capacity = rooms.iter().map(|room| room.limit).fold(total, u64::min);
        let tightest = rooms.into_iter().min_by_key(|room| room.free).filter(|room| room.free < free);
        Some(HostMemory {
            available: tightest.as_ref().map_or(free, |room| room.free),
            capacity,
            limited_by: tightest.map(|room| (room.file, room.limit)),
            oom_kills: self.oom_kills(),
        })
    }

    /// The lowest memory limit of this process's control groups, unless it is not below `total`.
    pub(crate) fn memory_limit(&self, total: u64) -> Option<u64> {
        self.rooms().into_iter().map(|room| room.limit).min().filter(|limit| *limit < total)
    }

    /// What each control group of this process leaves, those around it included.
    fn rooms(&self) -> Vec<Room> {
        let v2 = self.groups(None).into_iter();
        let v2 = v2.filter_map(|group| room(&group, "memory.max", "memory.current", ""));
        let v1 = self.groups(Some("memory")).into_iter();
        let v1 = v1.filter_map(|group| room(&group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"));
        v2.chain(v1).collect()
    }

    fn oom_kills(&self) -> Option<u64> {
        let in_group = |group: Option<PathBuf>, file: &str| count(&text(&group?.join(file))?, "oom_kill");
        in_group(self.groups(None).into_iter().next(), "memory.events")
            .or_else(|| in_group(self.groups(Some("memory")).into_iter().next(), "memory.oom_control"))
            .or_else(|| count(&text(&self.proc.join("vmstat"))?, "oom_kill"))
    }
}

/// The page cache counts as free: the kernel drops it before it kills anyone.
fn room(group: &Path, limit: &str, usage: &str, prefix: &str) -> Option<Room> {
    let file = group.join(limit);
    let limit = u64::try_from(number(&file)?).ok()?;
    let used = number(&group.join(usage)).and_then(|used| u64::try_from(used).ok()).unwrap_or(0);
    let stat = text(&group.join("memory.stat")).unwrap_or_default();
    let cache = ["inactive_file", "active_file"].map(|name| count(&stat, &format!("{prefix}{name}")).unwrap_or(0));
    let used = used.saturating_sub(cache.iter().sum());
    Some(Room { limit, free: limit.saturating_sub(used), file })
}

/// The number of a `name number` line.
fn count(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The bytes of a `name: number kB` line.
fn bytes_of(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| field(line, name))?;
    Some(line.strip_suffix("kB")?.trim().parse::<u64>().ok()?.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use crate::testing::Fake;

    const MIB: u64 = 1 << 20;

    fn machine() -> Fake {
        let fake = Fake::new();
        fake.proc_file("meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n");
        fake.proc_file("vmstat", "nr_free_pages 7\noom_kill 3\n");
        fake
    }

    #[test]
    fn without_limits_it_is_the_machines() {
        let memory = machine().tree().host_memory().unwrap();
        assert_eq!((memory.available, memory.capacity), (8192 * MIB, 16384 * MIB));
        assert_eq!((memory.limited_by, memory.oom_kills), (None, Some(3)));
        assert!(Fake::new().tree().host_memory().is_none());
    }

    #[test]
    fn the_tightest_of_nested_groups_decides() {
        let fake = machine();
        fake.proc_file("self/cgroup", "0::/pod/box\n");
        fake.file("fs/cgroup/pod/memory.max", &(2048 * MIB).to_string());
        fake.file("fs/cgroup/pod/memory.current", &(1900 * MIB).to_string());
        fake.file("fs/cgroup/pod/memory.stat", &format!("anon 1\ninactive_file {}\nactive_file {}", 50 * MIB, 2 * MIB));
        fake.file("fs/cgroup/pod/box/memory.max", &(1024 * MIB).to_string());
        fake.file("fs/cgroup/pod/box/memory.current", &(100 * MIB).to_string());
        fake.file("fs/cgroup/pod/box/memory.events", "low 0\noom 4\noom_kill 2\noom_group_kill 0");
        let memory = fake.tree().host_memory().unwrap();
        assert_eq!((memory.available, memory.capacity), (200 * MIB, 1024 * MIB));
        assert!(memory.limited_by.as_ref().unwrap().0.ends_with("pod/memory.max"));
        assert_eq!(memory.oom_kills, Some(2));
        assert!(memory.to_string().starts_with("209715200 bytes are free in this control group"), "{memory}");
    }

    #[test]
    fn a_limit_above_what_the_machine_has_free_changes_nothing() {
        let fake = machine();
        fake.proc_file("self/cgroup", "0::/\n");
        fake.file("fs/cgroup/memory.max", &(12288 * MIB).to_string());
        fake.file("fs/cgroup/memory.current", "0");
        let memory = fake.tree().host_memory().unwrap();
        assert_eq!((memory.available, memory.capacity, memory.limited_by), (8192 * MIB, 12288 * MIB, None));
    }

    #[test]
    fn version_1_groups_count_too() {
        let fake = machine();
        fake.proc_file("self/cgroup", "4:memory:/pod\n0::/\n");
        fake.file("fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
        fake.file("fs/cgroup/memory/memory.usage_in_bytes", "12345");
        fake.file("fs/cgroup/memory/pod/memory.limit_in_bytes", &(512 * MIB).to_string());
        fake.file("fs/cgroup/memory/pod/memory.usage_in_bytes", &(312 * MIB).to_string());
        fake.file("fs/cgroup/memory/pod/memory.stat", &format!("inactive_file 5\ntotal_inactive_file {}", 12 * MIB));
        fake.file("fs/cgroup/memory/pod/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1");
        let memory = fake.tree().host_memory().unwrap();
        assert_eq!((memory.available, memory.capacity, memory.oom_kills), (212 * MIB, 512 * MIB, Some(1)));
    }

    #[test]
    fn a_group_that_uses_more_than_it_may_leaves_nothing() {
        let fake = machine();
        fake.proc_file("self/cgroup", "0::/pod\n");
        fake.file("fs/cgroup/pod/memory.max", "1000");
        fake.file("fs/cgroup/pod/memory.current", "2000");
        assert_eq!(fake.tree().host_memory().unwrap().available, 0);
    }
}
