//! Groups of ranks.

use std::ffi::c_char;
use std::time::Duration;

use crossrail_control::RankState;
use crossrail_types::{Error, ErrorKind, Origin};

use crate::abi::{self, Bytes, GIVEN_LOCAL_RANK, GIVEN_RANK, OK, PENDING, read};
use crate::context::Context;
use crate::failure::Failure;
use crate::guard::{self, Ends, Object, handle, optional_text, place, slice, text, timeout};
use crate::output;
use crate::waits::Waits;

/// A handle.
pub(crate) struct Group {
    pub(crate) native: crossrail_control::Group,
    origin: Origin,
    waits: Waits,
}

impl Ends for Group {
    /// A panic ends no group: its state is the control plane's, and its threads are others.
    fn failure(&self) -> Option<&str> {
        None
    }

    fn fail(&self, _text: &str) {}
}

impl Object for Group {
    type Owner = Group;

    fn owner(&self) -> &Group {
        self
    }

    fn check(&self, operation: &str) -> crossrail_types::Result<()> {
        self.origin.check(operation)
    }
}

/// A limit among options, where 0 is the default.
pub(crate) fn limit(operation: &str, limit_us: i64) -> Result<Option<Duration>, Box<Failure>> {
    if limit_us == 0 { Ok(None) } else { timeout(operation, limit_us) }
}

/// The ranks that the caller names; none: all of `ranks`.
///
/// # Safety
/// `at` is null, or points to `count` numbers.
pub(crate) unsafe fn ranks_of(
    operation: &str,
    at: *const u32,
    count: usize,
    ranks: u32,
) -> Result<Vec<u32>, Box<Failure>> {
    // SAFETY: by the contract.
    let named = unsafe { slice(operation, at, count) }?;
    Ok(if named.is_empty() { (0..ranks).collect() } else { named.to_vec() })
}

/// Joins a group.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_join(
    context: *mut Context,
    options: *const abi::GroupOptions,
    out: *mut *mut Group,
) -> i32 {
    const OPERATION: &str = "group_join";
    // SAFETY: by the contract.
    guard::call(OPERATION, None, || unsafe {
        let (context, out) = (handle(OPERATION, context)?, place(OPERATION, out)?);
        let given = read(OPERATION, options, GIVEN_RANK | GIVEN_LOCAL_RANK)?;
        let of = |flag: u32, value: u32| (given.flags & flag != 0).then_some(value);
        let text = |at| Ok::<_, Box<Failure>>(optional_text(OPERATION, at)?.map(str::to_owned));
        let default = crossrail_control::GroupOptions::default();
        let options = crossrail_control::GroupOptions {
            name: text(given.name)?.unwrap_or(default.name),
            rank: of(GIVEN_RANK, given.rank),
            size: (given.size > 0).then_some(given.size),
            local_rank: of(GIVEN_LOCAL_RANK, given.local_rank),
            node: text(given.node)?,
            store: text(given.store)?,
            lease: limit(OPERATION, given.lease_us)?.unwrap_or(default.lease),
            timeout: limit(OPERATION, given.timeout_us)?,
        };
        context.1.check(OPERATION)?;
        let native = crossrail_control::Group::join(options, context.0.settings())?;
        out.set(Box::into_raw(Box::new(Group { native, origin: Origin::here(), waits: Waits::default() })));
        Ok(OK)
    })
}

/// Leaves.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_leave(group: *mut Group) -> i32 {
    const OPERATION: &str = "group_leave";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, group, |group| {
            group.native.leave()?;
            Ok(OK)
        })
    }
}

/// Gives the handle back.
///
/// # Safety
/// `group` is null or a group, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_free(group: *mut Group) {
    // SAFETY: by the contract.
    unsafe { guard::free("group_free", group, |group| group.origin) };
}

/// This rank, and the number of ranks.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_rank(group: *mut Group, rank: *mut u32, size: *mut u32) -> i32 {
    const OPERATION: &str = "group_rank";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, group, |group| {
            let (rank, size) = (place(OPERATION, rank)?, place(OPERATION, size)?);
            rank.set(group.native.rank());
            size.set(group.native.size());
            Ok(OK)
        })
    }
}

/// The store's address.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_store(group: *mut Group, text: *mut *mut c_char) -> i32 {
    const OPERATION: &str = "group_store";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, group, |group| {
            let out = place(OPERATION, text)?;
            out.set(output::text(OPERATION, &group.native.store_address())?);
            Ok(OK)
        })
    }
}

/// State of a rank.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_state(group: *mut Group, rank: u32) -> i32 {
    const OPERATION: &str = "group_state";
    let gone = |why: &str| {
        let error = Error::new(ErrorKind::PeerDead, OPERATION, format!("rank {rank} {why}"));
        Err(error.with_peer(format!("rank {rank}")).into())
    };
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, group, |group| match group.native.state(rank) {
            RankState::Alive => Ok(OK),
            RankState::Absent => Ok(PENDING),
            RankState::Dead(why) => gone(&format!("is dead: {why}")),
            RankState::Left => gone("has left"),
        })
    }
}

/// Waits for members.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_wait(
    group: *mut Group,
    ranks: *const u32,
    count: usize,
    timeout_us: i64,
) -> i32 {
    const OPERATION: &str = "group_wait";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, group, |group| {
            let (limit, ranks) =
                (timeout(OPERATION, timeout_us)?, ranks_of(OPERATION, ranks, count, group.native.size())?);
            group.waits.wait(|| group.native.wait_members(&ranks, limit))?;
            Ok(OK)
        })
    }
}

/// Waits for ranks at a barrier.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_barrier(
    group: *mut Group,
    name: *const c_char,
    ranks: *const u32,
    count: usize,
    timeout_us: i64,
) -> i32 {
    const OPERATION: &str = "group_barrier";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, group, |group| {
            let (name, limit) = (text(OPERATION, name)?, timeout(OPERATION, timeout_us)?);
            let ranks = ranks_of(OPERATION, ranks, count, group.native.size())?;
            group.waits.wait(|| group.native.barrier(name, &ranks, limit))?;
            Ok(OK)
        })
    }
}

/// Publishes a value.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_publish(
    group: *mut Group,
    key: *const c_char,
    data: *const std::ffi::c_void,
    size: usize,
) -> i32 {
    const OPERATION: &str = "group_publish";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, group, |group| {
            let (key, value) = (text(OPERATION, key)?, slice::<u8>(OPERATION, data.cast(), size)?);
            group.native.publish(key, value)?;
            Ok(OK)
        })
    }
}

/// The values that ranks have published.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_collect(
    group: *mut Group,
    key: *const c_char,
    ranks: *const u32,
    count: usize,
    timeout_us: i64,
    out: *mut *mut Bytes,
) -> i32 {
    const OPERATION: &str = "group_collect";
    // SAFETY: by the contract.
    unsafe {
        guard::with(OPERATION, group, |group| {
            let (out, key, limit) = (place(OPERATION, out)?, text(OPERATION, key)?, timeout(OPERATION, timeout_us)?);
            let ranks = ranks_of(OPERATION, ranks, count, group.native.size())?;
            let values = group.waits.wait(|| group.native.collect(key, &ranks, limit))?;
            let parts: Vec<_> = values.iter().map(|value| [value.as_slice()]).collect();
            let made =
                output::array(OPERATION, &parts, |at, [data]| Bytes { data: data.cast(), size: values[at].len() })?;
            out.set(made);
            Ok(OK)
        })
    }
}

/// Ends the waits in progress.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_group_interrupt(group: *mut Group) {
    // SAFETY: by the contract.
    if let Some(group) = unsafe { group.as_ref() }.filter(|group| group.origin.is_here()) {
        guard::quietly("group_interrupt", None, || group.waits.interrupt());
    }
}
