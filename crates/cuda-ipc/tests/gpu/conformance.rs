//! The suite that every link with single copies runs, on links of two GPUs if available, otherwise of one.
#![allow(unsafe_code)]

use std::rc::Rc;
use std::sync::PoisonError;

use crossrail_cuda::{PinnedMemory, Stream};
use crossrail_transport::Domain;
use crossrail_transport::conformance::{DomainEnd, DomainMemory, run_domain};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use crate::end::{End, LIMIT, Memory};
use crate::{KINDS, TURN, second, support};

/// A link's end, and what the suite reads and writes its GPU's memory by.
struct Gpu {
    end: End,
    kind: &'static str,
    access: Rc<(Stream, PinnedMemory)>,
}

struct GpuMemory {
    memory: Memory,
    access: Rc<(Stream, PinnedMemory)>,
}

impl DomainEnd for Gpu {
    fn domain(&mut self) -> &mut dyn Domain {
        &mut self.end.link
    }

    fn alloc(&mut self, len: usize) -> Box<dyn DomainMemory> {
        Box::new(GpuMemory { memory: Memory::new(&self.end.context, self.kind, len), access: self.access.clone() })
    }

    fn progress(&mut self) {
        assert!(self.end.pump(), "the other end is gone");
    }
}

impl DomainMemory for GpuMemory {
    fn ptr(&self) -> *mut u8 {
        self.memory.address() as usize as *mut u8
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let (stream, room) = &*self.access;
        let address = self.memory.address() + offset as u64;
        // SAFETY: the pinned memory is longer than any of the suite's buffers, and exclusive; the copy is awaited.
        unsafe {
            assert!(bytes.len() <= room.len() && offset + bytes.len() <= self.memory.len());
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), room.as_ptr(), bytes.len());
            stream.copy(address, room.address(), bytes.len()).expect("copy");
        }
        stream.wait(LIMIT).expect("copy");
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let (stream, room) = &*self.access;
        if len == 0 {
            return Vec::new();
        }
        // SAFETY: as in `write`.
        unsafe {
            assert!(len <= room.len() && offset + len <= self.memory.len());
            stream.copy(room.address(), self.memory.address() + offset as u64, len).expect("copy");
            stream.wait(LIMIT).expect("copy");
            std::slice::from_raw_parts(room.as_ptr(), len).to_vec()
        }
    }
}

#[test]
fn links_conform_for_all_kinds_of_memory() {
    let Some(cuda) = support::cuda() else { return };
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let ordinals = [0, second(&cuda).unwrap_or(0)];
    for kind in KINDS {
        run_domain(&format!("cuda_ipc, {kind} memory"), &mut || {
            let (one, other) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .expect("a pair of sockets");
            let end = |ordinal, socket| -> Box<dyn DomainEnd> {
                let end = End::new(&cuda, ordinal, socket);
                let stream = Stream::new(&end.context).expect("a stream");
                let room = PinnedMemory::new(&end.context, 8 << 20).expect("pinned memory");
                Box::new(Gpu { end, kind, access: Rc::new((stream, room)) })
            };
            (end(ordinals[0], one), end(ordinals[1], other))
        });
    }
}
