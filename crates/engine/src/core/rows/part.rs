//! Parts of lists, as the tables' entries have them.
#![allow(unsafe_code)]

use std::sync::Arc;

use crossrail_gpu::{ChunkMemory, Device};
use crossrail_transport::{List, Loan};
use proto::Offer;

use crossrail_proto as proto;

use crate::core::returns::{Owner, Returns};

/// First byte of an offer that stands for the pair in a view. No lane's descriptor begins so.
pub(in crate::core) const PAIRED: u8 = 0xfe;

/// Bytes of a list, from a position on.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) list: Arc<List>,
    pub(crate) from: u64,
    /// The GPU whose memory the rows are; `None`: host memory.
    pub(crate) gpu: Option<Arc<Device>>,
}

impl Part {
    /// The device memory of `len` bytes from `offset` on, and its GPU; `None`: host memory.
    pub(in crate::core) fn on_gpu(&self, offset: u64, len: u64) -> Option<(ChunkMemory, u32)> {
        let gpu = self.gpu.as_ref()?;
        let (mut cursor, mut left) = (self.list.cursor(self.from + offset), len);
        let next = || {
            let piece = cursor.piece(left).filter(|_| left > 0)?;
            left -= piece.1;
            Some(piece)
        };
        Some((ChunkMemory::Pieces(std::iter::from_fn(next).collect()), gpu.ordinal()))
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
    pub(in crate::core) fn buffer(
        &mut self,
        part: Part,
        len: usize,
        loan: Arc<Loan>,
        returns: &mut Returns,
    ) -> *mut u8 {
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
    pub(in crate::core) fn deliver(&mut self) {
        let Some((part, loan)) = self.target.take() else { return };
        if let Some(_permit) = loan.enter() {
            // SAFETY: host memory of an operation or of regions, which the loan keeps.
            unsafe { part.list.copy_in(part.from, self.bytes.as_ptr(), self.bytes.len() as u64) };
        }
    }
}

/// What follows the end of an operation.
#[derive(Debug)]
pub(crate) enum FollowUp {
    /// If it was good, the peer is to count an immediate in that region, and to be notified unless there are no bytes.
    Notify(Option<(proto::RegionKey, u32)>, Vec<u8>),
    /// If it was not, the peer may still hold the notice of that id, which was to be raised with its last byte.
    Forget(u32),
}

/// Whether an offer stands for the pair in a view.
pub(in crate::core) fn is_paired(offer: &Offer) -> bool {
    offer.descriptor[0] == PAIRED
}
