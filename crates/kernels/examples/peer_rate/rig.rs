//! The GPUs, their memory, and a gate at which all of their streams wait.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crossrail_cuda::nvrtc::Compiler;
use crossrail_cuda::{Context, Cuda, DeviceMemory, Event, PinnedMemory, Stream};
use crossrail_kernels::{CopyArgs, Kernels, PutArgs};

use crate::Outcome;

pub(crate) const LIMIT: Duration = Duration::from_secs(30);
/// The largest case.
pub(crate) const MOST: usize = 256 << 20;
/// Where a link's signal is in the memory that the other side watches: one line of the cache each.
pub(crate) const SIGNAL_STEP: u64 = 128;

/// How bytes are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Ordinary stores.
    Copy,
    /// Ordinary stores, and a signal by the last block.
    Put,
    /// Ordinary stores, and a signal by a second kernel.
    PutTwice,
    /// Bulk copies.
    Bulk,
    /// The copy engine.
    Engine,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Copy => "copy",
            Way::Put => "put",
            Way::PutTwice => "put, 2 kernels",
            Way::Bulk => "copy_bulk",
            Way::Engine => "engine",
        }
    }
}

/// One GPU of the rig.
pub(crate) struct Gpu {
    pub(crate) context: Context,
    pub(crate) kernels: Kernels,
    /// For its own memory, before and after what is measured.
    stream: Stream,
    /// What it sends.
    pub(crate) source: DeviceMemory,
    /// What each GPU sends to it, by number; its own place is empty.
    pub(crate) targets: Vec<Option<DeviceMemory>>,
    /// Signals that others set, one line for each.
    pub(crate) signals: DeviceMemory,
}

/// One GPU's way to another.
pub(crate) struct Link {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Whose kernels and copy engines do it: the sender's (push), or the receiver's (pull).
    pub(crate) by: usize,
    pub(crate) stream: Stream,
    pub(crate) start: Event,
    pub(crate) end: Event,
    pub(crate) counter: DeviceMemory,
}

pub(crate) struct Rig {
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) pushes: Vec<Link>,
    pub(crate) pulls: Vec<Link>,
    gate: PinnedMemory,
    back: PinnedMemory,
    sent: Vec<Vec<u8>>,
}

impl Rig {
    /// All GPUs of the machine that reach each other, at most `most`.
    pub(crate) fn new(cuda: &Cuda, compiler: &Compiler, most: usize) -> Outcome<Rig> {
        let devices: Vec<_> = cuda.devices()?.into_iter().take(most).collect();
        if devices.len() < 2 {
            return Err(format!("two GPUs are needed; there are {}", devices.len()).into());
        }
        let contexts: Vec<Context> = devices.iter().map(Context::primary).collect::<Result<_, _>>()?;
        for (i, one) in contexts.iter().enumerate() {
            for other in contexts.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, other)| other) {
                one.enable_peer(other)?;
            }
        }
        let gpus: Vec<Gpu> = contexts
            .iter()
            .enumerate()
            .map(|(i, context)| gpu(&contexts, i, context, compiler))
            .collect::<Outcome<_>>()?;
        let pairs = || (0..contexts.len()).flat_map(|from| (0..contexts.len()).map(move |to| (from, to)));
        let pairs = || pairs().filter(|(from, to)| from != to);
        let pushes = pairs().map(|(from, to)| link(&contexts, from, to, from)).collect::<Outcome<_>>()?;
        let pulls = pairs().map(|(from, to)| link(&contexts, from, to, to)).collect::<Outcome<_>>()?;
        let gate = PinnedMemory::new(&contexts[0], 4096)?;
        let back = PinnedMemory::new(&contexts[0], MOST)?;
        let sent = (0..gpus.len()).map(|i| bytes(i as u64 + 1, MOST)).collect();
        let rig = Rig { gpus, pushes, pulls, gate, back, sent };
        rig.prepare()?;
        Ok(rig)
    }

    /// Sources filled, signals and counters zero.
    fn prepare(&self) -> Outcome<()> {
        for link in self.pushes.iter().chain(&self.pulls) {
            // SAFETY: the memory is ours and valid; the waits are below.
            unsafe { link.stream.fill(link.counter.address(), 0, link.counter.len())? }
            link.stream.wait(LIMIT)?;
        }
        for (i, gpu) in self.gpus.iter().enumerate() {
            let stream = &gpu.stream;
            // SAFETY: as above; `back` is written after the copy of the last round is done.
            unsafe {
                std::ptr::copy_nonoverlapping(self.sent[i].as_ptr(), self.back.as_ptr(), MOST);
                stream.copy(gpu.source.address(), self.back.address(), MOST)?;
                stream.fill(gpu.signals.address(), 0, gpu.signals.len())?;
            }
            stream.wait(LIMIT)?;
        }
        Ok(())
    }

    /// One GPU's pushes to another.
    pub(crate) fn push(&self, from: usize, to: usize) -> Outcome<&Link> {
        self.pushes.iter().find(|link| (link.from, link.to) == (from, to)).ok_or_else(|| "no such link".into())
    }

    /// Where `link`'s bytes go.
    pub(crate) fn target(&self, link: &Link) -> Outcome<u64> {
        let memory = self.gpus[link.to].targets[link.from].as_ref().ok_or("a GPU does not send to itself")?;
        Ok(memory.address())
    }

    /// Where `link`'s signal is.
    pub(crate) fn signal(&self, link: &Link) -> u64 {
        self.gpus[link.to].signals.address() + SIGNAL_STEP * link.from as u64
    }

    /// Puts one send of `len` bytes into the link's stream.
    pub(crate) fn send(&self, link: &Link, way: Way, len: usize, blocks: Option<u32>) -> Outcome<()> {
        let (from, by) = (&self.gpus[link.from], &self.gpus[link.by]);
        let (dst, src) = (self.target(link)?, from.source.address());
        let copy = CopyArgs { dst, src, len: len as u64 };
        let counter = if way == Way::PutTwice { 0 } else { link.counter.address() };
        let put = PutArgs { dst, src, len: len as u64, part: 0, signal: self.signal(link), value: 1, counter };
        // SAFETY: all areas live as long as the rig, and every case is waited for before the next begins.
        unsafe {
            match way {
                Way::Copy => by.kernels.copy(&link.stream, &copy, blocks)?,
                Way::Bulk => by.kernels.copy_bulk(&link.stream, &copy, blocks)?,
                Way::Put | Way::PutTwice => by.kernels.put(&link.stream, &put, blocks)?,
                Way::Engine => link.stream.copy(dst, src, len)?,
            }
        }
        Ok(())
    }

    /// One send over each link, all bytes of which are looked at.
    pub(crate) fn verify(&self, links: &[&Link], way: Way, len: usize, blocks: Option<u32>) -> Outcome<()> {
        for link in links {
            let stream = &self.gpus[link.to].stream;
            // SAFETY: as in `send`.
            unsafe { stream.fill(self.target(link)?, 0, len)? };
            stream.wait(LIMIT)?;
        }
        for link in links {
            self.send(link, way, len, blocks)?;
        }
        for link in links {
            link.stream.wait(LIMIT)?;
            let stream = &self.gpus[link.to].stream;
            // SAFETY: the send is done; the bytes are read after the copy.
            let found = unsafe {
                stream.copy(self.back.address(), self.target(link)?, len)?;
                stream.wait(LIMIT)?;
                std::slice::from_raw_parts(self.back.as_ptr(), len)
            };
            if found != &self.sent[link.from][..len] {
                return Err(format!("{} of {len} bytes, {} to {}: wrong bytes", way.name(), link.from, link.to).into());
            }
        }
        Ok(())
    }

    /// Microseconds from when all `links` start until the last is done, when each does `work` on its stream. The
    /// slowest GPU counts.
    pub(crate) fn timed(&self, links: &[&Link], work: impl Fn(&Link) -> Outcome<()>) -> Outcome<f64> {
        // SAFETY: an aligned word of our own memory, that the host touches by atomics alone.
        let gate = unsafe { AtomicU32::from_ptr(self.gate.as_ptr().cast()) };
        gate.store(0, Ordering::Release);
        let opened = Opened(gate);
        for link in links {
            // SAFETY: the gate's word lives as long as the rig.
            unsafe { link.stream.wait_value32(self.gate.address(), 1)? };
            link.start.record(&link.stream)?;
            work(link)?;
            link.end.record(&link.stream)?;
        }
        drop(opened);
        for link in links {
            link.end.wait(LIMIT)?;
        }
        let mut longest = Duration::ZERO;
        for a in links {
            for b in links.iter().filter(|b| b.by == a.by) {
                longest = longest.max(a.end.since(&b.start)?);
            }
        }
        Ok(longest.as_nanos() as f64 / 1e3)
    }
}

/// Opens the gate whatever happens: streams that wait there would wait for ever.
struct Opened<'a>(&'a AtomicU32);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Release);
    }
}

fn link(contexts: &[Context], from: usize, to: usize, by: usize) -> Outcome<Link> {
    let context = &contexts[by];
    Ok(Link {
        from,
        to,
        by,
        stream: Stream::new(context)?,
        start: Event::timed(context)?,
        end: Event::timed(context)?,
        counter: DeviceMemory::new(context, 8)?,
    })
}

fn gpu(contexts: &[Context], number: usize, context: &Context, compiler: &Compiler) -> Outcome<Gpu> {
    let targets = (0..contexts.len())
        .map(|from| if from == number { Ok(None) } else { DeviceMemory::new(context, MOST).map(Some) })
        .collect::<Result<_, _>>()?;
    Ok(Gpu {
        context: context.clone(),
        kernels: Kernels::load(context, compiler, LIMIT)?,
        stream: Stream::new(context)?,
        source: DeviceMemory::new(context, MOST)?,
        targets,
        signals: DeviceMemory::new(context, SIGNAL_STEP as usize * contexts.len())?,
    })
}

/// Bytes without a pattern, the same every time.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut number = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut all = Vec::with_capacity(len);
    while all.len() < len {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all.extend_from_slice(&(number ^ (number >> 29)).to_le_bytes());
    }
    all.truncate(len);
    all
}
