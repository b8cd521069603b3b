//! Sharing memory by legacy handles, and in several allocations.

use std::os::fd::AsFd;
use std::process::Command;

use crossrail_cuda::{
    Allocation, Context, Cuda, DeviceMemory, IpcHandle, IpcMapping, Mapping, PinnedMemory, PointerInfo,
};
use crossrail_types::ErrorKind;

use crate::{LEN, context, pair, pattern, put, support, take};

/// The environment variable with the handle in hexadecimal and the GPU, for the child of
/// `another_process_opens_a_legacy_handle`.
const HANDLE: &str = "GPU_TEST_HANDLE";
const ORDINAL: &str = "GPU_TEST_ORDINAL";

/// Not a test by itself: the other process.
#[test]
fn handle_child_process() {
    let (Ok(hex), Ok(ordinal)) = (std::env::var(HANDLE), std::env::var(ORDINAL)) else { return };
    let mut bytes = [0; IpcHandle::LEN];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap();
    }
    let cuda = Cuda::load().unwrap();
    let context = context(&cuda, ordinal.parse().unwrap());
    let mapping = IpcMapping::open(&context, &IpcHandle::from_bytes(bytes)).unwrap();
    assert!(mapping.len() >= 3 * LEN as u64, "{} bytes", mapping.len());
    assert!(take(&context, mapping.address(), 3 * LEN) == pattern(1, 3 * LEN));
    // A second mapping of the handle is the same memory and outlives the first.
    let again = IpcMapping::open(&context, &IpcHandle::from_bytes(bytes)).unwrap();
    drop(mapping);
    put(&context, again.address() + LEN as u64, &pattern(2, LEN));
}

fn in_another_process(ordinal: u32) {
    let Some(cuda) = support::cuda() else { return };
    if ordinal > 0 && pair(&cuda).is_none() {
        return;
    }
    let context = context(&cuda, 0);
    let memory = DeviceMemory::new(&context, 3 * LEN).unwrap();
    put(&context, memory.address(), &pattern(1, 3 * LEN));
    // The handle of any address is that of the whole allocation.
    let handle = IpcHandle::of(&context, memory.address() + 100).unwrap();
    let hex: String = handle.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sharing::handle_child_process", "--nocapture"])
        .env(HANDLE, hex)
        .env(ORDINAL, ordinal.to_string())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found = take(&context, memory.address(), 3 * LEN);
    assert!(found[..LEN] == pattern(1, 3 * LEN)[..LEN] && found[2 * LEN..] == pattern(1, 3 * LEN)[2 * LEN..]);
    assert!(found[LEN..2 * LEN] == pattern(2, LEN));
}

#[test]
fn another_process_opens_a_legacy_handle() {
    in_another_process(0);
}

#[test]
fn another_process_opens_a_legacy_handle_on_another_gpu() {
    in_another_process(1);
}

#[test]
fn memory_without_a_legacy_handle_is_reported() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let mapping = Allocation::new(&context, LEN).unwrap().map(&[&context]).unwrap();
    assert!(!PointerInfo::of(&context, mapping.address()).unwrap().legacy_ipc);
    let error = IpcHandle::of(&context, mapping.address()).unwrap_err();
    assert!(error.detail.starts_with("cuIpcGetMemHandle: CUDA_ERROR_"), "{error}");
    let plain = DeviceMemory::new(&context, LEN).unwrap();
    assert!(PointerInfo::of(&context, plain.address()).unwrap().legacy_ipc);
    // An invalid handle, and one that this process itself exported.
    for handle in [IpcHandle::from_bytes([0; IpcHandle::LEN]), IpcHandle::of(&context, plain.address()).unwrap()] {
        let error = IpcMapping::open(&context, &handle).unwrap_err();
        assert!(error.detail.starts_with("cuIpcOpenMemHandle: CUDA_ERROR_"), "{error}");
    }
    // The context remains usable.
    put(&context, plain.address(), &pattern(3, LEN));
    assert!(take(&context, plain.address(), LEN) == pattern(3, LEN));
}

/// Three contiguous allocations, like an expandable segment.
fn segment(context: &Context) -> (Mapping, usize) {
    let parts: Vec<Allocation> = (0..3).map(|_| Allocation::new(context, 1).unwrap()).collect();
    let part = parts[0].len();
    (Mapping::of(&parts, &[context]).unwrap(), part)
}

#[test]
fn a_range_of_several_allocations_is_exported_piece_by_piece() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let (mapping, part) = segment(&context);
    assert_eq!(mapping.len(), 3 * part);
    let bytes = pattern(4, 3 * part);
    put(&context, mapping.address(), &bytes);
    // The whole range again, from descriptors.
    let imported: Vec<Allocation> = (0..3)
        .map(|i| {
            let place = (mapping.address() + i * part as u64, mapping.address() + (i + 1) * part as u64);
            for address in [place.0, place.0 + part as u64 / 2, place.1 - 1] {
                let info = PointerInfo::of(&context, address).unwrap();
                assert_eq!((info.base, info.base + info.len), place, "one handle's part of the reserved addresses");
                assert!(info.descriptor);
            }
            let piece = Allocation::of_address(&context, place.0, part).unwrap();
            let descriptor = piece.export().unwrap();
            Allocation::import(&context, descriptor.as_fd(), piece.len()).unwrap()
        })
        .collect();
    let again = Mapping::of(&imported, &[&context]).unwrap();
    drop((mapping, imported));
    assert!(take(&context, again.address(), 3 * part) == bytes);
}

#[test]
fn addresses_report_their_owner_and_export_types() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let (mapping, _) = segment(&context);
    let (plain, pinned) = (DeviceMemory::new(&context, LEN).unwrap(), PinnedMemory::new(&context, LEN).unwrap());
    assert_eq!(PointerInfo::device_at(&context, plain.address()).unwrap(), Some(0));
    assert_eq!(PointerInfo::device_at(&context, mapping.address() + 5).unwrap(), Some(0));
    assert_eq!(PointerInfo::device_at(&context, pinned.address()).unwrap(), None);
    assert_eq!(PointerInfo::device_at(&context, 0x10).unwrap(), None);
    assert!(PointerInfo::of(&context, mapping.address() + 5).unwrap().descriptor);
    for address in [plain.address(), pinned.address(), 0x10] {
        assert!(!PointerInfo::of(&context, address).unwrap().descriptor, "{address:#x}");
    }
    assert_eq!(Allocation::of_address(&context, mapping.address(), 0).unwrap_err().kind, ErrorKind::Usage);
}

#[test]
fn buffer_ids_are_never_reused() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let id = |address| PointerInfo::of(&context, address).unwrap().id;
    let memory = DeviceMemory::new(&context, LEN).unwrap();
    let first = id(memory.address());
    assert_eq!(id(memory.address() + LEN as u64 - 1), first);
    drop(memory);
    let memory = DeviceMemory::new(&context, LEN).unwrap();
    assert!(first != 0 && id(memory.address()) != first);
}
