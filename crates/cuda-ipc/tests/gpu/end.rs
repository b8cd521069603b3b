//! One end of a link in a test: its GPU, its memory, and the socket for its notes and messages.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_cuda::{Allocation, Context, Cuda, DeviceMemory, Mapping, PinnedMemory, Stream};
use crossrail_cuda_ipc::{Gpus, Link};
use crossrail_transport::{Copy, Descriptor, Domain, Job, Step};
use crossrail_types::Settings;
use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde_json::Value;

pub(crate) const LIMIT: Duration = Duration::from_secs(30);
const NOTE: u8 = 1;
const WORD: u8 = 2;
const LONGEST: usize = 4096;

/// GPU memory, allocated in one of three ways.
pub(crate) enum Memory {
    Plain(DeviceMemory),
    Mapped(Mapping),
}

impl Memory {
    /// `kind`: `legacy` like cudaMalloc, `vmm` as one allocation, `segment` in parts of 2 MiB like expandable segments.
    pub(crate) fn new(context: &Context, kind: &str, len: usize) -> Memory {
        let allocation = |len| Allocation::new(context, len).expect("memory");
        match kind {
            "legacy" => Memory::Plain(DeviceMemory::new(context, len).expect("memory")),
            "vmm" => Memory::Mapped(allocation(len).map(&[context]).expect("addresses")),
            "segment" => {
                let first = allocation(1);
                let count = len.div_ceil(first.len());
                let parts: Vec<Allocation> = (1..count).map(|_| allocation(1)).chain([first.clone()]).collect();
                Memory::Mapped(Mapping::of(&parts, &[context]).expect("addresses"))
            }
            _ => panic!("no memory of kind {kind}"),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        match self {
            Memory::Plain(memory) => memory.address(),
            Memory::Mapped(mapping) => mapping.address(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Memory::Plain(memory) => memory.len(),
            Memory::Mapped(mapping) => mapping.len(),
        }
    }
}

/// Bytes that depend on the seed and the position.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 11 ^ i ^ seed.wrapping_mul(151)) as u8).collect()
}

pub(crate) struct End {
    pub(crate) context: Context,
    pub(crate) gpus: Arc<Gpus>,
    pub(crate) link: Link,
    stream: Stream,
    room: PinnedMemory,
    socket: OwnedFd,
    words: VecDeque<Value>,
    /// Modifies received notes.
    pub(crate) tamper: Option<fn(&mut Vec<u8>)>,
    pub(crate) notes: usize,
}

impl End {
    pub(crate) fn new(cuda: &Cuda, ordinal: u32, socket: OwnedFd) -> End {
        let context = Context::primary(&cuda.device(ordinal).expect("a GPU")).expect("a context");
        let gpus = Gpus::new(cuda, &Settings::default()).expect("the GPUs");
        let link = Link::new(Arc::clone(&gpus), LIMIT);
        let stream = Stream::new(&context).expect("a stream");
        let room = PinnedMemory::new(&context, 16 << 20).expect("pinned memory");
        End { context, gpus, link, stream, room, socket, words: VecDeque::new(), tamper: None, notes: 0 }
    }

    /// Whether kernels are available, which requires NVRTC.
    pub(crate) fn has_kernels(&self) -> bool {
        let found = crossrail_kernels::shared(&self.context, &Settings::default(), LIMIT);
        found.map_err(|why| crate::support::skip(&format!("kernels: {why}"))).is_ok()
    }

    pub(crate) fn put(&self, address: u64, bytes: &[u8]) {
        for (index, part) in bytes.chunks(self.room.len()).enumerate() {
            // SAFETY: the bounce buffer is long enough and exclusive; the memory belongs to the test; the copy is
            // awaited.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), self.room.as_ptr(), part.len());
                let at = address + (index * self.room.len()) as u64;
                self.stream.copy(at, self.room.address(), part.len()).expect("copy");
            }
            self.stream.wait(LIMIT).expect("copy");
        }
    }

    pub(crate) fn take(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let part = (len - bytes.len()).min(self.room.len());
            // SAFETY: as in `put`.
            unsafe {
                self.stream.copy(self.room.address(), address + bytes.len() as u64, part).expect("copy");
                self.stream.wait(LIMIT).expect("copy");
                bytes.extend_from_slice(std::slice::from_raw_parts(self.room.as_ptr(), part));
            }
        }
        bytes
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The free memory of the GPU, in bytes.
    pub(crate) fn free(&self) -> u64 {
        self.context.memory().expect("memory info").free
    }

    fn send(&self, kind: u8, bytes: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        let raw: Vec<i32> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let control = [ControlMessage::ScmRights(&raw)];
        let parts = [IoSlice::new(std::slice::from_ref(&kind)), IoSlice::new(bytes)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let control = if raw.is_empty() { &[][..] } else { &control };
        match sendmsg::<()>(self.socket.as_raw_fd(), &parts, control, flags, None) {
            Ok(_) => true,
            Err(Errno::EAGAIN | Errno::ETOOMANYREFS | Errno::ENOBUFS) => false,
            Err(Errno::EPIPE | Errno::ECONNRESET) => panic!("the other end is gone"),
            Err(code) => panic!("sendmsg: {code}"),
        }
    }

    /// Exchanges notes in both directions. False: the other end has closed its socket.
    pub(crate) fn pump(&mut self) -> bool {
        while let Some((note, files)) = self.link.outgoing() {
            if !self.send(NOTE, note, &files) {
                break;
            }
            drop(files);
            self.link.sent();
        }
        let mut bytes = [0; LONGEST];
        loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let mut room = cmsg_space!([i32; 16]);
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let message = match recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, Some(&mut room), flags) {
                Ok(message) if message.bytes == 0 => return false,
                Ok(message) => message,
                Err(Errno::EAGAIN) => return true,
                Err(Errno::ECONNRESET) => return false,
                Err(code) => panic!("recvmsg: {code}"),
            };
            let mut files = Vec::new();
            for part in message.cmsgs().expect("control") {
                if let ControlMessageOwned::ScmRights(numbers) = part {
                    // SAFETY: just received from the kernel; nothing else owns them.
                    files.extend(numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }));
                }
            }
            let len = message.bytes;
            match bytes[0] {
                NOTE => {
                    let mut note = bytes[1..len].to_vec();
                    if let Some(tamper) = self.tamper {
                        tamper(&mut note);
                    }
                    self.notes += 1;
                    self.link.incoming(&note, files).expect("a note");
                }
                _ => self.words.push_back(serde_json::from_slice(&bytes[1..len]).expect("words")),
            }
        }
    }

    pub(crate) fn send_message(&mut self, word: &Value) {
        let started = Instant::now();
        while !self.send(WORD, word.to_string().as_bytes(), &[]) {
            assert!(started.elapsed() < LIMIT, "nobody reads");
            std::thread::yield_now();
        }
    }

    /// The next message of the other end; `None` if it has closed its socket.
    pub(crate) fn receive(&mut self) -> Option<Value> {
        let started = Instant::now();
        loop {
            let there = self.pump();
            if let Some(word) = self.words.pop_front() {
                return Some(word);
            }
            if !there {
                return None;
            }
            assert!(started.elapsed() < 2 * LIMIT, "the other end says nothing");
            std::thread::yield_now();
        }
    }

    pub(crate) fn ask(&mut self, word: &Value) -> Value {
        self.send_message(word);
        self.receive().expect("the other end is gone")
    }

    /// Makes a copy and waits for it; `Err` is the reason of a failure.
    pub(crate) fn copy(&mut self, copy: Copy, local: u64, remote: Descriptor, len: usize) -> Result<(), String> {
        let mut job = job(copy, local, remote, len);
        self.finish(&mut job)
    }

    pub(crate) fn finish(&mut self, job: &mut Job) -> Result<(), String> {
        let started = Instant::now();
        self.link.reach(&job.remote, job.len)?;
        loop {
            // SAFETY: memory of this test, which outlives the copy.
            match unsafe { self.link.step(job, 1 << 20) } {
                Step::Done => return Ok(()),
                Step::Failed(why) | Step::Unmapped(why) => return Err(why),
                Step::Moved(_) | Step::Waiting => {}
            }
            self.pump();
            assert!(started.elapsed() < 2 * LIMIT, "a copy that neither ends nor fails");
        }
    }
}

pub(crate) fn job(copy: Copy, local: u64, remote: Descriptor, len: usize) -> Job {
    Job { slot: None, local: local as usize as *mut u8, remote, len, copy, moved: 0, state: 0, helps: true }
}
