//! One endpoint of a provider with what belongs to it: fabric, domain, event queue, address vector, completion queue,
//! registrations. All calls of libfabric's tables are here.
//!
//! Every call returns at once. One thread at a time uses a port.
#![allow(unsafe_code)]

use std::collections::hash_map::RandomState;
use std::ffi::{c_int, c_void};
use std::hash::{BuildHasher, Hasher};
use std::os::fd::RawFd;
use std::ptr::null_mut;

use crossrail_locks::keeping_handlers;
use crossrail_transport::placing::Extent;
use crossrail_types::{Error, ErrorKind, Result};

use crate::library::{Library, text};
use crate::offer::{Attributes, Offer};
use crate::raw::{self, Context, Fid, MsgRma, RmaIov, Table};
use crate::wire::{NAME_MAX, PEER_WRITES, Remote, SLOTS};

/// Most extents of one write that this crate posts, whatever the provider takes.
pub(crate) const GATHER: usize = 4;
/// Completions that one read returns at most.
const BATCH: usize = 32;
/// Keys that are drawn before a registration is given up.
const DRAWS: usize = 16;
/// Entries of a completion queue for what does not count as a write: acknowledgements of frames, hellos.
const SPARE: usize = 64;

/// Completion queue entries that a port of that offer asks for, of which the peer's writes get a part.
pub(crate) fn queue_of(attributes: &Attributes) -> (usize, usize) {
    let posted = (attributes.tx_size / 2).clamp(4, 256);
    (posted, posted + PEER_WRITES + SLOTS + SPARE)
}

/// Event of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// The provider is done with that operation's memory. It proves nothing about the peer.
    Sent(usize),
    /// A write by the peer is in place.
    Arrived(u32),
    /// An operation has failed, ours if it has a number.
    Failed(Option<usize>, String),
}

/// The number of a registration of one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registered(usize);

/// See the module.
pub(crate) struct Port {
    library: &'static Library,
    attributes: Attributes,
    fabric: *mut raw::Fabric,
    domain: *mut raw::Domain,
    eq: *mut raw::Eq,
    av: *mut raw::Av,
    cq: *mut raw::Cq,
    ep: *mut raw::Ep,
    peer: raw::Address,
    registrations: Vec<*mut raw::Mr>,
    free: Vec<usize>,
    random: RandomState,
    draws: u64,
    contexts: Box<[Context]>,
    /// Those of receives, where immediates consume some.
    receives: Box<[Context]>,
    wait: Option<RawFd>,
}

// SAFETY: one thread at a time uses it, for which the domain was opened (FI_THREAD_DOMAIN).
unsafe impl Send for Port {}

/// A write to post.
pub(crate) struct Write<'a> {
    /// At most as many extents as the provider takes, and their registrations where it needs them.
    pub(crate) from: &'a [(Extent, Option<Registered>)],
    pub(crate) to: Remote,
    /// Offset in the peer's registration.
    pub(crate) at: u64,
    pub(crate) data: u32,
    /// Number of its context, by which its completion is found.
    pub(crate) context: usize,
}

impl Port {
    /// Opens an endpoint over that offer, with room for `contexts` operations in flight.
    ///
    /// # Errors
    /// The call that failed, with libfabric's text.
    pub(crate) fn open(offer: &Offer, contexts: usize, queue: usize) -> Result<Port> {
        let mut port = Port {
            library: offer.library,
            attributes: offer.attributes.clone(),
            fabric: null_mut(),
            domain: null_mut(),
            eq: null_mut(),
            av: null_mut(),
            cq: null_mut(),
            ep: null_mut(),
            peer: 0,
            registrations: Vec::new(),
            free: Vec::new(),
            random: RandomState::new(),
            draws: 0,
            contexts: vec![Context::default(); contexts].into(),
            receives: vec![Context::default(); if offer.attributes.rx_cq_data { queue } else { 0 }].into(),
            wait: None,
        };
        // Dropping the port closes what was opened until then.
        keeping_handlers(|| port.open_all(offer, queue))?;
        Ok(port)
    }

    fn open_all(&mut self, offer: &Offer, queue: usize) -> Result<()> {
        let library = self.library;
        let info = offer.info.0.as_ptr();
        // SAFETY: the offer's entry is complete; each object is used by the tables that it came with, as the man pages
        // describe, in this order.
        unsafe {
            let code = (library.raw.fi_fabric)((*info).fabric_attr, &mut self.fabric, null_mut());
            library.check("fi_fabric", code)?;
            let fabric: &raw::FabricOps = table((*self.fabric).ops)?;
            let code = member(fabric.domain, "fi_domain")?(self.fabric, info, &mut self.domain, null_mut());
            library.check("fi_domain", code)?;
            let domain: &raw::DomainOps = table((*self.domain).ops)?;
            // Without an event queue some providers end the process when they have an event.
            let mut attr = raw::EqAttr {
                size: 0,
                flags: 0,
                wait_obj: raw::FI_WAIT_NONE,
                signaling_vector: 0,
                wait_set: null_mut(),
            };
            let code = member(fabric.eq_open, "fi_eq_open")?(self.fabric, &mut attr, &mut self.eq, null_mut());
            library.check("fi_eq_open", code)?;
            let mut attr = raw::AvAttr {
                kind: raw::FI_AV_UNSPEC,
                rx_ctx_bits: 0,
                count: 1,
                ep_per_node: 0,
                name: std::ptr::null(),
                map_addr: null_mut(),
                flags: 0,
            };
            let code = member(domain.av_open, "fi_av_open")?(self.domain, &mut attr, &mut self.av, null_mut());
            library.check("fi_av_open", code)?;
            self.open_queue(domain, &offer.provider, queue)?;
            let code = member(domain.endpoint, "fi_endpoint")?(self.domain, info, &mut self.ep, null_mut());
            library.check("fi_endpoint", code)?;
            let ep = self.ep.cast();
            // Not every provider takes it: those that need it do.
            let _ = self.bind(ep, self.eq.cast(), 0);
            library.check("fi_ep_bind (av)", self.bind(ep, self.av.cast(), 0)?)?;
            library.check("fi_ep_bind (cq)", self.bind(ep, self.cq.cast(), raw::FI_TRANSMIT | raw::FI_RECV)?)?;
            library.check("fi_enable", self.control(ep, raw::FI_ENABLE, null_mut())?)?;
        }
        for at in 0..self.receives.len() {
            if !self.receive_nothing(at)? {
                break;
            }
        }
        Ok(())
    }

    /// # Safety
    /// `domain` must be the table of this port's domain.
    unsafe fn open_queue(&mut self, domain: &raw::DomainOps, provider: &str, queue: usize) -> Result<()> {
        let mut attr = raw::CqAttr {
            size: queue,
            flags: 0,
            format: raw::FI_CQ_FORMAT_DATA,
            wait_obj: raw::FI_WAIT_FD,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: null_mut(),
            later: [0; 4],
        };
        let open = member(domain.cq_open, "fi_cq_open")?;
        // SAFETY: as the caller guarantees.
        unsafe {
            // The descriptor of `net` is always readable.
            if provider == "net" || open(self.domain, &mut attr, &mut self.cq, null_mut()) != 0 {
                attr.wait_obj = raw::FI_WAIT_NONE;
                self.cq = null_mut();
                self.library.check("fi_cq_open", open(self.domain, &mut attr, &mut self.cq, null_mut()))?;
                return Ok(());
            }
            let mut fd: c_int = -1;
            let code = self.control(self.cq.cast(), raw::FI_GETWAIT, (&raw mut fd).cast())?;
            let can_wait = table((*self.fabric).ops).is_ok_and(|ops: &raw::FabricOps| ops.trywait.is_some());
            self.wait = (code == 0 && fd >= 0 && can_wait).then_some(fd);
        }
        Ok(())
    }

    /// # Safety
    /// Both must be open objects of this port.
    unsafe fn bind(&self, to: *mut Fid, object: *mut Fid, flags: u64) -> Result<c_int> {
        // SAFETY: as the caller guarantees.
        unsafe {
            let ops: &raw::Ops = table((*to).ops)?;
            Ok(member(ops.bind, "fi_bind")?(to, object, flags))
        }
    }

    /// # Safety
    /// `of` must be an open object of this port, and `argument` what the command takes.
    unsafe fn control(&self, of: *mut Fid, command: c_int, argument: *mut c_void) -> Result<c_int> {
        // SAFETY: as the caller guarantees.
        unsafe {
            let ops: &raw::Ops = table((*of).ops)?;
            Ok(member(ops.control, "fi_control")?(of, command, argument))
        }
    }

    /// Posts a receive without bytes, for an immediate to consume; false: the provider has as many as it takes.
    fn receive_nothing(&mut self, at: usize) -> Result<bool> {
        let Some(context) = self.receives.get_mut(at) else { return Ok(false) };
        let context = std::ptr::from_mut(context).cast();
        // SAFETY: the endpoint is open; a receive of no bytes refers to no memory. Its context is in no other operation.
        let code = unsafe {
            let ops: &raw::MsgOps = table((*self.ep).msg)?;
            member(ops.recv, "fi_recv")?(self.ep, null_mut(), 0, null_mut(), raw::Address::MAX, context)
        };
        if code == -raw::FI_EAGAIN {
            return Ok(false);
        }
        self.library.check("fi_recv", code as c_int).map(|()| true)
    }

    // ---- addresses

    /// The endpoint's name, for the peer.
    pub(crate) fn name(&self) -> Result<Vec<u8>> {
        let mut name = vec![0; NAME_MAX];
        let mut len = name.len();
        // SAFETY: the endpoint is open; it writes at most `len` bytes.
        let code = unsafe {
            let ops: &raw::CmOps = table((*self.ep).cm)?;
            member(ops.getname, "fi_getname")?(self.ep.cast(), name.as_mut_ptr().cast(), &mut len)
        };
        self.library.check("fi_getname", code)?;
        name.truncate(len);
        Ok(name)
    }

    /// Makes the endpoint of that name the peer that writes go to. The name is of the peer's provider, of the same kind.
    pub(crate) fn insert(&mut self, name: &[u8]) -> Result<()> {
        // Providers read a name of their own length.
        let mut padded = name.to_vec();
        padded.resize(NAME_MAX, 0);
        // SAFETY: one name, followed by room.
        let count = unsafe {
            let ops: &raw::AvOps = table((*self.av).ops)?;
            let insert = member(ops.insert, "fi_av_insert")?;
            insert(self.av, padded.as_ptr().cast(), 1, &mut self.peer, 0, null_mut())
        };
        match count {
            1 => Ok(()),
            0 => {
                Err(Error::new(ErrorKind::Unreachable, "fabric", "fi_av_insert: the provider refused the peer's name"))
            }
            code => Err(self.library.check("fi_av_insert", code).err().unwrap_or_else(|| {
                Error::new(ErrorKind::Protocol, "fabric", format!("fi_av_insert inserted {code} of 1 name"))
            })),
        }
    }

    // ---- memory

    /// Registers memory for the peer's writes, for own writes from it, or for both.
    ///
    /// # Errors
    /// The call that failed; `Exhausted` when no key is left.
    ///
    /// # Safety
    /// The memory must be valid until the registration is closed, or the port is dropped.
    pub(crate) unsafe fn register(&mut self, memory: &Extent, remote: bool) -> Result<(Registered, Remote)> {
        let local = self.attributes.mr_mode & raw::FI_MR_LOCAL != 0 || memory.gpu.is_some() || !remote;
        let access = if remote { raw::FI_REMOTE_WRITE } else { 0 } | if local { raw::FI_WRITE } else { 0 };
        // An empty registration is refused by some providers.
        let iov = libc::iovec { iov_base: memory.at as *mut c_void, iov_len: memory.len.max(1) };
        let mut code = 0;
        for _ in 0..DRAWS {
            let attr = raw::MrAttr {
                mr_iov: &raw const iov,
                iov_count: 1,
                access,
                offset: 0,
                requested_key: self.draw(),
                context: null_mut(),
                auth_key_size: 0,
                auth_key: null_mut(),
                iface: if memory.gpu.is_some() { raw::FI_HMEM_CUDA } else { raw::FI_HMEM_SYSTEM },
                device: memory.gpu.unwrap_or(0).into(),
                later: [0; 8],
            };
            let mut mr = null_mut();
            // SAFETY: the domain is open; attributes are those of the interface asked for, followed by zeros.
            code = unsafe {
                let ops: &raw::MrOps = table((*self.domain).mr)?;
                member(ops.regattr, "fi_mr_regattr")?(self.domain.cast(), &attr, 0, &mut mr)
            };
            if code == 0 && !mr.is_null() {
                return self.registered(mr, memory);
            }
            // A key that is in use is drawn anew.
            if code != -raw::FI_ENOKEY && code != -libc::EEXIST {
                break;
            }
        }
        let what = match memory.gpu {
            Some(gpu) => format!("fi_mr_regattr of {} bytes of GPU {gpu}", memory.len),
            None => format!("fi_mr_regattr of {} bytes", memory.len),
        };
        self.library.check(&what, code)?;
        Err(Error::new(ErrorKind::Io, "fabric", format!("{what}: no registration")))
    }

    fn registered(&mut self, mr: *mut raw::Mr, memory: &Extent) -> Result<(Registered, Remote)> {
        let at = self.free.pop().unwrap_or_else(|| {
            self.registrations.push(null_mut());
            self.registrations.len() - 1
        });
        self.registrations[at] = mr;
        let number = Registered(at);
        if self.attributes.mr_mode & raw::FI_MR_ENDPOINT != 0 {
            // SAFETY: both are open.
            let enabled = unsafe {
                self.bind(mr.cast(), self.ep.cast(), 0)
                    .and_then(|code| self.library.check("fi_mr_bind", code))
                    .and_then(|()| self.control(mr.cast(), raw::FI_ENABLE, null_mut()))
                    .and_then(|code| self.library.check("fi_mr_enable", code))
            };
            if let Err(error) = enabled {
                let _ = self.unregister(number);
                return Err(error);
            }
        }
        // SAFETY: open.
        let key = unsafe { (*mr).key };
        let base = if self.attributes.mr_mode & raw::FI_MR_VIRT_ADDR != 0 { memory.at } else { 0 };
        Ok((number, Remote { key, base }))
    }

    /// A key that cannot be guessed, of the provider's length.
    fn draw(&mut self) -> u64 {
        self.draws += 1;
        let mut hasher = self.random.build_hasher();
        hasher.write_u64(self.draws);
        let bits = self.attributes.mr_key_size.clamp(1, 8) * 8;
        hasher.finish() & (u64::MAX >> (64 - bits))
    }

    /// Closes a registration. What the provider is receiving into it at present may still be written.
    pub(crate) fn unregister(&mut self, Registered(at): Registered) -> Result<()> {
        let Some(mr) = self.registrations.get_mut(at).map(|mr| std::mem::replace(mr, null_mut())) else {
            return Ok(());
        };
        if mr.is_null() {
            return Ok(());
        }
        // SAFETY: open, and closed once.
        let code = unsafe { close(mr.cast()) };
        self.free.push(at);
        self.library.check("fi_close (mr)", code)
    }

    fn descriptor(&self, registered: Option<Registered>) -> *mut c_void {
        let mr = registered.and_then(|Registered(at)| self.registrations.get(at)).filter(|mr| !mr.is_null());
        // SAFETY: open.
        mr.map_or(null_mut(), |mr| unsafe { (**mr).mem_desc })
    }

    // ---- operations

    /// Posts a write. `Ok(false)`: not now, as the provider has no room.
    ///
    /// # Errors
    /// The provider's code: it is of no use any more.
    ///
    /// # Safety
    /// Its memory must be readable until its completion was polled, or the port was dropped; its context must not be in
    /// use.
    pub(crate) unsafe fn write(&mut self, write: &Write<'_>) -> std::result::Result<bool, String> {
        let mut iov = [libc::iovec { iov_base: null_mut(), iov_len: 0 }; GATHER];
        let mut desc = [null_mut(); GATHER];
        let count = write.from.len().min(GATHER);
        let mut len = 0;
        for (at, (extent, registered)) in write.from.iter().take(GATHER).enumerate() {
            iov[at] = libc::iovec { iov_base: extent.at as *mut c_void, iov_len: extent.len };
            desc[at] = self.descriptor(*registered);
            len += extent.len;
        }
        let Some(context) = self.contexts.get_mut(write.context) else { return Err("no such context".to_owned()) };
        let context: *mut c_void = std::ptr::from_mut(context).cast();
        let to = RmaIov { addr: write.to.base.wrapping_add(write.at), len, key: write.to.key };
        let message = MsgRma {
            msg_iov: iov.as_ptr(),
            desc: desc.as_mut_ptr(),
            iov_count: count,
            addr: self.peer,
            rma_iov: &raw const to,
            rma_iov_count: 1,
            context,
            data: write.data.into(),
        };
        // SAFETY: the endpoint is open; the arrays are read within the call, memory and context are the caller's.
        let code = unsafe {
            let ops: &raw::RmaOps = raw::table((*self.ep).rma)?;
            let Some(writemsg) = ops.writemsg else { return Err("it has no fi_writemsg".to_owned()) };
            writemsg(self.ep, &raw const message, raw::FI_REMOTE_CQ_DATA | raw::FI_COMPLETION)
        };
        match code {
            0 => Ok(true),
            code if code == -raw::FI_EAGAIN => Ok(false),
            code => Err(format!("fi_writemsg: {}", self.library.text(code as c_int))),
        }
    }

    /// Drives the provider and reports what has completed, `budget` entries and one batch at most. Whether anything has.
    ///
    /// # Errors
    /// The queue itself failed.
    pub(crate) fn poll(&mut self, budget: usize, into: &mut Vec<Completion>) -> std::result::Result<bool, String> {
        let mut entries = [raw::CqDataEntry::EMPTY; BATCH];
        let before = into.len();
        while into.len() - before < budget {
            // SAFETY: the queue is open and has entries of this format.
            let count = unsafe {
                let ops: &raw::CqOps = raw::table((*self.cq).ops)?;
                let Some(read) = ops.read else { return Err("it has no fi_cq_read".to_owned()) };
                read(self.cq, entries.as_mut_ptr().cast(), BATCH)
            };
            match count {
                1.. if count as usize <= BATCH => {
                    for entry in &entries[..count as usize] {
                        self.completed(entry, into)?;
                    }
                    if (count as usize) < BATCH {
                        break;
                    }
                }
                code if code == -raw::FI_EAVAIL => {
                    if !self.failed(into)? {
                        break;
                    }
                }
                0 => break,
                code if code == -raw::FI_EAGAIN => break,
                code if code == -(libc::EINTR as isize) => break,
                code => return Err(format!("fi_cq_read: {}", self.library.text(code as c_int))),
            }
        }
        Ok(into.len() > before)
    }

    fn completed(&mut self, entry: &raw::CqDataEntry, into: &mut Vec<Completion>) -> std::result::Result<(), String> {
        let remote = entry.flags & raw::FI_REMOTE_CQ_DATA != 0
            && (entry.flags & raw::FI_REMOTE_WRITE != 0 || entry.flags & raw::FI_WRITE == 0);
        if remote {
            into.push(Completion::Arrived(entry.data as u32));
            if let Some(at) = number(&self.receives, entry.op_context) {
                self.receive_nothing(at).map_err(|error| error.detail)?;
            }
            return Ok(());
        }
        // Writes without an immediate, which nobody here posts, complete to nobody where a provider reports them.
        if entry.flags & (raw::FI_REMOTE_WRITE | raw::FI_RECV) != 0 {
            return Ok(());
        }
        let at = number(&self.contexts, entry.op_context).ok_or("it completed an operation that was not posted")?;
        into.push(Completion::Sent(at));
        Ok(())
    }

    /// Reads one error entry; false: there was none.
    fn failed(&mut self, into: &mut Vec<Completion>) -> std::result::Result<bool, String> {
        let mut entry = raw::CqErrEntry {
            op_context: null_mut(),
            flags: 0,
            len: 0,
            buf: null_mut(),
            data: 0,
            tag: 0,
            olen: 0,
            err: 0,
            prov_errno: 0,
            err_data: null_mut(),
            err_data_size: 0,
            later: [0; 4],
        };
        // SAFETY: the queue is open; the entry has room for later members. The text is copied before the next read.
        let (count, why) = unsafe {
            let ops: &raw::CqOps = raw::table((*self.cq).ops)?;
            let (Some(readerr), Some(strerror)) = (ops.readerr, ops.strerror) else {
                return Err("it has no fi_cq_readerr".to_owned());
            };
            let count = readerr(self.cq, &mut entry, 0);
            let why = match count {
                1.. => text(strerror(self.cq, entry.prov_errno, entry.err_data, null_mut(), 0)),
                _ => String::new(),
            };
            (count, why)
        };
        match count {
            1.. => {
                let known = self.library.text(entry.err);
                let why = if why.is_empty() { known } else { format!("{known}, {why}") };
                into.push(Completion::Failed(number(&self.contexts, entry.op_context), why));
                Ok(true)
            }
            0 => Ok(false),
            code if code == -raw::FI_EAGAIN => Ok(false),
            code => Err(format!("fi_cq_readerr: {}", self.library.text(code as c_int))),
        }
    }

    // ---- waiting

    /// What becomes readable when there is a completion; `None`: the provider has nothing of that kind.
    pub(crate) fn fd(&self) -> Option<RawFd> {
        self.wait
    }

    /// Whether its descriptor may be slept on now. Some providers crash when they are asked about a queue without one.
    pub(crate) fn may_wait(&mut self) -> bool {
        if self.wait.is_none() {
            return false;
        }
        let mut fids = [self.cq.cast::<Fid>()];
        // SAFETY: the fabric and the queue are open.
        unsafe {
            let ops: std::result::Result<&raw::FabricOps, String> = raw::table((*self.fabric).ops);
            let Some(trywait) = ops.ok().and_then(|ops| ops.trywait) else { return false };
            trywait(self.fabric, fids.as_mut_ptr(), 1) == 0
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // SAFETY: each is open or null, and closed once, after what refers to it: the endpoint, after which nothing is
        // written or read any more, first.
        unsafe {
            close(self.ep.cast());
            for mr in &self.registrations {
                close(mr.cast());
            }
            close(self.cq.cast());
            close(self.av.cast());
            close(self.eq.cast());
            close(self.domain.cast());
            close(self.fabric.cast());
        }
    }
}

/// The number of a context; `None`: it is none of these.
fn number(contexts: &[Context], context: *mut c_void) -> Option<usize> {
    let offset = context.addr().checked_sub(contexts.as_ptr().addr())?;
    let at = offset / size_of::<Context>();
    (offset % size_of::<Context>() == 0 && at < contexts.len()).then_some(at)
}

/// # Safety
/// `fid` must be null or open; it is not used again.
unsafe fn close(fid: *mut Fid) -> c_int {
    if fid.is_null() {
        return 0;
    }
    // SAFETY: open objects have that table.
    unsafe {
        match raw::table((*fid).ops) {
            Ok(raw::Ops { close: Some(close), .. }) => close(fid),
            _ => -libc::ENOSYS,
        }
    }
}

/// # Safety
/// As [`raw::table`].
unsafe fn table<'a, T: Table>(ops: *const T) -> Result<&'a T> {
    // SAFETY: as the caller guarantees.
    unsafe { raw::table(ops) }
        .map_err(|why| Error::new(ErrorKind::Unsupported, "fabric", format!("the provider: {why}")))
}

fn member<T>(function: Option<T>, name: &str) -> Result<T> {
    function.ok_or_else(|| Error::new(ErrorKind::Unsupported, "fabric", format!("the provider has no {name}")))
}
