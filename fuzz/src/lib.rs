//! Fuzz targets for code that parses untrusted bytes. Each is a function of `&[u8]` that panics on a violation;
//! cargo-fuzz and `tests/replay.rs` share them.

mod admission;
mod ends;
mod gpu;
mod handshake;
mod input;
mod lists;
mod placing;
mod plugin;
mod protocol;
mod rng;
mod seeds;
mod settings;
mod store;

pub use admission::admission;
pub use crossrail_fabric::fuzzing::peer as fabric;
pub use ends::ends;
pub use gpu::gpu;
pub use handshake::{address, handshake};
pub use lists::lists;
pub use placing::placing;
pub use plugin::plugin;
pub use protocol::{frames, protocol};
pub use rng::Rng;
pub use seeds::seeds;
pub use settings::settings;
pub use store::store;

/// One target: its name (also that of its corpus folder) and its entry.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: &[Target] = &[
    ("protocol", protocol),
    ("handshake", handshake),
    ("address", address),
    ("settings", settings),
    ("store", store),
    ("gpu", gpu),
    ("lists", lists),
    ("ends", ends),
    ("admission", admission),
    ("plugin", plugin),
    ("placing", placing),
    ("fabric", fabric),
];
