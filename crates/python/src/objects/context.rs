use std::net::SocketAddr;

use crossrail::{CudaState, Distance, GpuSeen, NumaNode};
use crossrail_types::Settings;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use super::memory;
use crate::borrow::loan::Call;
use crate::runtime::dicts::{copied_dict, rows, set_fields};
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;
use crate::runtime::lifecycle::Detached;

/// One process's view of its devices and settings.
///
/// Settings are read from the environment (`CROSSRAIL_...`) and overridden by keywords:
/// `Context(tls="shm,tcp", chunk="4M", timeout=5)`.
///
/// Parameters
/// ----------
/// environment : bool
///     Whether to read settings from the environment.
/// **settings
///     Settings by the names in `settings_reference()`. A list is equivalent to its items
///     joined by commas; None leaves a setting unchanged.
///
/// Raises
/// ------
/// ConfigError
///     A setting is unknown or malformed, or a device does not exist.
///
/// Notes
/// -----
/// Thread safety: any thread may use the context.
///
/// Processes: a forked child (``os.fork``, ``multiprocessing`` with the start method ``fork``)
/// can use nothing that its parent made from a context; every operation raises UsageError with
/// the reason ``"other_process"``. Make a context in the child. Its end leaves the parent's
/// connections alone, but as long as it runs it holds them open: peers of a parent that dies
/// before its child learn of it only when the child ends or executes another program.
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct Context(Detached<crossrail::Context>);

impl Context {
    pub(crate) fn native(&self) -> &crossrail::Context {
        &self.0
    }
}

#[pymethods]
impl Context {
    #[new]
    #[pyo3(signature = (*, environment = true, **settings))]
    fn new(py: Python<'_>, environment: bool, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Context> {
        let _call = Call::enter(py);
        let mut merged = if environment { Settings::from_env().or_raise(py)? } else { Settings::default() };
        for (name, value) in settings.into_iter().flatten() {
            let name: String = name.extract()?;
            if let Some(text) = setting_text(&name, &value)? {
                merged.set(&name, &text).or_raise(py)?;
            }
        }
        merged.check().or_raise(py)?;
        Ok(Context(Detached::new(gate::detached(py, || crossrail::Context::new(merged)).or_raise(py)?)))
    }

    /// Allocate zeroed memory that peers on this machine can map: it is transferred with one copy.
    ///
    /// Parameters
    /// ----------
    /// nbytes : int
    ///     Size in bytes.
    /// device : str or int, optional
    ///     ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or the number of a GPU. The host by default.
    ///
    /// Returns
    /// -------
    /// Memory
    ///
    /// Raises
    /// ------
    /// ExhaustedError
    ///     There is not enough memory; the text has the bytes requested and, for a GPU, those free.
    /// UsageError
    ///     There is no such GPU.
    /// UnsupportedError
    ///     CUDA is unusable; the text has the reason.
    #[pyo3(signature = (nbytes, device = None))]
    fn alloc<'py>(
        slf: &Bound<'py, Self>,
        nbytes: usize,
        device: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _call = Call::enter(slf.py());
        memory::memory_type(slf.py())?.call1((slf, nbytes, device))
    }

    /// Return the transports and devices, and why those that are not used are not.
    ///
    /// This is the data of `crossrail info`.
    ///
    /// Raises
    /// ------
    /// IoError
    ///     The system does not expose its devices.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let _call = Call::enter(py);
        let info = gate::detached(py, || self.0.info()).or_raise(py)?;
        info_dict(py, info)
    }

    /// Return the current value of every setting by environment variable (None: unset; secrets are hidden).
    fn settings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let _call = Call::enter(py);
        let shown = PyDict::new(py);
        for (name, value) in self.0.settings().shown() {
            shown.set_item(name, value)?;
        }
        Ok(shown)
    }

    /// The default timeout of waits, CROSSRAIL_TIMEOUT, in seconds.
    #[getter]
    fn timeout(&self) -> f64 {
        self.0.settings().timeout.as_secs_f64()
    }

    fn __repr__(&self) -> String {
        let changed: Vec<String> = Settings::reference()
            .into_iter()
            .zip(self.0.settings().shown())
            .filter(|(info, (_, value))| info.default != *value)
            .map(|(info, (_, value))| format!("{}={}", info.field, value.unwrap_or_default()))
            .collect();
        format!("<crossrail.Context {}>", if changed.is_empty() { "defaults".to_owned() } else { changed.join(" ") })
    }
}

/// A setting's value as the environment would have it.
fn setting_text(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    let py = value.py();
    if value.is_none() {
        return Ok(None);
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items: Vec<String> =
            value.try_iter()?.map(|item| item?.str()?.extract::<String>()).collect::<PyResult<_>>()?;
        return Ok(Some(items.join(",")));
    }
    let plain =
        value.is_instance_of::<PyString>() || value.is_instance_of::<PyInt>() || value.is_instance_of::<PyFloat>();
    if plain && !value.is_instance_of::<PyBool>() {
        return value.str()?.extract().map(Some);
    }
    if value.hasattr("__fspath__")? {
        return value.call_method0("__fspath__")?.extract().map(Some);
    }
    let class = value.get_type().name()?;
    Err(errors::raise(
        py,
        &crossrail_types::Error::new(
            crossrail_types::ErrorKind::Config,
            name,
            format!("a {class} is no setting's value"),
        )
        .with_hint("text, a number, a list or None"),
    ))
}

/// `host:port` texts of listening addresses.
pub(super) fn socket_addresses(listen: &Bound<'_, PyAny>) -> PyResult<Option<Vec<SocketAddr>>> {
    let py = listen.py();
    let texts: Vec<String> = if listen.is_none() {
        return Ok(None);
    } else if let Ok(text) = listen.extract::<String>() {
        text.split(',').map(|part| part.trim().to_owned()).collect()
    } else {
        listen.extract()?
    };
    let parse = |text: &String| {
        zoned(py, text).parse::<SocketAddr>().map_err(|_| {
            errors::usage(
                py,
                "listen",
                format!("{text:?} is not an address with a port"),
                "as 127.0.0.1:7000, [::1]:7000 or [fe80::1%eth1]:7000; port 0 takes a free one",
            )
        })
    };
    texts.iter().map(parse).collect::<PyResult<Vec<_>>>().map(Some)
}

/// The memory that this process may use, within the limits of its control groups; None if procfs reports none.
#[pyfunction]
pub(super) fn host_memory(py: Python<'_>) -> PyResult<Option<Bound<'_, PyDict>>> {
    let Some(memory) = gate::detached(py, crossrail::host_memory) else { return Ok(None) };
    let all = PyDict::new(py);
    set_fields!(all, memory; available, capacity);
    all.set_item("limited_by", memory.limited_by.as_ref().map(|(file, _)| file.display().to_string()))?;
    all.set_item("limit", memory.limited_by.map(|(_, limit)| limit))?;
    all.set_item("oom_kills", memory.oom_kills)?;
    Ok(Some(all))
}

/// The CPU time that the control groups of this process leave, in processors; None if they leave all.
#[pyfunction]
pub(super) fn cpu_quota(py: Python<'_>) -> Option<f64> {
    gate::detached(py, crossrail::cpu_quota)
}

/// The address of this machine that only it reaches: 127.0.0.1, or ::1 where loopback has only IPv6.
#[pyfunction]
pub(super) fn loopback() -> String {
    crossrail_types::loopback().to_string()
}

/// A link-local address with its zone as a number: Rust parses no device names.
fn zoned(py: Python<'_>, text: &str) -> String {
    let number = || -> Option<String> {
        let (before, rest) = text.split_once('%')?;
        let (zone, after) = rest.split_once(']')?;
        let index = py.import("socket").and_then(|socket| socket.call_method1("if_nametoindex", (zone,)));
        Some(format!("{before}%{}]{after}", index.ok()?))
    };
    number().unwrap_or_else(|| text.to_owned())
}

fn info_dict(py: Python<'_>, info: crossrail::Info) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    let machine = PyDict::new(py);
    set_fields!(
        machine, info.machine; hostname, boot_id, kernel, page_size, memory_total, memory_available, memory_limit
    );
    machine.set_item("processor", &info.cpus.model)?;
    machine.set_item("cpu_quota", info.cpus.quota)?;
    machine.set_item("numa_nodes", numa_nodes(py, &info.cpus.numa_nodes)?)?;
    all.set_item("machine", machine)?;
    let os = py.import("os")?;
    let cpus = PyList::new(py, os.call_method1("sched_getaffinity", (0,))?.try_iter()?.collect::<PyResult<Vec<_>>>()?)?;
    cpus.sort()?;
    all.set_item("cpus", cpus)?;
    let transports = rows(py, info.transports, |row, transport| {
        set_fields!(row, transport; name, usable, detail, reason, fix);
        Ok(())
    })?;
    all.set_item("transports", transports)?;
    let devices = rows(py, info.devices, |row, device| {
        set_fields!(row, device; name, interface);
        row.set_item("address", device.address.map(|address| address.to_string()).unwrap_or_default())?;
        set_fields!(row, device; speed_mbps, numa_node, chosen);
        row.set_item("reason", device.reason.unwrap_or_default())
    })?;
    all.set_item("devices", devices)?;
    let ways = rows(py, info.tcp_ways, |row, way| {
        set_fields!(row, way; name, possible, used, reason, fix);
        Ok(())
    })?;
    all.set_item("tcp_ways", ways)?;
    let placement = PyDict::new(py);
    placement.set_item("near_devices", info.placement.why_not().is_none())?;
    placement.set_item("why_not", info.placement.why_not())?;
    placement.set_item("nodes", numa_nodes(py, info.placement.nodes())?)?;
    all.set_item("placement", placement)?;
    let gpus = rows(py, &info.gpus, |row, gpu| {
        set_fields!(row, gpu; pci, model, driver, numa_node);
        Ok(())
    })?;
    all.set_item("gpus", gpus)?;
    all.set_item("cuda", cuda_dict(py, &info.cuda, &info.gpus, &info.distances)?)?;
    let settings = rows(py, info.settings, |row, (name, value, is_default)| {
        row.set_item("name", name)?;
        row.set_item("value", value)?;
        row.set_item("is_default", is_default)
    })?;
    all.set_item("settings", settings)?;
    Ok(all)
}

/// What CUDA has here, or why there is none.
fn cuda_dict<'py>(
    py: Python<'py>,
    state: &CudaState,
    seen: &[GpuSeen],
    distances: &[(String, Vec<Distance>)],
) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    let (reason, fix, cuda) = match state {
        CudaState::Absent { reason, fix } => (Some(reason), fix.as_ref(), None),
        CudaState::Present(cuda) => (None, None, Some(cuda)),
    };
    all.set_item("present", cuda.is_some())?;
    all.set_item("reason", reason)?;
    all.set_item("fix", fix)?;
    all.set_item("driver", cuda.map(|cuda| &cuda.driver))?;
    let devices = rows(py, cuda.into_iter().flat_map(|cuda| &cuda.devices), |row, gpu| {
        set_fields!(row, gpu; ordinal, name, arch, memory, free, pci, numa_node, bounce_bytes);
        row.set_item("copied", copied_dict(py, gpu.copied)?)?;
        let at = seen.iter().position(|seen| seen.pci.eq_ignore_ascii_case(&gpu.pci));
        let far = distances.iter().filter_map(|(nic, far)| Some((nic, far.get(at?)?)));
        let nics = rows(py, far, |row, (nic, distance)| {
            row.set_item("name", nic)?;
            row.set_item("distance", distance.to_string())
        })?;
        row.set_item("nics", nics)
    })?;
    all.set_item("devices", devices)?;
    all.set_item("peer_access", cuda.map(|cuda| cuda.peer_access.clone()).unwrap_or_default())?;
    let cache = cuda.and_then(|cuda| cuda.kernel_cache.as_ref()).map(|cache| {
        let row = PyDict::new(py);
        row.set_item("folder", cache.folder.to_string_lossy())?;
        row.set_item("bytes", cache.bytes)?;
        Ok::<_, PyErr>(row)
    });
    all.set_item("kernel_cache", cache.transpose()?)?;
    let compiler = cuda.map(|cuda| &cuda.compiler);
    all.set_item("compiler", compiler.and_then(|compiler| compiler.as_ref().ok()))?;
    all.set_item("why_no_compiler", compiler.and_then(|compiler| compiler.as_ref().err()))?;
    Ok(all)
}

fn numa_nodes<'py>(py: Python<'py>, nodes: &[NumaNode]) -> PyResult<Bound<'py, PyList>> {
    rows(py, nodes, |row, node| {
        set_fields!(row, node; node, cpus);
        Ok(())
    })
}
