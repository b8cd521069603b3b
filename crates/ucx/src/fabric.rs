//! UCX contexts: which transports and devices UCX has, and one context for each choice of them.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossrail_types::{Error, ErrorKind, Result};

use crate::library::Library;
use crate::raw;

/// Versions whose default (newer) protocols assert that a payload's memory is not registered when the peer dies in
/// mid-transfer. In builds with assertions (Debian, Ubuntu) that aborts the process. Their older protocols do not
/// assert this.
const PROTOCOLS_THAT_ASSERT: [(u32, u32); 2] = [(1, 16), (1, 17)];
/// Versions whose tcp, seen with Debian's, asserts that it waits for an acknowledgement when a peer dies in the middle
/// of a write into its memory. The same bytes go as messages of their tcp, copied once more at each end.
const WRITES_THAT_ASSERT: [(u32, u32); 1] = [(1, 13)];

/// A transport of UCX on a device, as UCX writes it: `tcp/eth0`, `rc_mlx5/mlx5_0:1`, `posix/memory`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resource {
    /// UCX's name of the transport.
    pub transport: String,
    /// UCX's name of the device.
    pub device: String,
}

/// What kind of link a UCX transport is, as far as the choice of lanes depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Between processes of one machine, through memory.
    Memory,
    /// TCP sockets of the kernel.
    Tcp,
    /// A NIC that moves data by itself: InfiniBand, RoCE, EFA.
    Rdma,
    /// No link between two processes: copies within one, or memory types only.
    Local,
}

impl Class {
    /// The class of a UCX transport, by its name or alias (`shm`, `rc`, `ib`).
    pub fn of(transport: &str) -> Class {
        match transport {
            "posix" | "sysv" | "cma" | "knem" | "xpmem" | "shm" | "sm" | "mm" => Class::Memory,
            "tcp" | "sockcm" | "tcp_sockcm" => Class::Tcp,
            "self" | "cuda_copy" | "cuda_ipc" | "gdr_copy" | "cuda" | "rocm" | "rocm_copy" | "rocm_ipc" | "ze_copy"
            | "ze_ipc" | "ze_gdr" => Class::Local,
            _ => Class::Rdma,
        }
    }

    /// Whether a UCX transport can carry a connection alone: those that only copy large messages cannot.
    pub fn carries_messages(transport: &str) -> bool {
        !copy_by_the_kernel(std::iter::once(transport))
    }
}

impl Resource {
    /// What kind of link it is.
    pub fn class(&self) -> Class {
        Class::of(&self.transport)
    }
}

impl std::fmt::Display for Resource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.transport, self.device)
    }
}

/// A UCX context: UCX restricted to some transports and network devices. Any thread may create workers from it.
pub struct Fabric {
    pub(crate) library: &'static Library,
    context: raw::Context,
    resources: Vec<Resource>,
    /// A copy in place timed out.
    stages: AtomicBool,
}

// SAFETY: UCX permits any thread to use a context that was created for workers of several threads.
unsafe impl Send for Fabric {}
// SAFETY: as above.
unsafe impl Sync for Fabric {}

impl Fabric {
    /// Opens a context. `transports`: UCX's names, as in `UCX_TLS`; `None`: what `UCX_TLS` says, or all. `device`: the
    /// only network device to use, as in `UCX_NET_DEVICES`; `None`: what `UCX_NET_DEVICES` says, or all.
    ///
    /// # Errors
    /// `Unsupported` if no such transport or device can be used, with the variables that may be the reason; `Io` and
    /// `Exhausted` as UCX reports them.
    pub fn open(library: &'static Library, transports: Option<&[String]>, device: Option<&str>) -> Result<Arc<Fabric>> {
        let config = Configuration::read(library)?;
        if let Some(transports) = transports {
            config.set("TLS", &transports.join(","))?;
        }
        if let Some(device) = device {
            config.set("NET_DEVICES", device)?;
        }
        if copy_by_the_kernel(transports.unwrap_or_default().iter().map(String::as_str)) {
            // The receiving end copies: by itself, when it is called.
            config.set("RNDV_SCHEME", "get_zcopy")?;
        } else if may_use_tcp(transports) {
            // The sending end writes into the receiver's memory.
            config.set("RNDV_SCHEME", "put_zcopy")?;
            // UCX's tcp ends a message twice that it sends from its caller's memory when the connection is reset within
            // a call that sends the message's rest (`uct_tcp_ep_sendv`, up to 1.21 at least). In builds with assertions
            // that aborts the process.
            config.set_unless_told("UCX_ZCOPY_THRESH", "ZCOPY_THRESH", "inf")?;
            if WRITES_THAT_ASSERT.contains(&library.number()) {
                config.set_unless_told("UCX_TCP_PUT_ENABLE", "PUT_ENABLE", "n")?;
                // Segments of the default 8 KiB halve the rate of payloads that are copied into them.
                config.set_unless_told("UCX_TCP_TX_SEG_SIZE", "TX_SEG_SIZE", "32K")?;
            }
        }
        if PROTOCOLS_THAT_ASSERT.contains(&library.number()) {
            config.set_unless_told("UCX_PROTO_ENABLE", "PROTO_ENABLE", "n")?;
        }
        let params = raw::Params {
            field_mask: raw::PARAM_FEATURES | raw::PARAM_SHARED_BY_THREADS,
            features: raw::FEATURE_AM | raw::FEATURE_WAKEUP,
            request_size: 0,
            request_init: std::ptr::null(),
            request_cleanup: std::ptr::null(),
            tag_sender_mask: 0,
            mt_workers_shared: 1,
        };
        let mut context = std::ptr::null_mut();
        let (major, minor) = library.number();
        // SAFETY: the parameters are those of the mask; the configuration lives past the call.
        let status = unsafe { (library.raw.ucp_init_version)(major, minor, &params, config.config, &mut context) };
        if status != raw::OK {
            let error = nothing_usable(&library.status(status), transports, device);
            return Err(error);
        }
        let mut fabric = Fabric { library, context, resources: Vec::new(), stages: AtomicBool::new(false) };
        // By this interface, UCX names its resources only in print.
        // SAFETY: the context was opened above, the stream is open.
        let text = printed(|stream| unsafe { (library.raw.ucp_context_print_info)(context, stream) })?;
        fabric.resources = resources_in(&text);
        if !fabric.resources.iter().any(|resource| resource.class() != Class::Local) {
            return Err(nothing_usable("no device is left", transports, device));
        }
        Ok(Arc::new(fabric))
    }

    /// UCX's transports and devices in this context, in UCX's order.
    pub fn resources(&self) -> &[Resource] {
        &self.resources
    }

    /// Whether lanes receive into staging buffers.
    pub(crate) fn stages(&self) -> bool {
        self.stages.load(Ordering::Relaxed)
    }

    /// Makes lanes created from now on use staging buffers.
    pub(crate) fn stage_from_now_on(&self) {
        self.stages.store(true, Ordering::Relaxed);
    }

    pub(crate) fn context(&self) -> raw::Context {
        self.context
    }
}

/// Whether one of these transports of UCX's copies memory of another process by a call of the kernel.
pub(crate) fn copy_by_the_kernel<'a>(mut transports: impl Iterator<Item = &'a str>) -> bool {
    transports.any(|name| matches!(name, "cma" | "knem"))
}

/// Whether UCX may use its tcp by these names, or by `UCX_TLS` where there are none. UCX warns of a setting that no
/// transport of its context knows.
fn may_use_tcp(transports: Option<&[String]>) -> bool {
    let names = match transports {
        Some(names) => names.join(","),
        None => std::env::var("UCX_TLS").unwrap_or_else(|_| "all".to_owned()),
    };
    let (names, sense) = names.strip_prefix('^').map_or((names.as_str(), true), |others| (others, false));
    names.split(',').any(|name| matches!(name.trim(), "tcp" | "all")) == sense
}

/// What `print` prints to a stream.
///
/// # Errors
/// `Io` when the system provides no stream in memory.
pub(crate) fn printed(print: impl FnOnce(*mut libc::FILE)) -> Result<String> {
    let (mut text, mut len) = (std::ptr::null_mut(), 0);
    // SAFETY: open_memstream stores the text's address and length, valid after fclose, in the two variables, which
    // outlive the stream; the text is freed once it was copied.
    unsafe {
        let stream = libc::open_memstream(&mut text, &mut len);
        if stream.is_null() {
            return Err(Error::io("ucx", "open_memstream", &std::io::Error::last_os_error()));
        }
        print(stream);
        libc::fclose(stream);
        let copy = String::from_utf8_lossy(std::slice::from_raw_parts(text.cast(), len)).into_owned();
        libc::free(text.cast());
        Ok(copy)
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // SAFETY: workers hold the fabric, so none is left.
        unsafe { (self.library.raw.ucp_cleanup)(self.context) }
    }
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fabric({:?})", self.resources)
    }
}

struct Configuration {
    library: &'static Library,
    config: raw::Config,
}

impl Configuration {
    /// UCX's defaults, as its environment variables and its configuration file change them.
    fn read(library: &'static Library) -> Result<Configuration> {
        let mut config = std::ptr::null_mut();
        // SAFETY: null means UCX's own prefix and file.
        let status = unsafe { (library.raw.ucp_config_read)(std::ptr::null(), std::ptr::null(), &mut config) };
        library.check("ucp_config_read", status)?;
        Ok(Configuration { library, config })
    }

    /// As [`Configuration::set`], unless the environment has the variable.
    fn set_unless_told(&self, variable: &str, name: &str, value: &str) -> Result<()> {
        if std::env::var_os(variable).is_some() { Ok(()) } else { self.set(name, value) }
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let text = |text: &str| {
            CString::new(text)
                .map_err(|_| Error::new(ErrorKind::Config, "ucx", format!("{text:?} contains a zero byte")))
        };
        let (name, value) = (text(name)?, text(value)?);
        // SAFETY: both texts outlive the call, which copies them.
        let status = unsafe { (self.library.raw.ucp_config_modify)(self.config, name.as_ptr(), value.as_ptr()) };
        self.library.check("ucp_config_modify", status)
    }
}

impl Drop for Configuration {
    fn drop(&mut self) {
        // SAFETY: read by `read`, released once.
        unsafe { (self.library.raw.ucp_config_release)(self.config) }
    }
}

fn nothing_usable(why: &str, transports: Option<&[String]>, device: Option<&str>) -> Error {
    let mut asked = Vec::new();
    asked.extend(transports.map(|names| format!("transports {}", names.join(","))));
    asked.extend(device.map(|name| format!("device {name}")));
    let of = if asked.is_empty() { String::new() } else { format!(" for {}", asked.join(", ")) };
    let error = Error::new(ErrorKind::Unsupported, "ucx", format!("UCX has no usable device{of}: {why}"));
    let set: Vec<String> = ["UCX_TLS", "UCX_NET_DEVICES", "UCX_SHM_DEVICES"]
        .into_iter()
        .filter_map(|name| std::env::var(name).ok().map(|value| format!("{name}={value}")))
        .collect();
    match set.is_empty() {
        true => error.with_hint("`ucx_info -d` lists what UCX finds on this machine"),
        false => error.with_hint(format!("unset what hides it: {}; `ucx_info -d` lists the rest", set.join(" "))),
    }
}

/// The resources in the text of `ucp_context_print_info`: the last word of each line that begins with `resource`.
fn resources_in(text: &str) -> Vec<Resource> {
    let words = text.lines().filter_map(|line| {
        let line = line.trim_start_matches('#').trim();
        line.strip_prefix("resource").and_then(|rest| rest.split_whitespace().last())
    });
    words
        .filter_map(|word| word.split_once('/'))
        .map(|(transport, device)| Resource { transport: transport.to_owned(), device: device.to_owned() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_is_known_by_its_names() {
        let may = |names: &str| may_use_tcp(Some(&names.split(' ').map(str::to_owned).collect::<Vec<_>>()));
        assert_eq!((may("tcp"), may("posix tcp"), may("all"), may("^ib")), (true, true, true, true));
        assert_eq!((may("posix sysv"), may("rc"), may("^tcp"), may("^sysv,tcp")), (false, false, false, false));
    }

    #[test]
    fn resources_are_read_from_what_ucx_prints() {
        let text = "#\n# UCP context\n#\n#     component 0  :  self\n#            md 0  :  component 0  self \n#\n\
                    #      resource 0  :  md 0  dev 0  flags -- self/memory0\n\
                    #      resource 1  :  md 1  dev 1  flags -s tcp/eth0\n\
                    #      resource 12 :  md 4  dev 3  flags a- ud_mlx5/mlx5_0:1\n#\n";
        let found = resources_in(text);
        let texts: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["self/memory0", "tcp/eth0", "ud_mlx5/mlx5_0:1"]);
        let classes: Vec<Class> = found.iter().map(Resource::class).collect();
        assert_eq!(classes, [Class::Local, Class::Tcp, Class::Rdma]);
        assert_eq!((Class::of("srd"), Class::of("rc"), Class::of("cma")), (Class::Rdma, Class::Rdma, Class::Memory));
    }
}
