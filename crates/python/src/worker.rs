use crossrail::{ConnectOptions, Place, WorkerOptions};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::context::{Context, socket_addresses};
use crate::endpoint::Endpoint;
use crate::errors::{self, OrRaise};
use crate::lent::{Call, Use};
use crate::lifecycle::{self, Detached};
use crate::operand::Wanted;
use crate::region::Region;
use crate::request::Request;
use crate::{stream, wait};

/// Progress, one address, and the endpoints made from it.
///
/// Worker(context) listens on loopback with a free port; `listen="host:port"` (or several, with commas or as a list)
/// says where else. Beyond loopback a secret is required (CROSSRAIL_SECRET). `unix=False` listens on no Unix socket,
/// without which there is no shared memory. `background=False` starts no thread: then only calls that wait, `test`
/// and `progress` move anything, and nothing can be awaited.
///
/// Any thread may use a worker. A thread that waits makes progress for all; while none does, a background thread
/// does. As a context manager it is closed at the end.
///
/// Raises ConfigError (beyond loopback without a secret), UsageError (no address, or a port in use), IoError and
/// ExhaustedError (the system refuses descriptors or threads).
#[pyclass(module = "crossrail._native", frozen, weakref)]
pub(crate) struct Worker {
    native: Detached<crossrail::Worker>,
    context: Py<Context>,
    remembered: u64,
}

impl Worker {
    pub(crate) fn native(&self) -> &crossrail::Worker {
        &self.native
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        lifecycle::forget(self.remembered);
    }
}

#[pymethods]
impl Worker {
    #[new]
    #[pyo3(signature = (context, *, name = None, listen = None, unix = true, background = true))]
    fn new(
        context: Bound<'_, Context>,
        name: Option<String>,
        listen: Option<&Bound<'_, PyAny>>,
        unix: bool,
        background: bool,
    ) -> PyResult<Worker> {
        let py = context.py();
        let listen = listen.map(socket_addresses).transpose()?.flatten();
        let options = WorkerOptions { name, listen, unix, background };
        let native = context.get().native();
        let native = py.detach(|| crossrail::Worker::new(native, options)).or_raise(py)?;
        Ok(Worker {
            remembered: lifecycle::remember(&native),
            native: Detached::new(native),
            context: context.unbind(),
        })
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
    ) {
        let _ = (kind, value, traceback);
        self.close(py);
    }

    /// How others reach this worker: opaque bytes, to be handed over by any means. They admit whoever has them.
    fn address<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.native.address())
    }

    /// Where it accepts connections over TCP, as `host:port`.
    fn control_addresses(&self) -> Vec<String> {
        self.native.control_addresses().iter().map(ToString::to_string).collect()
    }

    /// Connects to the worker at `to`: the bytes of its address, or text as `host:port` or `host`.
    ///
    /// `require`: transports that may be used, as `tcp,shm`; it fails rather than use another. `cuda_ipc`: it fails where
    /// GPU memory cannot go straight; shared memory carries what is not a GPU's. `timeout`: seconds.
    ///
    /// Raises UnreachableError, TimeoutError, RefusedError (secret), MismatchError (version, chunk, window, channels),
    /// UsageError (neither an address nor `host:port`), UnsupportedError (nothing that `require` permits is possible).
    #[pyo3(signature = (to, *, require = None, timeout = None))]
    fn connect(
        slf: &Bound<'_, Self>,
        to: &Bound<'_, PyAny>,
        require: Option<String>,
        timeout: Option<f64>,
    ) -> PyResult<Endpoint> {
        let py = slf.py();
        let to: Vec<u8> = match to.extract::<String>() {
            Ok(text) => text.into_bytes(),
            Err(_) => to.extract().map_err(|_| {
                let detail = format!("a {} is no address", crate::operand::name(to));
                errors::usage(py, "connect", detail, "pass 'host:port', or the bytes of the other worker's address()")
            })?,
        };
        let options = ConnectOptions { require, timeout: wait::seconds(py, "connect", timeout)? };
        let worker = slf.get().native.clone();
        let native = wait::apart(py, move || worker.connect(&to, &options))?;
        Ok(Endpoint::new(native, slf.clone().unbind()))
    }

    /// The next endpoint that a peer has made, waiting for it at most `timeout` seconds.
    ///
    /// Raises TimeoutError, ClosedError.
    #[pyo3(signature = (timeout = None))]
    fn accept(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Endpoint> {
        let py = slf.py();
        let worker = slf.get();
        let limit = wait::seconds(py, "accept", timeout)?.unwrap_or(worker.native_timeout());
        let native = wait::bounded(py, limit, |left| worker.native.accept(left))?;
        Ok(Endpoint::new(native, slf.clone().unbind()))
    }

    /// As `accept`, for asyncio.
    #[pyo3(signature = (timeout = None))]
    fn accept_async<'py>(slf: &Bound<'py, Self>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("crossrail._async")?.call_method1("accept", (slf, timeout))
    }

    /// The end of a wait that was done elsewhere and took `waited` seconds.
    fn _accept_now(slf: &Bound<'_, Self>, waited: f64) -> PyResult<Endpoint> {
        let py = slf.py();
        let waited = wait::seconds(py, "accept", Some(waited))?.unwrap_or_default();
        let worker = slf.get();
        let native = wait::concluded(py, waited, |left| worker.native.accept(left))?;
        Ok(Endpoint::new(native, slf.clone().unbind()))
    }

    /// Lets peers with the region's key write to and read from `buffer`.
    ///
    /// `buffer` stays exported until the region is deregistered or dropped. Raises UsageError, ClosedError.
    fn register(slf: &Bound<'_, Self>, buffer: &Bound<'_, PyAny>) -> PyResult<Region> {
        let py = slf.py();
        let _call = Call::enter(py);
        let worker = slf.get();
        let wanted = Wanted { context: worker.context(), used: Use::Write, stream: None, operation: "register" };
        let lent = wanted.of(buffer)?;
        let region = py.detach(|| worker.native.register(lent)).or_raise(py)?;
        Ok(Region::new(region, worker.native_timeout()))
    }

    /// Receives the next message whose tag agrees with `tag` in the bits of `mask`, from `source` or from anybody.
    ///
    /// Messages match in the order in which they were sent, receives in the order in which they were posted. A longer
    /// message than `buffer` is a TruncatedError at both ends. `buffer` stays exported until the request is finished;
    /// do not touch it before. GPU memory is written after the work that the array's own stream, or `stream`, has now:
    /// a raw handle, or an object with `cuda_stream` or `__cuda_stream__`.
    #[pyo3(
        signature = (buffer, tag = 0, mask = u64::MAX, *, source = None, stream = None),
        text_signature = "($self, buffer, tag=0, mask=ALL_BITS, *, source=None, stream=None)"
    )]
    fn recv(
        slf: &Bound<'_, Self>,
        buffer: &Bound<'_, PyAny>,
        tag: u64,
        mask: u64,
        source: Option<&Bound<'_, Endpoint>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Request> {
        let py = slf.py();
        let _call = Call::enter(py);
        let worker = slf.get();
        let stream = stream::parse(stream, "recv")?;
        let lent = Wanted { context: worker.context(), used: Use::Write, stream, operation: "recv" }.of(buffer)?;
        let source = source.map(|endpoint| endpoint.get().native());
        let place = lent.place();
        let start = || worker.native.recv(lent, tag, mask, source);
        // A GPU's driver may take its time.
        let native = if place == Place::Host { start() } else { py.detach(start) };
        let native = native.or_raise(py)?;
        Ok(Request::new(native, slf.clone().unbind(), place))
    }

    /// Makes progress once; whether anything moved.
    fn progress(&self, py: Python<'_>) -> bool {
        let _call = Call::enter(py);
        py.detach(|| self.native.progress())
    }

    /// A descriptor that is readable whenever requests have finished or peers have connected; for event loops.
    /// Drain it with `drain_events`, then look at the requests. It belongs to the worker: do not close it.
    fn event_fd(&self) -> i32 {
        self.native.event_fd()
    }

    /// Makes `event_fd` unreadable until something else finishes.
    fn drain_events(&self) {
        self.native.drain_events();
    }

    /// Every endpoint with a living peer.
    fn endpoints(slf: &Bound<'_, Self>) -> Vec<Endpoint> {
        let natives = slf.get().native.endpoints();
        natives.into_iter().map(|native| Endpoint::new(native, slf.clone().unbind())).collect()
    }

    /// Closes every connection; what is under way fails with ClosedError. To call it again does nothing.
    fn close(&self, py: Python<'_>) {
        let _call = Call::enter(py);
        py.detach(|| self.native.close());
        lifecycle::forget(self.remembered);
    }

    /// The context it was made from.
    #[getter(context)]
    fn py_context(&self, py: Python<'_>) -> Py<Context> {
        self.context.clone_ref(py)
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Worker at {}>", self.control_addresses().join(", "))
    }
}

impl Worker {
    pub(crate) fn context(&self) -> &crossrail::Context {
        self.context.get().native()
    }

    pub(crate) fn native_timeout(&self) -> std::time::Duration {
        self.context().settings().timeout
    }
}

/// Operations of a batch, as tuples.
pub(crate) fn parse_operations(list: &Bound<'_, PyAny>, context: &crossrail::Context) -> PyResult<Vec<crossrail::Op>> {
    list.try_iter()?.map(|item| operation(&item?, context)).collect()
}

fn operation(item: &Bound<'_, PyAny>, context: &crossrail::Context) -> PyResult<crossrail::Op> {
    use crate::region::RegionKey;
    let py = item.py();
    let malformed = || {
        errors::usage(
            py,
            "batch",
            format!("{} is no operation", item.repr().map_or_else(|_| "this".to_owned(), |text| text.to_string())),
            "(\"send\", buffer, tag), (\"recv\", buffer, tag, mask), (\"write\", local, key, offset, imm) or \
             (\"read\", local, key, offset)",
        )
    };
    let parts = item.cast::<PyTuple>().map_err(|_| malformed())?;
    let name: String = parts.get_item(0).and_then(|name| name.extract()).map_err(|_| malformed())?;
    let key = |at: usize| -> PyResult<crossrail::RegionKey> {
        Ok(parts.get_item(at)?.cast::<RegionKey>().map_err(|_| malformed())?.get().native().clone())
    };
    let lent = |used, operation| Wanted { context, used, stream: None, operation }.of(&parts.get_item(1)?);
    let number = |at: usize| -> PyResult<u64> { parts.get_item(at)?.extract() };
    Ok(match (name.as_str(), parts.len()) {
        ("send", 3) => crossrail::Op::Send { buffer: lent(Use::Read, "send")?, tag: number(2)? },
        ("recv", 4) => crossrail::Op::Recv { buffer: lent(Use::Write, "recv")?, tag: number(2)?, mask: number(3)? },
        ("write", 5) => crossrail::Op::Write {
            local: lent(Use::Read, "write")?,
            remote: key(2)?,
            offset: number(3)?,
            imm: parts.get_item(4)?.extract()?,
        },
        ("read", 4) => crossrail::Op::Read { local: lent(Use::Write, "read")?, remote: key(2)?, offset: number(3)? },
        _ => return Err(malformed()),
    })
}
