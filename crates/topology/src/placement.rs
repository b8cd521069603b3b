//! On which processors the threads of a device run: those of its NUMA node.

use crossrail_types::{Affinity, Error, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::host::NumaNode;
use crate::tree::Tree;

/// Where threads run that serve a device. Made once, from what the process may use then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Nodes with processors that this process may use, and those processors.
    nodes: Vec<NumaNode>,
    why_not: Option<&'static str>,
}

impl Placement {
    /// As the setting has it, for this process on this machine.
    pub fn here(affinity: Affinity) -> Placement {
        let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
        let is_allowed = |cpu: &u32| set.is_set(*cpu as usize).unwrap_or(false);
        Placement::of(&Tree::default(), affinity, is_allowed)
    }

    pub(crate) fn of(tree: &Tree, affinity: Affinity, is_allowed: impl Fn(&u32) -> bool) -> Placement {
        let all = tree.numa_nodes();
        let count = all.len();
        let allowed = all.into_iter().map(|NumaNode { node, cpus }| {
            let cpus: Vec<u32> = cpus.into_iter().filter(&is_allowed).collect();
            NumaNode { node, cpus }
        });
        let nodes: Vec<NumaNode> = allowed.filter(|node| !node.cpus.is_empty()).collect();
        let why_not = match (affinity, count, nodes.len()) {
            (Affinity::Off, ..) => Some("CROSSRAIL_AFFINITY=off"),
            (_, 0, _) => Some("the system names no NUMA nodes"),
            (_, 1, _) => Some("this machine has one NUMA node"),
            (_, _, 0 | 1) => Some("this process may use the processors of one NUMA node only"),
            _ => None,
        };
        Placement { nodes, why_not }
    }

    /// Why threads are not pinned; `None`: threads of devices are pinned near them.
    pub fn why_not(&self) -> Option<&'static str> {
        self.why_not
    }

    /// The nodes, with the processors that this process may use.
    pub fn nodes(&self) -> &[NumaNode] {
        &self.nodes
    }

    /// The processors for threads of a device on that node; `None`: any.
    pub fn near(&self, node: Option<u32>) -> Option<&[u32]> {
        let node = node.filter(|_| self.why_not.is_none())?;
        self.nodes.iter().find(|known| known.node == node).map(|known| &known.cpus[..])
    }

    /// Pins the calling thread to the processors near that node, if there are any.
    ///
    /// # Errors
    /// `Io` when the system refuses; the thread then runs where it did.
    pub fn stay_near(&self, node: Option<u32>) -> Result<()> {
        let Some(cpus) = self.near(node) else { return Ok(()) };
        let refused = |errno: nix::Error| Error::io("place a thread", "sched_setaffinity", &errno.into());
        let mut set = CpuSet::new();
        cpus.iter().try_for_each(|cpu| set.set(*cpu as usize)).map_err(refused)?;
        sched_setaffinity(Pid::from_raw(0), &set).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Fake;

    fn two_nodes() -> Fake {
        let fake = Fake::new();
        fake.file("devices/system/node/node0/cpulist", "0-3,8");
        fake.file("devices/system/node/node1/cpulist", "4-7");
        fake
    }

    #[test]
    fn threads_run_on_the_allowed_processors_of_their_device_s_node() {
        let placement = Placement::of(&two_nodes().tree(), Affinity::Auto, |cpu| *cpu != 2 && *cpu != 4);
        assert_eq!(placement.why_not(), None);
        assert_eq!(placement.near(Some(0)), Some(&[0, 1, 3, 8][..]));
        assert_eq!(placement.near(Some(1)), Some(&[5, 6, 7][..]));
        assert_eq!([placement.near(None), placement.near(Some(2))], [None, None], "of a device without a known node");
    }

    #[test]
    fn where_there_is_no_choice_nothing_is_placed_and_the_reason_is_said() {
        let tree = two_nodes();
        let off = Placement::of(&tree.tree(), Affinity::Off, |_| true);
        let pinned = Placement::of(&tree.tree(), Affinity::Auto, |cpu| *cpu < 3);
        let one = Fake::new();
        one.file("devices/system/node/node0/cpulist", "0-3");
        let one = Placement::of(&one.tree(), Affinity::Auto, |_| true);
        let none = Placement::of(&Fake::new().tree(), Affinity::Auto, |_| true);
        for (placement, why) in
            [(off, "CROSSRAIL_AFFINITY"), (pinned, "of one NUMA node only"), (one, "has one"), (none, "names no")]
        {
            assert!(placement.why_not().is_some_and(|said| said.contains(why)), "{placement:?}");
            assert_eq!(placement.near(Some(0)), None);
            placement.stay_near(Some(0)).unwrap();
        }
    }

    #[test]
    fn a_thread_stays_where_it_is_placed() {
        let set = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let last = (0..CpuSet::count()).rfind(|cpu| set.is_set(*cpu).unwrap()).unwrap() as u32;
        let nodes = vec![NumaNode { node: 3, cpus: vec![last] }];
        std::thread::spawn(move || {
            Placement { nodes, why_not: None }.stay_near(Some(3)).unwrap();
            let now = sched_getaffinity(Pid::from_raw(0)).unwrap();
            let left: Vec<usize> = (0..CpuSet::count()).filter(|cpu| now.is_set(*cpu).unwrap()).collect();
            assert_eq!(left, [last as usize]);
        })
        .join()
        .unwrap();
    }
}
