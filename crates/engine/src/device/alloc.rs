//! Memory of a GPU that other processes can map.

use std::sync::Arc;

use crossrail_cuda::{Allocation, Mapping};
use crossrail_types::Result;

use super::{Device, Kind};

/// Memory of one GPU, freed when the last clone goes. Zeroed when new.
#[derive(Clone, Debug)]
pub(crate) struct DeviceAlloc(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: Backing,
    len: usize,
    device: Arc<Device>,
    /// After the memory itself.
    _freed: Option<Freed>,
}

/// Lets links know, when it is dropped, that this memory is gone, so that peers let go of it too.
#[derive(Debug)]
struct Freed {
    address: u64,
    len: u64,
}

impl Drop for Freed {
    fn drop(&mut self) {
        crossrail_cuda_ipc::freed(self.address, self.len);
    }
}

#[derive(Debug)]
enum Backing {
    Cuda(Mapping),
    #[cfg(any(test, feature = "simulated-gpu"))]
    Simulated(super::simulated::Memory),
}

impl DeviceAlloc {
    pub(super) fn new(device: &Arc<Device>, len: usize) -> Result<DeviceAlloc> {
        let memory = match &device.kind {
            Kind::Cuda(cuda) => {
                let mapping = Allocation::new(cuda.context(), len.max(1))?.map(&[cuda.context()])?;
                cuda.zero(mapping.address(), mapping.len())?;
                Backing::Cuda(mapping)
            }
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => Backing::Simulated(gpu.alloc(len.max(1))?),
        };
        let freed = match &memory {
            Backing::Cuda(mapping) => Some(Freed { address: mapping.address(), len: mapping.len() as u64 }),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Backing::Simulated(_) => None,
        };
        Ok(DeviceAlloc(Arc::new(Inner { memory, len, device: device.clone(), _freed: freed })))
    }

    /// Its address on the GPU; nothing that the CPU may touch.
    pub(crate) fn ptr(&self) -> u64 {
        match &self.0.memory {
            Backing::Cuda(mapping) => mapping.address(),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Backing::Simulated(memory) => memory.address(),
        }
    }

    /// Bytes, as asked for.
    pub(crate) fn len(&self) -> usize {
        self.0.len
    }

    /// The GPU.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.0.device
    }
}
