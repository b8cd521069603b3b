//! Registered memory that peers may write and read by key.

use std::sync::Arc;
use std::time::Duration;

use crossrail_proto as proto;
use crossrail_types::{Error, ErrorKind, Result};

use crate::memory::regions::{Counted, IMMEDIATES_MAX};
use crate::memory::{Buffer, Place, RegionKey, check_mapped};
use crate::progress::{self, Progress};

/// Memory that peers with its key may write and read, until it is deregistered or the last clone is dropped.
#[derive(Clone)]
pub struct Region(Arc<Registered>);

struct Registered {
    progress: Arc<Progress>,
    region: proto::RegionRef,
    base: u64,
    key: RegionKey,
}

impl Region {
    pub(crate) fn register(progress: &Arc<Progress>, mut buffer: Buffer) -> Result<Region> {
        progress::admit(progress, &mut buffer)?;
        if buffer.gpu.is_none() {
            check_mapped("register", buffer.ptr as usize, buffer.len)?;
        }
        if let Some(gpu) = &mut buffer.gpu
            && let Some(after) = gpu.after.take()
        {
            // Peers may come at any time from now on.
            progress::wait_ready(progress, gpu.ordinal, &after, "register")?;
        }
        let mut secret = [0; 16];
        getrandom::fill(&mut secret)
            .map_err(|error| Error::new(ErrorKind::Io, "register", format!("no random bytes: {error}")))?;
        let mut core = progress.core();
        if core.is_closed() {
            return Err(crate::core::gone("register"));
        }
        let base = buffer.ptr as u64;
        let (region, key) = core.transfers().regions().insert(buffer, secret);
        drop(core);
        Ok(Region(Arc::new(Registered { progress: progress.clone(), region, base, key })))
    }

    /// What a peer needs to access it.
    pub fn key(&self) -> RegionKey {
        self.0.key.clone()
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.0.key.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of its first byte.
    pub fn base(&self) -> u64 {
        self.0.base
    }

    /// Where it is.
    pub fn place(&self) -> Place {
        self.0.key.place()
    }

    /// Whether it is another clone of this one.
    pub(crate) fn is(&self, other: &Region) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether it belongs to that worker.
    pub(crate) fn is_of(&self, progress: &Arc<Progress>) -> bool {
        Arc::ptr_eq(&self.0.progress, progress)
    }

    /// Its entry in the worker's table.
    pub(crate) fn entry(&self) -> proto::RegionRef {
        self.0.region
    }

    /// Ends all access: once this has returned `Ok`, neither a peer nor an operation of this process touches the memory.
    /// Later accesses fail on the accessing side with `Region`. So do transfers in flight, the peers' and those that this
    /// process started on layouts of the region: one that has not finished by then does not succeed, and raises no notice.
    ///
    /// # Errors
    /// `Region`: it was deregistered before. `Timeout`: after `CROSSRAIL_TIMEOUT` something may still touch the memory,
    /// as a peer that is stopped; the error names the peers. Call it again before the memory is used for anything else.
    pub fn deregister(&self) -> Result<()> {
        self.0.progress.check_origin("deregister")?;
        self.0.progress.deregister(&[self.0.region])
    }

    /// [`Region::deregister`] of several at once, all within one timeout. Those that were deregistered before are left
    /// out.
    ///
    /// # Errors
    /// `Timeout`, as there; the regions that nothing touches any more are deregistered all the same.
    pub fn deregister_all(regions: &[Region]) -> Result<()> {
        let mut left: Vec<&Region> = regions.iter().collect();
        let mut outcome = Ok(());
        while let Some(first) = left.first().map(|region| region.0.progress.clone()) {
            first.check_origin("deregister")?;
            let of: Vec<_> = left.extract_if(.., |region| region.is_of(&first)).map(|region| region.entry()).collect();
            match first.deregister(&of) {
                Err(error) if error.kind != ErrorKind::Region => outcome = outcome.and(Err(error)),
                _ => {}
            }
        }
        outcome
    }

    /// How many writes with this immediate have arrived, all of their bytes included. Of each region the first 65,536
    /// different immediates are counted; 0 for others.
    pub fn imm_count(&self, imm: u32) -> u64 {
        let core = self.0.progress.core_here();
        match core.and_then(|mut core| core.transfers().regions().counted(self.0.region, imm)) {
            Some(Counted::Writes(count)) => count,
            Some(Counted::OneTooMany) | None => 0,
        }
    }

    /// Waits until more than `seen` writes with any immediate have arrived since the region was registered; how many
    /// there are then, or at the end of `timeout`.
    ///
    /// # Errors
    /// `Region` when it was deregistered, `Closed` when the worker was.
    pub fn wait_arrival(&self, seen: u64, timeout: Duration) -> Result<u64> {
        self.0.progress.check_origin("wait_arrival")?;
        let region = self.0.region;
        let outcome = self.0.progress.wait_until(timeout, |core| match core.transfers().regions().arrivals(region) {
            Some(count) if count > seen => Some(Ok(count)),
            Some(_) => None,
            None => Some(Err(Error::new(ErrorKind::Region, "wait_arrival", "the region was deregistered"))),
        });
        outcome.unwrap_or(Ok(seen))
    }

    /// Waits until `count` writes with this immediate have arrived since the region was registered.
    ///
    /// # Errors
    /// `Region` when it was deregistered; `Exhausted` when 65,536 other immediates have arrived before this one, so
    /// that it is not counted; `Timeout`.
    pub fn wait_imm(&self, imm: u32, count: u64, timeout: Option<Duration>) -> Result<()> {
        self.0.progress.check_origin("wait_imm")?;
        let region = self.0.region;
        let timeout = timeout.unwrap_or(self.0.progress.environment().settings().timeout);
        let outcome =
            self.0.progress.wait_until(timeout, |core| match core.transfers().regions().counted(region, imm) {
                Some(Counted::Writes(seen)) if seen >= count => Some(Ok(())),
                Some(Counted::Writes(_)) => None,
                Some(Counted::OneTooMany) => Some(Err(uncounted(imm))),
                None => Some(Err(Error::new(ErrorKind::Region, "wait_imm", "the region was deregistered"))),
            });
        outcome.unwrap_or_else(|| {
            let seen = self.imm_count(imm);
            let detail = format!("{seen} of {count} writes with immediate {imm} have arrived");
            Err(Error::new(ErrorKind::Timeout, "wait_imm", detail).with_waited(timeout))
        })
    }
}

fn uncounted(imm: u32) -> Error {
    let detail = format!("immediate {imm} is not counted: {IMMEDIATES_MAX} others have been written to this region");
    Error::new(ErrorKind::Exhausted, "wait_imm", detail).with_hint("use immediates again, or register another region")
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.progress.check_origin("deregister").is_err() {
            return;
        }
        if let Err(error) = self.progress.deregister(&[self.region])
            && error.kind == ErrorKind::Timeout
        {
            // The entry, and what keeps the memory, stay with the worker.
            self.progress.log().error(format_args!("dropped region: {error}"));
        }
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes)", self.len())
    }
}
