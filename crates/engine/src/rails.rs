//! Which network devices are rails, under the settings; those nearest to a GPU among them.

use crossrail_topology::{Distance, GpuSeen, NetDevice, Nic, distance, select};
use crossrail_types::{Error, ErrorKind, Filter, Rails, Result};

const SETTING: &str = "CROSSRAIL_NET_DEVICES";

/// The devices that carry data.
///
/// # Errors
/// `Config`: a device that is not there, nothing left, or no such GPU to be near to.
pub(crate) fn choose(rails: &Rails, nics: &[Nic]) -> Result<Vec<NetDevice>> {
    match rails {
        Rails::Named(filter) => select(filter, nics),
        Rails::Near(gpu) => {
            let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            let gpus = crossrail_topology::gpus();
            let gpu = nth(gpu.unwrap_or(0), &gpus, visible.as_deref())?;
            Ok(nearest(gpu, select(&Filter::All, nics)?, nics))
        }
    }
}

/// The GPU that CUDA calls `ordinal`, as far as can be said without asking CUDA: by bus address, through the list of
/// numbers in `CUDA_VISIBLE_DEVICES` where there is one.
fn nth<'a>(ordinal: u32, gpus: &'a [GpuSeen], visible: Option<&str>) -> Result<&'a GpuSeen> {
    let mapped = visible.and_then(|list| list.split(',').nth(ordinal as usize)?.trim().parse::<u32>().ok());
    gpus.get(mapped.unwrap_or(ordinal) as usize).ok_or_else(|| {
        Error::new(ErrorKind::Config, SETTING, format!("near:{ordinal} names a GPU that is not there"))
            .with_hint(format!("{} GPUs are seen on the bus", gpus.len()))
    })
}

/// Those of `devices` that are nearest to `gpu`; loopback reaches every GPU of this machine, but none of another.
fn nearest(gpu: &GpuSeen, devices: Vec<NetDevice>, nics: &[Nic]) -> Vec<NetDevice> {
    let far = |device: &NetDevice| {
        let nic = nics.iter().find(|nic| nic.name == device.interface);
        nic.filter(|nic| !nic.loopback).map(|nic| distance(nic, gpu))
    };
    let best: Option<Distance> = devices.iter().filter_map(far).min();
    devices.into_iter().filter(|device| far(device) == best || device.loopback).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(pci: &str, path: &[&str], numa_node: u32) -> GpuSeen {
        let pci_path = path.iter().map(|step| (*step).to_owned()).collect();
        GpuSeen { pci: pci.to_owned(), pci_path, numa_node: Some(numa_node), ..GpuSeen::default() }
    }

    fn nic(name: &str, index: u32, path: &[&str], numa_node: Option<u32>) -> (Nic, NetDevice) {
        let address = std::net::IpAddr::from([10, 0, index as u8, 1]);
        let nic = Nic {
            name: name.to_owned(),
            index,
            addresses: vec![address],
            up: true,
            running: true,
            loopback: name == "lo",
            virtual_: false,
            speed_mbps: None,
            mtu: None,
            numa_node,
            pci: None,
            pci_path: path.iter().map(|step| (*step).to_owned()).collect(),
            driver: None,
        };
        let device = NetDevice {
            name: name.to_owned(),
            interface: name.to_owned(),
            address,
            addresses: vec![address],
            index,
            speed_mbps: None,
            loopback: name == "lo",
            numa_node,
        };
        (nic, device)
    }

    #[test]
    fn only_the_nearest_rails_stay_and_loopback_beside_them() {
        let (nics, devices): (Vec<_>, Vec<_>) = [
            nic("eth0", 1, &["host0", "switch0", "a"], Some(0)),
            nic("eth1", 2, &["host0", "switch1", "b"], Some(0)),
            nic("eth2", 3, &["host1", "switch2", "c"], Some(1)),
            nic("lo", 4, &[], None),
        ]
        .into_iter()
        .unzip();
        let names = |gpu: &GpuSeen| -> Vec<String> {
            nearest(gpu, devices.clone(), &nics).into_iter().map(|device| device.name).collect()
        };
        assert_eq!(names(&gpu("0", &["host0", "switch0", "g"], 0)), ["eth0", "lo"]);
        assert_eq!(names(&gpu("1", &["host2", "switch9", "g"], 0)), ["eth0", "eth1", "lo"], "by NUMA node");
        assert_eq!(names(&gpu("2", &["host1", "switch9", "g"], 1)), ["eth2", "lo"]);
    }

    #[test]
    fn a_gpu_is_named_as_cuda_numbers_it() {
        let gpus = [gpu("a", &[], 0), gpu("b", &[], 0), gpu("c", &[], 0)];
        assert_eq!(nth(1, &gpus, None).unwrap().pci, "b");
        assert_eq!(nth(1, &gpus, Some("2, 0")).unwrap().pci, "a");
        assert_eq!(nth(1, &gpus, Some("GPU-aa,GPU-bb")).unwrap().pci, "b", "uuids are not resolved without CUDA");
        let error = nth(3, &gpus, None).unwrap_err();
        assert!(error.to_string().contains("near:3") && error.to_string().contains("3 GPUs"), "{error}");
    }
}
