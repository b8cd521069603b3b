//! The two single-producer single-consumer rings of a lane.
//!
//! A frame is a slot; a payload too large for it lies in the byte ring, one contiguous piece per frame. Where it
//! lies follows from the lengths of all frames before it by [`reserve`], which both ends compute alike: the only
//! number a consumer takes from the peer is the payload length in the head.
#![allow(unsafe_code)]

use std::iter;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossrail_transport::{LaneError, List, Payload};
use crossrail_types::Head;

use crate::atomics::AtomicU64;
use crate::control::{Control, INLINE, SLOTS, Slot};
use crate::copy;

const MASK: u64 = SLOTS as u64 - 1;
const LINE: u64 = 64;

/// Largest payload of one frame, in bytes.
pub(crate) const MAX_PAYLOAD: usize = 64 << 10;
/// Smallest and largest payload ring: two frames must fit beside the gap that a wrap leaves.
pub(crate) const RING_RANGE: std::ops::RangeInclusive<usize> = 2 * MAX_PAYLOAD..=1 << 30;

/// Maximum span of unread payload bytes in a ring of `ring` bytes. The producer next writes to the part beyond it,
/// which was read longest ago and has left the consumer's cache, so its stores need not wait for that cache.
fn window(ring: u64) -> u64 {
    (ring / 2).max(*RING_RANGE.start() as u64)
}

/// Where the next payload of `len` bytes lies, and where the one after it may start, as counts of bytes since the
/// lane began. A payload never wraps: what is left before the ring's end is skipped instead.
#[inline]
fn reserve(next: u64, len: u64, ring: u64) -> (u64, u64) {
    let room = ring - (next & (ring - 1));
    let start = if len <= room { next } else { next + room };
    (start, start + len.next_multiple_of(LINE))
}

/// The sending end.
pub(crate) struct Producer {
    slots: NonNull<Slot>,
    bytes: NonNull<u8>,
    consumed: NonNull<AtomicU64>,
    ring: u64,
    /// Of those, how many may be unread.
    window: u64,
    /// Frames written, and of those the ones known to be consumed.
    next: u64,
    seen: u64,
    /// The same in bytes of the payload ring.
    byte_next: u64,
    byte_seen: u64,
    /// `byte_next` after each frame that is in the ring.
    ends: Box<[u64; SLOTS]>,
    /// Keeps the memory mapped.
    _control: Arc<Control>,
}

// SAFETY: the pointers go into the mapping that `_control` keeps; nothing is tied to a thread.
unsafe impl Send for Producer {}

impl Producer {
    pub(crate) fn new(control: &Arc<Control>, side: usize) -> Option<Producer> {
        let fixed = control.fixed();
        Some(Producer {
            slots: NonNull::from(&fixed.slots[side]).cast(),
            bytes: NonNull::new(control.bytes(side))?,
            consumed: NonNull::from(&fixed.consumed[side].0),
            ring: control.ring() as u64,
            window: window(control.ring() as u64),
            next: 0,
            seen: 0,
            byte_next: 0,
            byte_seen: 0,
            ends: Box::new([0; SLOTS]),
            _control: Arc::clone(control),
        })
    }

    /// Puts one frame into the ring; false: no room.
    #[inline(always)]
    pub(crate) fn push(&mut self, head: &Head, payload: &Payload) -> Result<bool, LaneError> {
        debug_assert_eq!(head.payload_len() as usize, payload.len);
        if self.next - self.seen >= SLOTS as u64 && !self.refresh()? {
            return Ok(false);
        }
        let at = (self.next & MASK) as usize;
        // SAFETY: `at` < SLOTS, inside the mapping.
        let slot = unsafe { self.slots.add(at).as_ref() };
        if payload.len <= INLINE {
            put_inline(slot, payload);
        } else if !self.put_bytes(payload)? {
            return Ok(false);
        }
        self.ends[at] = self.byte_next;
        self.finish(slot, head);
        Ok(true)
    }

    /// Puts a frame into the ring whose payload fits into its slot; false: it does not, or there may be no room.
    ///
    /// # Safety
    /// `payload` must be readable for `len` bytes.
    #[inline(always)]
    pub(crate) unsafe fn push_inline(&mut self, head: &Head, payload: *const u8, len: usize) -> bool {
        debug_assert_eq!(head.payload_len() as usize, len);
        if len > INLINE || self.next - self.seen >= SLOTS as u64 {
            return false;
        }
        let at = (self.next & MASK) as usize;
        // SAFETY: `at` < SLOTS, inside the mapping.
        let slot = unsafe { self.slots.add(at).as_ref() };
        if len == 8 {
            // SAFETY: by the contract.
            slot.words[4].store(unsafe { payload.cast::<u64>().read_unaligned() }, Ordering::Relaxed);
        } else {
            // SAFETY: by the contract, and `len` <= INLINE.
            unsafe { put_words(slot, payload, len) };
        }
        self.ends[at] = self.byte_next;
        self.finish(slot, head);
        true
    }

    /// Writes the head of the next frame, whose payload is there, and shows it to the consumer.
    #[inline(always)]
    fn finish(&mut self, slot: &Slot, head: &Head) {
        for (word, bytes) in slot.words.iter().zip(head.0.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.next += 1;
        slot.seq.store(self.next, Ordering::Release);
    }

    /// Whether any frame at all would fit now.
    #[inline]
    pub(crate) fn room(&mut self) -> Result<bool, LaneError> {
        Ok(self.has_room() || (self.refresh()? && self.has_room()))
    }

    #[inline]
    fn has_room(&self) -> bool {
        let end = reserve(self.byte_next, MAX_PAYLOAD as u64, self.ring).1;
        self.next - self.seen < SLOTS as u64 && end - self.byte_seen <= self.window
    }

    /// Reads how far the consumer is; true when that has changed.
    #[cold]
    fn refresh(&mut self) -> Result<bool, LaneError> {
        // SAFETY: inside the mapping. Acquire: the consumer has read what we are about to overwrite.
        let consumed = unsafe { self.consumed.as_ref() }.load(Ordering::Acquire);
        if consumed < self.seen || consumed > self.next {
            return Err(LaneError::Protocol(format!(
                "the peer says it consumed {consumed} frames; it had {} before and {} were sent",
                self.seen, self.next
            )));
        }
        if consumed == self.seen {
            return Ok(false);
        }
        self.byte_seen = self.ends[((consumed - 1) & MASK) as usize];
        self.seen = consumed;
        Ok(true)
    }

    fn put_bytes(&mut self, payload: &Payload) -> Result<bool, LaneError> {
        if payload.len > MAX_PAYLOAD {
            return Err(LaneError::Protocol(format!(
                "a frame of {} payload bytes; this lane carries {MAX_PAYLOAD}",
                payload.len
            )));
        }
        let (start, end) = reserve(self.byte_next, payload.len as u64, self.ring);
        if end - self.byte_seen > self.window {
            self.refresh()?;
            if end - self.byte_seen > self.window {
                return Ok(false);
            }
        }
        // SAFETY: `reserve` keeps start..start+len inside the ring without a wrap.
        let dst = unsafe { self.bytes.add((start & (self.ring - 1)) as usize) }.as_ptr();
        let permit = payload.grant.as_ref().map(|grant| grant.enter());
        if matches!(permit, Some(None)) {
            // SAFETY: as above. Taken back by its owner: the frame keeps its length, with filler.
            unsafe { dst.write_bytes(0, payload.len) };
        } else {
            // SAFETY: the payload is valid for `len` bytes while the permit is held; `dst` as above, and it is
            // memory that the consumer does not read before the slot says so.
            unsafe { payload.read(0, payload.len, dst) };
        }
        self.byte_next = end;
        Ok(true)
    }
}

fn put_inline(slot: &Slot, payload: &Payload) {
    if payload.len == 0 {
        return;
    }
    if payload.list.is_some() {
        return put_rows_inline(slot, payload);
    }
    match &payload.grant {
        // SAFETY: no grant: the memory outlives the call.
        None => unsafe { put_words(slot, payload.ptr, payload.len) },
        Some(grant) => match grant.enter() {
            // SAFETY: valid while the permit is held.
            Some(_permit) => unsafe { put_words(slot, payload.ptr, payload.len) },
            None => store_words(slot, [0; 3]),
        },
    }
}

/// [`put_inline`] of bytes of a list.
#[cold]
fn put_rows_inline(slot: &Slot, payload: &Payload) {
    let mut words = [0; 3];
    let permit = payload.grant.as_ref().map(|grant| grant.enter());
    if !matches!(permit, Some(None)) {
        // SAFETY: valid while the permit is held; the caller has checked that `words` has as many bytes.
        unsafe { payload.read(0, payload.len, words.as_mut_ptr().cast()) };
    }
    store_words(slot, words);
}

/// # Safety
/// `ptr` must be readable for `len` bytes, and `len` <= 24.
#[inline(never)]
unsafe fn put_words(slot: &Slot, ptr: *const u8, len: usize) {
    // SAFETY: by the contract.
    store_words(slot, unsafe { load_words(ptr, len) });
}

/// The consumer looks at as many words as the head says.
fn store_words(slot: &Slot, words: [u64; 3]) {
    for (word, value) in slot.words[4..].iter().zip(words) {
        word.store(value, Ordering::Relaxed);
    }
}

/// Up to 24 bytes as words, the rest zeros, without a call to memcpy.
///
/// # Safety
/// `ptr` must be readable for `len` bytes, and `len` <= 24.
#[inline]
unsafe fn load_words(ptr: *const u8, len: usize) -> [u64; 3] {
    let mut words = [0; 3];
    let whole = len / 8;
    for (i, word) in words.iter_mut().enumerate().take(whole) {
        // SAFETY: 8 * i + 8 <= len.
        *word = unsafe { ptr.add(8 * i).cast::<u64>().read_unaligned() };
    }
    if !len.is_multiple_of(8) {
        let mut tail = [0u8; 8];
        for (i, byte) in tail.iter_mut().enumerate().take(len % 8) {
            // SAFETY: 8 * whole + i < len.
            *byte = unsafe { *ptr.add(8 * whole + i) };
        }
        words[whole.min(2)] = u64::from_ne_bytes(tail);
    }
    words
}

/// A frame that has arrived; its payload stays where it is until [`Consumer::release`].
#[derive(Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) head: Head,
    /// Payload bytes, checked.
    pub(crate) len: usize,
    slot: NonNull<Slot>,
    /// In the byte ring; meaningless for inline payloads.
    bytes: *const u8,
}

impl Frame {
    /// Copies `len` payload bytes from byte `at` on.
    ///
    /// # Safety
    /// `dst` must be writable for `len` bytes, `at + len` <= `self.len`, and the frame not yet released.
    #[inline]
    pub(crate) unsafe fn copy_to(&self, dst: *mut u8, at: usize, len: usize) {
        if self.len <= INLINE {
            // SAFETY: inside the mapping, which the consumer keeps.
            let words = unsafe { &self.slot.as_ref().words };
            if len == 8 && at == 0 {
                // SAFETY: by the contract.
                unsafe { dst.cast::<u64>().write_unaligned(words[4].load(Ordering::Relaxed)) };
            } else {
                let inline = [4, 5, 6].map(|i| words[i].load(Ordering::Relaxed));
                let src = inline.as_ptr().cast::<u8>().wrapping_add(at);
                // SAFETY: by the contract; at + len <= 24, the bytes of `inline`.
                unsafe { dst.copy_from_nonoverlapping(src, len) };
            }
        } else {
            // SAFETY: by the contract; `Consumer::payload` checked that the payload lies inside the ring. A hostile
            // peer may change the bytes meanwhile: then garbage arrives, as it could have sent in the first place.
            unsafe { copy::bytes(dst, self.bytes.wrapping_add(at), len) };
        }
    }

    /// [`Frame::copy_to`] into rows, from byte `from` of the list on.
    ///
    /// # Safety
    /// The rows must be writable there for `len` bytes, and the rest as for `copy_to`.
    pub(crate) unsafe fn copy_to_rows(&self, list: &List, from: u64, at: usize, len: usize) {
        let mut words = [0u64; 3];
        let mut src = self.bytes.wrapping_add(at);
        if self.len <= INLINE {
            // SAFETY: by the contract; `len` <= 24, the bytes of `words`.
            unsafe { self.copy_to(words.as_mut_ptr().cast(), at, len) };
            src = words.as_ptr().cast();
        }
        // SAFETY: by the contract; `src` has `len` bytes, which a hostile peer may change meanwhile, as in `copy_to`.
        unsafe { list.copy_in(from, src, len as u64) };
    }
}

/// The receiving end.
pub(crate) struct Consumer {
    slots: NonNull<Slot>,
    bytes: NonNull<u8>,
    consumed: NonNull<AtomicU64>,
    ring: u64,
    /// Frames taken, and of those the ones the producer has been told of.
    next: u64,
    told: u64,
    byte_next: u64,
    byte_told: u64,
    _control: Arc<Control>,
}

// SAFETY: the pointers go into the mapping that `_control` keeps; nothing is tied to a thread.
unsafe impl Send for Consumer {}

impl Consumer {
    /// The receiving end of what `side` sends.
    pub(crate) fn new(control: &Arc<Control>, side: usize) -> Option<Consumer> {
        let fixed = control.fixed();
        Some(Consumer {
            slots: NonNull::from(&fixed.slots[side]).cast(),
            bytes: NonNull::new(control.bytes(side))?,
            consumed: NonNull::from(&fixed.consumed[side].0),
            ring: control.ring() as u64,
            next: 0,
            told: 0,
            byte_next: 0,
            byte_told: 0,
            _control: Arc::clone(control),
        })
    }

    #[inline]
    fn slot(&self) -> &Slot {
        // SAFETY: the index is below SLOTS, inside the mapping.
        unsafe { self.slots.add((self.next & MASK) as usize).as_ref() }
    }

    /// Whether there is something: a frame, or an error to report.
    #[inline]
    pub(crate) fn has_next(&self) -> bool {
        self.slot().seq.load(Ordering::Acquire) != self.stale()
    }

    /// The number of the next frame, from 1.
    pub(crate) fn at(&self) -> u64 {
        self.next + 1
    }

    /// What the next slot holds before the producer writes it.
    #[inline]
    fn stale(&self) -> u64 {
        (self.next + 1).saturating_sub(SLOTS as u64)
    }

    /// Whether the ring holds a frame: one cache line is looked at.
    #[inline]
    pub(crate) fn is_ready(&self) -> Result<bool, LaneError> {
        let seq = self.slot().seq.load(Ordering::Acquire);
        if seq == self.next + 1 {
            return Ok(true);
        }
        if seq == self.stale() { Ok(false) } else { Err(self.wrong(seq)) }
    }

    /// The oldest frame in the ring, which [is there](Consumer::is_ready).
    #[inline]
    pub(crate) fn frame(&self) -> Result<Frame, LaneError> {
        let slot = self.slot();
        let head = read_head(slot);
        let len = head.payload_len() as usize;
        let bytes = if len <= INLINE { std::ptr::null() } else { self.payload(len)? };
        Ok(Frame { head, len, slot: NonNull::from(slot), bytes })
    }

    /// Whether there is a frame whose payload lies in its slot; the head of the oldest one is written to `head` then.
    #[inline]
    pub(crate) fn inline_head(&self, head: &mut Head) -> bool {
        let slot = self.slot();
        if slot.seq.load(Ordering::Acquire) != self.next + 1 {
            return false;
        }
        // Read once, as a word: what is checked here is what the caller gets.
        let first = slot.words[0].load(Ordering::Relaxed);
        if (first >> 32) as usize > INLINE {
            return false;
        }
        let words = [&slot.words[1], &slot.words[2], &slot.words[3]].map(|word| word.load(Ordering::Relaxed));
        for (bytes, word) in head.0.as_chunks_mut::<8>().0.iter_mut().zip(iter::once(first).chain(words)) {
            *bytes = word.to_le_bytes();
        }
        true
    }

    /// Copies the payload of that frame to `dst`, or nowhere if that is null, and is done with it. `len`: the length in
    /// its head, which the peer may have changed in the slot since. True: it is time to `publish`.
    ///
    /// # Safety
    /// `dst` must be null or writable for `len` bytes, and [`Consumer::inline_head`] have found the frame.
    #[inline(always)]
    pub(crate) unsafe fn take_inline(&mut self, dst: *mut u8, len: usize) -> bool {
        let slot = self.slot();
        if !dst.is_null() && len == 8 {
            // SAFETY: by the contract.
            unsafe { dst.cast::<u64>().write_unaligned(slot.words[4].load(Ordering::Relaxed)) };
        } else if !dst.is_null() {
            // SAFETY: by the contract.
            unsafe { copy_words(slot, dst, len.min(INLINE)) };
        }
        self.next += 1;
        self.next - self.told >= SLOTS as u64 / 8
    }

    /// Where the oldest frame's payload lies in the byte ring.
    fn payload(&self, len: usize) -> Result<*const u8, LaneError> {
        if len > MAX_PAYLOAD {
            return Err(LaneError::Protocol(format!(
                "a frame of {len} payload bytes; this lane carries {MAX_PAYLOAD}"
            )));
        }
        let (start, _) = reserve(self.byte_next, len as u64, self.ring);
        // SAFETY: `reserve` keeps start..start+len inside the ring without a wrap.
        Ok(unsafe { self.bytes.add((start & (self.ring - 1)) as usize) }.as_ptr())
    }

    #[cold]
    fn wrong(&self, seq: u64) -> LaneError {
        LaneError::Protocol(format!("a slot has sequence {seq} where {} is due", self.next + 1))
    }

    /// Done with the oldest frame. True: it is time to `publish`.
    #[inline]
    pub(crate) fn release(&mut self, frame: &Frame) -> bool {
        self.next += 1;
        if frame.len > INLINE {
            self.byte_next = reserve(self.byte_next, frame.len as u64, self.ring).1;
        }
        self.next - self.told >= SLOTS as u64 / 8 || self.byte_next - self.byte_told >= self.ring / 16
    }

    /// Whether frames were taken that the producer has not been told of.
    #[inline]
    pub(crate) fn owes(&self) -> bool {
        self.told != self.next
    }

    /// Tells the producer how far we are.
    #[inline]
    pub(crate) fn publish(&mut self) {
        self.told = self.next;
        self.byte_told = self.byte_next;
        // SAFETY: inside the mapping. Release: our reads of the slots come before.
        unsafe { self.consumed.as_ref() }.store(self.next, Ordering::Release);
    }
}

/// Copies the first `len` bytes of a payload in its slot.
///
/// # Safety
/// `dst` must be writable for `len` bytes, and `len` <= 24.
#[inline(never)]
unsafe fn copy_words(slot: &Slot, dst: *mut u8, len: usize) {
    let inline = [4, 5, 6].map(|i: usize| slot.words[i].load(Ordering::Relaxed));
    // SAFETY: by the contract.
    unsafe { dst.copy_from_nonoverlapping(inline.as_ptr().cast(), len) };
}

#[inline]
fn read_head(slot: &Slot) -> Head {
    let mut head = [0; 32];
    for (bytes, word) in head.as_chunks_mut::<8>().0.iter_mut().zip(&slot.words) {
        *bytes = word.load(Ordering::Relaxed).to_le_bytes();
    }
    Head(head)
}

#[cfg(all(test, not(loom)))]
mod tests;
