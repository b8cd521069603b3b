//! A UCX worker with its one endpoint.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_void;
use std::os::fd::{OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossrail_transport::LaneError;
use crossrail_types::{Error, ErrorKind, Result};

use crate::cut::{connections, cut};
use crate::fabric::{self, Class, Fabric, printed};
use crate::inbox::{self, Inbox, Offer};
use crate::library::lane_error;
use crate::raw::{self, AmHandlerParam, EpParams, RequestParam, StatusPtr, WorkerParams};

/// Ids of our active messages.
const MESSAGE: u32 = 1;
const PIECE: u32 = 2;
/// Maximum number of workers that this process abandons for good, each with some MiB and some descriptors: rails that
/// repeatedly fail in mid-payload must not exhaust it.
const ABANDONED_MAX: usize = 64;
/// Workers abandoned so far.
static ABANDONED: AtomicUsize = AtomicUsize::new(0);
/// How long UCX may take to close an endpoint by force, or one whose connections were cut, which needs no peer.
const CLOSE_MAX: Duration = Duration::from_millis(500);
/// How long a copy from the peer's memory may take, which the kernel makes in one call. It needs no peer.
pub(crate) const COPY_MAX: Duration = Duration::from_secs(2);

/// An operation of UCX's that has not ended. It refers to the memory it was begun with until then.
#[derive(Debug)]
pub(crate) struct Request(*mut c_void);

// SAFETY: it is passed to UCX only together with its worker, by the thread that drives that.
unsafe impl Send for Request {}

/// A UCX worker with its one endpoint and what its callbacks leave. It is driven by one thread at a time.
pub(crate) struct Link {
    fabric: Arc<Fabric>,
    worker: raw::Worker,
    ep: raw::Ep,
    /// UCX holds its address: never moved.
    inbox: Box<Inbox>,
    /// UCX refers to memory that it must not access any more, or would abort if the worker were destroyed: it is not
    /// called again.
    abandoned: Cell<bool>,
    /// A request was released before its end, and refers to the context's registration of its memory until then.
    unfinished: Cell<bool>,
}

// SAFETY: the worker was created for one thread at a time, any thread; the inbox is touched only inside its calls.
unsafe impl Send for Link {}

impl Link {
    /// A worker without an endpoint.
    ///
    /// # Errors
    /// As UCX reports them.
    pub(crate) fn new(fabric: &Arc<Fabric>) -> Result<Link> {
        if ABANDONED.load(Ordering::Relaxed) >= ABANDONED_MAX {
            let detail =
                format!("{ABANDONED_MAX} lanes over UCX have ended in mid-payload, and their workers cannot be freed");
            return Err(Error::new(ErrorKind::Exhausted, "connect", detail)
                .with_hint("restart this process, or leave ucx out of CROSSRAIL_TLS: TCP lanes go on"));
        }
        let library = fabric.library;
        let params = WorkerParams { field_mask: raw::WORKER_THREAD_MODE, thread_mode: raw::THREAD_SERIALIZED };
        let mut worker = ptr::null_mut();
        // SAFETY: the parameters are those of the mask.
        let status = unsafe { (library.raw.ucp_worker_create)(fabric.context(), &params, &mut worker) };
        library.check("ucp_worker_create", status)?;
        let inbox = Box::new(Inbox::new());
        let link = Link {
            fabric: fabric.clone(),
            worker,
            ep: ptr::null_mut(),
            inbox,
            abandoned: Cell::new(false),
            unfinished: Cell::new(false),
        };
        for (id, cb) in [(MESSAGE, inbox::on_message as raw::AmHandler), (PIECE, inbox::on_piece)] {
            let flags = raw::AM_FLAG_WHOLE;
            let param = AmHandlerParam { field_mask: raw::AM_HANDLER_FIELDS, id, flags, cb, arg: link.argument() };
            // SAFETY: the inbox outlives the worker.
            let status = unsafe { (library.raw.ucp_worker_set_am_recv_handler)(worker, &param) };
            library.check("ucp_worker_set_am_recv_handler", status)?;
        }
        Ok(link)
    }

    fn argument(&self) -> *mut c_void {
        ptr::from_ref::<Inbox>(&self.inbox).cast_mut().cast()
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// How the peer's worker reaches this one; opaque.
    ///
    /// # Errors
    /// As UCX reports them.
    pub(crate) fn address(&self) -> Result<Vec<u8>> {
        let library = self.fabric.library;
        let (mut address, mut len) = (ptr::null_mut(), 0);
        // SAFETY: UCX stores an address of `len` bytes, which is released after it was copied.
        unsafe {
            let status = (library.raw.ucp_worker_get_address)(self.worker, &mut address, &mut len);
            library.check("ucp_worker_get_address", status)?;
            let copy = std::slice::from_raw_parts(address.cast::<u8>(), len).to_vec();
            (library.raw.ucp_worker_release_address)(self.worker, address);
            Ok(copy)
        }
    }

    /// Makes the endpoint to the worker with that address.
    ///
    /// # Errors
    /// `Unreachable` when no device of ours reaches one of the address's; others as UCX reports them.
    pub(crate) fn connect(&mut self, address: &[u8]) -> Result<()> {
        let library = self.fabric.library;
        let err_mode = if self.notices_failures() { raw::ERR_MODE_PEER } else { raw::ERR_MODE_NONE };
        let params = EpParams {
            field_mask: raw::EP_REMOTE_ADDRESS | raw::EP_ERR_MODE | raw::EP_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode,
            err_handler: Some(inbox::on_error),
            err_arg: self.argument(),
        };
        // SAFETY: the address outlives the call; the inbox outlives the endpoint.
        let status = unsafe { (library.raw.ucp_ep_create)(self.worker, &params, &mut self.ep) };
        library.check("ucp_ep_create", status).map_err(|error| match (status, library.number()) {
            (raw::ERR_UNREACHABLE, (1, 20)) => {
                error.with_hint("UCX 1.20 reaches no peer by tcp over loopback; 1.19 and 1.21 do")
            }
            _ => error,
        })
    }

    /// Whether the lane's context has transports between processes of one machine.
    pub(crate) fn is_over_memory(&self) -> bool {
        self.fabric.resources().iter().any(|resource| resource.class() == Class::Memory)
    }

    /// Whether UCX reports a dead peer, and ends what was begun when it closes a connection by force. It does neither
    /// over the transports of one machine's memory, and a connection that demands it would not come up over them. Over
    /// TCP it does, but then it writes into no memory of the peer's (`ucp_wireup_add_rma_bw_lanes` wants a transport
    /// that can invalidate memory), and copies at both ends. The lane's TCP connection notices in any case.
    fn notices_failures(&self) -> bool {
        !self.is_over_memory() && !self.is_over_tcp()
    }

    /// Whether the lane's context has TCP and no device that moves data by itself.
    pub(crate) fn is_over_tcp(&self) -> bool {
        self.fabric.resources().iter().all(|resource| matches!(resource.class(), Class::Tcp | Class::Local))
    }

    /// What UCX uses beneath: `tcp/eth0`, `posix+cma/memory`.
    pub(crate) fn selected(&self) -> String {
        // SAFETY: the endpoint exists, and the stream is open.
        let text = printed(|stream| unsafe { (self.fabric.library.raw.ucp_ep_print_info)(self.ep, stream) });
        selected_in(&text.unwrap_or_default())
    }

    /// Whether pieces may be copied in place ([`Link::copy`]), with that selected.
    pub(crate) fn copies_in_place(&self, selected: &str) -> bool {
        reads_memory(selected) && !self.fabric.stages()
    }

    /// The descriptor to sleep on.
    ///
    /// # Errors
    /// As UCX reports them.
    pub(crate) fn descriptor(&self) -> Result<RawFd> {
        let library = self.fabric.library;
        let mut fd = -1;
        // SAFETY: stores one int.
        let status = unsafe { (library.raw.ucp_worker_get_efd)(self.worker, &mut fd) };
        library.check("ucp_worker_get_efd", status)?;
        Ok(fd)
    }

    /// Moves what UCX can move; whether anything did.
    pub(crate) fn progress(&self) -> bool {
        // SAFETY: the worker exists; no borrow of the inbox is held.
        !self.abandoned.get() && unsafe { (self.fabric.library.raw.ucp_worker_progress)(self.worker) > 0 }
    }

    /// Arms the descriptor for the next event. False: there is one already, or UCX cannot.
    pub(crate) fn arm(&self) -> bool {
        // SAFETY: as above.
        !self.abandoned.get() && unsafe { (self.fabric.library.raw.ucp_worker_arm)(self.worker) == raw::OK }
    }

    /// Sends a message of up to one segment.
    ///
    /// # Safety
    /// `bytes` must stay valid and unchanged until the request has ended.
    pub(crate) unsafe fn send(&self, bytes: *const u8, len: usize) -> std::result::Result<Option<Request>, LaneError> {
        self.expect_usable()?;
        let param = RequestParam { op_attr_mask: raw::OP_FLAGS, flags: raw::AM_EAGER };
        // SAFETY: guaranteed by the caller; there is no header.
        let sent = unsafe {
            (self.fabric.library.raw.ucp_am_send_nbx)(self.ep, MESSAGE, ptr::null(), 0, bytes.cast(), len, &param)
        };
        self.request("ucp_am_send_nbx", sent)
    }

    /// Offers a piece, which the peer fetches.
    ///
    /// # Safety
    /// `header` and `bytes` must stay valid and unchanged until the request has ended.
    pub(crate) unsafe fn offer(
        &self,
        (header, header_len): (*const u8, usize),
        (bytes, len): (*const u8, usize),
    ) -> std::result::Result<Option<Request>, LaneError> {
        self.expect_usable()?;
        let param = RequestParam { op_attr_mask: raw::OP_FLAGS, flags: raw::AM_RNDV };
        let call = self.fabric.library.raw.ucp_am_send_nbx;
        // SAFETY: guaranteed by the caller.
        let sent = unsafe { call(self.ep, PIECE, header.cast(), header_len, bytes.cast(), len, &param) };
        self.request("ucp_am_send_nbx", sent)
    }

    /// Fetches a piece that the peer offers.
    ///
    /// # Safety
    /// `into` must stay valid for writing the offer's length until the request has ended.
    pub(crate) unsafe fn fetch(&self, offer: Offer, into: *mut u8) -> std::result::Result<Option<Request>, LaneError> {
        self.expect_usable()?;
        let param = RequestParam::default();
        let call = self.fabric.library.raw.ucp_am_recv_data_nbx;
        // SAFETY: guaranteed by the caller; each offer is fetched once.
        let fetched = unsafe { call(self.worker, offer.descriptor, into.cast(), offer.len, &param) };
        self.request("ucp_am_recv_data_nbx", fetched)
    }

    /// Copies a piece that the peer offers, which takes one call of UCX's progress where UCX copies by a call of the
    /// kernel: the peer has no part in it. UCX does not refer to `into` afterwards.
    ///
    /// # Safety
    /// `into` must be valid for writing the offer's length.
    ///
    /// # Errors
    /// As UCX reports them; `Down` when the copy has not ended in [`COPY_MAX`]. After either, UCX is not called again.
    pub(crate) unsafe fn copy(&self, offer: Offer, into: *mut u8) -> std::result::Result<(), LaneError> {
        // SAFETY: guaranteed by the caller: UCX moves bytes only when it is called, which ends below.
        let mut request = unsafe { self.fetch(offer, into)? };
        let why = match self.drive_until(|link| !link.is_under_way(&request), COPY_MAX) {
            true => match self.has_ended(&mut request) {
                Ok(_) => return Ok(()),
                // UCX also reports a copy as failed that is in its queue still, when it gives the connection up.
                Err(error) => error,
            },
            false => {
                self.fabric.stage_from_now_on();
                LaneError::Down(format!("UCX did not end a copy of {} bytes in {COPY_MAX:?}", offer.len))
            }
        };
        self.abandon();
        Err(why)
    }

    /// Fails if UCX must not be called for this worker any more.
    fn expect_usable(&self) -> std::result::Result<(), LaneError> {
        match self.abandoned.get() {
            false => Ok(()),
            true => Err(LaneError::Down("UCX's worker was given up".to_owned())),
        }
    }

    /// Gives an offer back that is not fetched.
    pub(crate) fn release(&self, offer: Offer) {
        if self.abandoned.get() {
            return;
        }
        // SAFETY: an offer of this worker's that was never fetched.
        unsafe { (self.fabric.library.raw.ucp_am_data_release)(self.worker, offer.descriptor) };
    }

    fn request(&self, call: &str, begun: StatusPtr) -> std::result::Result<Option<Request>, LaneError> {
        if begun.is_null() {
            return Ok(None);
        }
        match raw::pointer_status(begun) {
            Some(status) => Err(lane_error(self.fabric.library, call, status)),
            None => Ok(Some(Request(begun))),
        }
    }

    /// Whether the operation in `request` is still outstanding. Its outcome is left for [`Link::has_ended`].
    pub(crate) fn is_under_way(&self, request: &Option<Request>) -> bool {
        // SAFETY: the request was begun by this worker and not freed yet.
        let status = |begun: *mut c_void| unsafe { (self.fabric.library.raw.ucp_request_check_status)(begun) };
        request.as_ref().is_some_and(|Request(begun)| status(*begun) == raw::IN_PROGRESS)
    }

    /// Whether the operation in `request` has ended; then the entry is empty, so an error is reported once.
    pub(crate) fn has_ended(&self, request: &mut Option<Request>) -> std::result::Result<bool, LaneError> {
        let Some(Request(begun)) = request else { return Ok(true) };
        self.expect_usable()?;
        let raw = &self.fabric.library.raw;
        // SAFETY: the request was begun by this worker and not freed yet.
        let status = unsafe { (raw.ucp_request_check_status)(*begun) };
        if status == raw::IN_PROGRESS {
            return Ok(false);
        }
        // SAFETY: as above; the entry is emptied.
        unsafe { (raw.ucp_request_free)(*begun) };
        *request = None;
        if status == raw::OK { Ok(true) } else { Err(lane_error(self.fabric.library, "a transfer of UCX's", status)) }
    }

    /// UCX's error, if it has closed the connection.
    pub(crate) fn failure(&self) -> Option<LaneError> {
        self.inbox.failed().map(|status| lane_error(self.fabric.library, "UCX gave the connection up", status))
    }

    /// Begins to wait until what was sent has left this end, for which UCX must have connected.
    pub(crate) fn begin_flush(&self) -> std::result::Result<Option<Request>, LaneError> {
        self.expect_usable()?;
        // SAFETY: the endpoint exists.
        let begun = unsafe { (self.fabric.library.raw.ucp_ep_flush_nbx)(self.ep, &RequestParam::default()) };
        self.request("ucp_ep_flush_nbx", begun)
    }

    /// Waits until what was sent has left this end, for at most `limit`.
    pub(crate) fn flush(&self, limit: Duration) {
        if let Ok(request) = self.begin_flush() {
            self.finish(request, limit);
        }
    }

    /// Drives a request that nothing else refers to, for at most `limit`.
    fn finish(&self, request: Option<Request>, limit: Duration) {
        self.drive_until(|link| !link.is_under_way(&request), limit);
        self.forget(request);
    }

    /// Drives UCX until `is_done`, for at most `limit`; whether it is.
    pub(crate) fn drive_until(&self, is_done: impl Fn(&Link) -> bool, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while !is_done(self) {
            if Instant::now() >= deadline {
                return false;
            }
            if !self.progress() {
                std::thread::yield_now();
            }
        }
        true
    }

    /// Cuts UCX's connections over its tcp, and has UCX notice: then it moves no byte any more, whatever it has begun,
    /// and its worker can be destroyed. `None` where UCX has not noticed; a peer has no part in it. What is returned
    /// keeps the connections open for the peer.
    pub(crate) fn cut(&self) -> Option<Vec<OwnedFd>> {
        let descriptor = self.descriptor().ok()?;
        let kept = connections(descriptor).into_iter().filter_map(cut).collect();
        let is_over = |link: &Link| link.failure().is_some() && connections(descriptor).is_empty();
        let noticed = self.drive_until(is_over, CLOSE_MAX) && self.drive_until(|link| !link.progress(), CLOSE_MAX);
        noticed.then_some(kept)
    }

    /// Abandons the worker: UCX keeps it, undriven, for as long as the process lives.
    pub(crate) fn abandon(&self) {
        self.abandoned.set(true);
    }

    /// Gives a request back that may not have ended.
    pub(crate) fn forget(&self, request: Option<Request>) {
        let ends = self.notices_failures() || !self.is_under_way(&request);
        if let Some(Request(begun)) = request
            && !self.abandoned.get()
        {
            self.unfinished.set(self.unfinished.get() || !ends);
            // SAFETY: begun by this worker; UCX frees it once it has ended.
            unsafe { (self.fabric.library.raw.ucp_request_free)(begun) };
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if self.abandoned.get() {
            ABANDONED.fetch_add(1, Ordering::Relaxed);
            // UCX still refers to these addresses.
            std::mem::forget(std::mem::replace(&mut self.inbox, Box::new(Inbox::new())));
            std::mem::forget(self.fabric.clone());
            return;
        }
        let raw = &self.fabric.library.raw;
        for offer in self.inbox.take_offers() {
            self.release(offer);
        }
        if !self.ep.is_null() {
            let param = RequestParam { op_attr_mask: raw::OP_FLAGS, flags: raw::EP_CLOSE_FORCE };
            // SAFETY: closed once; the endpoint is not used any more.
            let begun = unsafe { (raw.ucp_ep_close_nbx)(self.ep, &param) };
            if let Ok(request) = self.request("ucp_ep_close_nbx", begun) {
                self.finish(request, CLOSE_MAX);
            }
        }
        if self.unfinished.get() {
            // UCX, built with assertions, ends the process when it closes a context whose memory is referred to.
            std::mem::forget(self.fabric.clone());
        }
        // SAFETY: destroyed once, after its endpoint.
        unsafe { (raw.ucp_worker_destroy)(self.worker) }
    }
}

/// The transports and devices in the text of `ucp_ep_print_info`: of each line that begins with `lane`, the word after
/// the first, without UCX's own number before and path after it.
fn selected_in(text: &str) -> String {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for line in text.lines() {
        let mut words = line.trim_start_matches('#').split_whitespace();
        if !words.next().is_some_and(|word| word.starts_with("lane[")) {
            continue;
        }
        let Some((transport, device)) = words.find_map(|word| word.split_once('/')) else { continue };
        let transport = transport.rsplit(':').next().unwrap_or(transport);
        let device = match device.rsplit_once('.') {
            Some((name, path)) if path.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => device,
        };
        match found.iter_mut().find(|(known, _)| known == device) {
            Some((_, transports)) if transports.iter().any(|known| known == transport) => {}
            Some((_, transports)) => transports.push(transport.to_owned()),
            None => found.push((device.to_owned(), vec![transport.to_owned()])),
        }
    }
    let texts: Vec<String> =
        found.iter().map(|(device, transports)| format!("{}/{device}", transports.join("+"))).collect();
    texts.join(" ")
}

/// Whether UCX, having selected that, copies from the peer's memory by a call of the kernel, which it makes when this
/// end calls it.
pub(crate) fn reads_memory(selected: &str) -> bool {
    fabric::copy_by_the_kernel(selected.split(['+', '/', ' ']))
}

/// The error of a wait for the peer that ran out.
pub(crate) fn timed_out(what: &str) -> Error {
    Error::new(ErrorKind::Timeout, "connect", what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ucx_selected_is_read_from_what_it_prints() {
        let text = "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n\
                    #                 lane[0]:  3:posix/memory.0 md[3] -> md[3]/posix/sysdev[255] am am_bw#0\n\
                    #                 lane[1]:  4:cma/memory.0   md[4]           -> md[4]/cma/sysdev[255] rma_bw#0\n\
                    #                 lane[2]:  4:cma/memory.0   md[4]           -> md[4]/cma/sysdev[255] rma_bw#1\n#\n";
        assert_eq!(selected_in(text), "posix+cma/memory");
        assert_eq!(selected_in("# lane[0]: 12:rc_mlx5/mlx5_0:1.0 md[1]\n"), "rc_mlx5/mlx5_0:1");
        assert_eq!(selected_in("#  lane[0]:  1:tcp/eth0.100 md[1]\n# rma: none\n"), "tcp/eth0");
    }
}
