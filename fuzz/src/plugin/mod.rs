//! A network plugin that returns what the input has.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use crossrail_nccl_abi as abi;
use crossrail_nccl_driver::{Assignment, Lanes, Memory, Network, Plugin, Receiver, Sender};
use crossrail_types::Result;

use crate::input::Input;

mod table;

use table::{V4, V8, V12};

/// Bytes of a transfer.
const SIZE: usize = 4096;
/// Most steps of a transfer, and of connecting.
const STEPS: usize = 24;
/// Where a device's lists of fragments have their lengths; 16 lists.
const COUNTS_AT: usize = LISTS * LIST_LEN;
const LISTS: usize = 16;
const LIST_LEN: usize = 2048 * 16;

/// A foreign plugin, of one of three versions that stand for all, whose functions return what the input has: results,
/// null and foreign objects, sizes, lists of fragments. Whatever it returns, the driver does not panic or loop, and holds
/// to NCCL's contract: memory within what it registered, objects that live, as many requests as its window, and every
/// object closed once.
pub fn plugin(input: &[u8]) {
    let mut input = Input::new(input);
    let (version, shape) = (input.byte(), input.array::<4>());
    STATE.with_borrow_mut(|state| state.begin(input.rest()));
    let table = match version % 3 {
        0 => (4, ptr::from_ref(&V4).cast()),
        1 => (8, ptr::from_ref(&V8).cast()),
        _ => (12, ptr::from_ref(&V12).cast()),
    };
    // SAFETY: a static table of that version.
    let plugin = unsafe { Plugin::of_table(table.0, table.1) }.unwrap_or_else(|why| panic!("no table: {why}"));
    if let Err(error) = plugin.init().and_then(|network| transfer(&network, shape)) {
        assert!(!error.detail.is_empty() && !error.to_string().chars().any(|c| c.is_control()), "{error:?}");
    }
    STATE.with_borrow(State::check);
}

/// A transfer, as far as the plugin lets it come.
fn transfer(network: &Network<'_>, shape: [u8; 4]) -> Result<()> {
    let devices = network.devices()?;
    network.properties(devices - 1)?;
    let lanes = Lanes {
        devices: (0..devices.min(usize::from(shape[0] % 3))).collect(),
        channels: usize::from(shape[1] % 3),
        window: usize::from(shape[2] % 40),
        chunk: usize::from(shape[3]) * 16,
    };
    STATE.with_borrow_mut(|state| (state.window, state.chunk) = (lanes.window, lanes.chunk));
    let mut receiver = Receiver::new(network, lanes.clone(), Memory::new(SIZE)?)?;
    let mut sender = Sender::new(network, lanes, Memory::new(SIZE)?, &receiver.handles())?;
    for _ in 0..STEPS {
        if sender.connect()? & receiver.accept()? {
            break;
        }
    }
    sender.bytes()?.fill(1);
    receiver.begin();
    let (mut announced, mut received, mut delivered) = (Vec::new(), 0, 0);
    for _ in 0..STEPS {
        received += receiver.step(&mut announced)?.0;
        announced.drain(..).try_for_each(|chunk| sender.assign(chunk))?;
        delivered += sender.step()?.0;
        assert!(received <= receiver.chunks() && delivered <= sender.chunks(), "more chunks than there are");
    }
    assert!(sender.assign(Assignment { lane: 0, chunk: u32::MAX }).is_err());
    if received == receiver.chunks() {
        receiver.bytes()?;
    }
    let carried: u64 = receiver.take_report().lanes.iter().map(|lane| lane.bytes).sum();
    assert!(carried <= SIZE as u64, "{carried} bytes of {SIZE}");
    let _ = (sender.stuck(std::time::Duration::ZERO), receiver.not_connected(std::time::Duration::ZERO));
    sender.close()?;
    receiver.close()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Listener,
    Comm,
    Registration { comm: usize, at: usize, len: usize },
    Request { comm: usize, len: usize },
}

/// Objects that the plugin has returned, and misuse of them. Functions that C calls must not panic.
struct State {
    bytes: Vec<u8>,
    at: usize,
    logger: Option<abi::Logger>,
    next: usize,
    live: BTreeMap<usize, Kind>,
    window: usize,
    chunk: usize,
    /// The first thing that the driver did wrong.
    wrong: Option<String>,
    /// What a device of the kind `unpack` shares: lists and their lengths, the bounce area, addresses and the next list.
    lists: Vec<u8>,
    bounce: Vec<u8>,
    words: [usize; 3],
    offload: abi::DeviceHandle,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::new(State::new());
}

const NAMES: [&[u8]; 4] = [b"eth0\0", b"\xff\x1b[2J\n\0", b"\0", b"a name\0"];

impl State {
    fn new() -> State {
        let offload =
            abi::DeviceHandle { kind: 0, version: 0, handle: ptr::null_mut(), size: 0, needs_proxy_progress: 0 };
        State {
            bytes: Vec::new(),
            at: 0,
            logger: None,
            next: 16,
            live: BTreeMap::new(),
            window: 0,
            chunk: 0,
            wrong: None,
            lists: vec![0; COUNTS_AT + 8 * LISTS],
            bounce: vec![7; 2 * SIZE],
            words: [0; 3],
            offload,
        }
    }

    fn begin(&mut self, bytes: &[u8]) {
        self.bytes = bytes.to_vec();
        (self.at, self.next, self.wrong) = (0, 16, None);
        self.live.clear();
    }

    /// The next byte of the input; 0, which means success, once it is used up.
    fn byte(&mut self) -> u8 {
        self.at += 1;
        self.bytes.get(self.at - 1).copied().unwrap_or(0)
    }

    fn number(&mut self) -> u64 {
        let mut bytes = [0; 8];
        bytes.fill_with(|| self.byte());
        u64::from_le_bytes(bytes)
    }

    /// A number that is as expected, or extreme, or anything.
    fn odd(&mut self, expected: u64) -> u64 {
        // Bytes that mutations often make mean something.
        match self.byte() {
            0..0x80 => expected,
            extreme @ 0x80..0xc0 => {
                [u64::MAX, 0, 1, u64::MAX - 15, i64::MAX as u64, 1 << 31, u64::from(u32::MAX), 1 << 63]
                    [usize::from(extreme % 8)]
            }
            0xc0..0xe0 => expected.wrapping_add(u64::from(self.byte())).wrapping_sub(8),
            _ => self.number(),
        }
    }

    /// A function's result, with a warning where it fails.
    fn status(&mut self) -> abi::Status {
        let byte = self.byte();
        if byte < 244 {
            return abi::SUCCESS;
        }
        if let Some(logger) = self.logger {
            let text = NAMES[usize::from(byte % 4)].as_ptr().cast::<c_char>();
            // SAFETY: the driver's logger, as `init` was given it; the format takes one string.
            unsafe { logger(abi::LOG_WARN, abi::SUBSYSTEM_NET, text, 1, c"said: %s".as_ptr(), text) };
        }
        c_int::from(byte) - 243
    }

    fn fault(&mut self, what: impl Into<String>) {
        self.wrong.get_or_insert(what.into());
    }

    /// Gives out an object; null, sometimes.
    fn object(&mut self, kind: Kind) -> *mut c_void {
        if self.byte() >= 224 {
            return ptr::null_mut();
        }
        self.next += 16;
        self.live.insert(self.next, kind);
        self.next as *mut c_void
    }

    fn known(&mut self, object: *mut c_void, what: &str) -> Option<Kind> {
        let found = self.live.get(&(object as usize)).copied();
        if found.is_none() {
            self.fault(format!("{what} is given {object:?}, which is not alive"));
        }
        found
    }

    fn close(&mut self, object: *mut c_void, what: &str) {
        let comm = object as usize;
        self.known(object, what);
        self.live.remove(&comm);
        if self.live.values().any(|kind| matches!(kind, Kind::Registration { comm: of, .. } if *of == comm)) {
            self.fault(format!("{what} of a communicator with registrations"));
        }
        // They end with it.
        self.live.retain(|_, kind| !matches!(kind, Kind::Request { comm: of, .. } if *of == comm));
    }

    fn comm(&mut self, comm: *mut *mut c_void, offload: *mut *mut abi::DeviceHandle) -> abi::Status {
        let status = self.status();
        if status == abi::SUCCESS {
            let made = self.object(Kind::Comm);
            // SAFETY: places of the driver's; the handle outlives the communicator.
            unsafe {
                *comm = made;
                if !offload.is_null() && self.byte() >= 160 {
                    *offload = self.shared();
                }
            }
        }
        status
    }

    /// A device that takes part in the kernel, and the lists that it leaves.
    fn shared(&mut self) -> *mut abi::DeviceHandle {
        for list in 0..4 {
            let count = self.byte() % 4;
            let length = self.odd(count.into());
            self.lists[COUNTS_AT + 8 * list..][..8].copy_from_slice(&length.to_le_bytes());
            for entry in 0..usize::from(count) {
                let at = list * LIST_LEN + entry * 16;
                // Bytes of the bounce area, as many as a chunk has.
                let from_and_len = self.odd((self.chunk as u64) << 32 | 64);
                self.lists[at..at + 8].copy_from_slice(&from_and_len.to_le_bytes());
                let to = self.odd(0);
                self.lists[at + 8..at + 16].copy_from_slice(&to.to_le_bytes());
            }
        }
        let (lists, bounce) = (self.lists.as_ptr() as u64, self.bounce.as_ptr() as u64);
        self.words = [self.odd(lists) as usize, self.odd(bounce) as usize, self.odd(0) as usize];
        let words = self.words.as_ptr() as u64;
        self.offload = abi::DeviceHandle {
            kind: self.odd(abi::DEVICE_UNPACK as u64) as c_int,
            version: self.odd(abi::DEVICE_UNPACK_VERSION as u64) as c_int,
            handle: self.odd(words) as *mut c_void,
            size: 24,
            needs_proxy_progress: 0,
        };
        &raw mut self.offload
    }

    fn register(&mut self, comm: *mut c_void, at: *mut c_void, len: usize, made: *mut *mut c_void) -> abi::Status {
        self.known(comm, "regMr");
        let status = self.status();
        if status == abi::SUCCESS {
            // SAFETY: a place of the driver's.
            unsafe { *made = self.object(Kind::Registration { comm: comm as usize, at: at as usize, len }) };
        }
        status
    }

    fn deregister(&mut self, comm: *mut c_void, registration: *mut c_void) -> abi::Status {
        self.known(comm, "deregMr");
        if !registration.is_null() {
            self.known(registration, "deregMr");
        }
        self.live.remove(&(registration as usize));
        self.status()
    }

    fn post(
        &mut self,
        (comm, at, len): (*mut c_void, *mut c_void, usize),
        registration: *mut c_void,
        request: *mut *mut c_void,
    ) -> abi::Status {
        self.known(comm, "isend or irecv");
        if !registration.is_null() {
            match self.known(registration, "isend or irecv") {
                Some(Kind::Registration { at: base, len: room, .. })
                    if (at as usize) >= base && at as usize + len <= base + room => {}
                other => self.fault(format!("{len} bytes at {at:?} are outside of {other:?}")),
            }
        }
        let (comm, window) = (comm as usize, self.window);
        let flying = self.live.values().filter(|kind| matches!(kind, Kind::Request { comm: of, .. } if *of == comm));
        if flying.count() >= window {
            self.fault(format!("more than {window} requests"));
        }
        let status = self.status();
        if status == abi::SUCCESS {
            // SAFETY: a place of the driver's.
            unsafe { *request = self.object(Kind::Request { comm, len }) };
        }
        status
    }

    fn test(&mut self, request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> abi::Status {
        let Some(Kind::Request { len, .. }) = self.known(request, "test") else { return abi::INVALID_ARGUMENT };
        let status = self.status();
        let finished = self.byte() < 192;
        if status == abi::SUCCESS {
            // SAFETY: places of the driver's.
            unsafe {
                *done = c_int::from(finished) * (1 + c_int::from(self.byte() / 64));
                *sizes = self.odd(len as u64) as c_int;
            }
            if finished {
                self.live.remove(&(request as usize));
            }
        }
        status
    }

    fn check(&self) {
        assert_eq!(self.wrong, None);
        let left: Vec<_> = self.live.values().filter(|kind| !matches!(kind, Kind::Request { .. })).collect();
        assert!(left.is_empty(), "never closed: {left:?}");
    }
}
