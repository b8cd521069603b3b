//! Memory of a peer on the same machine, mapped into this process.
#![allow(unsafe_code)]

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_cuda::Stream;
use crossrail_gpu::Device;
use crossrail_kernels::PutArgs;
use crossrail_transport::{Descriptor, Window};
use crossrail_types::{Error, ErrorKind, Result};

use super::Endpoint;
use super::streams::{self, Signal, aligned, real};
use crate::core::Core;
use crate::memory::{self, Buffer, Memory, Place, Space};
use crate::progress;

const MAGIC: [u8; 4] = *b"XRS1";
/// Of a GPU's memory.
const GPU_MAGIC: [u8; 4] = *b"XRG1";

/// A handle by which the peer of an endpoint maps a [`Memory`]: opaque bytes, transferred by any means.
///
/// They are no secret. The memory itself goes to that one peer, over the endpoint's Unix socket; to anybody else, and
/// over any other connection, they mean nothing and are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    descriptor: Descriptor,
    len: u64,
    space: Space,
}

impl Shared {
    /// The description as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let magic = match self.space {
            Space::Host => MAGIC,
            Space::Gpu => GPU_MAGIC,
        };
        [&magic[..], &self.len.to_le_bytes(), &self.descriptor].concat()
    }

    /// A description from [`Shared::to_bytes`]; `Usage` if it is not one.
    pub fn from_bytes(bytes: &[u8]) -> Result<Shared> {
        let bad = || Error::new(ErrorKind::Usage, "shared memory", format!("{} bytes that are not one", bytes.len()));
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or_else(bad)?;
        let space = match *magic {
            MAGIC => Space::Host,
            GPU_MAGIC => Space::Gpu,
            _ => return Err(bad()),
        };
        let (len, descriptor) = rest.split_first_chunk::<8>().ok_or_else(bad)?;
        Ok(Shared { descriptor: descriptor.try_into().map_err(|_| bad())?, len: u64::from_le_bytes(*len), space })
    }

    /// Bytes of the memory.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is memory of a GPU.
    pub fn is_gpu(&self) -> bool {
        self.space == Space::Gpu
    }
}

/// A peer's [`Memory`], mapped into this process: both see the same bytes. It stays mapped until the last clone is
/// dropped, also when the peer has freed it or died, and when the endpoint is closed. Any thread may use it.
///
/// Memory of a GPU is mapped for a GPU of this process ([`Mapped::place`]), whose kernels and copies may use the
/// address; [`Mapped::put`] writes there in the order of a stream.
///
/// The peer may write into it at any time, so Rust references to its bytes are never handed out; use
/// [`Mapped::copy_to`] and [`Mapped::fill_from`], or the pointer with whatever order the two processes agree on.
#[derive(Clone)]
pub struct Mapped {
    ptr: NonNull<u8>,
    len: usize,
    pub(crate) gpu: Option<Arc<Device>>,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: an address and what keeps it mapped, both good on any thread; `_keep` is Send. Whoever dereferences the
// address answers for races.
unsafe impl Send for Mapped {}
// SAFETY: as above; `&Mapped` gives address and length, and `copy_to` and `fill_from` are as racy as the peer is.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// First byte.
    #[inline]
    pub fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it is: with the processors, or reached through that GPU of this process.
    pub fn place(&self) -> Place {
        self.gpu.as_ref().map_or(Place::Host, |gpu| Place::Gpu(gpu.ordinal()))
    }

    /// Copies `bytes` to `offset`. Errors with `Usage` when they do not fit; of a GPU's memory also with what its
    /// driver says.
    pub fn fill_from(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        memory::check(self.len, offset, bytes.len(), "fill_from")?;
        if let Some(gpu) = &self.gpu {
            return gpu.copy_in_mapped(self.ptr() as u64 + offset as u64, bytes);
        }
        // SAFETY: in bounds by the check; mapped while `self` lives.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr().add(offset), bytes.len()) };
        Ok(())
    }

    /// Copies from `offset` into `bytes`. Errors with `Usage` when the range is not there; of a GPU's memory also with
    /// what its driver says.
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        memory::check(self.len, offset, bytes.len(), "copy_to")?;
        if let Some(gpu) = &self.gpu {
            return gpu.copy_out_mapped(self.ptr() as u64 + offset as u64, bytes);
        }
        // SAFETY: in bounds by the check; mapped while `self` lives.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Enqueues in `stream` a copy of `len` bytes of GPU memory at `src` to `offset` of this memory, followed by
    /// `signal`: a reader that observes the signal's value there, on any GPU or the host, also observes the bytes. The
    /// host is not involved afterwards; a graph that captures this repeats it at every replay.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0; `src` must be valid for `len` bytes until the stream has come
    /// past this, and this memory mapped: keep a clone of it as long as that may be, or as the graph is used.
    ///
    /// # Errors
    /// `Usage`: outside the memory, a signal that is not 8-byte aligned, host memory, a stream of another GPU than
    /// [`Mapped::place`]; what the driver says.
    pub unsafe fn put(&self, offset: usize, src: u64, len: usize, stream: u64, signal: Option<Signal>) -> Result<()> {
        memory::check(self.len(), offset, len, "put")?;
        let signal_at = match signal {
            Some(signal) => self.signal_at(signal)?,
            None => 0,
        };
        let Some(device) = &self.gpu else {
            return Err(Error::new(ErrorKind::Usage, "put", "the memory is the host's: write it directly"));
        };
        let (context, calls) = real(device, "put")?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(context, stream)? };
        let kernels = calls.kernels(device.settings())?;
        let dst = self.ptr() as u64 + offset as u64;
        let value = signal.map_or(0, |signal| signal.value);
        // A kernel at every size: in a graph, the start-up cost of a copy-engine node exceeds its gain.
        let args = PutArgs { dst, src, len: len as u64, part: 0, signal: signal_at, value };
        // SAFETY: in bounds by the check, mapped as the caller promises; `src` is vouched for.
        unsafe { kernels.put(&stream, &args, None) }
    }

    fn signal_at(&self, signal: Signal) -> Result<u64> {
        memory::check(self.len(), signal.offset, 8, "put")?;
        aligned("put", self.ptr() as u64 + signal.offset as u64)
    }

    fn new(window: Window, gpu: Option<Arc<Device>>) -> Option<Mapped> {
        Some(Mapped { ptr: NonNull::new(window.ptr)?, len: window.len, gpu, _keep: window.keep })
    }
}

impl std::fmt::Debug for Mapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mapped({} bytes at {:?} of {})", self.len, self.ptr, self.place())
    }
}

impl Endpoint {
    /// Lets the peer map `memory` ([`Endpoint::map`] there): passes its descriptor over the endpoint's Unix socket.
    /// Copies nothing; repeating it for the same memory costs nothing. Does not keep the memory alive: once the last
    /// clone of `memory` is dropped, the peer can no longer map it, and existing mappings stay valid.
    ///
    /// # Errors
    /// `Usage`: the memory was allocated by another [`Context`](crate::Context); `Unsupported`: the endpoint has no
    /// shared-memory lane, or the system denies memfds to this process; `PeerDead`, `Closed`; `Timeout`: the peer did
    /// not read its socket within `CROSSRAIL_TIMEOUT`; `Exhausted`, `Io`: the system refused.
    pub fn share(&self, memory: &Memory) -> Result<Shared> {
        self.share_buffer(memory.into())
    }

    /// [`Endpoint::share`] for part of a [`Memory`], or for GPU memory that the caller owns
    /// ([`Buffer::device`]); that stays shared only as long as its owner does not free it.
    ///
    /// # Errors
    /// As there; `Unsupported` with the reason for memory of a GPU that cannot be passed on.
    pub fn share_buffer(&self, mut buffer: Buffer) -> Result<Shared> {
        let progress = self.worker.progress_handle();
        progress.check_origin("share")?;
        let (ptr, len, timeout) = (buffer.ptr, buffer.len, progress.environment().settings().timeout);
        let space = Space::of(buffer.gpu.as_ref());
        if space == Space::Gpu {
            progress::admit_shared(progress, &mut buffer)?;
        } else if progress.environment().arena().find(ptr, len).is_none() {
            if let Some(why) = progress.environment().arena().unshared() {
                let text = format!("peers cannot map memory of this process: {why}");
                let error = Error::new(ErrorKind::Unsupported, "share", text);
                return Err(error.with_hint("messages, writes and reads work; or allow memfd_create"));
            }
            return Err(Error::new(ErrorKind::Usage, "share", "the memory was allocated by another Context"));
        }
        let id = self.id;
        let question = |core: &mut Core| core.domain_of(id, "share", space)?.share(ptr, len);
        let descriptor = self.ask("share", space, timeout, question)?;
        Ok(Shared { descriptor, len: len as u64, space })
    }

    /// Maps memory that the peer has shared with [`Endpoint::share`], waiting at most `timeout` (`CROSSRAIL_TIMEOUT`
    /// if `None`) until its descriptor has arrived. Touches none of its pages, so its size costs nothing. Mapping the
    /// same host memory again gives the same addresses.
    ///
    /// # Errors
    /// `Timeout`: nothing of that name was passed over this endpoint; `Region`: the peer has freed it, or the
    /// description is of memory shared with somebody else or longer than the memory; `Unsupported`: the endpoint has
    /// no shared-memory lane; `Protocol`: the peer could take it away while it is mapped; `PeerDead`, `Closed`;
    /// `Exhausted`, `Io`: the system refused.
    pub fn map(&self, shared: &Shared, timeout: Option<Duration>) -> Result<Mapped> {
        self.map_on(shared, None, timeout)
    }

    /// [`Endpoint::map`] of a GPU's memory for GPU `gpu` of this process: [`Mapped::place`] is that GPU. `None`: one
    /// that this process uses already, or else the owner's if it is visible here, or else the first.
    ///
    /// # Errors
    /// As there; `Usage`: no such GPU, or memory of the host; `Region`: that GPU cannot reach the memory.
    pub fn map_on(&self, shared: &Shared, gpu: Option<u32>, timeout: Option<Duration>) -> Result<Mapped> {
        self.worker.progress_handle().check_origin("map")?;
        if gpu.is_some() && !shared.is_gpu() {
            return Err(Error::new(ErrorKind::Usage, "map", "the memory is the host's: no GPU is needed for it"));
        }
        let timeout = timeout.unwrap_or(self.worker.progress_handle().environment().settings().timeout);
        let len = usize::try_from(shared.len)
            .map_err(|_| Error::new(ErrorKind::Usage, "map", format!("{} bytes do not fit here", shared.len)))?;
        let progress = self.worker.progress_handle();
        if shared.is_gpu() {
            progress::admit_links(progress);
        }
        if let Some(ordinal) = gpu {
            progress.environment().gpus().device(ordinal)?;
        }
        let id = self.id;
        let question = |core: &mut Core| core.domain_of(id, "map", shared.space)?.map(&shared.descriptor, len, gpu);
        let window = self.ask("map", shared.space, timeout, question)?;
        let gpu = window.device.map(|ordinal| progress.environment().gpus().device(ordinal)).transpose()?;
        if let Some(gpu) = &gpu {
            streams::prepare(gpu);
        }
        Mapped::new(window, gpu).ok_or_else(|| Error::new(ErrorKind::Io, "map", "the mapping has no address"))
    }

    /// Asks the endpoint's shared-memory lane, or its link to GPU memory, until it answers.
    fn ask<T>(
        &self,
        what: &'static str,
        space: Space,
        timeout: Duration,
        mut question: impl FnMut(&mut Core) -> Result<Option<T>>,
    ) -> Result<T> {
        let started = Instant::now();
        let mut attempt = |core: &mut Core| {
            let answer = question(core);
            if space == Space::Gpu {
                core.transfers().exchange_notes((true, 0));
            }
            answer.transpose()
        };
        if let Some(answer) = self.worker.progress_handle().observe_until(timeout, &mut attempt) {
            return answer.map_err(|error| match error.peer {
                None => error.with_peer(self.peer()),
                Some(_) => error,
            });
        }
        let detail = match what {
            "share" => "the peer has not read its socket",
            _ => "the peer's memory has not arrived: was it shared over this endpoint?",
        };
        Err(Error::new(ErrorKind::Timeout, what, detail)
            .with_waited(started.elapsed())
            .with_peer(self.peer())
            .with_lane(if space == Space::Gpu { "cuda_ipc" } else { "shm" }))
    }
}
