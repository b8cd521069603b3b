//! The driver on a real GPU: memory, copies, sharing between processes, several GPUs. Skipped with a message without
//! one.
#![allow(unsafe_code)]

mod capture;
mod sharing;
#[path = "../support/mod.rs"]
#[allow(dead_code)]
mod support;
mod waiting;

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::time::Duration;

use crossrail_cuda::nvrtc::{Compiler, Source};
use crossrail_cuda::{
    Allocation, Context, Cuda, DeviceMemory, Event, MemoryKind, Module, PinnedMemory, PointerInfo, RegisteredMemory,
    Stream,
};
use crossrail_types::{ErrorKind, format_gib};

const LIMIT: Duration = Duration::from_secs(20);
const LEN: usize = 1 << 20;
/// The environment variable with the memory's length, for the child of `another_process_maps_the_same_memory`.
const CHILD: &str = "GPU_TEST_LEN";

fn context(cuda: &Cuda, ordinal: u32) -> Context {
    Context::primary(&cuda.device(ordinal).unwrap()).unwrap()
}

/// Bytes that depend on the seed and the position.
fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) >> 3) as u8 ^ seed).collect()
}

/// Writes `bytes` to a GPU address and waits.
fn put(context: &Context, address: u64, bytes: &[u8]) {
    let pinned = PinnedMemory::new(context, bytes.len()).unwrap();
    let stream = Stream::new(context).unwrap();
    // SAFETY: the pinned memory is exclusive; the caller's range is valid; the copy is awaited.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), pinned.as_ptr(), bytes.len());
        stream.copy(address, pinned.address(), bytes.len()).unwrap();
    }
    stream.wait(LIMIT).unwrap();
}

/// Reads from a GPU address and waits.
fn take(context: &Context, address: u64, len: usize) -> Vec<u8> {
    let pinned = PinnedMemory::new(context, len).unwrap();
    let stream = Stream::new(context).unwrap();
    // SAFETY: as in `put`; the bytes are read after the copy has completed.
    unsafe {
        stream.copy(pinned.address(), address, len).unwrap();
        stream.wait(LIMIT).unwrap();
        std::slice::from_raw_parts(pinned.as_ptr(), len).to_vec()
    }
}

/// Two GPUs with peer access; otherwise the test is skipped with a message.
fn pair(cuda: &Cuda) -> Option<(Context, Context)> {
    let devices = cuda.devices().unwrap();
    let [first, second, ..] = devices.as_slice() else {
        support::skip("needs two GPUs");
        return None;
    };
    if !first.reaches(second).unwrap() {
        support::skip("the two GPUs can't reach each other");
        return None;
    }
    Some((Context::primary(first).unwrap(), Context::primary(second).unwrap()))
}

#[test]
fn devices_report_their_properties() {
    let Some(cuda) = support::cuda() else { return };
    let devices = cuda.devices().unwrap();
    assert!(!devices.is_empty());
    let mut uuids = Vec::new();
    for (ordinal, device) in devices.iter().enumerate() {
        println!(
            "cuda:{ordinal} {} {} {} {} bytes, NUMA node {:?}, driver {cuda:?}",
            device.name().unwrap(),
            device.arch().unwrap(),
            device.pci().unwrap(),
            device.memory().unwrap(),
            device.numa_node().unwrap(),
        );
        assert_eq!(device.ordinal() as usize, ordinal);
        assert!(device.name().unwrap().contains("NVIDIA"));
        assert!(device.arch().unwrap().major >= 5);
        assert!(device.multiprocessors().unwrap() > 0);
        assert_eq!(device.pci().unwrap().split([':', '.']).count(), 4);
        uuids.push(device.uuid().unwrap());
        let memory = Context::primary(device).unwrap().memory().unwrap();
        assert!(memory.free > 0 && memory.free <= memory.total && memory.total <= device.memory().unwrap());
    }
    uuids.sort_unstable();
    uuids.dedup();
    assert_eq!(uuids.len(), devices.len());
    assert_eq!(cuda.device(devices.len() as u32).unwrap_err().kind, ErrorKind::Usage);
}

#[test]
fn data_is_copied_to_the_gpu_and_back() {
    let Some(cuda) = support::cuda() else { return };
    for device in cuda.devices().unwrap() {
        let context = Context::primary(&device).unwrap();
        let memory = DeviceMemory::new(&context, LEN).unwrap();
        assert_eq!((memory.len(), memory.address() % 256), (LEN, 0));
        let bytes = pattern(device.ordinal() as u8, LEN);
        put(&context, memory.address(), &bytes);
        assert!(take(&context, memory.address(), LEN) == bytes);
        let stream = Stream::new(&context).unwrap();
        // SAFETY: the memory belongs to this test and outlives the wait.
        unsafe { stream.fill(memory.address() + 3, 7, 5).unwrap() };
        stream.wait(LIMIT).unwrap();
        assert_eq!(take(&context, memory.address(), 9)[3..8], [7; 5]);
        assert_eq!(take(&context, memory.address() + 8, 1), bytes[8..9]);
    }
}

#[test]
fn events_order_streams_and_measure_time() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let (first, second) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
    let (start, end) = (Event::timed(&context).unwrap(), Event::timed(&context).unwrap());
    let (a, b) = (DeviceMemory::new(&context, 64 * LEN).unwrap(), DeviceMemory::new(&context, 64 * LEN).unwrap());
    assert!(start.is_done().unwrap(), "never recorded");
    // SAFETY: the memory belongs to this test and outlives the waits.
    unsafe {
        first.fill(a.address(), 1, a.len()).unwrap();
        start.record(&first).unwrap();
        second.wait_for(&start).unwrap();
        second.copy(b.address(), a.address(), a.len()).unwrap();
    }
    end.record(&second).unwrap();
    end.wait(LIMIT).unwrap();
    assert!(first.is_done().unwrap() && second.is_done().unwrap());
    let time = end.since(&start).unwrap();
    assert!(time > Duration::ZERO && time < LIMIT, "{time:?}");
    assert_eq!(take(&context, b.address() + 63 * LEN as u64, LEN), vec![1; LEN]);
}

#[test]
fn a_borrowed_stream_remains_the_callers() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let own = Stream::new(&context).unwrap();
    // SAFETY: the stream is alive as long as the borrowed one, and so is the default stream.
    let (borrowed, default) =
        unsafe { (Stream::borrow(&context, own.handle()).unwrap(), Stream::borrow(&context, 0).unwrap()) };
    assert_eq!(borrowed.handle(), own.handle());
    borrowed.wait(LIMIT).unwrap();
    default.wait(LIMIT).unwrap();
    drop(borrowed);
    own.wait(LIMIT).unwrap();
    if cuda.devices().unwrap().len() > 1 {
        let other = self::context(&cuda, 1);
        // SAFETY: the stream is alive.
        let error = unsafe { Stream::borrow(&other, own.handle()) }.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage, "{error}");
        assert!(error.detail.contains("does not belong to cuda:1"), "{error}");
    }
}

#[test]
fn an_allocation_beyond_free_memory_reports_both_sizes() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let error = DeviceMemory::new(&context, 1 << 50).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Exhausted);
    assert!(error.detail.starts_with(&format!("{} requested", format_gib(1 << 50))), "{error}");
    assert!(error.detail.contains("are free") && error.detail.contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{error}");
    let error = Allocation::new(&context, 1 << 50).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Exhausted, "{error}");
    for error in [DeviceMemory::new(&context, 0).unwrap_err(), PinnedMemory::new(&context, 0).unwrap_err()] {
        assert_eq!(error.kind, ErrorKind::Usage, "{error}");
    }
    // The context remains usable.
    assert!(DeviceMemory::new(&context, LEN).is_ok());
}

#[test]
fn dropped_memory_is_freed() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let len = usize::try_from(context.memory().unwrap().free / 32).unwrap();
    // In total several times the memory of the GPU.
    for _ in 0..100 {
        let memory = DeviceMemory::new(&context, len).unwrap();
        let mapping = Allocation::new(&context, len).unwrap().map(&[&context]).unwrap();
        assert_ne!(memory.address(), mapping.address());
    }
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let allocation = Allocation::new(&context, LEN).unwrap();
    drop(Allocation::import(&context, allocation.export().unwrap().as_fd(), LEN));
    let before = descriptors();
    for _ in 0..50 {
        drop(Allocation::import(&context, allocation.export().unwrap().as_fd(), LEN).unwrap());
    }
    // Other tests of this process open files too, but fewer.
    assert!(descriptors() < before + 40, "{before} descriptors before, {} after", descriptors());
}

#[test]
fn an_address_has_the_attributes_of_its_memory() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let memory = DeviceMemory::new(&context, LEN).unwrap();
    let info = PointerInfo::of(&context, memory.address() + 12_345).unwrap();
    assert_eq!((info.kind, info.device), (MemoryKind::Device, Some(0)));
    assert_eq!((info.base, info.len), (memory.address(), LEN as u64));
    assert!(info.legacy_ipc && !info.descriptor && !info.pooled && info.id != 0, "{info:?}");
    let pinned = PinnedMemory::new(&context, LEN).unwrap();
    assert_eq!(PointerInfo::of(&context, pinned.as_ptr() as u64).unwrap().kind, MemoryKind::Pinned);
    let mapping = Allocation::new(&context, LEN).unwrap().map(&[&context]).unwrap();
    let info = PointerInfo::of(&context, mapping.address() + 1).unwrap();
    assert_eq!((info.kind, info.base, info.len), (MemoryKind::Device, mapping.address(), mapping.len() as u64));
    assert!(info.descriptor && !info.legacy_ipc, "{info:?}");
    let heap = Box::new([0_u8; 100]);
    for address in [heap.as_ptr() as u64, 0, 8, u64::MAX] {
        let info = PointerInfo::of(&context, address).unwrap();
        assert_eq!((info.kind, info.device), (MemoryKind::Unknown, None), "{address:#x}");
    }
}

#[test]
fn existing_host_memory_is_pinned_temporarily() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let bytes = pattern(3, LEN);
    let mut heap = bytes.clone();
    let start = NonNull::new(heap.as_mut_ptr()).unwrap();
    let kind = || PointerInfo::of(&context, start.as_ptr() as u64).unwrap().kind;
    assert_eq!(kind(), MemoryKind::Unknown);
    for _ in 0..2 {
        // SAFETY: the memory outlives the registration.
        let registered = unsafe { RegisteredMemory::new(&context, start, LEN) }.unwrap();
        assert_eq!((kind(), registered.len()), (MemoryKind::Pinned, LEN));
        assert!(take(&context, registered.address(), LEN) == bytes);
        // SAFETY: as above.
        let error = unsafe { RegisteredMemory::new(&context, start, LEN) }.unwrap_err();
        assert!(error.detail.contains("of pinned host memory requested: cuMemHostRegister: "), "{error}");
        assert!(error.detail.contains("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"), "{error}");
        drop(registered);
        assert_eq!(kind(), MemoryKind::Unknown);
    }
    assert!(heap == bytes);
}

#[test]
fn memory_is_exported_as_a_descriptor() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let allocation = Allocation::new(&context, LEN + 1).unwrap();
    assert!(allocation.len() > LEN + 1);
    let mapping = allocation.map(&[&context]).unwrap();
    let bytes = pattern(9, LEN);
    put(&context, mapping.address(), &bytes);
    let descriptor = allocation.export().unwrap();
    let imported = Allocation::import(&context, descriptor.as_fd(), allocation.len()).unwrap();
    let again = imported.map(&[&context]).unwrap();
    assert_ne!(again.address(), mapping.address());
    // The second mapping needs neither the descriptor nor the first mapping.
    drop((descriptor, mapping, allocation, imported));
    assert!(take(&context, again.address(), LEN) == bytes);
    // The allocation at an address, as needed for memory allocated by others.
    let found = Allocation::of_address(&context, again.address(), again.len()).unwrap();
    let third = found.map(&[&context]).unwrap();
    assert!(take(&context, third.address(), LEN) == bytes);
    let plain = DeviceMemory::new(&context, LEN).unwrap();
    let error = Allocation::of_address(&context, plain.address(), LEN).unwrap_err();
    assert!(error.detail.starts_with("cuMemRetainAllocationHandle: CUDA_ERROR_"), "{error}");
}

#[test]
fn invalid_descriptors_are_rejected() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let file = std::fs::File::open("/dev/zero").unwrap();
    let error = Allocation::import(&context, file.as_fd(), LEN).unwrap_err();
    assert!(error.detail.starts_with("cuMemImportFromShareableHandle: CUDA_ERROR_"), "{error}");
    let allocation = Allocation::new(&context, LEN).unwrap();
    let descriptor = allocation.export().unwrap();
    let longer = Allocation::import(&context, descriptor.as_fd(), 2 * allocation.len()).unwrap();
    let error = longer.map(&[&context]).unwrap_err();
    assert!(error.detail.starts_with("cuMem"), "{error}");
    assert_eq!(allocation.map(&[]).unwrap_err().kind, ErrorKind::Usage);
    assert!(allocation.map(&[&context]).is_ok());
}

/// Not a test by itself: the other process, whose standard input is the memory's descriptor.
#[test]
fn child_process() {
    let Ok(len) = std::env::var(CHILD) else { return };
    let len: usize = len.parse().unwrap();
    let cuda = Cuda::load().unwrap();
    let context = context(&cuda, 0);
    let mapping = Allocation::import(&context, std::io::stdin().as_fd(), len).unwrap().map(&[&context]).unwrap();
    assert!(take(&context, mapping.address(), LEN) == pattern(1, LEN));
    put(&context, mapping.address(), &pattern(2, LEN));
}

#[test]
fn another_process_maps_the_same_memory() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let allocation = Allocation::new(&context, LEN).unwrap();
    let mapping = allocation.map(&[&context]).unwrap();
    put(&context, mapping.address(), &pattern(1, LEN));
    let descriptor: OwnedFd = allocation.export().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process", "--nocapture"])
        .env(CHILD, allocation.len().to_string())
        .stdin(Stdio::from(descriptor))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(take(&context, mapping.address(), LEN) == pattern(2, LEN));
}

#[test]
fn gpus_copy_between_each_other() {
    let Some(cuda) = support::cuda() else { return };
    let Some((first, second)) = pair(&cuda) else { return };
    let (source, target) = (DeviceMemory::new(&first, LEN).unwrap(), DeviceMemory::new(&second, LEN).unwrap());
    put(&first, source.address(), &pattern(5, LEN));
    let stream = Stream::new(&first).unwrap();
    first.enable_peer(&second).unwrap();
    first.enable_peer(&second).unwrap();
    // SAFETY: both ranges belong to this test and outlive the wait.
    unsafe { stream.copy(target.address(), source.address(), LEN).unwrap() };
    stream.wait(LIMIT).unwrap();
    assert!(take(&second, target.address(), LEN) == pattern(5, LEN));
    // Memory of the second GPU, mapped for both at one address.
    let shared = Allocation::new(&second, LEN).unwrap().map(&[&first, &second]).unwrap();
    // SAFETY: as above.
    unsafe { stream.copy(shared.address(), source.address(), LEN).unwrap() };
    stream.wait(LIMIT).unwrap();
    assert!(take(&second, shared.address(), LEN) == pattern(5, LEN));
    assert_eq!(PointerInfo::of(&first, shared.address()).unwrap().device, Some(1));
}

#[test]
fn a_module_for_another_gpu_or_without_the_kernel_is_an_error() {
    let Some(cuda) = support::cuda() else { return };
    let Some(library) = support::nvrtc() else { return };
    let context = context(&cuda, 0);
    let own = context.device().arch().unwrap();
    let source = Source { name: "k.cu", text: "extern \"C\" __global__ void k() {}", headers: &[] };
    let compiler = Compiler::new(library, None);
    let other = if own.major == 8 { "sm_90a" } else { "sm_80" };
    let compiled = compiler.compile(&source, other.parse().unwrap(), &[], LIMIT).unwrap();
    let error = Module::load(&context, &compiled).unwrap_err();
    assert!(error.detail.starts_with("cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (209)"), "{error}");
    let module = Module::load(&context, &compiler.compile(&source, own, &[], LIMIT).unwrap()).unwrap();
    let usage = module.function("k").unwrap().usage().unwrap();
    assert!(usage.max_threads >= 256 && usage.local == 0, "{usage:?}");
    let error = module.function("nobody").unwrap_err();
    assert_eq!(error.operation, "kernel nobody on cuda:0");
    assert!(error.detail.starts_with("cuModuleGetFunction: CUDA_ERROR_NOT_FOUND (500)"), "{error}");
}
