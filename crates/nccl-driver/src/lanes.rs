//! Sending and receiving through a plugin: chunks of one memory over any number of devices and channels.
//!
//! The receiver assigns chunks: whichever lane has room in its window takes the next one, so that a slow lane holds up
//! no other. It posts the receive where the chunk belongs and announces the assignment, and the sender posts the send
//! on the same lane in the same order. The window is checked before anything is posted.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crossrail_nccl_abi::{DEVICE_HOST, DEVICE_UNPACK, MAX_REQUESTS, PTR_HOST};
use crossrail_types::{Error, ErrorKind, Result};

use crate::fragments::{DEPTH, Fragments};
use crate::memory::Memory;
use crate::plugin::{Comm, Handle, Network, Object};

/// What the lanes of both ends have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// The plugin's devices to use, by index.
    pub devices: Vec<usize>,
    /// Connections per device.
    pub channels: usize,
    /// Most requests in flight on one connection.
    pub window: usize,
    /// Bytes of a chunk.
    pub chunk: usize,
}

/// A chunk that the receiver expects on a lane, behind those that it announced before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The lane.
    pub lane: u32,
    /// The chunk.
    pub chunk: u32,
}

/// What one device carried of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneUse {
    /// The plugin's and the device's name.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Chunks.
    pub chunks: u64,
}

/// What a transfer did, at either end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Transfer {
    /// One row per device.
    pub lanes: Vec<LaneUse>,
    /// Time spent gathering fragments.
    pub unpack: Duration,
}

impl Lanes {
    /// Checks that the plugin has these devices and that they can be used with host memory; their names.
    ///
    /// # Errors
    /// `Usage`: no such device, or a window or chunk of 0; `Unsupported`: the device cannot use host memory; and what
    /// the plugin returns.
    pub fn check(&self, network: &Network<'_>) -> Result<Vec<String>> {
        let count = network.devices()?;
        let usage = |detail: String| Error::new(ErrorKind::Usage, "net plugin", detail);
        if self.devices.is_empty() || self.channels == 0 || self.window == 0 || self.chunk == 0 {
            return Err(usage("devices, channels, window and chunk must be at least 1".to_owned()));
        }
        if self.window > MAX_REQUESTS {
            return Err(usage(format!("a window of {} is too large: NCCL posts at most {MAX_REQUESTS}", self.window)));
        }
        let plugin = network.plugin().name();
        let mut names = Vec::new();
        for device in &self.devices {
            if *device >= count {
                return Err(usage(format!("{plugin} has no device {device}; it has {count}")));
            }
            let properties = network.properties(*device)?;
            let (kind, _) = properties.offload;
            if properties.ptr_support & PTR_HOST == 0 || ![DEVICE_HOST, DEVICE_UNPACK].contains(&kind) {
                let detail = format!("device {device} of {plugin} ({}) cannot use host memory", properties.name);
                return Err(Error::new(ErrorKind::Unsupported, "net plugin", detail));
            }
            if kind == DEVICE_UNPACK && self.window > DEPTH {
                return Err(usage(format!("a window of {} is too large for lists of fragments: {DEPTH}", self.window)));
            }
            names.push(format!("{plugin}/{}", properties.name));
        }
        Ok(names)
    }

    fn len(&self) -> usize {
        self.devices.len() * self.channels
    }

    /// The position in `devices` of a lane.
    fn device_of(&self, lane: usize) -> usize {
        lane / self.channels
    }

    fn chunks(&self, size: usize) -> usize {
        size.div_ceil(self.chunk)
    }

    /// Offset and length of a chunk.
    fn range(&self, chunk: usize, size: usize) -> (usize, usize) {
        let offset = chunk * self.chunk;
        (offset, self.chunk.min(size.saturating_sub(offset)))
    }
}

/// One connection at either end.
struct Lane {
    comm: Comm,
    registration: Object,
    fragments: Option<Fragments>,
    flights: VecDeque<(Object, usize)>,
    /// The plugin returned no request at the last attempt.
    busy: bool,
    bytes: u64,
    chunks: u64,
}

impl Lane {
    fn new(network: &Network<'_>, comm: Comm, memory: &Memory) -> Result<Lane> {
        // SAFETY: the memory is freed after the lanes are closed, or not at all.
        let registration = unsafe { network.register(comm.object, memory.ptr(), memory.len()) }?;
        let offload = comm.offload.as_ref().filter(|handle| handle.kind != DEVICE_HOST);
        let fragments = offload.map(Fragments::of).transpose().inspect_err(|_| {
            // The first error is the one to report.
            let _ = network.deregister(comm.object, registration);
        })?;
        Ok(Lane { comm, registration, fragments, flights: VecDeque::new(), busy: false, bytes: 0, chunks: 0 })
    }

    fn count(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.chunks += 1;
    }
}

/// What both ends have: the lanes, their memory, and the end of both.
struct End<'a> {
    network: &'a Network<'a>,
    lanes: Lanes,
    names: Vec<String>,
    open: Vec<Option<Lane>>,
    /// `None` only once it is leaked.
    memory: Option<Memory>,
    close: fn(&Network<'_>, Object) -> Result<()>,
}

impl End<'_> {
    fn is_open(&self) -> bool {
        self.open.iter().all(Option::is_some)
    }

    /// Registers the memory with a new connection, which is closed if that fails.
    fn opened(&mut self, index: usize, comm: Comm) -> Result<()> {
        let Some(memory) = &self.memory else { return (self.close)(self.network, comm.object) };
        let lane = Lane::new(self.network, comm, memory).inspect_err(|_| {
            let _ = (self.close)(self.network, comm.object);
        })?;
        self.open[index] = Some(lane);
        Ok(())
    }

    fn size(&self) -> usize {
        self.memory.as_ref().map_or(0, Memory::len)
    }

    fn in_flight(&self) -> usize {
        self.open.iter().flatten().map(|lane| lane.flights.len()).sum()
    }

    fn bytes(&mut self) -> Result<&mut [u8]> {
        if self.in_flight() > 0 {
            return Err(Error::new(ErrorKind::Usage, "net plugin", "requests are in flight"));
        }
        Ok(self.memory.as_mut().map_or(&mut [], Memory::bytes))
    }

    /// What each device has carried since the last call.
    fn take_use(&mut self) -> Vec<LaneUse> {
        let mut rows: Vec<LaneUse> =
            self.names.iter().map(|name| LaneUse { name: name.clone(), bytes: 0, chunks: 0 }).collect();
        for (index, lane) in self.open.iter_mut().enumerate() {
            let Some(lane) = lane else { continue };
            let row = &mut rows[self.lanes.device_of(index)];
            row.bytes += std::mem::take(&mut lane.bytes);
            row.chunks += std::mem::take(&mut lane.chunks);
        }
        rows
    }

    /// The error of a transfer that has not moved for `waited`.
    fn stuck(&self, post: &str, waited: Duration) -> Error {
        let plugin = self.network.plugin();
        if self.open.iter().flatten().any(|lane| lane.busy && lane.flights.is_empty()) {
            return plugin.stuck(post, "returned no request, though none was in flight", waited);
        }
        match self.in_flight() {
            0 => Error::new(ErrorKind::Timeout, "net plugin", "the other end moves no data").with_waited(waited),
            count => plugin.stuck("test", &format!("reports {count} requests as unfinished"), waited),
        }
    }

    /// Closes all lanes.
    fn finish(&mut self) -> Result<()> {
        if self.in_flight() > 0 {
            // The plugin may still write into it.
            std::mem::forget(self.memory.take());
        }
        let mut outcome = Ok(());
        for lane in self.open.drain(..).flatten() {
            let deregistered = self.network.deregister(lane.comm.object, lane.registration);
            outcome = outcome.and(deregistered).and((self.close)(self.network, lane.comm.object));
        }
        outcome
    }
}

/// The sending end.
pub struct Sender<'a> {
    end: End<'a>,
    /// Never moved: a plugin may keep state in a handle until `connect` succeeds.
    handles: Vec<Handle>,
    assigned: Vec<VecDeque<usize>>,
}

impl<'a> Sender<'a> {
    /// A sender of `memory` to the listeners behind `handles`, one for each lane.
    ///
    /// # Errors
    /// As [`Lanes::check`]; `Protocol` for a wrong number of bytes.
    pub fn new(network: &'a Network<'a>, lanes: Lanes, memory: Memory, handles: &[u8]) -> Result<Sender<'a>> {
        let names = lanes.check(network)?;
        let (handles, rest) = handles.as_chunks();
        if handles.len() != lanes.len() || !rest.is_empty() {
            let detail = format!("the other end listens on {} lanes instead of {}", handles.len(), lanes.len());
            return Err(Error::new(ErrorKind::Protocol, "net plugin", detail));
        }
        let handles = handles.to_vec();
        let open = (0..lanes.len()).map(|_| None).collect();
        let assigned = vec![VecDeque::new(); lanes.len()];
        let close = |network: &Network<'_>, comm| network.close_send(comm);
        Ok(Sender { end: End { network, lanes, names, open, memory: Some(memory), close }, handles, assigned })
    }

    /// Continues to connect; whether all lanes are connected.
    ///
    /// # Errors
    /// What the plugin returns.
    pub fn connect(&mut self) -> Result<bool> {
        let end = &mut self.end;
        for (index, handle) in self.handles.iter_mut().enumerate() {
            if end.open[index].is_some() {
                continue;
            }
            let device = end.lanes.devices[end.lanes.device_of(index)];
            if let Some(comm) = end.network.connect(device, handle)? {
                end.opened(index, comm)?;
            }
        }
        Ok(end.is_open())
    }

    /// The error of connections that have not been made within `waited`.
    pub fn not_connected(&self, waited: Duration) -> Error {
        self.end.network.plugin().stuck("connect", "returned no communicator", waited)
    }

    /// The memory, while nothing is in flight.
    ///
    /// # Errors
    /// `Usage`: something is.
    pub fn bytes(&mut self) -> Result<&mut [u8]> {
        self.end.bytes()
    }

    /// Adds a chunk that the receiver expects.
    ///
    /// # Errors
    /// `Protocol`: no such lane or chunk.
    pub fn assign(&mut self, assignment: Assignment) -> Result<()> {
        let chunk = assignment.chunk as usize;
        let known = chunk < self.end.lanes.chunks(self.end.size());
        match self.assigned.get_mut(assignment.lane as usize).filter(|_| known) {
            Some(queue) => {
                queue.push_back(chunk);
                Ok(())
            }
            None => {
                let detail = format!("the other end expects chunk {chunk} on lane {}", assignment.lane);
                Err(Error::new(ErrorKind::Protocol, "net plugin", detail))
            }
        }
    }

    /// Posts sends and tests the oldest of each lane, once; the number of chunks that completed, and whether anything
    /// moved.
    ///
    /// # Errors
    /// What the plugin returns.
    pub fn step(&mut self) -> Result<(usize, bool)> {
        let (end, mut completed, mut moved) = (&mut self.end, 0, false);
        let (size, window) = (end.size(), end.lanes.window);
        let base = end.memory.as_ref().map_or(std::ptr::null_mut(), Memory::ptr);
        for (lane, queue) in end.open.iter_mut().flatten().zip(&mut self.assigned) {
            while let (Some(chunk), true) = (queue.front(), lane.flights.len() < window) {
                let (offset, len) = end.lanes.range(*chunk, size);
                // SAFETY: within the memory, which nothing writes while requests are in flight.
                let started =
                    unsafe { end.network.isend(lane.comm.object, (base.add(offset), len), lane.registration) }?;
                lane.busy = started.is_none();
                let Some(request) = started else { break };
                lane.flights.push_back((request, *chunk));
                queue.pop_front();
                moved = true;
            }
            while let Some((request, chunk)) = lane.flights.front().copied() {
                let Some(bytes) = end.network.test(request)? else { break };
                let (_, len) = end.lanes.range(chunk, size);
                lane.flights.pop_front();
                if bytes != len {
                    return Err(end.network.plugin().fault("test", &wrong_size("send", bytes, len)));
                }
                lane.count(len);
                completed += 1;
                moved = true;
            }
        }
        Ok((completed, moved))
    }

    /// The number of chunks of a transfer.
    pub fn chunks(&self) -> usize {
        self.end.lanes.chunks(self.end.size())
    }

    /// What was sent since the last call.
    pub fn take_report(&mut self) -> Transfer {
        Transfer { lanes: self.end.take_use(), unpack: Duration::ZERO }
    }

    /// The error of a transfer that has not moved for `waited`.
    pub fn stuck(&self, waited: Duration) -> Error {
        self.end.stuck("isend", waited)
    }

    /// Closes all lanes.
    ///
    /// # Errors
    /// What the plugin returns.
    pub fn close(mut self) -> Result<()> {
        self.end.finish()
    }
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

/// The receiving end.
pub struct Receiver<'a> {
    end: End<'a>,
    listeners: Vec<Object>,
    handles: Vec<Handle>,
    next: usize,
    unpack: Duration,
}

impl<'a> Receiver<'a> {
    /// A receiver into `memory` that listens on every lane.
    ///
    /// # Errors
    /// As [`Lanes::check`], and what the plugin returns.
    pub fn new(network: &'a Network<'a>, lanes: Lanes, memory: Memory) -> Result<Receiver<'a>> {
        let names = lanes.check(network)?;
        let open = (0..lanes.len()).map(|_| None).collect();
        let close = |network: &Network<'_>, comm| network.close_recv(comm);
        let end = End { network, lanes, names, open, memory: Some(memory), close };
        let mut made =
            Receiver { end, listeners: Vec::new(), handles: Vec::new(), next: usize::MAX, unpack: Duration::ZERO };
        for lane in 0..made.end.lanes.len() {
            let (listener, handle) = network.listen(made.end.lanes.devices[made.end.lanes.device_of(lane)])?;
            made.listeners.push(listener);
            made.handles.push(handle);
        }
        Ok(made)
    }

    /// The handles of all lanes, for [`Sender::new`].
    pub fn handles(&self) -> Vec<u8> {
        self.handles.concat()
    }

    /// Continues to accept; whether all lanes are connected.
    ///
    /// # Errors
    /// What the plugin returns.
    pub fn accept(&mut self) -> Result<bool> {
        let end = &mut self.end;
        for (index, listener) in self.listeners.iter().enumerate() {
            if end.open[index].is_some() {
                continue;
            }
            if let Some(comm) = end.network.accept(*listener)? {
                end.opened(index, comm)?;
            }
        }
        Ok(end.is_open())
    }

    /// The error of connections that have not been made within `waited`.
    pub fn not_connected(&self, waited: Duration) -> Error {
        self.end.network.plugin().stuck("accept", "returned no communicator", waited)
    }

    /// The memory, while nothing is in flight.
    ///
    /// # Errors
    /// `Usage`: something is.
    pub fn bytes(&mut self) -> Result<&mut [u8]> {
        self.end.bytes()
    }

    /// Begins a transfer.
    pub fn begin(&mut self) {
        self.next = 0;
        self.unpack = Duration::ZERO;
    }

    /// Posts receives, tests the oldest of each lane, and gathers fragments, once; the number of chunks that
    /// completed, and whether anything moved. The chunks posted go to `announce`.
    ///
    /// # Errors
    /// What the plugin returns; `Protocol` for lists of fragments that are malformed.
    pub fn step(&mut self, announce: &mut Vec<Assignment>) -> Result<(usize, bool)> {
        let (end, mut completed, mut moved) = (&mut self.end, 0, false);
        let (size, window, chunks) = (end.size(), end.lanes.window, end.lanes.chunks(end.size()));
        let base = end.memory.as_ref().map_or(std::ptr::null_mut(), Memory::ptr);
        for (index, lane) in end.open.iter_mut().enumerate() {
            let Some(lane) = lane else { continue };
            // One at a time, so that all lanes get their share of a short transfer.
            if self.next < chunks && lane.flights.len() < window {
                let (offset, len) = end.lanes.range(self.next, size);
                // SAFETY: within the memory, which nothing else accesses while requests are in flight.
                let started =
                    unsafe { end.network.irecv(lane.comm.object, (base.add(offset), len), lane.registration) }?;
                lane.busy = started.is_none();
                if let Some(request) = started {
                    lane.flights.push_back((request, self.next));
                    announce.push(Assignment { lane: index as u32, chunk: self.next as u32 });
                    self.next += 1;
                    moved = true;
                }
            }
            while let Some((request, chunk)) = lane.flights.front().copied() {
                let Some(bytes) = end.network.test(request)? else { break };
                let (offset, len) = end.lanes.range(chunk, size);
                lane.flights.pop_front();
                if bytes != len {
                    return Err(end.network.plugin().fault("test", &wrong_size("receive", bytes, len)));
                }
                if let Some(fragments) = &mut lane.fragments {
                    let began = Instant::now();
                    // SAFETY: this chunk's part of the memory, which no other request uses any more.
                    fragments.gather(unsafe { std::slice::from_raw_parts_mut(base.add(offset), len) })?;
                    self.unpack += began.elapsed();
                }
                // Only now may the plugin reuse the bounce memory.
                end.network.consumed(lane.comm.object, request)?;
                lane.count(len);
                completed += 1;
                moved = true;
            }
        }
        Ok((completed, moved))
    }

    /// The number of chunks of a transfer.
    pub fn chunks(&self) -> usize {
        self.end.lanes.chunks(self.end.size())
    }

    /// What was received since the last call.
    pub fn take_report(&mut self) -> Transfer {
        Transfer { lanes: self.end.take_use(), unpack: self.unpack }
    }

    /// The error of a transfer that has not moved for `waited`.
    pub fn stuck(&self, waited: Duration) -> Error {
        self.end.stuck("irecv", waited)
    }

    /// Closes all lanes and listeners.
    ///
    /// # Errors
    /// What the plugin returns.
    pub fn close(mut self) -> Result<()> {
        let outcome = self.end.finish();
        outcome.and(self.stop_listening())
    }

    fn stop_listening(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for listener in self.listeners.drain(..) {
            outcome = outcome.and(self.end.network.close_listen(listener));
        }
        outcome
    }
}

impl Drop for Receiver<'_> {
    fn drop(&mut self) {
        let _ = self.end.finish();
        let _ = self.stop_listening();
    }
}

fn wrong_size(what: &str, bytes: usize, len: usize) -> String {
    format!("reports {bytes} bytes for a {what} of {len}")
}
