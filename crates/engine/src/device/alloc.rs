//! Memory of a GPU that other processes can map.

use std::sync::Arc;

use crossrail_cuda::{Allocation, Later, Mapping};
use crossrail_types::Result;

use super::{Device, Kind};

/// Memory of one GPU, freed, by a thread of its own, when the last clone goes. Zeroed when new.
#[derive(Clone, Debug)]
pub(crate) struct DeviceAlloc(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: Backing,
    len: usize,
    device: Arc<Device>,
}

/// Memory as the driver gives it, and what is to be told of it.
#[derive(Debug)]
struct Told {
    mapping: Mapping,
    /// After the memory itself.
    _freed: Freed,
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
    Cuda(Later<Told>),
    #[cfg(any(test, feature = "simulated-gpu"))]
    Simulated(super::simulated::Memory),
}

impl DeviceAlloc {
    pub(super) fn new(device: &Arc<Device>, len: usize) -> Result<DeviceAlloc> {
        let memory = match &device.kind {
            Kind::Cuda(cuda) => {
                let mapping = Allocation::new(cuda.context(), len.max(1))?.map(&[cuda.context()])?;
                let freed = Freed { address: mapping.address(), len: mapping.len() as u64 };
                let told = Later::new(Told { mapping, _freed: freed }, cuda.context());
                cuda.zero(told.mapping.address(), told.mapping.len())?;
                Backing::Cuda(told)
            }
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => Backing::Simulated(gpu.alloc(len.max(1))?),
        };
        Ok(DeviceAlloc(Arc::new(Inner { memory, len, device: device.clone() })))
    }

    /// Its address on the GPU; nothing that the CPU may touch.
    pub(crate) fn ptr(&self) -> u64 {
        match &self.0.memory {
            Backing::Cuda(told) => told.mapping.address(),
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
