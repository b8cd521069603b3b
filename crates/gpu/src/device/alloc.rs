//! Memory of a GPU that other processes can map.

use std::sync::Arc;

use crossrail_cuda::{Allocation, Deferred, Mapping};
use crossrail_types::Result;

use super::{Device, Kind};

/// Memory of one GPU, zeroed when new. Freed when the last clone is dropped, on a thread of the driver layer's.
#[derive(Clone, Debug)]
pub struct DeviceAlloc(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: Backing,
    len: usize,
    device: Arc<Device>,
}

/// A mapping, and the announcement that it was freed.
#[derive(Debug)]
struct Announced {
    mapping: Mapping,
    /// Declared last: dropped after the mapping.
    _freed: AnnounceFreed,
}

/// Announces to IPC links, when dropped, that this memory was freed, so that peers unmap it.
#[derive(Debug)]
struct AnnounceFreed {
    address: u64,
    len: u64,
}

impl Drop for AnnounceFreed {
    fn drop(&mut self) {
        crossrail_cuda_ipc::announce_free(self.address, self.len);
    }
}

#[derive(Debug)]
enum Backing {
    Cuda(Deferred<Announced>),
    #[cfg(any(test, feature = "simulated-gpu"))]
    Simulated(crate::simulated::Memory),
}

impl DeviceAlloc {
    pub(super) fn new(device: &Arc<Device>, len: usize) -> Result<DeviceAlloc> {
        let memory = match &device.kind {
            Kind::Cuda(cuda) => {
                let mapping = Allocation::new(cuda.context(), len.max(1))?.map(&[cuda.context()])?;
                let freed = AnnounceFreed { address: mapping.address(), len: mapping.len() as u64 };
                let announced = Deferred::new(Announced { mapping, _freed: freed }, cuda.context());
                cuda.zero(announced.mapping.address(), announced.mapping.len())?;
                Backing::Cuda(announced)
            }
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => Backing::Simulated(gpu.alloc(len.max(1))?),
        };
        Ok(DeviceAlloc(Arc::new(Inner { memory, len, device: device.clone() })))
    }

    /// Its device address, which the CPU must not dereference.
    pub fn ptr(&self) -> u64 {
        match &self.0.memory {
            Backing::Cuda(announced) => announced.mapping.address(),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Backing::Simulated(memory) => memory.address(),
        }
    }

    /// Its length in bytes, as requested.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The GPU that it is on.
    pub fn device(&self) -> &Arc<Device> {
        &self.0.device
    }
}
