//! The GPUs of this process, and their properties.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;
use std::str::FromStr;

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{CUdevice, CUdevice_attribute as Attribute, CUuuid};

use crate::driver::Cuda;

/// A target architecture of kernels, such as `sm_80` or `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// The major version of the compute capability.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
    /// Whether architecture-specific instructions may be used (suffix `a`).
    pub specific: bool,
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}{}", self.major, self.minor, if self.specific { "a" } else { "" })
    }
}

impl FromStr for Arch {
    type Err = Error;

    fn from_str(text: &str) -> Result<Arch> {
        let bad =
            || Error::new(ErrorKind::Usage, "architecture", format!("{text:?} is not an architecture such as sm_90a"));
        let rest = text.strip_prefix("sm_").ok_or_else(bad)?;
        let (digits, specific) = rest.strip_suffix('a').map_or((rest, false), |digits| (digits, true));
        let number: u32 = digits.parse().map_err(|_| bad())?;
        if !(10..1000).contains(&number) || digits.starts_with('+') {
            return Err(bad());
        }
        Ok(Arch { major: number / 10, minor: number % 10, specific })
    }
}

impl Cuda {
    /// All GPUs that are visible to this process, in the driver's order (`CUDA_VISIBLE_DEVICES` applies).
    ///
    /// # Errors
    /// A failed call.
    pub fn devices(&self) -> Result<Vec<Device>> {
        (0..self.device_count()?).map(|ordinal| Device::open(self, ordinal)).collect()
    }

    /// The GPU `cuda:ordinal`.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] if there is no such GPU; a failed call.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        let count = self.device_count()?;
        if ordinal >= count {
            let detail = format!("no such GPU: {count} visible to this process");
            return Err(Error::new(ErrorKind::Usage, format!("cuda:{ordinal}"), detail)
                .with_hint("CUDA_VISIBLE_DEVICES selects and numbers the GPUs"));
        }
        Device::open(self, ordinal)
    }
}

/// A GPU. Cheap to clone; holds neither a context nor memory.
#[derive(Clone, Debug)]
pub struct Device {
    cuda: Cuda,
    raw: CUdevice,
    ordinal: u32,
}

impl Device {
    pub(crate) fn open(cuda: &Cuda, ordinal: u32) -> Result<Device> {
        let mut raw: CUdevice = 0;
        let index = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: `raw` is a valid out pointer.
        let code = unsafe { (cuda.raw().cuDeviceGet)(&mut raw, index) };
        cuda.check(&format!("cuda:{ordinal}"), "cuDeviceGet", code)?;
        Ok(Device { cuda: cuda.clone(), raw, ordinal })
    }

    /// The driver.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// The number of the GPU in this process, as in `cuda:0`.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The model name, such as `NVIDIA H200`.
    ///
    /// # Errors
    /// A failed call.
    pub fn name(&self) -> Result<String> {
        self.text("cuDeviceGetName", self.cuda.raw().cuDeviceGetName)
    }

    /// The PCI address in Linux notation, such as `0000:3b:00.0`.
    ///
    /// # Errors
    /// A failed call.
    pub fn pci(&self) -> Result<String> {
        Ok(self.text("cuDeviceGetPCIBusId", self.cuda.raw().cuDeviceGetPCIBusId)?.to_ascii_lowercase())
    }

    /// The NUMA node it is attached to; `None` if it is not disclosed, as in many virtual machines.
    ///
    /// # Errors
    /// A failed call.
    pub fn numa_node(&self) -> Result<Option<u32>> {
        let path = format!("/sys/bus/pci/devices/{}/numa_node", self.pci()?);
        Ok(std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()))
    }

    /// The globally unique id; for a MIG instance, that of the instance.
    ///
    /// # Errors
    /// A failed call.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: `uuid` is a valid out pointer.
        self.check("cuDeviceGetUuid", unsafe { (self.cuda.raw().cuDeviceGetUuid_v2)(&mut uuid, self.raw) })?;
        Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// The total memory in bytes. Free memory is known only to a context: [`crate::Context::memory`].
    ///
    /// # Errors
    /// A failed call.
    pub fn memory(&self) -> Result<u64> {
        let mut bytes: usize = 0;
        // SAFETY: `bytes` is a valid out pointer.
        self.check("cuDeviceTotalMem", unsafe { (self.cuda.raw().cuDeviceTotalMem_v2)(&mut bytes, self.raw) })?;
        Ok(bytes as u64)
    }

    /// The architecture that its kernels are compiled for; architecture-specific from compute capability 9.0 on.
    ///
    /// # Errors
    /// A failed call.
    pub fn arch(&self) -> Result<Arch> {
        let major = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Arch { major, minor, specific: major >= 9 })
    }

    /// The number of multiprocessors.
    ///
    /// # Errors
    /// A failed call.
    pub fn multiprocessors(&self) -> Result<u32> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// The maximum shared memory of a block, in bytes.
    ///
    /// # Errors
    /// A failed call.
    pub fn shared_memory(&self) -> Result<u32> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    /// Whether its memory can be exported to other processes as a file descriptor.
    ///
    /// # Errors
    /// A failed call.
    pub fn shares_memory(&self) -> Result<bool> {
        let attribute = Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        Ok(self.attribute(attribute)? != 0)
    }

    /// Whether its primary context exists, because this process uses the GPU already.
    ///
    /// # Errors
    /// A failed call.
    pub fn in_use(&self) -> Result<bool> {
        let (mut flags, mut active): (c_uint, c_int) = (0, 0);
        // SAFETY: both are valid out pointers.
        let code = unsafe { (self.cuda.raw().cuDevicePrimaryCtxGetState)(self.raw, &mut flags, &mut active) };
        self.check("cuDevicePrimaryCtxGetState", code)?;
        Ok(active != 0)
    }

    /// Whether its streams can write, and wait for, 64-bit words. All can do so for 32-bit words.
    ///
    /// # Errors
    /// A failed call.
    pub fn has_64bit_stream_ops(&self) -> Result<bool> {
        Ok(self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)? != 0)
    }

    /// Whether kernels and copies of this GPU can access the memory of `peer` directly (peer access).
    ///
    /// # Errors
    /// A failed call.
    pub fn reaches(&self, peer: &Device) -> Result<bool> {
        let mut answer: c_int = 0;
        // SAFETY: `answer` is a valid out pointer.
        let code = unsafe { (self.cuda.raw().cuDeviceCanAccessPeer)(&mut answer, self.raw, peer.raw) };
        self.check("cuDeviceCanAccessPeer", code)?;
        Ok(answer != 0)
    }

    pub(crate) fn raw(&self) -> CUdevice {
        self.raw
    }

    fn check(&self, call: &str, code: u32) -> Result<()> {
        self.cuda.check(&format!("cuda:{}", self.ordinal), call, code)
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: `value` is a valid out pointer.
        let code = unsafe { (self.cuda.raw().cuDeviceGetAttribute)(&mut value, attribute, self.raw) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    fn text(&self, call: &str, ask: unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> u32) -> Result<String> {
        let mut text = [0_u8; 256];
        // SAFETY: at most 255 of the 256 bytes are written, so the last stays zero.
        let code = unsafe { ask(text.as_mut_ptr().cast(), 255, self.raw) };
        self.check(call, code)?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }
}
