//! Distances between network devices and GPUs, from their positions on the PCI bus and their NUMA nodes.

use std::cmp::Reverse;
use std::fmt;

use crate::gpu::GpuSeen;
use crate::nic::Nic;

/// The distance between a network device and a GPU, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Below the same PCI switch or root port: traffic does not cross the host bridge.
    SameSwitch,
    /// Under the same host bridge.
    SameRoot,
    /// On the same NUMA node, under different host bridges or an undisclosed one.
    SameNuma,
    /// On different NUMA nodes.
    Across,
    /// Not disclosed, as in many virtual machines, or the device has no hardware of its own.
    Unknown,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Distance::SameSwitch => "same switch",
            Distance::SameRoot => "same root",
            Distance::SameNuma => "same NUMA node",
            Distance::Across => "across",
            Distance::Unknown => "unknown",
        })
    }
}

/// The distance between `nic` and `gpu`, from their positions on the PCI bus and their NUMA nodes.
pub fn distance(nic: &Nic, gpu: &GpuSeen) -> Distance {
    match (shared(nic, gpu), nic.numa_node, gpu.numa_node) {
        (2.., ..) => Distance::SameSwitch,
        (_, Some(a), Some(b)) if a != b => Distance::Across,
        (1, ..) if behind_a_port(gpu) => Distance::SameRoot,
        (_, Some(_), Some(_)) => Distance::SameNuma,
        _ => Distance::Unknown,
    }
}

/// The devices of `nics` that are nearest to `gpu`, in the order of `nics`.
///
/// Returns several if they are equally near, and all if the machine does not disclose its topology. Loopback is never
/// included; interfaces without hardware of their own (bridges, tunnels) only if there are no others.
pub fn nearest<'a>(gpu: &GpuSeen, nics: &'a [Nic]) -> Vec<&'a Nic> {
    // Below the same root port, the device that shares more switches with the GPU is nearer.
    let rank = |nic: &Nic| (nic.virtual_, distance(nic, gpu), Reverse(shared(nic, gpu)));
    let candidates = || nics.iter().filter(|nic| !nic.loopback);
    let best = candidates().map(rank).min();
    candidates().filter(|nic| Some(rank(nic)) == best).collect()
}

/// The number of PCI devices above both, including the host bridge.
fn shared(nic: &Nic, gpu: &GpuSeen) -> usize {
    nic.pci_path.iter().zip(&gpu.pci_path).take_while(|(a, b)| a == b).count()
}

/// Whether the GPU's position on the bus is meaningful. No physical machine has a GPU directly on its host bridge, but
/// virtual machines show all of their devices there.
fn behind_a_port(gpu: &GpuSeen) -> bool {
    gpu.pci_path.len() > 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic::Interface;
    use crate::testing::Fake;

    /// Adds a GPU at the given path on the bus.
    fn gpu(fake: &Fake, path: &str, numa: &str) {
        let real = format!("devices/{path}");
        for (name, text) in [("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x2335"), ("numa_node", numa)] {
            fake.file(&format!("{real}/{name}"), text);
        }
        fake.link(&format!("bus/pci/devices/{}", path.rsplit('/').next().unwrap()), &real);
    }

    /// Adds a network device at the given path on the bus; returns its entry in the kernel's interface list.
    fn nic(fake: &Fake, path: &str, numa: &str, name: &str, index: u32) -> Interface {
        let real = format!("devices/{path}");
        fake.file(&format!("{real}/numa_node"), numa);
        fake.file(&format!("{real}/net/{name}/ifindex"), &index.to_string());
        fake.link(&format!("{real}/net/{name}/device"), &real);
        fake.link(&format!("class/net/{name}"), &format!("{real}/net/{name}"));
        Interface { name: name.to_owned(), index, up: true, running: true, ..Interface::default() }
    }

    fn virtual_nic(fake: &Fake, name: &str, index: u32) -> Interface {
        fake.file(&format!("devices/virtual/net/{name}/ifindex"), &index.to_string());
        fake.link(&format!("class/net/{name}"), &format!("devices/virtual/net/{name}"));
        Interface { name: name.to_owned(), index, up: true, running: true, ..Interface::default() }
    }

    fn described(fake: &Fake, interfaces: Vec<Interface>) -> Vec<Nic> {
        interfaces.into_iter().map(|interface| fake.tree().describe(interface)).collect()
    }

    fn names(gpu: &GpuSeen, nics: &[Nic]) -> Vec<String> {
        nearest(gpu, nics).into_iter().map(|nic| nic.name.clone()).collect()
    }

    /// 8 GPUs and 4 NICs: on each of two NUMA nodes two host bridges, below each a switch with 2 GPUs and a NIC. A NIC
    /// for management hangs on another port of the first host bridge.
    fn cloud() -> (Fake, Vec<Nic>) {
        let fake = Fake::new();
        let mut interfaces = Vec::new();
        for (i, bus) in [0x10, 0x40, 0x80, 0xc0].into_iter().enumerate() {
            let numa = (i / 2).to_string();
            let switch = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{:02x}:00.0", bus + 1);
            let below = |port: u32, at: u32| {
                format!("{switch}/0000:{:02x}:{port:02x}.0/0000:{:02x}:00.0", bus + 2, bus + 2 + at)
            };
            gpu(&fake, &below(0, 1), &numa);
            gpu(&fake, &below(1, 2), &numa);
            interfaces.push(nic(&fake, &below(2, 3), &numa, &format!("eth{}", i + 1), i as u32 + 3));
        }
        interfaces.push(nic(&fake, "pci0000:10/0000:10:05.0/0000:1a:00.0", "0", "eth0", 2));
        interfaces.push(virtual_nic(&fake, "docker0", 9));
        interfaces.push(Interface { name: "lo".to_owned(), index: 1, loopback: true, ..Interface::default() });
        let nics = described(&fake, interfaces);
        (fake, nics)
    }

    #[test]
    fn in_a_cloud_machine_each_gpu_has_the_nic_of_its_switch() {
        let (fake, nics) = cloud();
        let gpus = fake.tree().gpus();
        assert_eq!(gpus.len(), 8);
        for (i, gpu) in gpus.iter().enumerate() {
            assert_eq!(names(gpu, &nics), [format!("eth{}", i / 2 + 1)]);
            assert_eq!(gpu.numa_node, Some(i as u32 / 4));
        }
        let row = |gpu: usize| nics.iter().map(|nic| distance(nic, &gpus[gpu])).collect::<Vec<_>>();
        use Distance::{Across, SameNuma, SameRoot, SameSwitch, Unknown};
        assert_eq!(row(0), [SameSwitch, SameNuma, Across, Across, SameRoot, Unknown, Unknown]);
        assert_eq!(row(1), row(0));
        assert_eq!(row(3), [SameNuma, SameSwitch, Across, Across, SameNuma, Unknown, Unknown]);
        assert_eq!(row(7), [Across, Across, SameNuma, SameSwitch, Across, Unknown, Unknown]);
    }

    #[test]
    fn next_nearest_are_nics_of_the_same_root_then_of_the_same_node() {
        let (fake, nics) = cloud();
        let gpus = fake.tree().gpus();
        let without = |gone: &[&str]| -> Vec<Nic> {
            nics.iter().filter(|nic| !gone.contains(&nic.name.as_str())).cloned().collect()
        };
        assert_eq!(names(&gpus[0], &without(&["eth1"])), ["eth0"]);
        assert_eq!(names(&gpus[0], &without(&["eth1", "eth0"])), ["eth2"]);
        assert_eq!(names(&gpus[0], &without(&["eth1", "eth0", "eth2"])), ["eth3", "eth4"]);
        assert_eq!(names(&gpus[0], &without(&["eth0", "eth1", "eth2", "eth3", "eth4"])), ["docker0"]);
        assert!(names(&gpus[0], &[]).is_empty());
    }

    #[test]
    fn with_nested_switches_the_inner_one_is_nearer() {
        let fake = Fake::new();
        let outer = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0";
        let inner = format!("{outer}/0000:13:00.0/0000:14:00.0");
        gpu(&fake, &format!("{inner}/0000:15:00.0"), "0");
        let nics = described(
            &fake,
            vec![
                nic(&fake, "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:20:00.0", "0", "eth1", 2),
                nic(&fake, &format!("{outer}/0000:13:00.0/0000:14:01.0/0000:16:00.0"), "0", "eth2", 3),
            ],
        );
        let gpus = fake.tree().gpus();
        assert!(nics.iter().all(|nic| distance(nic, &gpus[0]) == Distance::SameSwitch));
        assert_eq!(names(&gpus[0], &nics), ["eth2"]);
    }

    #[test]
    fn without_numa_the_bus_decides() {
        let fake = Fake::new();
        gpu(&fake, "pci0000:00/0000:00:01.0/0000:01:00.0", "-1");
        let nics = described(
            &fake,
            vec![
                nic(&fake, "pci0000:00/0000:00:1c.0/0000:02:00.0", "-1", "eth0", 2),
                nic(&fake, "pci0000:00/0000:00:1f.6", "-1", "eth1", 3),
                nic(&fake, "pci0000:80/0000:80:01.0/0000:81:00.0", "-1", "eth2", 4),
            ],
        );
        let gpus = fake.tree().gpus();
        assert_eq!(gpus[0].numa_node, None);
        let far: Vec<Distance> = nics.iter().map(|nic| distance(nic, &gpus[0])).collect();
        assert_eq!(far, [Distance::SameRoot, Distance::SameRoot, Distance::Unknown]);
        assert_eq!(names(&gpus[0], &nics), ["eth0", "eth1"]);
    }

    /// A virtual machine: all devices on a single flat bus, with the given NUMA nodes.
    fn flat(nodes: [&str; 4]) -> (Fake, Vec<Nic>) {
        let fake = Fake::new();
        gpu(&fake, "pci0000:00/0000:00:04.0", nodes[0]);
        gpu(&fake, "pci0000:00/0000:00:05.0", nodes[1]);
        let nics = described(
            &fake,
            vec![
                nic(&fake, "pci0000:00/0000:00:06.0", nodes[2], "eth0", 2),
                nic(&fake, "pci0000:00/0000:00:07.0/virtio4", nodes[3], "eth1", 3),
            ],
        );
        (fake, nics)
    }

    #[test]
    fn in_a_virtual_machine_without_topology_all_nics_are_equally_near() {
        let (fake, nics) = flat(["-1"; 4]);
        for gpu in fake.tree().gpus() {
            assert!(nics.iter().all(|nic| distance(nic, &gpu) == Distance::Unknown));
            assert_eq!(names(&gpu, &nics), ["eth0", "eth1"]);
        }
    }

    #[test]
    fn a_virtual_machine_may_disclose_numa_nodes() {
        let (fake, nics) = flat(["0", "1", "0", "1"]);
        let gpus = fake.tree().gpus();
        assert_eq!(distance(&nics[0], &gpus[0]), Distance::SameNuma);
        assert_eq!(distance(&nics[1], &gpus[0]), Distance::Across);
        assert_eq!((names(&gpus[0], &nics), names(&gpus[1], &nics)), (vec!["eth0".into()], vec!["eth1".into()]));
    }

    #[test]
    fn distances_have_an_order_and_names() {
        use Distance::{Across, SameNuma, SameRoot, SameSwitch, Unknown};
        let all = [SameSwitch, SameRoot, SameNuma, Across, Unknown];
        assert!(all.is_sorted());
        assert_eq!(
            all.map(|distance| distance.to_string()).join(", "),
            "same switch, same root, same NUMA node, across, unknown"
        );
        assert_eq!(format!("[{SameRoot:<11}]"), "[same root  ]");
    }
}
