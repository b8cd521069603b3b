//! Reads of GPU memory by the host, beside whatever streams do.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail_cuda::{Context, Event, PinnedMemory, Stream};
use crossrail_locks::Mutex;
use crossrail_types::Result;

/// Reads GPU memory, on a stream of its own, that no kernel writes any more.
pub(crate) struct Reader {
    context: Context,
    parts: Mutex<Option<Parts>>,
}

struct Parts {
    stream: Stream,
    done: Event,
    area: PinnedMemory,
}

/// Bytes read at once.
const AREA: usize = 1 << 18;
const READ_LIMIT: Duration = Duration::from_secs(10);

impl Reader {
    /// Creates stream and pinned memory only at the first read.
    pub(crate) fn new(context: &Context) -> Reader {
        Reader { context: context.clone(), parts: Mutex::default() }
    }

    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let mut kept = self.parts.lock();
        let parts = match kept.take() {
            Some(parts) => parts,
            None => Parts {
                stream: Stream::urgent(&self.context)?,
                done: Event::new(&self.context)?,
                area: PinnedMemory::new(&self.context, AREA)?,
            },
        };
        // `parts` was taken out: if a read times out, its pinned memory is not reused while the copy may still write
        // it.
        for (part, at) in bytes.chunks_mut(AREA).zip((address..).step_by(AREA)) {
            // SAFETY: the area has that many bytes and no copy uses it; kernels are done with the source.
            unsafe { parts.stream.copy_out(parts.area.as_ptr(), at, part.len())? };
            parts.done.record(&parts.stream)?;
            parts.done.wait(READ_LIMIT)?;
            // SAFETY: as above; the copy is done.
            unsafe { std::ptr::copy_nonoverlapping(parts.area.as_ptr(), part.as_mut_ptr(), part.len()) };
        }
        *kept = Some(parts);
        Ok(())
    }
}
