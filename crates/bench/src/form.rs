//! JSON forms of the fields of plans.

use std::time::Duration;

use crossrail::{Place, Unpack};
use crossrail_ep::Layout;
use crossrail_types::Error;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// The number of a GPU, which is written as `cuda:0`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Gpu(pub(crate) u32);

impl TryFrom<String> for Gpu {
    type Error = String;

    fn try_from(name: String) -> std::result::Result<Gpu, String> {
        match name.parse() {
            Ok(Place::Gpu(ordinal)) => Ok(Gpu(ordinal)),
            Ok(Place::Host) | Err(_) => Err(format!("{name:?} is not a GPU, such as cuda:0")),
        }
    }
}

pub(crate) fn gpu<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<u32, D::Error> {
    Gpu::deserialize(input).map(|Gpu(ordinal)| ordinal)
}

pub(crate) fn modes<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Vec<Unpack>, D::Error> {
    let names = Vec::<String>::deserialize(input)?;
    names.iter().map(|name| name.parse().map_err(|error: Error| D::Error::custom(error.detail))).collect()
}

pub(crate) fn seconds<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Duration, D::Error> {
    Duration::try_from_secs_f64(f64::deserialize(input)?).map_err(D::Error::custom)
}

/// The names of layouts.
#[derive(Deserialize)]
#[serde(remote = "Layout", rename_all = "lowercase")]
pub(crate) enum LayoutName {
    Expert,
    Rank,
}
