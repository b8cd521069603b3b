//! A loaded plugin: its calls, in one form for all versions. What it returns is checked here.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use crossrail_nccl_abi as abi;
use crossrail_types::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::logger;

/// The bytes of a listener's handle. Shorter ones of old versions leave the rest alone.
pub(crate) type Handle = [u8; abi::HANDLE_LEN];

/// Versions that are looked for only to name them in an error.
const TOO_OLD: std::ops::Range<u32> = 2..4;
const TOO_NEW: std::ops::Range<u32> = 13..32;

#[derive(Clone, Copy, Debug)]
enum Table {
    V4(&'static abi::NetV4),
    V5(&'static abi::NetV5),
    V6(&'static abi::NetV6),
    V7(&'static abi::NetV7),
    V8(&'static abi::NetV8),
    V9(&'static abi::NetV9),
    V10(&'static abi::NetV10),
    V11(&'static abi::NetV11),
    V12(&'static abi::NetV12),
}

/// The same expression for every version's table.
macro_rules! each {
    ($table:expr, $t:ident => $body:expr) => {
        match $table {
            Table::V4($t) => $body,
            Table::V5($t) => $body,
            Table::V6($t) => $body,
            Table::V7($t) => $body,
            Table::V8($t) => $body,
            Table::V9($t) => $body,
            Table::V10($t) => $body,
            Table::V11($t) => $body,
            Table::V12($t) => $body,
        }
    };
}

/// A plugin that has been loaded. It stays loaded until the process ends: plugins have threads.
#[derive(Debug)]
pub struct Plugin {
    name: String,
    version: u32,
    table: Table,
}

/// What a plugin reports of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Properties {
    /// Its name.
    pub name: String,
    /// Its PCI device in sysfs.
    pub pci_path: Option<String>,
    /// Mbit/s.
    pub speed_mbps: i32,
    /// Microseconds; 0 before version 5, or if the plugin does not know.
    pub latency_us: f32,
    /// The kinds of memory it supports, as [`abi::PTR_HOST`].
    pub ptr_support: i32,
    /// Maximum number of receives in one request.
    pub max_recvs: i32,
    /// The kind of device, as [`abi::DEVICE_UNPACK`], and its version.
    pub offload: (i32, i32),
}

impl Plugin {
    /// Loads the newest table of the library at `path` that is known here: versions 4 to 12.
    ///
    /// # Errors
    /// `Usage`: the file cannot be loaded, is not a network plugin, or has no table of these versions; the text names
    /// the versions it has.
    pub fn open(path: &Path) -> Result<Plugin> {
        let fail = |detail: String| Error::new(ErrorKind::Usage, "net plugin", format!("{}: {detail}", path.display()));
        // SAFETY: the user names a plugin to run; its initializers are trusted as NCCL trusts them.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| {
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            fail(format!("it cannot be loaded: {why}"))
        })?;
        let find = |version: u32| -> Option<*const c_void> {
            // SAFETY: only the symbol's address is used.
            let symbol = unsafe { library.get::<*const c_void>(abi::symbol(version).as_bytes()) };
            symbol.ok().map(|symbol| symbol.into_raw().cast_const()).filter(|table| !table.is_null())
        };
        let Some((version, table)) = abi::VERSIONS.into_iter().find_map(|version| Some((version, find(version)?)))
        else {
            let others: Vec<u32> = TOO_OLD.chain(TOO_NEW).filter(|version| find(*version).is_some()).collect();
            let Some(other) = others.last() else {
                return Err(fail("it exports no ncclNetPlugin_v* symbol, so it is not an NCCL network plugin".into()));
            };
            let age = if TOO_OLD.contains(other) { "old" } else { "new" };
            return Err(fail(format!("it is a plugin of version {other}, which is too {age}: 4 to 12 are supported")));
        };
        std::mem::forget(library);
        // SAFETY: the symbol is the table of that version, by NCCL's contract; the library stays loaded.
        unsafe { Plugin::of_table(version, table) }.map_err(fail)
    }

    /// The plugin whose table of `version` is at `table`.
    ///
    /// # Errors
    /// Why that is no table.
    ///
    /// # Safety
    /// `table` points to a table of that version, which is never freed.
    pub unsafe fn of_table(version: u32, table: *const c_void) -> std::result::Result<Plugin, String> {
        // SAFETY: promised by the caller, for each version.
        let table = unsafe {
            match version {
                4 => Table::V4(&*table.cast()),
                5 => Table::V5(&*table.cast()),
                6 => Table::V6(&*table.cast()),
                7 => Table::V7(&*table.cast()),
                8 => Table::V8(&*table.cast()),
                9 => Table::V9(&*table.cast()),
                10 => Table::V10(&*table.cast()),
                11 => Table::V11(&*table.cast()),
                12 => Table::V12(&*table.cast()),
                other => return Err(format!("version {other} is not supported")),
            }
        };
        // SAFETY: a table's name is a string that lives as long as the library.
        let name = unsafe { text(each!(table, t => t.name)) };
        let name = name.ok_or_else(|| format!("its table of version {version} has no name"))?;
        Ok(Plugin { name, version, table })
    }

    /// Its name, which `NCCL_NET` must equal.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version of its table.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Initializes it.
    ///
    /// # Errors
    /// `Io`: it refused, with its last warning.
    pub fn init(&self) -> Result<Network<'_>> {
        let mut context = ptr::null_mut();
        let mut config = abi::Config { traffic_class: -1 };
        let log = Some(logger::function());
        // SAFETY: the arguments are as the version requires.
        let status = unsafe {
            match self.table {
                Table::V10(t) => self.has("init", t.init)?(log, None),
                // Any number distinguishes the communicator; there is one.
                Table::V11(t) => self.has("init", t.init)?(&mut context, 1, &mut config, log, None),
                Table::V12(t) => self.has("init", t.init)?(&mut context, 1, &mut config, log, None),
                Table::V4(t) => self.has("init", t.init)?(log),
                Table::V5(t) => self.has("init", t.init)?(log),
                Table::V6(t) => self.has("init", t.init)?(log),
                Table::V7(t) => self.has("init", t.init)?(log),
                Table::V8(t) => self.has("init", t.init)?(log),
                Table::V9(t) => self.has("init", t.init)?(log),
            }
        };
        self.check("init", status)?;
        Ok(Network { plugin: self, context })
    }

    fn has<F>(&self, function: &str, pointer: Option<F>) -> Result<F> {
        pointer.ok_or_else(|| self.fault(function, "is missing from the table"))
    }

    fn check(&self, function: &str, status: abi::Status) -> Result<()> {
        if status == abi::SUCCESS {
            return Ok(());
        }
        let mut said = format!("returned {} ({status})", abi::status_name(status));
        if let Some(warning) = logger::take_warning() {
            said.push_str(": ");
            said.push_str(&warning);
        }
        Err(self.fault(function, &said))
    }

    /// The error of a function that returned what it may not.
    pub(crate) fn fault(&self, function: &str, what: &str) -> Error {
        Error::new(ErrorKind::Io, "net plugin", format!("{function} of {} (v{}) {what}", self.name, self.version))
    }

    /// The error of a function that did not succeed within the time allowed.
    pub(crate) fn stuck(&self, function: &str, what: &str, waited: std::time::Duration) -> Error {
        let detail = format!("{function} of {} (v{}) {what}", self.name, self.version);
        Error::new(ErrorKind::Timeout, "net plugin", detail).with_waited(waited)
    }
}

/// An initialized plugin.
#[derive(Debug)]
pub struct Network<'a> {
    plugin: &'a Plugin,
    context: *mut c_void,
}

/// A listener, a communicator, a registration or a request of a plugin's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Object(pub(crate) *mut c_void);

/// A communicator, and what the plugin shares with a kernel for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comm {
    pub(crate) object: Object,
    pub(crate) offload: Option<abi::DeviceHandle>,
}

impl Network<'_> {
    /// The plugin.
    pub fn plugin(&self) -> &Plugin {
        self.plugin
    }

    /// Number of devices.
    ///
    /// # Errors
    /// `Io`: the plugin failed, or has none.
    pub fn devices(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: a place for the number.
        let status = unsafe { self.plugin.has("devices", each!(self.plugin.table, t => t.devices))?(&mut count) };
        self.plugin.check("devices", status)?;
        match usize::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(self.plugin.fault("devices", &format!("reports {count} devices"))),
        }
    }

    /// The properties of a device.
    ///
    /// # Errors
    /// `Io`: the plugin failed, or reported no name.
    pub fn properties(&self, device: usize) -> Result<Properties> {
        const GET: &str = "getProperties";
        /// Calls a version's function on zeroed properties.
        macro_rules! fetch {
            ($t:ident, $type:ty, $p:ident => $latency:expr, $recvs:expr, $offload:expr) => {{
                // SAFETY: integers, floats and pointers, for all of which zero is valid.
                let mut $p: $type = unsafe { std::mem::zeroed() };
                let get = self.plugin.has(GET, $t.get_properties)?;
                // SAFETY: a place for the properties of this version.
                self.plugin.check(GET, unsafe { get(device as c_int, &mut $p) })?;
                ($p.name, $p.pci_path, $p.speed, $latency, $p.ptr_support, $recvs, $offload)
            }};
        }
        let (name, pci_path, speed_mbps, latency_us, ptr_support, max_recvs, offload) = match self.plugin.table {
            Table::V4(t) => fetch!(t, abi::PropertiesV4, p => 0.0, 1, (0, 0)),
            Table::V5(t) => fetch!(t, abi::PropertiesV6, p => p.latency, p.max_recvs, (0, 0)),
            Table::V6(t) => fetch!(t, abi::PropertiesV6, p => p.latency, p.max_recvs, (0, 0)),
            Table::V7(t) => {
                fetch!(t, abi::PropertiesV7, p => p.latency, p.max_recvs, (p.device_kind, p.device_version))
            }
            Table::V8(t) => {
                fetch!(t, abi::PropertiesV8, p => p.latency, p.max_recvs, (p.device_kind, p.device_version))
            }
            Table::V9(t) => {
                fetch!(t, abi::PropertiesV9, p => p.latency, p.max_recvs, (p.device_kind, p.device_version))
            }
            Table::V10(t) => {
                fetch!(t, abi::PropertiesV9, p => p.latency, p.max_recvs, (p.device_kind, p.device_version))
            }
            Table::V11(t) => {
                fetch!(t, abi::PropertiesV11, p => p.latency, p.max_recvs, (p.device_kind, p.device_version))
            }
            Table::V12(t) => {
                fetch!(t, abi::PropertiesV12, p => p.latency, p.max_recvs, (p.device_kind, p.device_version))
            }
        };
        // SAFETY: strings of the plugin's that live as long as it.
        let (name, pci_path) = unsafe { (text(name), text(pci_path)) };
        let name = name.ok_or_else(|| self.plugin.fault(GET, &format!("gives device {device} no name")))?;
        Ok(Properties { name, pci_path, speed_mbps, latency_us, ptr_support, max_recvs, offload })
    }

    pub(crate) fn listen(&self, device: usize) -> Result<(Object, Handle)> {
        let mut handle = [0; abi::HANDLE_LEN];
        let (mut listener, at) = (ptr::null_mut(), handle.as_mut_ptr().cast());
        let device = device as c_int;
        let plugin = self.plugin;
        // SAFETY: 128 bytes for the handle, and a place for the listener.
        let status = unsafe {
            match plugin.table {
                Table::V11(t) => plugin.has("listen", t.listen)?(self.context, device, at, &mut listener),
                Table::V12(t) => plugin.has("listen", t.listen)?(self.context, device, at, &mut listener),
                Table::V4(t) => plugin.has("listen", t.listen)?(device, at, &mut listener),
                Table::V5(t) => plugin.has("listen", t.listen)?(device, at, &mut listener),
                Table::V6(t) => plugin.has("listen", t.listen)?(device, at, &mut listener),
                Table::V7(t) => plugin.has("listen", t.listen)?(device, at, &mut listener),
                Table::V8(t) => plugin.has("listen", t.listen)?(device, at, &mut listener),
                Table::V9(t) => plugin.has("listen", t.listen)?(device, at, &mut listener),
                Table::V10(t) => plugin.has("listen", t.listen)?(device, at, &mut listener),
            }
        };
        plugin.check("listen", status)?;
        if listener.is_null() {
            return Err(plugin.fault("listen", "succeeded without a listener"));
        }
        Ok((Object(listener), handle))
    }

    /// Connects to the listener of `handle`; `None`: call again, with the same memory.
    pub(crate) fn connect(&self, device: usize, handle: &mut Handle) -> Result<Option<Comm>> {
        let (mut comm, at) = (ptr::null_mut(), handle.as_mut_ptr().cast());
        let mut offload = ptr::null_mut();
        let mut config = abi::Config { traffic_class: -1 };
        let device = device as c_int;
        let plugin = self.plugin;
        // SAFETY: the handle's memory is the same in all calls; places for what is returned.
        let status = unsafe {
            match plugin.table {
                Table::V4(t) => plugin.has("connect", t.connect)?(device, at, &mut comm),
                Table::V5(t) => plugin.has("connect", t.connect)?(device, at, &mut comm),
                Table::V6(t) => plugin.has("connect", t.connect)?(device, at, &mut comm),
                Table::V7(t) => plugin.has("connect", t.connect)?(device, at, &mut comm, &mut offload),
                Table::V8(t) => plugin.has("connect", t.connect)?(device, at, &mut comm, &mut offload),
                Table::V9(t) => plugin.has("connect", t.connect)?(device, at, &mut comm, &mut offload),
                Table::V10(t) => plugin.has("connect", t.connect)?(device, &mut config, at, &mut comm, &mut offload),
                Table::V11(t) => plugin.has("connect", t.connect)?(self.context, device, at, &mut comm, &mut offload),
                Table::V12(t) => plugin.has("connect", t.connect)?(self.context, device, at, &mut comm, &mut offload),
            }
        };
        plugin.check("connect", status)?;
        // SAFETY: null, or a handle of the plugin's that lives as long as the communicator.
        Ok((!comm.is_null()).then(|| Comm { object: Object(comm), offload: unsafe { offload.as_ref() }.copied() }))
    }

    /// Accepts a connection; `None`: call again.
    pub(crate) fn accept(&self, listener: Object) -> Result<Option<Comm>> {
        let mut comm = ptr::null_mut();
        let mut offload = ptr::null_mut();
        let plugin = self.plugin;
        // SAFETY: a listener of this plugin; places for what is returned.
        let status = unsafe {
            match plugin.table {
                Table::V4(t) => plugin.has("accept", t.accept)?(listener.0, &mut comm),
                Table::V5(t) => plugin.has("accept", t.accept)?(listener.0, &mut comm),
                Table::V6(t) => plugin.has("accept", t.accept)?(listener.0, &mut comm),
                Table::V7(t) => plugin.has("accept", t.accept)?(listener.0, &mut comm, &mut offload),
                Table::V8(t) => plugin.has("accept", t.accept)?(listener.0, &mut comm, &mut offload),
                Table::V9(t) => plugin.has("accept", t.accept)?(listener.0, &mut comm, &mut offload),
                Table::V10(t) => plugin.has("accept", t.accept)?(listener.0, &mut comm, &mut offload),
                Table::V11(t) => plugin.has("accept", t.accept)?(listener.0, &mut comm, &mut offload),
                Table::V12(t) => plugin.has("accept", t.accept)?(listener.0, &mut comm, &mut offload),
            }
        };
        plugin.check("accept", status)?;
        // SAFETY: as in `connect`.
        Ok((!comm.is_null()).then(|| Comm { object: Object(comm), offload: unsafe { offload.as_ref() }.copied() }))
    }

    /// Registers host memory. Some plugins return no registration.
    ///
    /// # Safety
    /// The memory is valid until [`Network::deregister`].
    pub(crate) unsafe fn register(&self, comm: Object, data: *mut u8, len: usize) -> Result<Object> {
        let mut registration = ptr::null_mut();
        let (plugin, data) = (self.plugin, data.cast());
        let short = || c_int::try_from(len).map_err(|_| plugin.fault("regMr", "takes at most 2 GiB in this version"));
        let kind = abi::PTR_HOST;
        // SAFETY: a communicator of this plugin; the memory is valid, as promised by the caller.
        let status = unsafe {
            match plugin.table {
                Table::V4(t) => plugin.has("regMr", t.reg_mr)?(comm.0, data, short()?, kind, &mut registration),
                Table::V5(t) => plugin.has("regMr", t.reg_mr)?(comm.0, data, short()?, kind, &mut registration),
                Table::V6(t) => plugin.has("regMr", t.reg_mr)?(comm.0, data, short()?, kind, &mut registration),
                Table::V7(t) => plugin.has("regMr", t.reg_mr)?(comm.0, data, short()?, kind, &mut registration),
                Table::V8(t) => plugin.has("regMr", t.reg_mr)?(comm.0, data, len, kind, &mut registration),
                Table::V9(t) => plugin.has("regMr", t.reg_mr)?(comm.0, data, len, kind, &mut registration),
                Table::V10(t) => plugin.has("regMr", t.reg_mr)?(comm.0, data, len, kind, &mut registration),
                Table::V11(t) => plugin.has("regMr", t.reg_mr)?(comm.0, data, len, kind, &mut registration),
                Table::V12(t) => plugin.has("regMr", t.reg_mr)?(comm.0, data, len, kind, &mut registration),
            }
        };
        plugin.check("regMr", status)?;
        Ok(Object(registration))
    }

    pub(crate) fn deregister(&self, comm: Object, registration: Object) -> Result<()> {
        let function = self.plugin.has("deregMr", each!(self.plugin.table, t => t.dereg_mr))?;
        // SAFETY: a communicator and a registration of this plugin.
        self.plugin.check("deregMr", unsafe { function(comm.0, registration.0) })
    }

    /// Starts to send; `None`: the plugin is busy, try again.
    ///
    /// # Safety
    /// The memory is registered, valid, and not written until the request has completed.
    pub(crate) unsafe fn isend(
        &self,
        comm: Object,
        (data, len): (*mut u8, usize),
        registration: Object,
    ) -> Result<Option<Object>> {
        let mut request = ptr::null_mut();
        let (plugin, data, mr) = (self.plugin, data.cast(), registration.0);
        let short = || c_int::try_from(len).map_err(|_| plugin.fault("isend", "takes at most 2 GiB in this version"));
        let out = &mut request;
        // SAFETY: objects of this plugin; the memory is valid, as promised by the caller.
        let status = unsafe {
            match plugin.table {
                Table::V4(t) => plugin.has("isend", t.isend)?(comm.0, data, short()?, mr, out),
                Table::V5(t) => plugin.has("isend", t.isend)?(comm.0, data, short()?, TAG, mr, out),
                Table::V6(t) => plugin.has("isend", t.isend)?(comm.0, data, short()?, TAG, mr, out),
                Table::V7(t) => plugin.has("isend", t.isend)?(comm.0, data, short()?, TAG, mr, out),
                Table::V8(t) => plugin.has("isend", t.isend)?(comm.0, data, short()?, TAG, mr, out),
                Table::V9(t) => plugin.has("isend", t.isend)?(comm.0, data, len, TAG, mr, out),
                Table::V10(t) => plugin.has("isend", t.isend)?(comm.0, data, len, TAG, mr, ptr::null_mut(), out),
                Table::V11(t) => plugin.has("isend", t.isend)?(comm.0, data, len, TAG, mr, ptr::null_mut(), out),
                Table::V12(t) => plugin.has("isend", t.isend)?(comm.0, data, len, TAG, mr, ptr::null_mut(), out),
            }
        };
        plugin.check("isend", status)?;
        Ok((!request.is_null()).then_some(Object(request)))
    }

    /// Starts to receive one message; `None`: the plugin is busy, try again.
    ///
    /// # Safety
    /// The memory is registered, valid, and not accessed until the request has completed.
    pub(crate) unsafe fn irecv(
        &self,
        comm: Object,
        (data, len): (*mut u8, usize),
        registration: Object,
    ) -> Result<Option<Object>> {
        let mut request = ptr::null_mut();
        let plugin = self.plugin;
        let (mut data, mut size, mut tag, mut mr) = (data.cast::<c_void>(), len, TAG, registration.0);
        let mut profile = ptr::null_mut();
        let short = || c_int::try_from(len).map_err(|_| plugin.fault("irecv", "takes at most 2 GiB in this version"));
        let (d, s, g, m, p, out) = (&mut data, &mut size, &mut tag, &mut mr, &mut profile, &mut request);
        // SAFETY: objects of this plugin, arrays of one element; the memory is valid, as promised by the caller.
        let status = unsafe {
            match plugin.table {
                Table::V4(t) => plugin.has("irecv", t.irecv)?(comm.0, *d, short()?, *m, out),
                Table::V5(t) => plugin.has("irecv", t.irecv)?(comm.0, 1, d, &mut short()?, g, m, out),
                Table::V6(t) => plugin.has("irecv", t.irecv)?(comm.0, 1, d, &mut short()?, g, m, out),
                Table::V7(t) => plugin.has("irecv", t.irecv)?(comm.0, 1, d, &mut short()?, g, m, out),
                Table::V8(t) => plugin.has("irecv", t.irecv)?(comm.0, 1, d, &mut short()?, g, m, out),
                Table::V9(t) => plugin.has("irecv", t.irecv)?(comm.0, 1, d, s, g, m, out),
                Table::V10(t) => plugin.has("irecv", t.irecv)?(comm.0, 1, d, s, g, m, p, out),
                Table::V11(t) => plugin.has("irecv", t.irecv)?(comm.0, 1, d, s, g, m, p, out),
                Table::V12(t) => plugin.has("irecv", t.irecv)?(comm.0, 1, d, s, g, m, p, out),
            }
        };
        plugin.check("irecv", status)?;
        Ok((!request.is_null()).then_some(Object(request)))
    }

    /// The bytes of a request that has completed; `None`: not yet.
    pub(crate) fn test(&self, request: Object) -> Result<Option<usize>> {
        // Room for several sizes: a plugin may write as many as it declares receives.
        let (mut done, mut sizes) = (0, [0; 32]);
        let function = self.plugin.has("test", each!(self.plugin.table, t => t.test))?;
        // SAFETY: a request in flight; places for the answers.
        self.plugin.check("test", unsafe { function(request.0, &mut done, sizes.as_mut_ptr()) })?;
        if done == 0 {
            return Ok(None);
        }
        match usize::try_from(sizes[0]) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(_) => Err(self.plugin.fault("test", &format!("reports a transfer of {} bytes", sizes[0]))),
        }
    }

    /// Tells the plugin that the data of a completed receive has been taken; old versions need not know.
    pub(crate) fn consumed(&self, comm: Object, request: Object) -> Result<()> {
        let function = match self.plugin.table {
            Table::V4(_) | Table::V5(_) | Table::V6(_) => None,
            Table::V7(t) => t.irecv_consumed,
            Table::V8(t) => t.irecv_consumed,
            Table::V9(t) => t.irecv_consumed,
            Table::V10(t) => t.irecv_consumed,
            Table::V11(t) => t.irecv_consumed,
            Table::V12(t) => t.irecv_consumed,
        };
        match function {
            // SAFETY: a communicator, and the request of it that completed last; NCCL calls it at the same point.
            Some(function) => self.plugin.check("irecvConsumed", unsafe { function(comm.0, 1, request.0) }),
            None => Ok(()),
        }
    }

    pub(crate) fn close_send(&self, comm: Object) -> Result<()> {
        let function = self.plugin.has("closeSend", each!(self.plugin.table, t => t.close_send))?;
        // SAFETY: closed once.
        self.plugin.check("closeSend", unsafe { function(comm.0) })
    }

    pub(crate) fn close_recv(&self, comm: Object) -> Result<()> {
        let function = self.plugin.has("closeRecv", each!(self.plugin.table, t => t.close_recv))?;
        // SAFETY: closed once.
        self.plugin.check("closeRecv", unsafe { function(comm.0) })
    }

    pub(crate) fn close_listen(&self, listener: Object) -> Result<()> {
        let function = self.plugin.has("closeListen", each!(self.plugin.table, t => t.close_listen))?;
        // SAFETY: closed once.
        self.plugin.check("closeListen", unsafe { function(listener.0) })
    }
}

impl Drop for Network<'_> {
    fn drop(&mut self) {
        let finalize = match self.plugin.table {
            Table::V11(t) => t.finalize,
            Table::V12(t) => t.finalize,
            _ => None,
        };
        if let Some(finalize) = finalize {
            // SAFETY: what `init` returned, once; lanes, which borrow the network, have been closed before.
            unsafe { finalize(self.context) };
        }
    }
}

/// All messages of a communicator have this tag, so that they match in order.
const TAG: c_int = 0;

/// A C string's text without control characters, which a terminal would obey; `None` for null.
///
/// # Safety
/// `pointer` is null or points to a terminated string.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: promised by the caller.
    let text = (!pointer.is_null()).then(|| CString::from(unsafe { CStr::from_ptr(pointer) }));
    text.map(|text| text.to_string_lossy().chars().filter(|c| !c.is_control()).collect())
}
