//! One GPU of this process, with its pools of copy streams and completion words.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crossrail_cuda::{Context, Device};
use crossrail_kernels::Kernels;
use crossrail_types::{Result, Settings};

use crate::completion_word::WordPool;
use crate::copy_stream::CopyStream;
use crate::lock::locked;
use crate::note::Uuid;
use crate::row_table::RowTables;
use crate::schedule::CopySchedule;

/// Maximum number of idle streams kept for reuse.
const MAX_IDLE: usize = 32;

/// One GPU of this process. Shared by all links; may be used from any thread.
pub(crate) struct Gpu {
    pub(crate) context: Context,
    pub(crate) uuid: Uuid,
    /// The order of long copies to and from this GPU.
    pub(crate) schedule: Arc<CopySchedule>,
    /// Whether streams can write 64-bit words.
    writes_words: bool,
    words: WordPool,
    idle: Mutex<Vec<CopyStream>>,
    /// The number of copies started.
    copies: AtomicU64,
    /// Row kernels and their maximum number of blocks, or why there are none. Empty until [`Gpu::load_kernels`].
    kernels: OnceLock<std::result::Result<(Arc<Kernels>, u32), String>>,
    /// Tables of launches that move rows.
    pub(crate) tables: Arc<RowTables>,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({})", self.ordinal())
    }
}

impl Gpu {
    pub(crate) fn new(device: &Device, uuid: Uuid) -> Result<Gpu> {
        let context = Context::primary(device)?;
        let writes_words = device.has_64bit_stream_ops()?;
        Ok(Gpu {
            context,
            uuid,
            schedule: Arc::new(CopySchedule::new(uuid)),
            writes_words,
            words: WordPool::default(),
            idle: Mutex::default(),
            copies: AtomicU64::new(0),
            kernels: OnceLock::new(),
            tables: Arc::default(),
        })
    }

    /// Loads the row kernels, once. May take seconds if they must be compiled.
    pub(crate) fn load_kernels(&self, settings: &Settings) {
        self.kernels.get_or_init(|| match settings.gpu_sms {
            0 => Err("CROSSRAIL_GPU_SMS=0".to_owned()),
            blocks => crossrail_kernels::shared(&self.context, settings, settings.timeout)
                .map(|kernels| (kernels, blocks))
                .map_err(|error| error.to_string()),
        });
    }

    /// Row kernels and their maximum number of blocks; `Err`: why there are none.
    pub(crate) fn kernels(&self) -> std::result::Result<(&Kernels, u32), &str> {
        match self.kernels.get() {
            Some(Ok((kernels, blocks))) => Ok((kernels, *blocks)),
            Some(Err(why)) => Err(why),
            None => Err("the kernels were not loaded"),
        }
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.context.device().ordinal()
    }

    /// Counts a copy that was started.
    pub(crate) fn count_copy(&self) {
        self.copies.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of copies started.
    pub(crate) fn copies(&self) -> u64 {
        self.copies.load(Ordering::Relaxed)
    }

    /// A stream for exclusive use: an idle one or a new one.
    pub(crate) fn take_stream(&self) -> Result<CopyStream> {
        let idle = locked(&self.idle).pop();
        idle.map_or_else(|| CopyStream::new(&self.context, &self.words, self.writes_words), Ok)
    }

    /// Takes a stream back. It is kept for reuse if it is idle, otherwise destroyed; enqueued work still executes.
    pub(crate) fn put_back(&self, stream: CopyStream) {
        if stream.is_idle() {
            let mut idle = locked(&self.idle);
            if idle.len() < MAX_IDLE {
                idle.push(stream);
                return;
            }
        }
        stream.destroy(&self.words);
    }
}
