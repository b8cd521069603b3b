//! A loaded RMA plugin: its calls, in one form for all versions, as NCCL's proxy for kernels makes them.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::path::Path;
use std::ptr;

use crossrail_nccl_abi as abi;
use crossrail_nccl_abi::rma::{self, RmaConfig, RmaConfigV13, RmaProperties, RmaV13, RmaV14, RmaV15, RmaV16};
use crossrail_types::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::logger;

#[derive(Clone, Copy, Debug)]
enum Table {
    V13(&'static RmaV13),
    V14(&'static RmaV14),
    V15(&'static RmaV15),
    V16(&'static RmaV16),
}

/// One expression for every version's table.
macro_rules! each {
    ($table:expr, $t:ident => $body:expr) => {
        match $table {
            Table::V13($t) => $body,
            Table::V14($t) => $body,
            Table::V15($t) => $body,
            Table::V16($t) => $body,
        }
    };
}

/// An RMA plugin that has been loaded. It stays loaded until the process ends.
#[derive(Debug)]
pub struct RmaPlugin {
    name: String,
    version: u32,
    table: Table,
}

/// An initialized RMA plugin.
#[derive(Debug)]
pub struct Rma<'a> {
    plugin: &'a RmaPlugin,
    context: *mut c_void,
}

/// An object of a plugin: a listener, a group, contexts, a registration or a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RmaObject(pub *mut c_void);

// SAFETY: NCCL uses these from several threads, and a plugin must allow that.
unsafe impl Send for RmaObject {}
// SAFETY: as above.
unsafe impl Sync for RmaObject {}
// SAFETY: as above.
unsafe impl Send for Rma<'_> {}
// SAFETY: as above.
unsafe impl Sync for Rma<'_> {}

impl RmaObject {
    /// None: a null pointer.
    pub const NULL: RmaObject = RmaObject(ptr::null_mut());
}

/// The bytes of a listener's handle.
pub type RmaHandle = [u8; abi::HANDLE_LEN];

/// A range of registered memory begins at an offset.
pub type At = (u64, RmaObject);

/// Contexts, the index of one of them, and the rank that an operation concerns.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Result of [`Rma::contexts`].
    pub contexts: RmaObject,
    /// The index.
    pub context: i32,
    /// The rank.
    pub rank: u32,
}

/// A signal after a put.
#[derive(Clone, Copy, Debug)]
pub struct SignalOp {
    /// Its word.
    pub at: At,
    /// [`rma::SIGNAL_INC`] or [`rma::SIGNAL_ADD`].
    pub operation: u32,
    /// The increment.
    pub value: u64,
}

/// Properties of an RMA plugin's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RmaDevice {
    /// Its name.
    pub name: String,
    /// The kinds of memory it supports.
    pub ptr_support: i32,
    /// A 32nd of the operations that NCCL has in flight.
    pub max_recvs: i32,
    /// The kind of device.
    pub kind: i32,
}

impl RmaPlugin {
    /// Loads the newest table of the library at `path` that is known here: versions 13 to 16.
    ///
    /// # Errors
    /// `Usage`: the file cannot be loaded, or has no RMA table of these versions.
    pub fn open(path: &Path) -> Result<RmaPlugin> {
        let fail = |detail: String| Error::new(ErrorKind::Usage, "RMA plugin", format!("{}: {detail}", path.display()));
        // SAFETY: the user names a plugin to run; its initializers are trusted as NCCL trusts them.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| fail(format!("it cannot be loaded: {error}")))?;
        let find = |version: u32| -> Option<*const c_void> {
            // SAFETY: only the symbol's address is used.
            let symbol = unsafe { library.get::<*const c_void>(rma::rma_symbol(version).as_bytes()) };
            symbol.ok().map(|symbol| symbol.into_raw().cast_const()).filter(|table| !table.is_null())
        };
        let found = rma::RMA_VERSIONS.into_iter().find_map(|version| Some((version, find(version)?)));
        let Some((version, table)) = found else { return Err(fail("it has no RMA table of versions 13 to 16".into())) };
        std::mem::forget(library);
        // SAFETY: the symbol is the table of that version, by NCCL's contract; the library stays loaded.
        unsafe { RmaPlugin::of_table(version, table) }.map_err(fail)
    }

    /// The plugin whose table of `version` is at `table`.
    ///
    /// # Errors
    /// Why that is not a table.
    ///
    /// # Safety
    /// `table` points to a table of that version, which is never freed.
    pub unsafe fn of_table(version: u32, table: *const c_void) -> std::result::Result<RmaPlugin, String> {
        // SAFETY: promised by the caller, for each version.
        let table = unsafe {
            match version {
                13 => Table::V13(&*table.cast()),
                14 => Table::V14(&*table.cast()),
                15 => Table::V15(&*table.cast()),
                16 => Table::V16(&*table.cast()),
                other => return Err(format!("version {other} is not supported")),
            }
        };
        let name = each!(table, t => t.name);
        if name.is_null() {
            return Err(format!("its table of version {version} has no name"));
        }
        // SAFETY: a table's name is a string that lives as long as the library.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        Ok(RmaPlugin { name, version, table })
    }

    /// Its name.
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
    /// `Io`: it refused.
    pub fn init(&self) -> Result<Rma<'_>> {
        let mut context = ptr::null_mut();
        let init = self.has("init", each!(self.table, t => t.init))?;
        // SAFETY: a place for the context; any number distinguishes the communicator.
        self.check("init", unsafe { init(&mut context, 1, Some(logger::function())) })?;
        Ok(Rma { plugin: self, context })
    }

    fn has<F>(&self, function: &str, pointer: Option<F>) -> Result<F> {
        pointer.ok_or_else(|| self.fault(function, "is missing from the table"))
    }

    fn check(&self, function: &str, status: abi::Status) -> Result<()> {
        if status == abi::SUCCESS {
            return Ok(());
        }
        Err(self.fault(function, &format!("returned {} ({status})", abi::status_name(status))))
    }

    fn fault(&self, function: &str, what: &str) -> Error {
        Error::new(ErrorKind::Io, "RMA plugin", format!("{function} of {} (v{}) {what}", self.name, self.version))
    }
}

/// Calls a function that all versions have alike, and checks its result.
macro_rules! call {
    ($self:expr, $name:literal, $function:ident($($argument:expr),*)) => {{
        let plugin = $self.plugin;
        let function = plugin.has($name, each!(plugin.table, t => t.$function))?;
        // SAFETY: objects are the plugin's, which checks them; results have their places; memory is as the caller of
        // the method promises.
        plugin.check($name, unsafe { function($($argument),*) })
    }};
}

impl Rma<'_> {
    /// Result of `init`.
    pub fn context(&self) -> RmaObject {
        RmaObject(self.context)
    }

    /// Number of devices.
    ///
    /// # Errors
    /// `Io`, as in all methods: the plugin failed.
    pub fn devices(&self) -> Result<i32> {
        let mut count = 0;
        call!(self, "devices", devices(&mut count))?;
        Ok(count)
    }

    /// The properties of a device.
    ///
    /// # Errors
    /// `Io`.
    pub fn device(&self, device: i32) -> Result<RmaDevice> {
        // SAFETY: integers, floats and pointers, for all of which zero is valid.
        let mut properties: abi::PropertiesV12 = unsafe { std::mem::zeroed() };
        call!(self, "getProperties", get_properties(device, &mut properties))?;
        if properties.name.is_null() {
            return Err(self.plugin.fault("getProperties", "gives a device no name"));
        }
        // SAFETY: a string that lives as long as the plugin.
        let name = unsafe { CStr::from_ptr(properties.name) }.to_string_lossy().into_owned();
        let abi::PropertiesV12 { ptr_support, max_recvs, device_kind: kind, .. } = properties;
        Ok(RmaDevice { name, ptr_support, max_recvs, kind })
    }

    /// Listens on a device. `context`: as [`Rma::context`]; NCCL may pass another plugin's.
    ///
    /// # Errors
    /// `Io`.
    pub fn listen(&self, context: RmaObject, device: i32) -> Result<(RmaObject, RmaHandle)> {
        let (mut handle, mut listener) = ([0; abi::HANDLE_LEN], ptr::null_mut());
        call!(self, "listen", listen(context.0, device, handle.as_mut_ptr().cast(), &mut listener))?;
        Ok((RmaObject(listener), handle))
    }

    /// Connects all ranks, which make this call at the same time; it blocks.
    ///
    /// # Errors
    /// `Io`.
    pub fn connect(
        &self,
        context: RmaObject,
        handles: &[RmaHandle],
        rank: i32,
        listener: RmaObject,
    ) -> Result<RmaObject> {
        let mut copies = handles.to_vec();
        let mut pointers: Vec<*mut c_void> = copies.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let (mut group, ranks) = (ptr::null_mut(), handles.len() as c_int);
        call!(self, "connect", connect(context.0, pointers.as_mut_ptr(), ranks, rank, listener.0, &mut group))?;
        Ok(RmaObject(group))
    }

    /// Makes contexts. `stride`: only ranks at multiples of it are peers; version 13 has none.
    ///
    /// # Errors
    /// `Io`.
    pub fn contexts(&self, group: RmaObject, count: i32, stride: i32) -> Result<RmaObject> {
        let (plugin, mut contexts, mut device) = (self.plugin, ptr::null_mut(), ptr::null_mut());
        let mut config = RmaConfig { contexts: count, traffic_class: -1, rank_stride: stride };
        let mut old = RmaConfigV13 { signals: 0, counters: 0, contexts: count, queue_depth: 0, traffic_class: -1 };
        // SAFETY: a configuration of the version, and places for what is returned.
        let status = unsafe {
            match plugin.table {
                Table::V13(t) => {
                    plugin.has("createContext", t.create_context)?(group.0, &mut old, &mut contexts, &mut device)
                }
                Table::V14(t) => plugin.has("createContext", t.create_context)?(group.0, &mut config, &mut contexts),
                Table::V15(t) => plugin.has("createContext", t.create_context)?(group.0, &mut config, &mut contexts),
                Table::V16(t) => plugin.has("createContext", t.create_context)?(group.0, &mut config, &mut contexts),
            }
        };
        plugin.check("createContext", status)?;
        Ok(RmaObject(contexts))
    }

    /// Reports if any signal makes all puts visible that were received before; `None` before version 16.
    ///
    /// # Errors
    /// `Io`.
    pub fn flushes_all_puts(&self, group: RmaObject) -> Result<Option<bool>> {
        let Table::V16(table) = self.plugin.table else { return Ok(None) };
        let mut properties = RmaProperties { flushes_all_puts_on_any_signal: false };
        let get = self.plugin.has("getRmaProperties", table.get_rma_properties)?;
        // SAFETY: a place for the properties.
        self.plugin.check("getRmaProperties", unsafe { get(group.0, &mut properties) })?;
        Ok(Some(properties.flushes_all_puts_on_any_signal))
    }

    /// Registers memory of a kind, as all ranks do in the same order. `dma_buf`: by the other of the two calls.
    ///
    /// # Safety
    /// The memory is valid until it is deregistered.
    ///
    /// # Errors
    /// `Io`.
    pub unsafe fn register(
        &self,
        group: RmaObject,
        (data, len): (*mut u8, usize),
        (kind, flags): (i32, u64),
        dma_buf: bool,
    ) -> Result<RmaObject> {
        let (plugin, data) = (self.plugin, data.cast());
        let (mut made, mut device) = (ptr::null_mut(), ptr::null_mut());
        /// The call of a version, whose last arguments are these.
        macro_rules! register {
            ($t:ident $(, $more:expr)*) => {
                if dma_buf {
                    let function = plugin.has("regMrSymDmaBuf", $t.reg_mr_sym_dma_buf)?;
                    function(group.0, data, len, kind, 0, -1, flags $(, $more)*)
                } else {
                    plugin.has("regMrSym", $t.reg_mr_sym)?(group.0, data, len, kind, flags $(, $more)*)
                }
            };
        }
        // SAFETY: places for the handles; the memory is valid, as promised by the caller.
        let status = unsafe {
            match plugin.table {
                Table::V13(t) => register!(t, &mut made, &mut device),
                Table::V14(t) => register!(t, &mut made),
                Table::V15(t) => register!(t, &mut made),
                Table::V16(t) => register!(t, &mut made),
            }
        };
        plugin.check("regMrSym", status)?;
        Ok(RmaObject(made))
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// `Io`.
    pub fn deregister(&self, group: RmaObject, registration: RmaObject) -> Result<()> {
        call!(self, "deregMrSym", dereg_mr_sym(group.0, registration.0))
    }

    /// Starts a put. The request.
    ///
    /// # Errors
    /// `Io`.
    pub fn put(&self, route: Route, from: At, len: usize, to: At) -> Result<RmaObject> {
        let (plugin, mut request) = (self.plugin, ptr::null_mut());
        let Route { contexts, context, rank } = route;
        /// The call of a version, with its arguments before the request.
        macro_rules! put {
            ($t:ident $(, $flags:expr)?) => {
                plugin.has("iput", $t.iput)?(
                    contexts.0, context, from.0, from.1.0, len, to.0, to.1.0, rank, $($flags,)? &mut request,
                )
            };
        }
        // SAFETY: a place for the request; the plugin checks the rest.
        let status = unsafe {
            match plugin.table {
                Table::V13(t) => put!(t),
                Table::V14(t) => put!(t),
                Table::V15(t) => put!(t, 0),
                Table::V16(t) => put!(t, 0),
            }
        };
        plugin.check("iput", status)?;
        Ok(RmaObject(request))
    }

    /// Starts a put with a signal after it. The request.
    ///
    /// # Errors
    /// `Io`.
    pub fn put_signal(&self, route: Route, from: At, len: usize, to: At, signal: SignalOp) -> Result<RmaObject> {
        let (plugin, mut request) = (self.plugin, ptr::null_mut());
        let Route { contexts, context, rank } = route;
        let SignalOp { at, operation, value } = signal;
        /// The call of a version, with its arguments before the request.
        macro_rules! put {
            ($t:ident $(, $more:expr)*) => {
                plugin.has("iputSignal", $t.iput_signal)?(
                    contexts.0, context, from.0, from.1.0, len, to.0, to.1.0, rank, at.0, at.1.0, value, operation,
                    $($more,)* &mut request,
                )
            };
        }
        // SAFETY: as in `put`.
        let status = unsafe {
            match plugin.table {
                Table::V13(t) => put!(t),
                Table::V14(t) => put!(t, true),
                Table::V15(t) => put!(t, true, 0),
                Table::V16(t) => put!(t, true, 0),
            }
        };
        plugin.check("iputSignal", status)?;
        Ok(RmaObject(request))
    }

    /// Starts a get. The request.
    ///
    /// # Errors
    /// `Io`.
    pub fn get(&self, route: Route, remote: At, len: usize, local: At) -> Result<RmaObject> {
        let (plugin, mut request) = (self.plugin, ptr::null_mut());
        let Route { contexts, context, rank } = route;
        /// The call of a version, with its arguments before the request.
        macro_rules! get {
            ($t:ident $(, $flags:expr)?) => {
                plugin.has("iget", $t.iget)?(
                    contexts.0, context, remote.0, remote.1.0, len, local.0, local.1.0, rank, $($flags,)? &mut request,
                )
            };
        }
        // SAFETY: as in `put`.
        let status = unsafe {
            match plugin.table {
                Table::V13(t) => get!(t),
                Table::V14(t) => get!(t),
                Table::V15(t) => get!(t, 0),
                Table::V16(t) => get!(t, 0),
            }
        };
        plugin.check("iget", status)?;
        Ok(RmaObject(request))
    }

    /// Makes gets that are done visible to the GPU. The request; `None`: they are.
    ///
    /// # Errors
    /// `Io`.
    pub fn flush(&self, route: Route) -> Result<Option<RmaObject>> {
        let mut request = ptr::null_mut();
        let Route { contexts, context, rank } = route;
        call!(self, "iflush", iflush(contexts.0, context, ptr::null_mut(), rank, &mut request))?;
        Ok((!request.is_null()).then_some(RmaObject(request)))
    }

    /// Returns true once a request is done, which ends it.
    ///
    /// # Errors
    /// `Io`.
    pub fn test(&self, group: RmaObject, request: RmaObject) -> Result<bool> {
        let mut done = 0;
        call!(self, "test", test(group.0, request.0, &mut done))?;
        Ok(done != 0)
    }

    /// Lets the plugin make progress.
    ///
    /// # Errors
    /// `Io`.
    pub fn progress(&self, contexts: RmaObject) -> Result<()> {
        call!(self, "rmaProgress", rma_progress(contexts.0))
    }

    /// Returns true if there was an error.
    ///
    /// # Errors
    /// `Io`.
    pub fn has_error(&self, contexts: RmaObject) -> Result<bool> {
        let mut has_error = false;
        call!(self, "queryLastError", query_last_error(contexts.0, &mut has_error))?;
        Ok(has_error)
    }

    /// Ends contexts.
    ///
    /// # Errors
    /// `Io`.
    pub fn destroy_contexts(&self, contexts: RmaObject) -> Result<()> {
        call!(self, "destroyContext", destroy_context(contexts.0))
    }

    /// Ends a group.
    ///
    /// # Errors
    /// `Io`.
    pub fn close_group(&self, group: RmaObject) -> Result<()> {
        call!(self, "closeColl", close_coll(group.0))
    }

    /// Ends a listener.
    ///
    /// # Errors
    /// `Io`.
    pub fn close_listener(&self, listener: RmaObject) -> Result<()> {
        call!(self, "closeListen", close_listen(listener.0))
    }

    /// Ends what `init` returned.
    ///
    /// # Errors
    /// `Io`.
    pub fn finalize(&self, context: RmaObject) -> Result<()> {
        call!(self, "finalize", finalize(context.0))
    }
}
