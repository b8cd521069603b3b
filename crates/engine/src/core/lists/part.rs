//! Parts of lists, as the tables' entries have them.
#![allow(unsafe_code)]

use std::sync::Arc;

use crossrail_gpu::Device;
use crossrail_transport::{List, Loan};
use crossrail_types::Result;
use proto::Offer;

use crossrail_proto as proto;

use crate::core::returns::{Owner, Returns};

/// First byte of an offer that stands for the pair in a view. No lane's descriptor begins so.
pub(super) const PAIRED: u8 = 0xfe;

/// Bytes of a list, from a position on.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) list: Arc<List>,
    pub(crate) from: u64,
    /// The GPU whose memory the rows are; `None`: host memory.
    pub(crate) gpu: Option<Arc<Device>>,
}

impl Part {
    /// Copies the first bytes of the part to `to`, synchronously.
    ///
    /// # Safety
    /// The rows must be readable memory of the host or of that GPU.
    ///
    /// # Errors
    /// Why the GPU's driver refuses.
    pub(super) unsafe fn copy_out(&self, to: &mut [u8]) -> Result<()> {
        let Some(gpu) = &self.gpu else {
            // SAFETY: by the contract.
            unsafe { self.list.copy_out(self.from, to.as_mut_ptr(), to.len() as u64) };
            return Ok(());
        };
        let (mut cursor, mut rest) = (self.list.cursor(self.from), to);
        while let Some((at, len)) = cursor.piece(rest.len() as u64) {
            let (row, after) = rest.split_at_mut(len as usize);
            gpu.copy_out(at, row)?;
            rest = after;
        }
        Ok(())
    }

    /// Copies bytes to the part's beginning, synchronously.
    ///
    /// # Safety
    /// The rows must be writable memory of the host or of that GPU.
    ///
    /// # Errors
    /// As [`Part::copy_out`].
    unsafe fn copy_in(&self, from: &[u8]) -> Result<()> {
        let Some(gpu) = &self.gpu else {
            // SAFETY: by the contract.
            unsafe { self.list.copy_in(self.from, from.as_ptr(), from.len() as u64) };
            return Ok(());
        };
        let (mut cursor, mut rest) = (self.list.cursor(self.from), from);
        while let Some((at, len)) = cursor.piece(rest.len() as u64) {
            let (row, after) = rest.split_at(len as usize);
            gpu.copy_in(at, row)?;
            rest = after;
        }
        Ok(())
    }
}

/// Memory of a lane that takes no lists: bytes for one arrive there.
#[derive(Default)]
pub(in crate::core) struct RowsBuffer {
    bytes: Vec<u8>,
    target: Option<(Part, Arc<Loan>)>,
}

impl RowsBuffer {
    /// Memory for `len` bytes that go to `part`. What a lane keeps of former bytes that were given up is waited for.
    pub(super) fn buffer(&mut self, part: Part, len: usize, loan: Arc<Loan>, returns: &mut Returns) -> *mut u8 {
        if let Some((_, loan)) = self.target.take()
            && !loan.keepers().is_empty()
        {
            returns.await_loan(Owner::Memory(std::mem::take(&mut self.bytes).into()), loan);
        }
        self.bytes.resize(len, 0);
        self.target = Some((part, loan));
        self.bytes.as_mut_ptr()
    }

    /// Copies the bytes that have arrived to their rows. Nothing if the memory was taken back meanwhile.
    ///
    /// # Errors
    /// Why a GPU's driver refuses; the lane must fail then.
    pub(in crate::core) fn deliver(&mut self) -> std::result::Result<(), String> {
        let Some((part, loan)) = self.target.take() else { return Ok(()) };
        match loan.enter() {
            // SAFETY: rows of an operation or of regions, which the loan keeps.
            Some(_permit) => unsafe { part.copy_in(&self.bytes) }.map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }
}

/// What follows the end of an operation.
#[derive(Debug)]
pub(crate) enum Then {
    /// If it was good, the peer is to be notified.
    Notify(Vec<u8>),
    /// If it was not, the peer may still hold the notice of that id, which was to be raised with its last byte.
    Forget(u32),
}

/// Whether an offer stands for the pair in a view.
pub(in crate::core) fn is_paired(offer: &Offer) -> bool {
    offer.descriptor[0] == PAIRED
}
