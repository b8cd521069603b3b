use std::path::Path;

use crate::tree::{Tree, link_name, names, natural, number, pci_path, text};

const NVIDIA: i64 = 0x10de;
const DISPLAY_CLASS: i64 = 0x03;

/// An NVIDIA GPU on the PCI bus, whether or not anything can use it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuSeen {
    /// The PCI address: `0000:3b:00.0`.
    pub pci: String,
    /// The PCI devices from the host bridge down to the GPU.
    pub pci_path: Vec<String>,
    /// The PCI device number.
    pub device: u32,
    /// The NUMA node it hangs on.
    pub numa_node: Option<u32>,
    /// The kernel driver bound to it: `nvidia`, `vfio-pci`, none.
    pub driver: Option<String>,
    /// The name that the NVIDIA driver gives it.
    pub model: Option<String>,
    /// The name that tells it from every other, such as `GPU-2a4d…`, where the NVIDIA driver gives it.
    pub uuid: Option<String>,
}

impl Tree {
    /// The NVIDIA GPUs on the PCI bus, by address.
    pub fn gpus(&self) -> Vec<GpuSeen> {
        let bus = self.sys.join("bus/pci/devices");
        names(&bus).into_iter().filter_map(|pci| self.gpu(&bus.join(&pci), pci)).collect()
    }

    fn gpu(&self, device: &Path, pci: String) -> Option<GpuSeen> {
        if number(&device.join("vendor"))? != NVIDIA || number(&device.join("class"))? >> 16 != DISPLAY_CLASS {
            return None;
        }
        let information = text(&self.proc.join("driver/nvidia/gpus").join(&pci).join("information"));
        let said = |field: &str| {
            let line = information.as_deref()?.lines().find_map(|line| line.strip_prefix(field))?;
            Some(line.trim().to_owned())
        };
        // Without rights the driver says `GPU-????????-…`.
        let (model, uuid) = (said("Model:"), said("GPU UUID:").filter(|uuid| !uuid.contains('?')));
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

    fn put(fake: &Fake, path: &str, vendor: &str, class: &str, numa: &str) {
        let real = format!("devices/{path}");
        for (name, text) in [("vendor", vendor), ("class", class), ("device", "0x2335"), ("numa_node", numa)] {
            fake.file(&format!("{real}/{name}"), text);
        }
        fake.link(&format!("bus/pci/devices/{}", path.rsplit('/').next().unwrap()), &real);
    }

    #[test]
    fn only_nvidia_display_devices_are_gpus() {
        let fake = Fake::new();
        put(&fake, "pci0000:80/0000:80:01.0/0000:81:00.0", "0x10de", "0x030200", "1");
        put(&fake, "pci0000:00/0000:00:01.0/0000:01:00.0", "0x10de", "0x030000", "-1");
        put(&fake, "pci0000:00/0000:00:01.0/0000:01:00.1", "0x10de", "0x040300", "0"); // its sound function
        put(&fake, "pci0000:00/0000:00:02.0", "0x1a03", "0x030000", "0"); // another vendor's
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
