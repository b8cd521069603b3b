//! NVIDIA GPUs on the PCI bus, found without a driver.

use std::path::Path;

use crate::tree::{Tree, link_name, names, natural, number, pci_path, text};

const NVIDIA: i64 = 0x10de;
const DISPLAY_CLASS: i64 = 0x03;

/// An NVIDIA GPU on the PCI bus, whether or not it is usable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuSeen {
    /// The PCI address, such as `0000:3b:00.0`.
    pub pci: String,
    /// The PCI devices from the host bridge down to the GPU.
    pub pci_path: Vec<String>,
    /// The PCI device number.
    pub device: u32,
    /// The NUMA node it is attached to.
    pub numa_node: Option<u32>,
    /// The kernel driver bound to it, such as `nvidia` or `vfio-pci`.
    pub driver: Option<String>,
    /// The model name, if the NVIDIA driver reports it.
    pub model: Option<String>,
    /// The UUID, such as `GPU-2a4d…`, if the NVIDIA driver reports it.
    pub uuid: Option<String>,
}

impl Tree {
    /// The NVIDIA GPUs on the PCI bus, ordered by address.
    pub fn gpus(&self) -> Vec<GpuSeen> {
        let bus = self.sys.join("bus/pci/devices");
        names(&bus).into_iter().filter_map(|pci| self.gpu(&bus.join(&pci), pci)).collect()
    }

    fn gpu(&self, device: &Path, pci: String) -> Option<GpuSeen> {
        if number(&device.join("vendor"))? != NVIDIA || number(&device.join("class"))? >> 16 != DISPLAY_CLASS {
            return None;
        }
        let information = text(&self.proc.join("driver/nvidia/gpus").join(&pci).join("information"));
        let reported = |field: &str| {
            let line = information.as_deref()?.lines().find_map(|line| line.strip_prefix(field))?;
            Some(line.trim().to_owned())
        };
        // Without permission the driver reports `GPU-????????-…`.
        let (model, uuid) = (reported("Model:"), reported("GPU UUID:").filter(|uuid| !uuid.contains('?')));
        Some(GpuSeen {
            pci_path: pci_path(device),
            device: natural(&device.join("device"))?,
            numa_node: natural(&device.join("numa_node")),
            driver: link_name(&device.join("driver")),
            model,
            uuid,
            pci,
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::Fake;

    fn add(fake: &Fake, path: &str, vendor: &str, class: &str, numa: &str) {
        let real = format!("devices/{path}");
        for (name, text) in [("vendor", vendor), ("class", class), ("device", "0x2335"), ("numa_node", numa)] {
            fake.file(&format!("{real}/{name}"), text);
        }
        fake.link(&format!("bus/pci/devices/{}", path.rsplit('/').next().unwrap()), &real);
    }

    #[test]
    fn only_nvidia_display_devices_are_gpus() {
        let fake = Fake::new();
        add(&fake, "pci0000:80/0000:80:01.0/0000:81:00.0", "0x10de", "0x030200", "1");
        add(&fake, "pci0000:00/0000:00:01.0/0000:01:00.0", "0x10de", "0x030000", "-1");
        add(&fake, "pci0000:00/0000:00:01.0/0000:01:00.1", "0x10de", "0x040300", "0"); // the GPU's audio function
        add(&fake, "pci0000:00/0000:00:02.0", "0x1a03", "0x030000", "0"); // another vendor
        fake.proc_file(
            "driver/nvidia/gpus/0000:81:00.0/information",
            "Model: \t\t NVIDIA H200\nIRQ: 55\nGPU UUID: \t GPU-2a4d\n",
        );
        fake.proc_file("driver/nvidia/gpus/0000:01:00.0/information", "GPU UUID: \t GPU-????????-????\n");
        let gpus = fake.tree().gpus();
        assert_eq!(gpus.iter().map(|gpu| gpu.pci.as_str()).collect::<Vec<_>>(), ["0000:01:00.0", "0000:81:00.0"]);
        assert_eq!((gpus[0].numa_node, gpus[1].numa_node), (None, Some(1)));
        assert_eq!((gpus[1].model.as_deref(), gpus[1].device), (Some("NVIDIA H200"), 0x2335));
        assert_eq!((gpus[0].uuid.as_deref(), gpus[1].uuid.as_deref()), (None, Some("GPU-2a4d")));
        assert_eq!(gpus[1].driver, None);
        assert_eq!(gpus[1].pci_path, ["pci0000:80", "0000:80:01.0", "0000:81:00.0"]);
    }

    #[test]
    fn no_bus_no_gpus() {
        assert_eq!(Fake::new().tree().gpus(), []);
    }
}
