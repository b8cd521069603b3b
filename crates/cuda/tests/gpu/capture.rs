//! Operations leave the current context and the graph captures of callers intact.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crossrail_cuda::{Capture, Context, DeviceMemory, Event, PinnedMemory, Stream};
use crossrail_types::ErrorKind;
use cudarc::driver::sys;

use crate::{LEN, LIMIT, context, pair, pattern, put, support, take};

/// The thread's current context.
fn current() -> u64 {
    let mut current: sys::CUcontext = std::ptr::null_mut();
    // SAFETY: the driver is initialised; `current` is a valid out pointer.
    assert_eq!(unsafe { sys::cuCtxGetCurrent(&mut current) } as u32, 0);
    current as usize as u64
}

#[test]
fn operations_keep_the_threads_current_context() {
    let Some(cuda) = support::cuda() else { return };
    let first = context(&cuda, 0);
    let other = pair(&cuda).map(|(_, second)| second);
    assert_eq!(current(), 0);
    {
        let _entered = first.enter().unwrap();
        let inside = current();
        assert_ne!(inside, 0);
        let memory = DeviceMemory::new(&first, LEN).unwrap();
        put(&first, memory.address(), &pattern(1, LEN));
        if let Some(other) = &other {
            // Calls for another GPU, and entering its context.
            let elsewhere = DeviceMemory::new(other, LEN).unwrap();
            assert_eq!(current(), inside);
            let nested = other.enter().unwrap();
            assert_ne!(current(), inside);
            put(&first, memory.address(), &pattern(2, LEN));
            put(other, elsewhere.address(), &pattern(3, LEN));
            assert!(take(other, elsewhere.address(), LEN) == pattern(3, LEN));
            assert!(take(&first, memory.address(), LEN) == pattern(2, LEN));
            drop(nested);
        }
        assert_eq!(current(), inside);
    }
    assert_eq!(current(), 0);
}

/// A capture in global mode, as started by PyTorch. Calls of other threads invalidate it unless they are in relaxed
/// mode.
struct Foreign<'a>(&'a Stream);

impl Foreign<'_> {
    fn begin(stream: &Stream) -> Foreign<'_> {
        let _entered = stream.context().enter().unwrap();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is alive.
        assert_eq!(unsafe { sys::cuStreamBeginCapture_v2(raw(stream), mode) } as u32, 0);
        Foreign(stream)
    }

    /// Ends the capture; returns the driver's code, 0 if it is valid.
    fn end(self) -> u32 {
        let _entered = self.0.context().enter().unwrap();
        let mut graph: sys::CUgraph = std::ptr::null_mut();
        // SAFETY: the capture was started; `graph` is a valid out pointer, and is destroyed once.
        unsafe {
            let code = sys::cuStreamEndCapture(raw(self.0), &mut graph) as u32;
            if !graph.is_null() {
                sys::cuGraphDestroy(graph);
            }
            code
        }
    }
}

fn raw(stream: &Stream) -> sys::CUstream {
    stream.handle() as usize as sys::CUstream
}

fn work_of_all_kinds(context: &Context) {
    let (event, stream) = (Event::new(context).unwrap(), Stream::new(context).unwrap());
    let memory = DeviceMemory::new(context, LEN).unwrap();
    put(context, memory.address(), &pattern(1, LEN));
    event.record(&stream).unwrap();
    assert!(event.wait(LIMIT).is_ok() && stream.is_done().unwrap());
    assert!(take(context, memory.address(), LEN) == pattern(1, LEN));
    let mut host = vec![0_u8; LEN];
    // SAFETY: the memory outlives the registration.
    drop(unsafe { crossrail_cuda::RegisteredMemory::new(context, NonNull::from(&mut host[0]), LEN) }.unwrap());
}

#[test]
fn operations_keep_another_threads_capture_valid() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let stream = Stream::new(&context).unwrap();
    assert_eq!(stream.capture().unwrap(), Capture::None);
    let capture = Foreign::begin(&stream);
    assert_eq!(stream.capture().unwrap(), Capture::Active);
    std::thread::scope(|scope| {
        scope.spawn(|| work_of_all_kinds(&context));
        scope.spawn(|| {
            // The same on a thread that enters relaxed mode once.
            let _relaxed = cuda.relaxed();
            work_of_all_kinds(&context);
        });
    });
    // And on the capturing thread itself.
    work_of_all_kinds(&context);
    assert_eq!(stream.capture().unwrap(), Capture::Active);
    assert_eq!(capture.end(), 0);
    assert_eq!(stream.capture().unwrap(), Capture::None);
}

#[test]
fn captured_work_executes_when_launched() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let stream = Stream::new(&context).unwrap();
    let (a, b) = (DeviceMemory::new(&context, LEN).unwrap(), DeviceMemory::new(&context, LEN).unwrap());
    put(&context, b.address(), &pattern(0, LEN));
    // SAFETY: both ranges belong to this test and outlive the launches.
    let graph = stream.record(|stream| unsafe { stream.copy(b.address(), a.address(), LEN) }).unwrap();
    assert!(take(&context, b.address(), LEN) == pattern(0, LEN));
    for seed in 1..4 {
        put(&context, a.address(), &pattern(seed, LEN));
        // SAFETY: as above.
        unsafe { graph.launch(&stream).unwrap() };
        stream.wait(LIMIT).unwrap();
        assert!(take(&context, b.address(), LEN) == pattern(seed, LEN));
    }
    // Work that cannot be captured is an error, and the stream remains usable.
    let error = stream.record(|stream| stream.wait(Duration::from_millis(1))).unwrap_err();
    assert!(error.detail.starts_with("cuStreamQuery: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"), "{error}");
    assert_eq!(stream.capture().unwrap(), Capture::None);
    // SAFETY: as above.
    unsafe { stream.copy(b.address(), a.address(), LEN).unwrap() };
    stream.wait(LIMIT).unwrap();
}

#[test]
fn streams_wait_for_words_and_write_them() {
    let Some(cuda) = support::cuda() else { return };
    let context = context(&cuda, 0);
    let stream = Stream::new(&context).unwrap();
    let pinned = PinnedMemory::new(&context, 64).unwrap();
    // SAFETY: aligned words of this test's memory, accessed only by atomics from here on.
    let (gate, said) = unsafe {
        pinned.as_ptr().write_bytes(0, 64);
        (AtomicU32::from_ptr(pinned.as_ptr().cast()), AtomicU64::from_ptr(pinned.as_ptr().add(8).cast()))
    };
    let (word, out) = (pinned.address(), pinned.address() + 8);
    let writes = context.device().has_64bit_stream_ops().unwrap();
    // SAFETY: the words outlive the stream's work.
    unsafe {
        stream.wait_value32(word, 7).unwrap();
        if writes {
            stream.write_value64(out, u64::MAX - 1).unwrap();
        }
    }
    assert_eq!(stream.wait(Duration::from_millis(20)).unwrap_err().kind, ErrorKind::Timeout);
    assert_eq!(said.load(Ordering::Acquire), 0);
    gate.store(8, Ordering::Release);
    stream.wait(LIMIT).unwrap();
    assert_eq!(said.load(Ordering::Acquire), if writes { u64::MAX - 1 } else { 0 });
    // SAFETY: as above.
    unsafe {
        assert_eq!(stream.wait_value32(word + 2, 1).unwrap_err().kind, ErrorKind::Usage);
        assert_eq!(stream.write_value64(word + 4, 1).unwrap_err().kind, ErrorKind::Usage);
        if !writes {
            assert_eq!(stream.write_value64(out, 1).unwrap_err().kind, ErrorKind::Unsupported);
        }
    }
}
