//! NICs that no rail leads to, as EFA's and Slingshot's: which of libfabric's devices this process uses, in which order.
//!
//! A connection over any rail introduces two of them to each other. Both ends give theirs numbers; a lane or an object
//! has one number, which both take modulo how many they have. So alike machines pair alike NICs.

use crossrail_fabric::Offer;
use crossrail_topology::{GpuSeen, Nic, hardware, nearest};

/// Most NICs of a process: each costs every peer a lane, with its memory and a connection.
pub(super) const NICS_MAX: usize = 16;

/// The devices to use of those offered, in the order of their numbers: those nearest to the GPU, if one is known, and of
/// these none whose link is down while another's is up.
pub(super) fn used(mut offers: Vec<Offer>, gpu: Option<&GpuSeen>) -> Vec<Offer> {
    offers.sort_by(|a, b| (&a.attributes.pci, &a.domain).cmp(&(&b.attributes.pci, &b.domain)));
    let nic = |offer: &Offer| match &offer.attributes.pci {
        Some(pci) => hardware(&offer.domain, pci),
        None => Nic { name: offer.domain.clone(), ..Nic::default() },
    };
    let found: Vec<(Nic, bool)> = offers.iter().map(|offer| (nic(offer), offer.attributes.up != Some(false))).collect();
    let numbers = choose(&found, gpu);
    let mut at = 0..;
    offers.retain(|_| at.next().is_some_and(|at| numbers.contains(&at)));
    offers
}

/// Positions of the NICs to use, of those with whether their link may be up.
fn choose(found: &[(Nic, bool)], gpu: Option<&GpuSeen>) -> Vec<usize> {
    let nics: Vec<Nic> = found.iter().map(|(nic, _)| nic.clone()).collect();
    let near = gpu.map(|gpu| nearest(gpu, &nics));
    let is_near = |nic: &Nic| near.as_ref().is_none_or(|near| near.iter().any(|one| one.name == nic.name));
    let mut chosen: Vec<usize> = (0..found.len()).filter(|at| is_near(&found[*at].0)).collect();
    if chosen.iter().any(|at| found[*at].1) {
        chosen.retain(|at| found[*at].1);
    }
    let len = chosen.len();
    (0..len.min(NICS_MAX)).map(|at| chosen[at * len / len.min(NICS_MAX)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two root ports with a GPU and two NICs each, as in machines with eight of them.
    fn machine() -> (Vec<GpuSeen>, Vec<(Nic, bool)>) {
        let path = |port: usize, leaf: &str| -> Vec<String> {
            ["pci0000:00".to_owned(), format!("0000:00:0{port}.0"), format!("0000:{port}0:{leaf}.0")].into()
        };
        let gpu = |port| GpuSeen { pci_path: path(port, "00"), numa_node: Some(0), ..GpuSeen::default() };
        let nic = |port, leaf: &str| Nic {
            name: format!("rdmap{port}{leaf}"),
            pci_path: path(port, leaf),
            numa_node: Some(0),
            ..Nic::default()
        };
        let nics = [(1, "01"), (1, "02"), (2, "01"), (2, "02")].map(|(port, leaf)| (nic(port, leaf), true));
        (vec![gpu(1), gpu(2)], nics.into())
    }

    #[test]
    fn a_process_with_one_gpu_uses_the_nics_below_its_switch() {
        let (gpus, nics) = machine();
        assert_eq!(choose(&nics, None), [0, 1, 2, 3]);
        assert_eq!(choose(&nics, Some(&gpus[0])), [0, 1]);
        assert_eq!(choose(&nics, Some(&gpus[1])), [2, 3]);
        // Of a virtual machine that discloses nothing, all.
        assert_eq!(choose(&nics, Some(&GpuSeen::default())), [0, 1, 2, 3]);
    }

    #[test]
    fn a_nic_without_a_link_is_used_only_if_no_other_is_near() {
        let (gpus, mut nics) = machine();
        nics[0].1 = false;
        assert_eq!(choose(&nics, Some(&gpus[0])), [1]);
        nics[1].1 = false;
        assert_eq!(choose(&nics, Some(&gpus[0])), [0, 1], "they may come up");
    }

    #[test]
    fn of_too_many_every_other_one_is_used() {
        let nic = |at| (Nic { name: format!("efa{at:02}"), ..Nic::default() }, true);
        let nics: Vec<_> = (0..2 * NICS_MAX).map(nic).collect();
        let chosen = choose(&nics, None);
        assert_eq!(chosen, (0..NICS_MAX).map(|at| 2 * at).collect::<Vec<_>>());
    }
}
