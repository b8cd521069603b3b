//! State that UCX's callbacks update for the lane.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::c_void;

use crossrail_types::Head;

use crate::raw::{self, AmRecvParam, Ep, Status};
use crate::wire::{self, FRAMES, Kind, MESSAGE_MAX, PIECE_MAX, PIECES, slot};

/// A piece that the peer offers and that has not been fetched: UCX's descriptor and the piece's length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    pub(crate) descriptor: *mut c_void,
    pub(crate) len: usize,
}

/// What has arrived, for the lane. UCX's callbacks run only inside calls that the lane makes, so no borrow may be held
/// across such a call.
pub(crate) struct Inbox(RefCell<Arrived>);

struct Arrived {
    /// Buffers of [`MESSAGE_MAX`] bytes, one for each frame that may be outstanding.
    messages: Box<[u8]>,
    /// Those that hold no message. The last one used is the next one, because it is in a cache.
    free: Vec<u8>,
    /// By number modulo [`FRAMES`]: the message's buffer and its length, 0 where there is none.
    frames: [(u8, u32); FRAMES as usize],
    /// Number of the next frame to be taken.
    next_frame: u32,
    offers: [Option<Offer>; PIECES as usize],
    /// Number of the next piece to be fetched.
    next_piece: u32,
    /// The peer's first message has arrived.
    hello: bool,
    /// Frames that the peer says it has consumed, of those that were sent.
    consumed: u32,
    sent: u32,
    /// The peer's protocol violation.
    fault: Option<String>,
    /// UCX has given the connection up.
    failed: Option<Status>,
}

impl Inbox {
    pub(crate) fn new() -> Inbox {
        Inbox(RefCell::new(Arrived {
            messages: vec![0; FRAMES as usize * MESSAGE_MAX].into_boxed_slice(),
            free: (0..FRAMES as u8).rev().collect(),
            frames: [(0, 0); FRAMES as usize],
            next_frame: 0,
            offers: [None; PIECES as usize],
            next_piece: 0,
            hello: false,
            consumed: 0,
            sent: 0,
            fault: None,
            failed: None,
        }))
    }

    pub(crate) fn has_hello(&self) -> bool {
        self.0.borrow().hello
    }

    /// UCX's error that ended the connection.
    pub(crate) fn failed(&self) -> Option<Status> {
        self.0.borrow().failed
    }

    /// What the peer did wrong.
    pub(crate) fn fault(&self) -> Option<String> {
        self.0.borrow().fault.clone()
    }

    // ---- what this end sends

    /// Counts a frame that is about to be sent; `None`: the peer has not consumed enough of those before.
    pub(crate) fn number_frame(&self) -> Option<u32> {
        let arrived = &mut *self.0.borrow_mut();
        if arrived.sent.wrapping_sub(arrived.consumed) >= FRAMES {
            return None;
        }
        let number = arrived.sent;
        arrived.sent = number.wrapping_add(1);
        Some(number)
    }

    pub(crate) fn may_send(&self) -> bool {
        let arrived = self.0.borrow();
        arrived.sent.wrapping_sub(arrived.consumed) < FRAMES
    }

    /// Frames sent so far.
    pub(crate) fn sent(&self) -> u32 {
        self.0.borrow().sent
    }

    // ---- what the peer has sent

    /// Frames consumed so far.
    pub(crate) fn taken(&self) -> u32 {
        self.0.borrow().next_frame
    }

    pub(crate) fn has_frame(&self) -> bool {
        let arrived = self.0.borrow();
        arrived.frames[slot(arrived.next_frame, FRAMES)].1 > 0
    }

    /// Calls `use_it` with the next frame's head and inline payload, and takes the frame if that returns true.
    pub(crate) fn next_frame(&self, use_it: impl FnOnce(Head, &[u8]) -> bool) {
        let arrived = &mut *self.0.borrow_mut();
        let at = slot(arrived.next_frame, FRAMES);
        let (buffer, len) = arrived.frames[at];
        let bytes = &arrived.messages[buffer as usize * MESSAGE_MAX..][..len as usize];
        // It was read when it arrived.
        let Ok((_, _, Some((head, inline)))) = wire::message(bytes) else { return };
        if use_it(head, inline) {
            arrived.frames[at].1 = 0;
            arrived.free.push(buffer);
            arrived.next_frame = arrived.next_frame.wrapping_add(1);
        }
    }

    pub(crate) fn has_offer(&self) -> bool {
        let arrived = self.0.borrow();
        arrived.offers[slot(arrived.next_piece, PIECES)].is_some()
    }

    /// The next piece that the peer offers, with its number.
    pub(crate) fn next_offer(&self) -> Option<(u32, Offer)> {
        let arrived = &mut *self.0.borrow_mut();
        let number = arrived.next_piece;
        let offer = arrived.offers[slot(number, PIECES)].take()?;
        arrived.next_piece = number.wrapping_add(1);
        Some((number, offer))
    }

    /// All offers, for release.
    pub(crate) fn take_offers(&self) -> Vec<Offer> {
        self.0.borrow_mut().offers.iter_mut().filter_map(Option::take).collect()
    }
}

impl Arrived {
    fn message(&mut self, bytes: &[u8]) -> Result<(), String> {
        if bytes.len() > MESSAGE_MAX {
            return Err(format!("a message of {} bytes, of {MESSAGE_MAX} at most", bytes.len()));
        }
        let (kind, consumed, _) = wire::message(bytes)?;
        count(&mut self.consumed, consumed, self.sent)?;
        match kind {
            Kind::Hello => self.hello = true,
            Kind::Credit => {}
            Kind::Frame(number) => {
                let at = slot(number, FRAMES);
                let free = self.free.last().copied();
                let (false, Some(buffer)) =
                    (number.wrapping_sub(self.next_frame) >= FRAMES || self.frames[at].1 > 0, free)
                else {
                    return Err(format!("frame {number} came when {} was next", self.next_frame));
                };
                self.free.pop();
                self.messages[buffer as usize * MESSAGE_MAX..][..bytes.len()].copy_from_slice(bytes);
                self.frames[at] = (buffer, bytes.len() as u32);
            }
        }
        Ok(())
    }

    fn offer(&mut self, header: &[u8], offer: Offer) -> Result<(), String> {
        let number = wire::piece(header).ok_or_else(|| format!("a piece with a header of {} bytes", header.len()))?;
        if offer.len == 0 || offer.len > PIECE_MAX {
            return Err(format!("a piece of {} bytes, of {PIECE_MAX} at most", offer.len));
        }
        let entry = &mut self.offers[slot(number, PIECES)];
        if number.wrapping_sub(self.next_piece) >= PIECES || entry.is_some() {
            return Err(format!("piece {number} came when {} was next", self.next_piece));
        }
        *entry = Some(offer);
        Ok(())
    }
}

/// Processes the peer's count of consumed frames, out of `sent`. If two messages were reordered, the later one carries
/// the lower count, lower by [`FRAMES`] at most.
fn count(consumed: &mut u32, told: u32, sent: u32) -> Result<(), String> {
    if consumed.wrapping_sub(told) <= FRAMES {
        return Ok(());
    }
    if told.wrapping_sub(*consumed) > sent.wrapping_sub(*consumed) {
        return Err(format!("it says that it consumed {told} frames of {sent}"));
    }
    *consumed = told;
    Ok(())
}

const _: () = assert!(FRAMES.is_power_of_two() && FRAMES <= 1 << 8 && PIECES.is_power_of_two());

/// The bytes that a callback was given.
///
/// # Safety
/// `ptr` must be valid for `len` bytes for as long as the slice is used, unless `len` is 0.
unsafe fn bytes<'a>(ptr: *const c_void, len: usize) -> &'a [u8] {
    if len == 0 || ptr.is_null() {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts(ptr.cast(), len) }
}

/// UCX's callback for messages; `arg` is the [`Inbox`].
pub(crate) unsafe extern "C" fn on_message(
    arg: *mut c_void,
    _header: *const c_void,
    _header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const AmRecvParam,
) -> Status {
    // SAFETY: the argument given with the handler; the inbox outlives the worker.
    let inbox = unsafe { &*arg.cast::<Inbox>() };
    let arrived = &mut *inbox.0.borrow_mut();
    // SAFETY: UCX passes its parameters.
    let result = match unsafe { (*param).recv_attr } & raw::RECV_RNDV {
        // SAFETY: `len` bytes are at `data`, because it is no rendezvous.
        0 => arrived.message(unsafe { bytes(data, len) }),
        _ => Err("a message came by rendezvous".to_owned()),
    };
    if let Err(why) = result {
        arrived.fault.get_or_insert(why);
    }
    raw::OK
}

/// UCX's callback for pieces; `arg` is the [`Inbox`].
pub(crate) unsafe extern "C" fn on_piece(
    arg: *mut c_void,
    header: *const c_void,
    header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const AmRecvParam,
) -> Status {
    // SAFETY: as above.
    let inbox = unsafe { &*arg.cast::<Inbox>() };
    let arrived = &mut *inbox.0.borrow_mut();
    // SAFETY: UCX passes its parameters, and `header_len` bytes at `header`.
    let (attr, header) = unsafe { ((*param).recv_attr, bytes(header, header_len)) };
    let result = match attr & raw::RECV_RNDV {
        0 => Err("a piece came without a rendezvous".to_owned()),
        _ => arrived.offer(header, Offer { descriptor: data, len }),
    };
    match result {
        // The descriptor is ours until it is fetched or released.
        Ok(()) => raw::IN_PROGRESS,
        Err(why) => {
            arrived.fault.get_or_insert(why);
            raw::OK
        }
    }
}

/// UCX's callback for a connection that it gives up; `arg` is the [`Inbox`].
pub(crate) unsafe extern "C" fn on_error(arg: *mut c_void, _ep: Ep, status: Status) {
    // SAFETY: as above.
    let inbox = unsafe { &*arg.cast::<Inbox>() };
    inbox.0.borrow_mut().failed.get_or_insert(status);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{PREFIX_LEN, prefix};

    fn frame(number: u32, consumed: u32) -> Vec<u8> {
        let mut bytes = prefix(Kind::Frame(number), consumed).to_vec();
        bytes.extend(Head::new(1, 0).0);
        bytes
    }

    #[test]
    fn frames_out_of_order_are_taken_in_order() {
        let inbox = Inbox::new();
        for number in [1, 0, 2] {
            inbox.0.borrow_mut().message(&frame(number, 0)).expect("in the window");
        }
        for taken in 1..=3 {
            inbox.next_frame(|_, _| true);
            assert_eq!(inbox.taken(), taken);
        }
        assert!(!inbox.has_frame());
    }

    #[test]
    fn counts_out_of_order_take_no_credit_away() {
        let inbox = Inbox::new();
        (0..FRAMES).for_each(|number| assert_eq!(inbox.number_frame(), Some(number)));
        inbox.0.borrow_mut().message(&frame(1, 2)).expect("two were consumed");
        inbox.0.borrow_mut().message(&frame(0, 1)).expect("it was overtaken");
        assert_eq!((inbox.number_frame(), inbox.number_frame()), (Some(FRAMES), Some(FRAMES + 1)));
        assert_eq!(inbox.number_frame(), None);
    }

    #[test]
    fn what_the_peer_may_not_send_is_named() {
        let inbox = Inbox::new();
        let send = |bytes: &[u8]| inbox.0.borrow_mut().message(bytes);
        send(&frame(0, 0)).expect("the first");
        for (bytes, expected) in [
            (frame(0, 0), "frame 0 came"),
            (frame(FRAMES, 0), "came when 0 was next"),
            (frame(u32::MAX, 0), "came when 0 was next"),
            (frame(1, 1), "consumed 1 frames of 0"),
            (vec![2; PREFIX_LEN - 1], "shorter"),
            (vec![2; MESSAGE_MAX + 1], "at most"),
        ] {
            let error = send(&bytes).expect_err("refused");
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(inbox.number_frame(), Some(0));
        send(&frame(1, 1)).expect("one was sent, and consumed");
        let offer = |number: u32, len| {
            inbox.0.borrow_mut().offer(&number.to_le_bytes(), Offer { descriptor: std::ptr::null_mut(), len })
        };
        offer(0, 1).expect("the first");
        for (number, len) in [(0, 1), (PIECES, 1), (1, 0), (1, PIECE_MAX + 1)] {
            assert!(offer(number, len).is_err(), "{number} {len}");
        }
        assert!(inbox.0.borrow_mut().offer(&[0; 3], Offer { descriptor: std::ptr::null_mut(), len: 1 }).is_err());
    }

    #[test]
    fn frames_wait_for_credit() {
        let inbox = Inbox::new();
        for number in 0..FRAMES {
            assert_eq!(inbox.number_frame(), Some(number));
        }
        assert_eq!(inbox.number_frame(), None);
        inbox.0.borrow_mut().message(&prefix(Kind::Credit, 1)).expect("credit");
        assert_eq!(inbox.number_frame(), Some(FRAMES));
    }
}
