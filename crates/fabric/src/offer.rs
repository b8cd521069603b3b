//! Offers of libfabric: providers with reliable datagrams, remote writes and immediates, one entry per device.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::net::IpAddr;
use std::ptr::NonNull;

use crossrail_locks::keeping_handlers;
use crossrail_types::{Error, ErrorKind, Result};

use crate::library::{Library, text};
use crate::raw::{self, Info};

/// Least immediate: 32 bits.
const DATA_MIN: usize = 4;

/// One provider over one device, ready to be opened.
pub struct Offer {
    pub(crate) info: OwnedInfo,
    pub(crate) library: &'static Library,
    /// The provider, as `efa` or `tcp;ofi_rxm`.
    pub provider: String,
    /// The device, as `rdmap0s6-rdm` or `lo`.
    pub domain: String,
    /// Its limits and modes.
    pub attributes: Attributes,
}

/// Limits and modes of an [`Offer`], as the provider states them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// `FI_MR_*`: what registrations need.
    pub mr_mode: i32,
    /// Bytes of a key.
    pub mr_key_size: usize,
    /// Bytes of an immediate.
    pub cq_data_size: usize,
    /// Writes that its queue holds.
    pub tx_size: usize,
    /// Most bytes that are copied within a post.
    pub inject_size: usize,
    /// Most local extents of a write.
    pub iov_limit: usize,
    /// Most remote extents of a write.
    pub rma_iov_limit: usize,
    /// Most bytes of a write.
    pub max_msg_size: usize,
    /// Each immediate consumes a posted receive.
    pub rx_cq_data: bool,
    /// Memory of GPUs can be registered.
    pub hmem: bool,
    /// The NIC's name, if the provider knows one.
    pub nic: Option<String>,
    /// The NIC's PCI address, as `0000:36:00.0`.
    pub pci: Option<String>,
    /// Speed of the link in bits per second; 0: not known.
    pub speed: u64,
    /// State of the link; `None`: not known.
    pub up: Option<bool>,
}

impl Attributes {
    /// `LOCAL VIRT_ADDR ...`
    pub fn modes(&self) -> String {
        let names = [
            (raw::FI_MR_LOCAL, "LOCAL"),
            (raw::FI_MR_VIRT_ADDR, "VIRT_ADDR"),
            (raw::FI_MR_ALLOCATED, "ALLOCATED"),
            (raw::FI_MR_PROV_KEY, "PROV_KEY"),
            (raw::FI_MR_ENDPOINT, "ENDPOINT"),
            (raw::FI_MR_HMEM, "HMEM"),
        ];
        let set: Vec<&str> = names.iter().filter(|(bit, _)| self.mr_mode & bit != 0).map(|(_, name)| *name).collect();
        if set.is_empty() { "none".to_owned() } else { set.join(" ") }
    }
}

impl std::fmt::Display for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.provider, self.domain)
    }
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self} {:?}", self.attributes)
    }
}

/// A query.
#[derive(Clone, Debug, Default)]
pub struct Wanted<'a> {
    /// The provider, as `tcp`, which also names `tcp;ofi_rxm` where there is no such provider; `None`: any.
    pub provider: Option<&'a str>,
    /// The local address, for providers whose devices have IP addresses.
    pub address: Option<IpAddr>,
    /// The network interface or NIC, for others.
    pub device: Option<&'a str>,
    /// Memory of GPUs is to be registered.
    pub gpu: bool,
}

impl Library {
    /// All that fits, in the library's order: best first.
    ///
    /// # Errors
    /// `Unsupported`: nothing fits, or what does lacks something that this crate needs, which the error names.
    pub fn offers(&'static self, wanted: &Wanted<'_>) -> Result<Vec<Offer>> {
        let mut lacking = Vec::new();
        let mut offers: Vec<Offer> = Vec::new();
        let list = self.query(wanted)?;
        let mut next = list.as_ref().map(|list| list.0);
        while let Some(info) = next {
            // SAFETY: an entry of the library's list, which lives until `list` is dropped.
            let (entry, following) = unsafe { (Attributes::of(info), NonNull::new((*info.as_ptr()).next)) };
            next = following;
            let (provider, domain, attributes) = entry;
            if wanted.provider.is_some_and(|name| !is_named(&provider, name)) {
                continue;
            }
            if let Some(lacks) = attributes.lacks() {
                lacking.push(format!("{provider}/{domain} {lacks}"));
                continue;
            }
            if offers.iter().any(|known| known.provider == provider && known.domain == domain) {
                continue;
            }
            // SAFETY: copies one entry.
            let Some(copy) = NonNull::new(unsafe { (self.raw.fi_dupinfo)(info.as_ptr()) }) else { continue };
            offers.push(Offer { info: OwnedInfo(copy, self), library: self, provider, domain, attributes });
        }
        if let Some(name) = wanted.provider
            && offers.iter().any(|offer| offer.provider == name)
        {
            offers.retain(|offer| offer.provider == name);
        }
        if let Some(device) = wanted.device
            && offers.iter().any(|offer| offer.is_of(device))
        {
            offers.retain(|offer| offer.is_of(device));
        }
        if !offers.is_empty() {
            return Ok(offers);
        }
        let name = wanted.provider.unwrap_or("any provider");
        let place = wanted.address.map(|address| format!(" at {address}")).unwrap_or_default();
        let why = match lacking.is_empty() {
            true => format!("libfabric {} finds no device for {name}{place}", self.version()),
            false => format!("libfabric {} has no usable device: {}", self.version(), lacking.join("; ")),
        };
        let hint = "`fi_info` lists what libfabric finds; FI_PROVIDER, FI_PROVIDER_PATH and the provider's own variables \
                    may leave it out";
        Err(Error::new(ErrorKind::Unsupported, "fabric", why).with_hint(hint))
    }

    /// As [`Library::offers`], of devices that register memory of GPUs; where there are none, of all that fit, whose
    /// attributes state it. `wanted.gpu` is ignored.
    ///
    /// # Errors
    /// As [`Library::offers`].
    pub fn offers_for_gpus(&'static self, wanted: &Wanted<'_>) -> Result<Vec<Offer>> {
        let with = |gpu| self.offers(&Wanted { gpu, ..wanted.clone() });
        with(true).or_else(|_| with(false))
    }

    fn query(&'static self, wanted: &Wanted<'_>) -> Result<Option<OwnedInfo>> {
        // SAFETY: copying nothing allocates an empty entry with its attributes.
        let hints = NonNull::new(unsafe { (self.raw.fi_dupinfo)(std::ptr::null()) });
        let hints = OwnedInfo(hints.ok_or_else(|| out_of_memory("fi_allocinfo"))?, self);
        // SAFETY: allocated by the library just now, with all of its attributes; the text is freed by it.
        unsafe {
            let info = hints.0.as_ptr();
            (*info).caps = raw::FI_MSG | raw::FI_RMA | if wanted.gpu { raw::FI_HMEM } else { 0 };
            (*info).mode = raw::FI_CONTEXT | raw::FI_CONTEXT2 | raw::FI_RX_CQ_DATA;
            (*(*info).ep_attr).kind = raw::FI_EP_RDM;
            let domain = &mut *(*info).domain_attr;
            domain.threading = raw::FI_THREAD_DOMAIN;
            domain.mr_mode = raw::FI_MR_LOCAL
                | raw::FI_MR_VIRT_ADDR
                | raw::FI_MR_ALLOCATED
                | raw::FI_MR_PROV_KEY
                | raw::FI_MR_ENDPOINT
                | if wanted.gpu { raw::FI_MR_HMEM } else { 0 };
            if let Some(name) = wanted.provider.and_then(|name| CString::new(name).ok()) {
                (*(*info).fabric_attr).prov_name = libc::strdup(name.as_ptr());
            }
        }
        let node = wanted.address.and_then(|address| CString::new(address.to_string()).ok());
        let (node, flags) = match &node {
            Some(node) => (node.as_ptr(), raw::FI_SOURCE | raw::FI_NUMERICHOST),
            None => (std::ptr::null(), 0),
        };
        let mut found = std::ptr::null_mut();
        // SAFETY: the hints are the library's own, the node is a C string or null.
        let code = keeping_handlers(|| unsafe {
            (self.raw.fi_getinfo)(self.interface(), node, std::ptr::null(), flags, hints.0.as_ptr(), &mut found)
        });
        if code == -raw::FI_ENODATA {
            return Ok(None);
        }
        self.check("fi_getinfo", code)?;
        Ok(NonNull::new(found).map(|found| OwnedInfo(found, self)))
    }
}

impl Offer {
    fn is_of(&self, device: &str) -> bool {
        self.domain == device || self.attributes.nic.as_deref() == Some(device)
    }
}

impl Attributes {
    /// Provider, domain and attributes of an entry.
    ///
    /// # Safety
    /// `info` must be an entry that the library returned.
    unsafe fn of(info: NonNull<Info>) -> (String, String, Attributes) {
        // SAFETY: entries are complete but for `nic`.
        unsafe {
            let info = info.as_ref();
            let (tx, rx, ep) = (&*info.tx_attr, &*info.rx_attr, &*info.ep_attr);
            let (domain, fabric) = (&*info.domain_attr, &*info.fabric_attr);
            let mut attributes = Attributes {
                mr_mode: domain.mr_mode,
                mr_key_size: domain.mr_key_size,
                cq_data_size: domain.cq_data_size,
                tx_size: tx.size,
                inject_size: tx.inject_size,
                iov_limit: tx.iov_limit,
                rma_iov_limit: tx.rma_iov_limit,
                max_msg_size: ep.max_msg_size,
                rx_cq_data: (info.mode | rx.mode) & raw::FI_RX_CQ_DATA != 0,
                hmem: info.caps & raw::FI_HMEM != 0,
                ..Attributes::default()
            };
            if let Some(nic) = info.nic.as_ref() {
                attributes.nic =
                    nic.device_attr.as_ref().map(|device| text(device.name)).filter(|name| !name.is_empty());
                if let Some(link) = nic.link_attr.as_ref() {
                    attributes.speed = link.speed as u64;
                    attributes.up = (link.state != 0).then_some(link.state == 2);
                }
                if let Some(bus) = nic.bus_attr.as_ref().filter(|bus| bus.bus_type == 1) {
                    let (domain, device) = (bus.domain_id, bus.device_id);
                    attributes.pci = Some(format!("{domain:04x}:{:02x}:{device:02x}.{}", bus.bus_id, bus.function_id));
                }
            }
            (text(fabric.prov_name), text(domain.name), attributes)
        }
    }

    /// The first requirement of this crate that the provider lacks.
    fn lacks(&self) -> Option<String> {
        if self.cq_data_size < DATA_MIN {
            return Some(format!("has immediates of {} bytes, of {DATA_MIN} that are needed", self.cq_data_size));
        }
        if self.iov_limit == 0 || self.rma_iov_limit == 0 || self.tx_size < 8 {
            return Some(format!("takes {} writes of {} extents at a time", self.tx_size, self.iov_limit));
        }
        (self.max_msg_size < 1 << 16).then(|| format!("takes at most {} bytes per write", self.max_msg_size))
    }
}

/// True if a provider goes by that name: `tcp` is the utility provider over tcp, too.
fn is_named(provider: &str, name: &str) -> bool {
    provider == name || provider.split(';').next() == Some(name)
}

fn out_of_memory(call: &str) -> Error {
    Error::new(ErrorKind::Exhausted, "fabric", format!("{call}: no memory"))
}

/// An `fi_info` list that the library allocated.
pub(crate) struct OwnedInfo(pub(crate) NonNull<Info>, &'static Library);

// SAFETY: plain memory, which no other owner refers to.
unsafe impl Send for OwnedInfo {}
// SAFETY: it is only read.
unsafe impl Sync for OwnedInfo {}

impl Drop for OwnedInfo {
    fn drop(&mut self) {
        // SAFETY: allocated by the library and freed once.
        unsafe { (self.1.raw.fi_freeinfo)(self.0.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_provider_that_lacks_something_is_refused_by_what_it_lacks() {
        let good = Attributes {
            cq_data_size: 4,
            iov_limit: 1,
            rma_iov_limit: 1,
            tx_size: 8,
            max_msg_size: 1 << 16,
            ..Attributes::default()
        };
        assert_eq!(good.lacks(), None);
        let lacks = |attributes: Attributes| attributes.lacks().unwrap_or_default();
        assert!(lacks(Attributes { cq_data_size: 0, ..good.clone() }).contains("immediates of 0 bytes"));
        assert!(lacks(Attributes { iov_limit: 0, ..good.clone() }).contains("0 extents"));
        assert!(lacks(Attributes { tx_size: 7, ..good.clone() }).contains("7 writes"));
        assert!(lacks(Attributes { max_msg_size: 4096, ..good }).contains("4096 bytes per write"));
    }

    #[test]
    fn a_layered_provider_goes_by_the_name_of_its_core() {
        assert!(is_named("tcp;ofi_rxm", "tcp") && is_named("tcp", "tcp") && is_named("tcp;ofi_rxm", "tcp;ofi_rxm"));
        assert!(!is_named("efa-direct", "efa") && !is_named("shm", "tcp"));
    }
}
