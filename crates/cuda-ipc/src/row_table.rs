//! Memory for the tables of kernels that move rows.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex};

use crossrail_cuda::{Context, DeviceMemory, PinnedMemory, Stream};
use crossrail_types::Result;

use crate::lock::locked;

/// The least size of a table in bytes: most moves need no more, so that it is allocated once.
const LEAST: usize = 2 << 20;
/// Maximum number of tables kept for reuse.
const MAX_KEPT: usize = 4;

/// Pinned memory where the host writes a table, and memory of the GPU where a kernel reads it.
pub(crate) struct RowTable {
    pinned: PinnedMemory,
    device: DeviceMemory,
}

/// The tables of one GPU that no launch reads.
#[derive(Default)]
pub(crate) struct RowTables(Mutex<Vec<RowTable>>);

/// A table with one user. It is reused once this is dropped, so it must be leaked if a kernel may still read it.
pub(crate) struct LentTable {
    tables: Arc<RowTables>,
    table: Option<RowTable>,
}

impl LentTable {
    /// A table of at least `words` words, for the GPU of `context`.
    ///
    /// # Errors
    /// `Exhausted`: no memory; a failed driver call.
    pub(crate) fn take(tables: &Arc<RowTables>, context: &Context, words: usize) -> Result<LentTable> {
        let kept = {
            let mut kept = locked(&tables.0);
            let fits = kept.iter().position(|table| table.pinned.len() / 8 >= words);
            fits.map(|at| kept.swap_remove(at))
        };
        let table = match kept {
            Some(table) => table,
            None => {
                let len = (8 * words).next_power_of_two().max(LEAST);
                let pinned = PinnedMemory::new(context, len)?;
                // SAFETY: the memory is new and of this length.
                unsafe { std::ptr::write_bytes(pinned.as_ptr(), 0, len) };
                RowTable { pinned, device: DeviceMemory::new(context, len)? }
            }
        };
        Ok(LentTable { tables: Arc::clone(tables), table: Some(table) })
    }

    /// The words of the table, and the address at which a kernel will read them.
    pub(crate) fn words(&mut self) -> (&mut [u64], u64) {
        match &mut self.table {
            // SAFETY: aligned to a page, initialised, and of this length; the previous user's kernel has ended.
            Some(RowTable { pinned, device }) => unsafe {
                (std::slice::from_raw_parts_mut(pinned.as_ptr().cast(), pinned.len() / 8), device.address())
            },
            None => (&mut [], 0),
        }
    }

    /// Enqueues the copy of the first `words` words to the GPU.
    ///
    /// # Errors
    /// A failed driver call.
    pub(crate) fn upload(&self, stream: &Stream, words: usize) -> Result<()> {
        let Some(table) = &self.table else { return Ok(()) };
        // SAFETY: both are as long as that, and this table's user alone uses them until the stream has done so.
        unsafe { stream.copy_in(table.device.address(), table.pinned.as_ptr(), 8 * words) }
    }
}

impl Drop for LentTable {
    fn drop(&mut self) {
        let mut tables = locked(&self.tables.0);
        if tables.len() < MAX_KEPT {
            tables.extend(self.table.take());
        }
    }
}
