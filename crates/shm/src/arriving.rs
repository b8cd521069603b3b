//! A frame on its way out of the ring.
#![allow(unsafe_code)]

use std::sync::Arc;

use crossrail_transport::{LaneError, List, Loan, Place};

use crate::ring::Frame;

/// A frame that is being copied to its place, in one poll or over several.
pub(crate) struct Arriving {
    frame: Frame,
    target: Target,
    /// Bytes wanted of it, and bytes gone through.
    len: usize,
    at: usize,
    grant: Option<Arc<Loan>>,
    /// `None`: discarded.
    token: Option<u64>,
}

// SAFETY: describes memory; whoever calls `go_on` answers for touching it, on whichever thread.
unsafe impl Send for Arriving {}

/// Where a payload goes.
enum Target {
    Flat(*mut u8),
    /// To rows, from that byte of the list on.
    Rows(Arc<List>, u64),
}

impl Arriving {
    /// `None`: it has no place at present.
    #[inline]
    pub(crate) fn new(frame: Frame, place: Place) -> Result<Option<Arriving>, LaneError> {
        let (target, len, grant, token) = match place {
            Place::Into { dst, len, grant, token } => (Target::Flat(dst), len, grant, Some(token)),
            Place::Rows { list, from, len, grant, token } => (Target::Rows(list, from), len, grant, Some(token)),
            Place::Discard => (Target::Flat(std::ptr::null_mut()), 0, None, None),
            Place::Wait => return Ok(None),
            Place::Refuse(why) => return Err(LaneError::Protocol(why)),
        };
        Ok(Some(Arriving { frame, target, len: len.min(frame.len), at: 0, grant, token }))
    }

    /// Bytes that it has not gone through.
    pub(crate) fn left(&self) -> usize {
        self.frame.len - self.at
    }

    /// Goes through the next `len` bytes, which are not more than are left. Once it has gone through all: the frame,
    /// and the token of a place that has all of it, which a discarded frame and a recalled loan have not.
    ///
    /// # Safety
    /// The place must be writable for the bytes wanted of it, unless its loan was recalled.
    #[inline]
    pub(crate) unsafe fn go_on(&mut self, len: usize) -> Option<(Frame, Option<u64>)> {
        let wanted = len.min(self.len - self.at.min(self.len));
        let permit = self.grant.as_ref().map(|grant| grant.enter());
        let revoked = matches!(permit, Some(None));
        if wanted > 0 && !revoked {
            match &self.target {
                // SAFETY: by the contract, while the permit is held; `at + wanted` is not more than `len`, nor than the
                // frame has.
                Target::Flat(dst) => unsafe { self.frame.copy_to(dst.wrapping_add(self.at), self.at, wanted) },
                // SAFETY: as above.
                Target::Rows(list, from) => unsafe {
                    self.frame.copy_to_rows(list, from + self.at as u64, self.at, wanted);
                },
            }
        }
        drop(permit);
        self.at += len;
        (self.at >= self.frame.len).then(|| (self.frame, self.token.filter(|_| !revoked)))
    }
}
