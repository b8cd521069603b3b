//! Selection of the rails: network devices that carry data, by the settings or by distance to a GPU.

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

/// The GPU near which devices are chosen that have no rail: that of the settings, else that of the CUDA ordinal, else the
/// only GPU that this process sees; `None`: there are several, none, or it is not known.
pub(crate) fn gpu_to_be_near(rails: &Rails, ordinal: Option<u32>) -> Option<GpuSeen> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let gpus = crossrail_topology::gpus();
    let ordinal = match rails {
        Rails::Near(gpu) => Some(gpu.unwrap_or(0)),
        Rails::Named(_) => ordinal,
    };
    let seen = visible.as_deref().map_or(gpus.len(), |list| list.split(',').count());
    let ordinal = ordinal.or((seen == 1).then_some(0))?;
    nth(ordinal, &gpus, visible.as_deref()).ok().cloned()
}

/// The GPU with CUDA's ordinal `ordinal`, determined without loading CUDA: in the order of bus addresses, through the
/// ordinals and UUID prefixes (`GPU-...`) in `CUDA_VISIBLE_DEVICES` if that is set.
fn nth<'a>(ordinal: u32, gpus: &'a [GpuSeen], visible: Option<&str>) -> Result<&'a GpuSeen> {
    let said = visible.and_then(|list| list.split(',').nth(ordinal as usize)).map(str::trim);
    let found = match said {
        None => gpus.get(ordinal as usize),
        Some(said) => match said.parse::<usize>() {
            Ok(number) => gpus.get(number),
            Err(_) => named(said, gpus)?,
        },
    };
    found.ok_or_else(|| {
        Error::new(ErrorKind::Config, SETTING, format!("near:{ordinal} names a GPU that is not there"))
            .with_hint(format!("{} GPUs are seen on the bus", gpus.len()))
    })
}

/// The GPU whose UUID starts with this.
fn named<'a>(name: &str, gpus: &'a [GpuSeen]) -> Result<Option<&'a GpuSeen>> {
    let known = gpus.iter().all(|gpu| gpu.uuid.is_some());
    let full = name.starts_with("GPU-");
    let found = gpus.iter().find(|gpu| full && gpu.uuid.as_ref().is_some_and(|uuid| uuid.starts_with(name)));
    if found.is_none() && !(known && full) {
        let detail = format!("near: which GPU {name:?} in CUDA_VISIBLE_DEVICES is cannot be said without CUDA");
        return Err(Error::new(ErrorKind::Config, SETTING, detail).with_hint("list devices, as eth1,eth2"));
    }
    Ok(found)
}

/// The devices nearest to `gpu`, and loopback, which has no distance.
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
        let unknown = nth(1, &gpus, Some("GPU-aa,GPU-bb")).unwrap_err().to_string();
        assert!(unknown.contains("GPU-bb") && unknown.contains("eth1,eth2"), "{unknown}");
        let gpus = [("a", "GPU-aa1"), ("b", "GPU-bb2"), ("c", "GPU-cc3")]
            .map(|(pci, uuid)| GpuSeen { uuid: Some(uuid.to_owned()), ..gpu(pci, &[], 0) });
        assert_eq!(nth(1, &gpus, Some("GPU-aa,GPU-cc")).unwrap().pci, "c");
        assert_eq!(nth(0, &gpus, Some("GPU-bb2")).unwrap().pci, "b");
        assert!(nth(0, &gpus, Some("GPU-dd")).unwrap_err().to_string().contains("near:0"));
        assert!(nth(0, &gpus, Some("MIG-aa")).unwrap_err().to_string().contains("MIG-aa"));
        let error = nth(3, &gpus, None).unwrap_err();
        assert!(error.to_string().contains("near:3") && error.to_string().contains("3 GPUs"), "{error}");
    }
}
