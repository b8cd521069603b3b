//! Handles of this plugin's objects: numbers, which NCCL passes as pointers. One that is unknown is an error.

use std::sync::Arc;
use std::sync::OnceLock;

use crossrail_locks::{Mutex, PerProcess};
use crossrail_nccl_abi::Ptr;
use crossrail_types::{Error, ErrorKind, Result};
use slab::Slab;

use super::connecting::Listener;
use super::group::{Contexts, Group};
use super::memory::Region;

/// Target of a handle.
#[derive(Clone)]
pub(crate) enum Object {
    /// Result of `init`. NCCL passes another plugin's to `connect`, so it has no content.
    Plugin,
    Listener(Arc<Listener>),
    Group(Arc<Group>),
    Contexts(Arc<Contexts>),
    Region(Arc<Region>),
}

#[derive(Default)]
struct Table {
    entries: Slab<(u64, Object)>,
    /// Handles are never used again.
    serial: u64,
}

const INDEX_BITS: u32 = 24;

static TABLE: PerProcess<OnceLock<Mutex<Table>>> = PerProcess::new();

fn table() -> &'static Mutex<Table> {
    TABLE.get_or_init(Mutex::default)
}

fn unknown(operation: &str, handle: Ptr, what: &str) -> Error {
    Error::new(ErrorKind::Usage, operation, format!("{:#x} is no {what}", handle as usize))
}

/// A new handle.
pub(crate) fn add(object: Object) -> Ptr {
    let mut table = table().lock();
    table.serial += 1;
    let serial = table.serial;
    let index = table.entries.insert((serial, object));
    ((serial << INDEX_BITS | index as u64) as usize) as Ptr
}

fn find(table: &Table, handle: Ptr) -> Option<&Object> {
    let handle = handle as usize as u64;
    let (serial, index) = (handle >> INDEX_BITS, handle & ((1 << INDEX_BITS) - 1));
    table.entries.get(index as usize).filter(|(known, _)| *known == serial).map(|(_, object)| object)
}

/// The end of a handle; its object.
///
/// # Errors
/// `Usage`: it is unknown, or of another kind.
pub(crate) fn remove<T>(operation: &str, handle: Ptr, what: fn(&Object) -> Option<T>, name: &str) -> Result<T> {
    let mut table = table().lock();
    let object = find(&table, handle).and_then(what).ok_or_else(|| unknown(operation, handle, name))?;
    table.entries.remove((handle as usize as u64 & ((1 << INDEX_BITS) - 1)) as usize);
    drop(table);
    Ok(object)
}

/// A group has ended: so have the handles of its contexts and registrations.
pub(crate) fn remove_all_of(group: u64) {
    let mut table = table().lock();
    let mut ended = Vec::new();
    table.entries.retain(|_, (_, object)| {
        let keeps = match object {
            Object::Contexts(contexts) => contexts.shared().id != group,
            Object::Region(region) => region.group != group,
            Object::Plugin | Object::Listener(_) | Object::Group(_) => true,
        };
        if !keeps {
            ended.push(object.clone());
        }
        keeps
    });
    drop(table);
    // What they hold is dropped without the lock.
    drop(ended);
}

/// The object of a handle.
///
/// # Errors
/// As [`remove`].
pub(crate) fn get<T>(operation: &str, handle: Ptr, what: fn(&Object) -> Option<T>, name: &str) -> Result<T> {
    find(&table().lock(), handle).and_then(what).ok_or_else(|| unknown(operation, handle, name))
}

/// Contexts, and regions, of which some may be null.
pub(crate) type Operands<const COUNT: usize> = (Arc<Contexts>, [Option<Arc<Region>>; COUNT]);

/// The objects that a call names.
///
/// # Errors
/// As [`remove`].
pub(crate) fn operands<const COUNT: usize>(
    operation: &str,
    handle: Ptr,
    regions: [Ptr; COUNT],
) -> Result<Operands<COUNT>> {
    let table = table().lock();
    let contexts = find(&table, handle).and_then(contexts).ok_or_else(|| unknown(operation, handle, CONTEXTS))?;
    let mut found = [const { None }; COUNT];
    for (place, handle) in found.iter_mut().zip(regions).filter(|(_, handle)| !handle.is_null()) {
        *place = Some(find(&table, handle).and_then(region).ok_or_else(|| unknown(operation, handle, REGION))?);
    }
    Ok((contexts, found))
}

pub(crate) const LISTENER: &str = "listener";
pub(crate) const GROUP: &str = "group of ranks";
pub(crate) const CONTEXTS: &str = "context";
pub(crate) const REGION: &str = "registration of memory";

pub(crate) fn listener(object: &Object) -> Option<Arc<Listener>> {
    if let Object::Listener(listener) = object { Some(Arc::clone(listener)) } else { None }
}

pub(crate) fn group(object: &Object) -> Option<Arc<Group>> {
    if let Object::Group(group) = object { Some(Arc::clone(group)) } else { None }
}

pub(crate) fn contexts(object: &Object) -> Option<Arc<Contexts>> {
    if let Object::Contexts(contexts) = object { Some(Arc::clone(contexts)) } else { None }
}

pub(crate) fn region(object: &Object) -> Option<Arc<Region>> {
    if let Object::Region(region) = object { Some(Arc::clone(region)) } else { None }
}

pub(crate) fn plugin(object: &Object) -> Option<()> {
    matches!(object, Object::Plugin).then_some(())
}
