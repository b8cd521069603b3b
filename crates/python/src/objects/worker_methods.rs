//! What Python calls on a worker.

use crossrail::{ConnectOptions, Place, WorkerOptions};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::context::{Context, socket_addresses};
use super::endpoint::Endpoint;
use super::moves::{self, Layout};
use super::notice;
use super::operand::OperandSpec;
use super::region::Region;
use super::request::Request;
use super::worker::Worker;
use crate::borrow::lent::Use;
use crate::borrow::loan::Call;
use crate::borrow::number::U64;
use crate::borrow::{place, stream};
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::{gate, wait};

#[pymethods]
impl Worker {
    #[new]
    #[pyo3(signature = (context, *, name = None, listen = None, unix = true, background = true, admit = false))]
    fn create(
        context: Bound<'_, Context>,
        name: Option<String>,
        listen: Option<&Bound<'_, PyAny>>,
        unix: bool,
        background: bool,
        admit: bool,
    ) -> PyResult<Worker> {
        let py = context.py();
        let _call = Call::enter(py);
        let listen = listen.map(socket_addresses).transpose()?.flatten();
        let options = WorkerOptions { name, listen, unix, background, admit, ..WorkerOptions::default() };
        let native = context.get().native();
        let native = gate::detached(py, || crossrail::Worker::new(native, options)).or_raise(py)?;
        Ok(Worker::new(native, context.unbind()))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind, value, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        value: Option<&Bound<'_, PyAny>>,
        traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (kind, value, traceback);
        self.close(py)
    }

    /// The address of this worker: opaque bytes, to be sent to peers by any means.
    ///
    /// Whoever has it is admitted as a peer.
    fn address<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.native().address())
    }

    /// The addresses ``host:port`` at which it accepts TCP connections.
    fn control_addresses(&self) -> Vec<String> {
        self.native().control_addresses().iter().map(ToString::to_string).collect()
    }

    /// Connect to another worker.
    ///
    /// Parameters
    /// ----------
    /// to : bytes or str
    ///     The address of the worker, or ``host:port`` or ``host``.
    /// require : str, optional
    ///     Transports that may be used, such as ``"tcp,shm"``. The call fails rather than use
    ///     another one. With ``cuda_ipc`` it fails if GPU memory cannot be copied directly;
    ///     other memory uses shared memory.
    /// timeout : float, optional
    ///     Maximum seconds to wait; CROSSRAIL_TIMEOUT by default.
    ///
    /// Returns
    /// -------
    /// Endpoint
    ///
    /// Raises
    /// ------
    /// UnreachableError, TimeoutError
    ///     The worker could not be reached, or not in time.
    /// RefusedError
    ///     The worker has another secret.
    /// MismatchError
    ///     The ends differ in version, chunk, window or channels.
    /// UsageError
    ///     `to` is neither an address nor ``host:port``.
    /// UnsupportedError
    ///     No transport that `require` permits is possible.
    #[pyo3(signature = (to, *, require = None, timeout = None))]
    fn connect(
        slf: &Bound<'_, Self>,
        to: &Bound<'_, PyAny>,
        require: Option<String>,
        timeout: Option<f64>,
    ) -> PyResult<Endpoint> {
        let py = slf.py();
        let _call = Call::enter(py);
        let to: Vec<u8> = match to.extract::<String>() {
            Ok(text) => text.into_bytes(),
            Err(_) => to.extract().map_err(|_| {
                let detail = format!("{} is not an address", super::operand::one(to));
                errors::usage(py, "connect", detail, "pass 'host:port', or the bytes of the other worker's address()")
            })?,
        };
        let timeout = wait::seconds(py, "connect", timeout)?;
        let options = ConnectOptions { require, timeout, ..ConnectOptions::default() };
        let worker = slf.get().native().clone();
        let native = wait::on_own_thread(py, move || worker.connect(&to, &options))?;
        Ok(Endpoint::new(native, slf.clone().unbind()))
    }

    /// Return the next endpoint that a peer has connected.
    ///
    /// Parameters
    /// ----------
    /// timeout : float, optional
    ///     Maximum seconds to wait; CROSSRAIL_TIMEOUT by default.
    ///
    /// Returns
    /// -------
    /// Endpoint
    ///
    /// Raises
    /// ------
    /// TimeoutError, ClosedError
    #[pyo3(signature = (timeout = None))]
    fn accept(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Endpoint> {
        let py = slf.py();
        let _call = Call::enter(py);
        let worker = slf.get();
        let limit = wait::seconds(py, "accept", timeout)?.unwrap_or(worker.native_timeout());
        let native = wait::bounded(py, limit, |left| worker.native().accept(left))?;
        Ok(Endpoint::new(native, slf.clone().unbind()))
    }

    /// Return the next endpoint that a peer has connected; `accept` for asyncio.
    ///
    /// `timeout`: maximum seconds to wait; CROSSRAIL_TIMEOUT by default. Errors are those of `accept`.
    /// The worker needs ``background``: otherwise nothing wakes the event loop.
    #[pyo3(signature = (timeout = None))]
    fn accept_async<'py>(slf: &Bound<'py, Self>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let _call = Call::enter(slf.py());
        slf.py().import("crossrail._async")?.call_method1("accept", (slf, timeout))
    }

    /// Admits no further peer: whoever connects from now on gets ExhaustedError with this text.
    fn _refuse_peers(&self, py: Python<'_>, why: &str) {
        let _call = Call::enter(py);
        gate::detached(py, || self.native().refuse_peers(why));
    }

    /// Concludes an `accept` that asyncio waited for, for `waited` seconds.
    fn _accept_now(slf: &Bound<'_, Self>, waited: f64) -> PyResult<Endpoint> {
        let py = slf.py();
        let _call = Call::enter(py);
        let waited = wait::seconds(py, "accept", Some(waited))?.unwrap_or_default();
        let worker = slf.get();
        let native = wait::poll_finished(py, waited, |left| worker.native().accept(left))?;
        Ok(Endpoint::new(native, slf.clone().unbind()))
    }

    /// Register a buffer, so that peers with the region's key can write to and read from it.
    ///
    /// Parameters
    /// ----------
    /// buffer
    ///     Writable memory: an object with the buffer protocol, DLPack or
    ///     ``__cuda_array_interface__``. It stays exported until the region is deregistered or
    ///     dropped.
    ///
    /// Returns
    /// -------
    /// Region
    ///
    /// Raises
    /// ------
    /// UsageError, ClosedError
    fn register(slf: &Bound<'_, Self>, buffer: &Bound<'_, PyAny>) -> PyResult<Region> {
        let py = slf.py();
        let _call = Call::enter(py);
        let worker = slf.get();
        let wanted = OperandSpec { context: worker.context(), used: Use::Write, stream: None, operation: "register" };
        let lent = wanted.of(buffer)?;
        let region = gate::detached(py, || worker.native().register(lent)).or_raise(py)?;
        Ok(Region::new(region, worker.native_timeout()))
    }

    /// Register memory by its address; as `register`.
    ///
    /// Parameters
    /// ----------
    /// address, nbytes : int
    ///     The caller keeps the memory allocated until `Region.deregister` has returned. Dropping
    ///     the region has no effect while layouts, moves or operations in flight use it.
    /// device : str or int, optional
    ///     Whose memory it is: ``"cpu"``, ``"cuda:1"`` or the number of a GPU. The host by default.
    ///
    /// Returns
    /// -------
    /// Region
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     There is no memory at such an address, or no such GPU.
    /// ClosedError
    #[allow(unsafe_code)]
    #[pyo3(signature = (address, nbytes, device = None))]
    fn register_range(
        slf: &Bound<'_, Self>,
        address: U64,
        nbytes: U64,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Region> {
        let py = slf.py();
        let _call = Call::enter(py);
        let (worker, place) = (slf.get(), place::parse(device)?);
        // SAFETY: that the memory stays allocated is the documented rule for callers.
        let register = || unsafe { worker.native().register_range(address.0, nbytes.0, place) };
        Ok(Region::new(gate::detached(py, register).or_raise(py)?, worker.native_timeout()))
    }

    /// Describe this worker and some of its regions for a peer, which needs nothing else to access them.
    ///
    /// Parameters
    /// ----------
    /// regions : iterable of Region
    ///
    /// Returns
    /// -------
    /// bytes
    ///     For `Description`. Whoever has them may connect, and write and read the regions.
    ///
    /// Raises
    /// ------
    /// RegionError
    ///     A region was deregistered.
    fn describe<'py>(&self, regions: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let py = regions.py();
        let _call = Call::enter(py);
        let regions = moves::regions(regions)?;
        let described = gate::detached(py, || self.native().describe(&regions)).or_raise(py)?;
        Ok(PyBytes::new(py, &described))
    }

    /// Make a list of rows of this worker's registered memory.
    ///
    /// Parameters
    /// ----------
    /// rows
    ///     An array of 64-bit integers with rows (address, length, device) or (address, length,
    ///     device, stride, count), or an iterable of (Region, offset, length) or (Region, offset,
    ///     length, stride, count). A stride is the distance between the starts of two rows.
    /// regions : iterable of Region, optional
    ///     Where rows of addresses lie: each in one of them.
    ///
    /// Returns
    /// -------
    /// Layout
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     The rows are malformed.
    /// RegionError
    ///     A row does not lie in one of the regions.
    #[pyo3(signature = (rows, regions = None))]
    fn layout(&self, rows: &Bound<'_, PyAny>, regions: Option<&Bound<'_, PyAny>>) -> PyResult<Layout> {
        moves::local(self, rows, regions)
    }

    /// Return notices that peers have raised, oldest first, and forget them.
    ///
    /// Parameters
    /// ----------
    /// limit : int, optional
    ///     At most so many.
    ///
    /// Returns
    /// -------
    /// list of Notice
    ///     Tuples of the peer's name and the bytes.
    #[pyo3(signature = (limit = None))]
    fn notices<'py>(&self, py: Python<'py>, limit: Option<usize>) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::enter(py);
        let notices = self.native().notices(limit.unwrap_or(usize::MAX));
        let items = notices.iter().map(|notice| notice::of(py, notice)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, items)
    }

    /// Return the endpoint of this number, as `Endpoint.id`, if its peer is alive, or None.
    fn endpoint(slf: &Bound<'_, Self>, number: u32) -> Option<Endpoint> {
        let _call = Call::enter(slf.py());
        let native = slf.get().native().endpoint(number)?;
        Some(Endpoint::new(native, slf.clone().unbind()))
    }

    /// Return an endpoint whose living peer is called `name`, whichever end connected, or None. Raises nothing.
    fn peer(slf: &Bound<'_, Self>, name: &str) -> Option<Endpoint> {
        let _call = Call::enter(slf.py());
        let native = slf.get().native().peer(name)?;
        Some(Endpoint::new(native, slf.clone().unbind()))
    }

    /// Receive the next message whose tag equals `tag` in the bits of `mask`.
    ///
    /// Messages match in the order in which they were sent, and receives in the order in which
    /// they were posted.
    ///
    /// Parameters
    /// ----------
    /// buffer
    ///     Writable contiguous memory. It stays exported until the request is finished; do not
    ///     access it before.
    /// tag, mask : int
    ///     64 bits. A mask of 0 matches every tag.
    /// source : Endpoint, optional
    ///     Receive from this peer only; from any peer by default.
    /// stream : optional
    ///     GPU memory is written behind the work enqueued so far in this stream, by default the
    ///     array's own: a raw handle, or an object with ``cuda_stream`` or ``__cuda_stream__``.
    ///
    /// Returns
    /// -------
    /// Request
    ///
    /// Notes
    /// -----
    /// A message that is longer than `buffer` is a TruncatedError at both ends.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     `source` belongs to another worker; `tag` or `mask` does not fit; the buffer is read-only
    ///     or not contiguous.
    #[pyo3(
        signature = (buffer, tag = U64(0), mask = U64(u64::MAX), *, source = None, stream = None),
        text_signature = "($self, buffer, tag=0, mask=18446744073709551615, *, source=None, stream=None)"
    )]
    fn recv(
        slf: &Bound<'_, Self>,
        buffer: &Bound<'_, PyAny>,
        tag: U64,
        mask: U64,
        source: Option<&Bound<'_, Endpoint>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Request> {
        let py = slf.py();
        let _call = Call::enter(py);
        let worker = slf.get();
        let stream = stream::parse(stream, "recv")?;
        let lent = OperandSpec { context: worker.context(), used: Use::Write, stream, operation: "recv" }.of(buffer)?;
        let source = source.map(|endpoint| endpoint.get().native());
        let place = lent.place();
        let start = || worker.native().recv(lent, tag.0, mask.0, source);
        // Calls of the GPU driver may block: release the GIL.
        let native = if place == Place::Host { start() } else { gate::detached(py, start) };
        let native = native.or_raise(py)?;
        Ok(Request::new(native, slf.clone().unbind(), place))
    }

    /// Make progress once, without blocking. Returns whether there was any.
    fn progress(&self, py: Python<'_>) -> bool {
        let _call = Call::enter(py);
        gate::detached(py, || self.native().progress())
    }

    /// Hold the worker's lock for some seconds, for tests.
    fn _hold_lock(&self, py: Python<'_>, seconds: f64) {
        let _call = Call::enter(py);
        gate::detached(py, || crossrail::hold_lock(self.native(), std::time::Duration::from_secs_f64(seconds)));
    }

    /// Return a file descriptor that becomes readable when requests finish or peers connect.
    ///
    /// For event loops: drain it with `drain_events`, then check the requests. It belongs to the
    /// worker; do not close it.
    fn event_fd(&self) -> i32 {
        self.native().event_fd()
    }

    /// Drain `event_fd`, so that it is unreadable until the next event.
    fn drain_events(&self) {
        self.native().drain_events();
    }

    /// Return all endpoints whose peer is alive.
    fn endpoints(slf: &Bound<'_, Self>) -> Vec<Endpoint> {
        let _call = Call::enter(slf.py());
        let natives = slf.get().native().endpoints();
        natives.into_iter().map(|native| Endpoint::new(native, slf.clone().unbind())).collect()
    }

    /// Close all connections. Operations in flight fail with ClosedError. Calling it again has no effect.
    ///
    /// Raises
    /// ------
    /// TimeoutError
    ///     A peer may still access memory of operations or regions, and has not confirmed its end
    ///     within three seconds, because it is stopped. The worker is closed nevertheless. Do not reuse
    ///     or free that memory before the peer's process has ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::enter(py);
        let ended = gate::detached(py, || self.native().close());
        self.forget();
        ended.or_raise(py)
    }

    /// The context of the worker.
    #[getter(context)]
    fn get_context(&self, py: Python<'_>) -> Py<Context> {
        self.py_context().clone_ref(py)
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Worker at {}>", self.control_addresses().join(", "))
    }
}
