//! libfabric over the rails: lanes that are dialled, lost and dialled again as TCP's are, and the endpoint of one-sided
//! writes.
//!
//! Used where `CROSSRAIL_TLS` names it, or by itself with a NIC that nothing else drives: EFA, then Slingshot.
//! See docs/guides/fabric.md.

use std::net::{IpAddr, TcpStream};
use std::path::Path;

use crossrail_fabric::{Library, Offer, Wanted};
use crossrail_transport::Lane;
use crossrail_types::{Error, ErrorKind, Filter, Result, Settings};

use super::carrier::{Carrier, Join, Obstacle};
use super::nics;
use super::transport::{Availability, Local};
use crate::environment::{gpus_seen, rails};

/// RDMA devices, as the kernel lists them, and Slingshot's.
const DEVICES: &str = "/sys/class/infiniband";
const SLINGSHOT: &str = "/sys/class/cxi";
/// Providers of NICs, in the order in which they are used without being named.
const NICS: [&str; 2] = ["efa", "cxi"];
/// Providers of which any is used where no NIC is, and none is named: for trying. Not `shm`: a peer that is killed within a
/// call of it leaves a spin lock in shared memory taken, on which the next call of the other end spins for ever.
const OTHERS: [&str; 4] = ["verbs;ofi_rxm", "tcp", "net", "tcp;ofi_rxm"];
/// Providers whose devices are found by their IP address.
const ADDRESSED: [&str; 5] = ["tcp", "net", "verbs", "sockets", "udp"];

/// See the module.
pub(super) struct Fabric;

impl Carrier for Fabric {
    fn name(&self) -> &'static str {
        "fabric"
    }

    fn class(&self) -> u16 {
        2
    }

    fn announcement(&self) -> u8 {
        b'F'
    }

    fn availability(&self, local: &Local<'_>) -> Availability {
        if !local.settings.tls.allows(self.name()) {
            // The settings show it; the library need not be loaded for that.
            return Availability::Usable(String::new());
        }
        match open(local.settings) {
            Err(unused) => Availability::Unusable(unused.why, unused.fix),
            Ok((library, offers)) => {
                let one = |offer: &Offer| match offer.attributes.hmem {
                    true => format!("{offer} (GPU memory)"),
                    false => offer.to_string(),
                };
                let list: Vec<String> = offers.iter().map(one).collect();
                Availability::Usable(format!("libfabric {}: {}", library.version(), list.join(" ")))
            }
        }
    }

    fn is_offered(&self, settings: &Settings) -> bool {
        open(settings).is_ok()
    }

    fn obstacle(&self, settings: &Settings) -> Option<Obstacle> {
        open(settings).err()
    }

    fn devices(&self, settings: &Settings) -> usize {
        open(settings).map_or(0, |(_, offers)| offers.iter().filter(|offer| is_apart(&offer.provider)).count())
    }

    fn join(&self, stream: TcpStream, join: Join<'_>) -> Result<Box<dyn Lane>> {
        // A lane's frames are host memory: its payloads come from the stager.
        let end = End { interface: join.interface, number: join.number, gpu: None };
        let offer = offer(join.settings, &stream, &end, false)?;
        let peer = stream.peer_addr().map_or_else(|_| "the peer".to_owned(), |address| address.to_string());
        let lane = crossrail_fabric::attach_lane(stream, &offer, join.id, (&peer, join.label), join.deadline)?;
        Ok(Box::new(lane))
    }
}

/// True if the settings name it.
pub(super) fn is_named(settings: &Settings) -> bool {
    matches!(&settings.tls, Filter::Only(_)) && settings.tls.allows("fabric")
}

/// The library with what it offers, if it is used at all.
fn open(settings: &Settings) -> std::result::Result<(&'static Library, Vec<Offer>), Obstacle> {
    if !is_named(settings) && !has_nic() {
        let fix =
            "with EFA or Slingshot libfabric is used by itself; CROSSRAIL_TLS=fabric:PROVIDER uses it elsewhere, too";
        return Err(Obstacle { why: "no EFA or Slingshot NIC is here".to_owned(), fix: Some(fix.to_owned()) });
    }
    let library = library(settings)?;
    let found = offers(library, settings, None, &End::default(), gpus_seen())?;
    Ok((library, found))
}

/// One end of a connection that needs a device.
#[derive(Clone, Copy, Default)]
pub(super) struct End<'a> {
    /// The network interface of the rail.
    pub(super) interface: Option<&'a str>,
    /// The number of the lane or object, the same at both ends: for NICs that no rail leads to.
    pub(super) number: usize,
    /// The GPU that it serves, if one is known.
    pub(super) gpu: Option<u32>,
}

/// True if no rail leads to the devices of that provider: they have no IP addresses.
fn is_apart(provider: &str) -> bool {
    let core = core_of(provider);
    !ADDRESSED.contains(&core) && core != "shm"
}

fn core_of(provider: &str) -> &str {
    provider.split(';').next().unwrap_or(provider)
}

/// Number of NICs, to which no rail leads, that objects for that GPU are spread over.
pub(super) fn nics_of(settings: &Settings, gpu: Option<u32>) -> usize {
    let found = library(settings)
        .and_then(|library| offers(library, settings, None, &End { gpu, ..End::default() }, gpus_seen()));
    found.map_or(0, |offers| offers.iter().filter(|offer| is_apart(&offer.provider)).count())
}

fn library(settings: &Settings) -> Result<&'static Library> {
    Library::load(settings.fabric_library.as_deref()).map_err(Error::from)
}

/// True with a NIC whose provider this transport uses unnamed.
fn has_nic() -> bool {
    let has_driver = |device: std::fs::DirEntry| {
        let driver = std::fs::read_link(device.path().join("device/driver"));
        driver.is_ok_and(|driver| driver.ends_with("efa"))
    };
    let mut devices = std::fs::read_dir(DEVICES).into_iter().flatten().flatten();
    devices.any(has_driver) || Path::new(SLINGSHOT).is_dir()
}

/// Offers of the provider that the settings name, or of the first one that has any.
fn offers(
    library: &'static Library,
    settings: &Settings,
    address: Option<IpAddr>,
    end: &End<'_>,
    hmem: bool,
) -> Result<Vec<Offer>> {
    let named = settings.tls.of_fabric();
    let of = |provider: &str| {
        let address = address.filter(|_| ADDRESSED.contains(&core_of(provider)));
        let wanted = Wanted { provider: Some(provider), address, device: end.interface, gpu: false };
        let found = if hmem { library.offers_for_gpus(&wanted)? } else { library.offers(&wanted)? };
        if !is_apart(provider) {
            return Ok(found);
        }
        Ok(nics::used(found, rails::gpu_to_be_near(&settings.net_devices, end.gpu).as_ref()))
    };
    if let Some(provider) = named {
        return of(provider);
    }
    let others = if is_named(settings) { &OTHERS[..] } else { &[] };
    let mut last = None;
    for provider in NICS.iter().chain(others) {
        match of(provider) {
            Ok(offers) => return Ok(offers),
            Err(error) => last = Some(error),
        }
    }
    let detail = format!("libfabric {} finds no device of {}", library.version(), NICS.join(", "));
    let error = Error::new(ErrorKind::Unsupported, "fabric", detail);
    Err(match last.and_then(|error| error.hint) {
        Some(hint) => error.with_hint(hint),
        None => error,
    })
}

/// The offer to open for a connection over a rail. `hmem`: one that registers memory of GPUs, if there is one.
///
/// # Errors
/// `Unsupported` when the library has nothing there.
pub(super) fn offer(settings: &Settings, stream: &TcpStream, end: &End<'_>, hmem: bool) -> Result<Offer> {
    let failed = |call: &'static str| move |error: std::io::Error| Error::io("connect", call, &error);
    let here = stream.local_addr().map_err(failed("getsockname"))?.ip().to_canonical();
    let there = stream.peer_addr().map_err(failed("getpeername"))?.ip().to_canonical();
    let mut found = offers(library(settings)?, settings, Some(here), end, hmem)?;
    if found.is_empty() {
        return Err(Error::new(ErrorKind::Unsupported, "fabric", "libfabric offers nothing over this rail"));
    }
    let number = if is_apart(&found[0].provider) { end.number % found.len() } else { 0 };
    let offer = found.swap_remove(number);
    if offer.provider == "shm" && here != there && !here.is_loopback() {
        let detail = format!("{offer} reaches this machine only, and the peer is at {there}");
        return Err(Error::new(ErrorKind::Unsupported, "fabric", detail));
    }
    Ok(offer)
}
