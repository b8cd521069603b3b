//! libfabric on this machine: what it offers, and tests of what its devices really do.
#![allow(unsafe_code)]

use crossrail_fabric::examine::{Test, loaded_files, write_into};
use crossrail_fabric::{Absent, Library, Offer, Wanted};
use crossrail_transport::placing::Extent;
use crossrail_types::{Error, ErrorKind, Result, Settings};

use super::context::Context;

pub use crossrail_fabric::Attributes as FabricAttributes;
pub use crossrail_fabric::examine::Facts as FabricFacts;

/// libfabric as this process has loaded it, or why there is none.
#[derive(Clone, Debug, Default)]
pub struct FabricState {
    /// As `2.6`; `None`: it cannot be used.
    pub version: Option<String>,
    /// Why not, and what would help.
    pub reason: Option<String>,
    /// See `reason`.
    pub fix: Option<String>,
    /// Files of libfabric in this process: that of the version, and others that other libraries brought.
    pub files: Vec<String>,
    /// Its devices with reliable datagrams, remote writes and immediates.
    pub devices: Vec<FabricDevice>,
    /// Why there is no device, or why some are not usable.
    pub refused: Option<String>,
}

/// One provider over one device.
#[derive(Clone, Debug)]
pub struct FabricDevice {
    /// As `efa`.
    pub provider: String,
    /// As `rdmap0s6-rdm`.
    pub name: String,
    /// Limits, modes, the NIC and its link.
    pub attributes: FabricAttributes,
    /// Memory of GPUs can be registered when it is asked for.
    pub gpu: bool,
}

/// Loads libfabric and lists the devices of one provider, or of all. Loading may take a second.
pub fn fabric_state(context: &Context, provider: Option<&str>) -> FabricState {
    state(context.settings(), provider)
}

/// Runs one of the tests of a device by their names (`write`, `fence`, `key`, `rows`, `register`). A provider may end
/// the process: call it in one of its own.
///
/// # Errors
/// `Usage` for an unknown name; what failed otherwise.
pub fn fabric_test(context: &Context, provider: &str, device: &str, test: &str) -> Result<FabricFacts> {
    let known = Test::ALL.iter().find(|(name, _)| *name == test).map(|(_, test)| *test);
    let unknown = || Error::new(ErrorKind::Usage, "fabric", format!("there is no test {test:?}"));
    known.ok_or_else(unknown)?.run(&offer(context.settings(), (provider, device), false)?)
}

/// Writes `pattern` over a device into memory, as that of a GPU, and returns once its immediates have arrived: the
/// caller compares. A provider may end the process: call it in one of its own.
///
/// # Errors
/// What failed.
///
/// # Safety
/// The memory must be writable until this returns.
pub unsafe fn fabric_write_into(
    context: &Context,
    device: (&str, &str),
    (at, len): (u64, usize),
    gpu: Option<u32>,
    pattern: u8,
) -> Result<FabricFacts> {
    let offer = offer(context.settings(), device, gpu.is_some())?;
    // SAFETY: as the caller guarantees.
    unsafe { write_into(&offer, &Extent { at, len, gpu }, pattern) }
}

fn state(settings: &Settings, provider: Option<&str>) -> FabricState {
    let library = match load(settings) {
        Ok(library) => library,
        Err(absent) => {
            return FabricState { reason: Some(absent.why), fix: absent.fix, ..FabricState::default() };
        }
    };
    let mut state = FabricState { version: Some(library.version()), files: loaded_files(), ..FabricState::default() };
    let of_gpus = library.offers(&Wanted { provider, gpu: true, ..Wanted::default() }).unwrap_or_default();
    match library.offers(&Wanted { provider, ..Wanted::default() }) {
        Ok(offers) => {
            let row = |offer: &Offer| FabricDevice {
                provider: offer.provider.clone(),
                name: offer.domain.clone(),
                attributes: offer.attributes.clone(),
                gpu: of_gpus.iter().any(|one| one.provider == offer.provider && one.domain == offer.domain),
            };
            state.devices = offers.iter().map(row).collect();
        }
        Err(error) => (state.refused, state.fix) = (Some(error.detail), error.hint),
    }
    state
}

fn load(settings: &Settings) -> std::result::Result<&'static Library, Absent> {
    Library::load(settings.fabric_library.as_deref())
}

fn offer(settings: &Settings, (provider, device): (&str, &str), gpu: bool) -> Result<Offer> {
    let library = load(settings).map_err(Error::from)?;
    let offers = library.offers(&Wanted { provider: Some(provider), gpu, ..Wanted::default() })?;
    let missing = || Error::new(ErrorKind::Unsupported, "fabric", format!("{provider} has no device {device}"));
    offers.into_iter().find(|offer| offer.domain == device).ok_or_else(missing)
}
