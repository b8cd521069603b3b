//! Which driver calls return while a stream waits or a kernel runs: the basis of the rule in `release.rs`.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use crossrail_cuda::{Deferred, max_waiting_streams, wait_for_releases};
use cudarc::driver::sys::{CUcontext, CUevent, CUfunction, CUmemAccessDesc, CUmemAllocationProp, CUmodule, CUstream};
use libloading::Library;

use super::*;

/// Set in the child process, so that calls which do not return cannot affect other tests.
const CHILD: &str = "GPU_TEST_WAITING";
/// A call that takes longer is considered blocked.
const HELD: Duration = Duration::from_millis(150);
/// The time for a thread to enter a call.
const STANDS: Duration = Duration::from_millis(20);
/// The time limit of the child.
const CHILD_LIMIT: Duration = Duration::from_secs(90);
const PART: usize = 2 << 20;

/// `spin` runs until the word at its first parameter has reached the second; `nothing` returns at once.
const KERNELS: &CStr = c"
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 word, .param .u32 value) {
    .reg .u64 %a; .reg .u32 %v, %w; .reg .pred %p;
    ld.param.u64 %a, [word];
    ld.param.u32 %w, [value];
again:
    ld.volatile.global.u32 %v, [%a];
    setp.lt.u32 %p, %v, %w;
    @%p bra again;
    ret;
}
.visible .entry nothing() { ret; }
";

/// Calls a driver function by name; returns its code.
macro_rules! cu {
    ($lab:expr, $name:ident($($arg:expr => $ty:ty),* $(,)?)) => {{
        let name = concat!(stringify!($name), "\0");
        // SAFETY: the signature is the driver's; the arguments are live objects of the lab.
        unsafe {
            let function = $lab.library.get::<unsafe extern "C" fn($($ty),*) -> u32>(name.as_bytes()).unwrap();
            function($($arg),*)
        }
    }};
}

/// As `cu!`, but the call must succeed.
macro_rules! ok {
    ($lab:expr, $name:ident($($rest:tt)*)) => {
        assert_eq!(cu!($lab, $name($($rest)*)), 0, stringify!($name))
    };
}

/// The driver's plain functions, without the layer of this crate.
struct Lab {
    library: Library,
    context: usize,
    /// The stream that waits, and the one for copies and kernels.
    waiting: usize,
    other: usize,
    spin: usize,
    nothing: usize,
    /// Pinned memory: its address on the host and on the GPU.
    word: (usize, u64),
    from: u64,
    to: u64,
    value: AtomicU32,
}

/// What blocks calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// A stream that waits for a word.
    Stream,
    /// A kernel that runs.
    Kernel,
}

type Call = Box<dyn FnOnce(&Lab) + Send>;

impl Lab {
    fn new() -> Arc<Lab> {
        // SAFETY: NVIDIA's driver, found by its name.
        let library = unsafe { Library::new("libcuda.so.1") }.unwrap();
        let mut lab = Lab {
            library,
            context: 0,
            waiting: 0,
            other: 0,
            spin: 0,
            nothing: 0,
            word: (0, 0),
            from: 0,
            to: 0,
            value: AtomicU32::new(0),
        };
        ok!(lab, cuInit(0 => c_uint));
        let mut context: CUcontext = std::ptr::null_mut();
        ok!(lab, cuDevicePrimaryCtxRetain(&mut context => *mut CUcontext, 0 => c_int));
        lab.context = context.expose_provenance();
        lab.enter();
        lab.waiting = lab.stream();
        lab.other = lab.stream();
        let module = lab.module();
        lab.spin = lab.function(module, c"spin");
        lab.nothing = lab.function(module, c"nothing");
        let host = lab.pinned();
        let mut address = 0_u64;
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(host);
        ok!(lab, cuMemHostGetDevicePointer_v2(&mut address => *mut u64, start => *mut c_void, 0 => c_uint));
        lab.word = (host, address);
        lab.cell().store(0, Ordering::SeqCst);
        (lab.from, lab.to) = (lab.memory(), lab.memory());
        Arc::new(lab)
    }

    fn enter(&self) {
        let context = std::ptr::with_exposed_provenance_mut(self.context);
        ok!(self, cuCtxSetCurrent(context => CUcontext));
    }

    fn cell(&self) -> &AtomicU32 {
        // SAFETY: pinned memory that lives as long as the process.
        unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(self.word.0)) }
    }

    fn stream(&self) -> usize {
        let mut stream: CUstream = std::ptr::null_mut();
        ok!(self, cuStreamCreate(&mut stream => *mut CUstream, 1 => c_uint));
        stream.expose_provenance()
    }

    fn urgent_stream(&self) -> usize {
        let mut stream: CUstream = std::ptr::null_mut();
        ok!(self, cuStreamCreateWithPriority(&mut stream => *mut CUstream, 1 => c_uint, c_int::MIN => c_int));
        stream.expose_provenance()
    }

    fn event(&self) -> usize {
        let mut event: CUevent = std::ptr::null_mut();
        ok!(self, cuEventCreate(&mut event => *mut CUevent, 2 => c_uint));
        event.expose_provenance()
    }

    fn module(&self) -> usize {
        let mut module: CUmodule = std::ptr::null_mut();
        ok!(self, cuModuleLoadData(&mut module => *mut CUmodule, KERNELS.as_ptr().cast() => *const c_void));
        module.expose_provenance()
    }

    fn function(&self, module: usize, name: &CStr) -> usize {
        let mut function: CUfunction = std::ptr::null_mut();
        let module = std::ptr::with_exposed_provenance_mut(module);
        ok!(self, cuModuleGetFunction(&mut function => *mut CUfunction, module => CUmodule, name.as_ptr() => *const i8));
        function.expose_provenance()
    }

    fn memory(&self) -> u64 {
        let mut address = 0_u64;
        ok!(self, cuMemAlloc_v2(&mut address => *mut u64, PART => usize));
        address
    }

    fn pinned(&self) -> usize {
        let mut start: *mut c_void = std::ptr::null_mut();
        ok!(self, cuMemHostAlloc(&mut start => *mut *mut c_void, 4096 => usize, 3 => c_uint));
        start.expose_provenance()
    }

    fn free_pinned(&self, start: usize) {
        ok!(self, cuMemFreeHost(std::ptr::with_exposed_provenance_mut(start) => *mut c_void));
    }

    /// Unused host memory, leaked.
    fn host() -> usize {
        Box::leak(vec![0_u8; PART].into_boxed_slice()).as_mut_ptr().expose_provenance()
    }

    fn register(&self, start: usize) {
        let start = std::ptr::with_exposed_provenance_mut(start);
        ok!(self, cuMemHostRegister_v2(start => *mut c_void, PART => usize, 0 => c_uint));
    }

    /// A handle of exportable memory.
    fn handle(&self) -> u64 {
        // SAFETY: all zeros is a value of this plain struct.
        let mut prop: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = cudarc::driver::sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.requestedHandleTypes =
            cudarc::driver::sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        prop.location.type_ = cudarc::driver::sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let mut handle = 0_u64;
        ok!(self, cuMemCreate(
            &mut handle => *mut u64, PART => usize, &raw const prop => *const CUmemAllocationProp, 0 => u64
        ));
        handle
    }

    fn reserve(&self) -> u64 {
        let mut address = 0_u64;
        ok!(self, cuMemAddressReserve(
            &mut address => *mut u64, PART => usize, 0 => usize, 0 => u64, 0 => u64
        ));
        address
    }

    fn map(&self, address: u64, handle: u64) {
        ok!(self, cuMemMap(address => u64, PART => usize, 0 => usize, handle => u64, 0 => u64));
    }

    fn allow(&self, address: u64) {
        // SAFETY: all zeros is a value of this plain struct.
        let mut access: CUmemAccessDesc = unsafe { std::mem::zeroed() };
        access.location.type_ = cudarc::driver::sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        access.flags = cudarc::driver::sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        ok!(self, cuMemSetAccess(
            address => u64, PART => usize, &raw const access => *const CUmemAccessDesc, 1 => usize
        ));
    }

    fn mapped(&self) -> u64 {
        let address = self.reserve();
        self.map(address, self.handle());
        self.allow(address);
        address
    }

    fn export(&self, handle: u64) -> c_int {
        let mut file: c_int = -1;
        ok!(self, cuMemExportToShareableHandle(
            (&raw mut file).cast() => *mut c_void, handle => u64, 1 => c_uint, 0 => u64
        ));
        file
    }

    fn launch(&self, function: usize, stream: usize, parameters: &mut [*mut c_void]) {
        let (function, stream) =
            (std::ptr::with_exposed_provenance_mut(function), std::ptr::with_exposed_provenance_mut(stream));
        ok!(self, cuLaunchKernel(
            function => CUfunction, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, stream => CUstream, parameters.as_mut_ptr() => *mut *mut c_void,
            std::ptr::null_mut() => *mut *mut c_void
        ));
    }

    /// The next value of the word.
    fn next_value(&self) -> u32 {
        self.value.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Enqueues work in `stream` that lasts until the word has reached `value`.
    fn hold(&self, holder: Holder, stream: usize, mut value: u32) {
        match holder {
            Holder::Stream => {
                let stream = std::ptr::with_exposed_provenance_mut(stream);
                ok!(self, cuStreamWaitValue32_v2(
                    stream => CUstream, self.word.1 => u64, value => c_uint, 0 => c_uint
                ));
            }
            Holder::Kernel => {
                let mut word = self.word.1;
                self.launch(self.spin, stream, &mut [(&raw mut word).cast(), (&raw mut value).cast()]);
            }
        }
    }

    fn let_go(&self, value: u32) {
        self.cell().store(value, Ordering::SeqCst);
    }

    fn is_done(&self, stream: usize) -> bool {
        let code = cu!(self, cuStreamQuery(std::ptr::with_exposed_provenance_mut(stream) => CUstream));
        assert!(code == 0 || code == 600, "cuStreamQuery: {code}");
        code == 0
    }

    fn drain(&self, stream: usize) {
        let started = Instant::now();
        while !self.is_done(stream) {
            assert!(started.elapsed() < LIMIT, "the stream does not go on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Runs `call` on a new thread, with the GPU's context current.
fn begin(lab: &Arc<Lab>, call: impl FnOnce(&Lab) + Send + 'static) -> Receiver<()> {
    let (lab, (tell, told)) = (Arc::clone(lab), channel());
    std::thread::spawn(move || {
        lab.enter();
        call(&lab);
        let _ = tell.send(());
    });
    told
}

type Row = (&'static str, Call);

fn row(name: &'static str, call: impl FnOnce(&Lab) + Send + 'static) -> Row {
    (name, Box::new(call))
}

/// Calls that operations in flight make, with their prerequisites created in advance: a waiting stream must block none
/// of them.
fn needed(lab: &Lab) -> Vec<Row> {
    let (memory, handle, exported, unused) = (lab.memory(), lab.handle(), lab.handle(), lab.handle());
    let (place, unmapped, fresh, event) = (lab.reserve(), lab.reserve(), Lab::host(), lab.event());
    lab.map(unmapped, lab.handle());
    let (from, to, other, nothing) = (lab.from, lab.to, lab.other, lab.nothing);
    let stream = move || std::ptr::with_exposed_provenance_mut(other);
    let event = move || std::ptr::with_exposed_provenance_mut(event);
    vec![
        row("cuStreamQuery", move |lab| _ = lab.is_done(other)),
        row("cuMemcpyDtoDAsync", move |lab| {
            ok!(lab, cuMemcpyDtoDAsync_v2(to => u64, from => u64, PART => usize, stream() => CUstream));
            lab.drain(other);
        }),
        row("cuLaunchKernel", move |lab| {
            lab.launch(nothing, other, &mut []);
            lab.drain(other);
        }),
        row("cuStreamWriteValue32", move |lab| {
            let address = lab.word.1 + 64;
            ok!(lab, cuStreamWriteValue32_v2(stream() => CUstream, address => u64, 1 => c_uint, 0 => c_uint));
            lab.drain(other);
        }),
        row("cuEventCreate", |lab| _ = lab.event()),
        row("cuEventRecord", move |lab| ok!(lab, cuEventRecord(event() => CUevent, stream() => CUstream))),
        row("cuEventQuery", move |lab| _ = cu!(lab, cuEventQuery(event() => CUevent))),
        row("cuStreamCreate", |lab| _ = lab.stream()),
        row("cuPointerGetAttribute", move |lab| {
            let mut id = 0_u64;
            ok!(lab, cuPointerGetAttribute((&raw mut id).cast() => *mut c_void, 7 => c_uint, memory => u64));
        }),
        row("cuMemGetInfo", |lab| {
            let (mut free, mut total) = (0_usize, 0_usize);
            ok!(lab, cuMemGetInfo_v2(&mut free => *mut usize, &mut total => *mut usize));
        }),
        row("cuMemHostAlloc", |lab| _ = lab.pinned()),
        row("cuMemHostRegister", move |lab| lab.register(fresh)),
        row("cuMemCreate", |lab| _ = lab.handle()),
        row("cuMemExport and Import", move |lab| {
            let mut handle = 0_u64;
            let file = lab.export(exported) as usize as *mut c_void;
            ok!(lab, cuMemImportFromShareableHandle(&mut handle => *mut u64, file => *mut c_void, 1 => c_uint));
        }),
        row("cuMemMap", move |lab| lab.map(place, handle)),
        row("cuMemSetAccess", move |lab| lab.allow(unmapped)),
        row("cuMemRelease", move |lab| ok!(lab, cuMemRelease(unused => u64))),
    ]
}

/// Calls that load or release resources: no operation may depend on one while a stream waits.
fn others(lab: &Lab) -> Vec<Row> {
    let (memory, mapped, pinned, registered) = (lab.memory(), lab.mapped(), lab.pinned(), Lab::host());
    lab.register(registered);
    let (module, stream, event) = (lab.module(), lab.stream(), lab.event());
    let (fresh, other) = (lab.function(lab.module(), c"nothing"), lab.other);
    vec![
        row("cuMemAlloc", |lab| _ = lab.memory()),
        row("cuMemUnmap", move |lab| ok!(lab, cuMemUnmap(mapped => u64, PART => usize))),
        row("cuEventDestroy", move |lab| {
            ok!(lab, cuEventDestroy_v2(std::ptr::with_exposed_provenance_mut(event) => CUevent));
        }),
        row("cuStreamDestroy", move |lab| {
            ok!(lab, cuStreamDestroy_v2(std::ptr::with_exposed_provenance_mut(stream) => CUstream));
        }),
        row("cuLaunchKernel, the first", move |lab| {
            lab.launch(fresh, other, &mut []);
            lab.drain(other);
        }),
        row("cuModuleLoadData", |lab| _ = lab.module()),
        row("cuModuleUnload", move |lab| {
            ok!(lab, cuModuleUnload(std::ptr::with_exposed_provenance_mut(module) => CUmodule));
        }),
        row("cuMemHostUnregister", move |lab| {
            let start = std::ptr::with_exposed_provenance_mut(registered);
            ok!(lab, cuMemHostUnregister(start => *mut c_void));
        }),
        row("cuMemFreeHost", move |lab| lab.free_pinned(pinned)),
        row("cuMemFree", move |lab| ok!(lab, cuMemFree_v2(memory => u64))),
    ]
}

/// A column of the table: whether each call was blocked.
fn column(lab: &Arc<Lab>, holder: Holder, beside_a_free: bool) -> Vec<(&'static str, bool)> {
    let rows = needed(lab).into_iter().chain(others(lab));
    rows.into_iter()
        .map(|(name, call)| {
            let pinned = lab.pinned();
            let value = lab.next_value();
            lab.hold(holder, lab.waiting, value);
            let standing = beside_a_free.then(|| {
                let standing = begin(lab, move |lab| lab.free_pinned(pinned));
                let _ = standing.recv_timeout(STANDS);
                standing
            });
            let told = begin(lab, call);
            let held = told.recv_timeout(HELD).is_err();
            lab.let_go(value);
            if held {
                told.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{name} does not return"));
            }
            if let Some(standing) = standing {
                // Reported already, if it did not block at all.
                let _ = standing.recv_timeout(LIMIT);
            }
            lab.drain(lab.waiting);
            (name, held)
        })
        .collect()
}

/// Whether a free that is blocked by a waiting stream also waits for work enqueued in another stream after it started.
fn later_work_prolongs_a_free(lab: &Arc<Lab>) -> bool {
    let (pinned, second) = (lab.pinned(), lab.stream());
    let (first, later) = (lab.next_value(), lab.next_value());
    lab.hold(Holder::Stream, lab.waiting, first);
    let standing = begin(lab, move |lab| lab.free_pinned(pinned));
    let _ = standing.recv_timeout(STANDS);
    // If this is blocked too, it is enqueued after the free and prolongs nothing.
    let put_in = begin(lab, move |lab| lab.hold(Holder::Stream, second, later));
    let _ = put_in.recv_timeout(HELD);
    lab.let_go(first);
    let prolonged = standing.recv_timeout(HELD).is_err();
    let _ = put_in.recv_timeout(LIMIT);
    lab.let_go(later);
    lab.drain(second);
    prolonged
}

/// Enqueues work in a stream, using pinned memory.
type PutIn = fn(&Lab, usize, usize);

/// Which work streams of either priority execute while the maximum number of others wait. Crossrail's own are urgent.
fn many_wait() {
    let lab = Lab::new();
    let many = max_waiting_streams();
    let waiting: Vec<usize> = (0..many).map(|_| lab.stream()).collect();
    let host = lab.pinned();
    let work: [(&str, PutIn); 6] = [
        ("a copy within the GPU", |lab, stream, _| {
            let stream = std::ptr::with_exposed_provenance_mut(stream);
            ok!(lab, cuMemcpyDtoDAsync_v2(lab.to => u64, lab.from => u64, PART => usize, stream => CUstream));
        }),
        ("a copy out", |lab, stream, host| {
            let stream = std::ptr::with_exposed_provenance_mut(stream);
            let host = std::ptr::with_exposed_provenance_mut(host);
            ok!(lab, cuMemcpyDtoHAsync_v2(host => *mut c_void, lab.from => u64, 4096 => usize, stream => CUstream));
        }),
        ("a copy in", |lab, stream, host| {
            let stream = std::ptr::with_exposed_provenance_mut(stream);
            let host = std::ptr::with_exposed_provenance(host);
            ok!(lab, cuMemcpyHtoDAsync_v2(lab.to => u64, host => *const c_void, 4096 => usize, stream => CUstream));
        }),
        ("a fill", |lab, stream, _| {
            let stream = std::ptr::with_exposed_provenance_mut(stream);
            ok!(lab, cuMemsetD8Async(lab.to => u64, 7 => u8, PART => usize, stream => CUstream));
        }),
        ("a kernel", |lab, stream, _| lab.launch(lab.nothing, stream, &mut [])),
        ("a word", |lab, stream, _| {
            let (stream, address) = (std::ptr::with_exposed_provenance_mut(stream), lab.word.1 + 64);
            ok!(lab, cuStreamWriteValue32_v2(stream => CUstream, address => u64, 1 => c_uint, 0 => c_uint));
        }),
    ];
    // A stream for each, so that a blocked one blocks no other; one-time driver initialisation is done before.
    let streams = work.map(|(_, put_in)| {
        [lab.stream(), lab.urgent_stream()].map(|stream| {
            put_in(&lab, stream, host);
            lab.drain(stream);
            stream
        })
    });
    let value = lab.next_value();
    waiting.iter().for_each(|stream| lab.hold(Holder::Stream, *stream, value));
    let mut stuck = Vec::new();
    println!("{many} streams wait:{:>28}{:>15}", "usual", "urgent");
    for ((what, put_in), streams) in work.iter().zip(streams) {
        let held = streams.map(|stream| {
            put_in(&lab, stream, host);
            let started = Instant::now();
            while !lab.is_done(stream) && started.elapsed() < HELD {}
            !lab.is_done(stream)
        });
        println!("{what:30}{}", held.map(|held| format!("{:>15}", if held { "HELD" } else { "-" })).concat());
        stuck.extend(held[1].then_some(*what));
    }
    lab.let_go(value);
    waiting.iter().chain(streams.as_flattened()).for_each(|stream| lab.drain(*stream));
    assert!(stuck.is_empty(), "an urgent stream does not go on while {many} others wait: {stuck:?}");
}

/// The guarantee of [`max_waiting_streams`].
#[test]
fn urgent_streams_go_on_while_as_many_others_wait_as_may() {
    if support::cuda().is_some() && alone("urgent_streams_go_on_while_as_many_others_wait_as_may") {
        many_wait();
    }
}

fn table() {
    let lab = Lab::new();
    let count = needed(&lab).len();
    let heads = ["stream", "kernel", "stream + free", "kernel + free"];
    let columns = [(Holder::Stream, false), (Holder::Kernel, false), (Holder::Stream, true), (Holder::Kernel, true)]
        .map(|(holder, beside_a_free)| column(&lab, holder, beside_a_free));
    println!("{:28}{}", "held by", heads.map(|head| format!("{head:>15}")).concat());
    for (row, (name, _)) in columns[0].iter().enumerate() {
        let cells = columns.each_ref().map(|column| if column[row].1 { "HELD" } else { "-" });
        println!("{name:28}{}", cells.map(|cell| format!("{cell:>15}")).concat());
    }
    println!("a free waits for work that is put in after it began: {}", later_work_prolongs_a_free(&lab));
    let wrong: Vec<&str> = columns[0][..count].iter().filter(|(_, held)| *held).map(|(name, _)| *name).collect();
    assert!(wrong.is_empty(), "operations make these calls, and a stream that waits holds them: {wrong:?}");
}

/// Runs the test again in a child process, and returns true there: blocked or deferred calls may block those of other
/// tests. The child's output bypasses the harness's capture, so that it is in the log.
fn alone(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("waiting::{test}"), "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > CHILD_LIMIT {
            child.kill().unwrap();
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
    assert!(output.status.success(), "{text}");
    false
}

#[test]
fn calls_that_operations_make_return_while_a_stream_waits() {
    if support::cuda().is_some() && alone("calls_that_operations_make_return_while_a_stream_waits") {
        table();
    }
}

#[test]
fn what_is_dropped_while_a_stream_waits_holds_nobody_up() {
    let Some(cuda) = support::cuda() else { return };
    if !alone("what_is_dropped_while_a_stream_waits_holds_nobody_up") {
        return;
    }
    let context = context(&cuda, 0);
    let (waiting, other) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
    let word = PinnedMemory::new(&context, 4096).unwrap();
    // SAFETY: pinned memory of this test, aligned to a page.
    let cell = unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) };
    cell.store(0, Ordering::SeqCst);
    let waits = Arc::new(AtomicBool::new(true));
    let asked = Arc::downgrade(&waits);
    context.defer_releases_while(move || asked.upgrade().map(|waits| waits.load(Ordering::SeqCst)));
    let (plain, pinned) = (DeviceMemory::new(&context, LEN).unwrap(), PinnedMemory::new(&context, LEN).unwrap());
    let mapping = Deferred::new(Allocation::new(&context, LEN).unwrap().map(&[&context]).unwrap(), &context);
    let (from, to) = (DeviceMemory::new(&context, LEN).unwrap(), DeviceMemory::new(&context, LEN).unwrap());
    let (gone, started) = (plain.address(), Instant::now());
    // SAFETY: the word outlives the wait of the stream.
    unsafe { waiting.wait_value32(word.address(), 1).unwrap() };
    drop((plain, pinned, mapping));
    assert!(!wait_for_releases(Duration::from_secs(5)), "two of them are put off");
    // SAFETY: both ranges belong to this test.
    unsafe { other.copy_within(to.address(), from.address(), LEN).unwrap() };
    other.wait(LIMIT).unwrap();
    assert!(!waiting.is_done().unwrap());
    assert_eq!(PointerInfo::of(&context, gone).unwrap().kind, MemoryKind::Device, "not freed yet");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    cell.store(1, Ordering::SeqCst);
    waits.store(false, Ordering::SeqCst);
    waiting.wait(LIMIT).unwrap();
    assert!(wait_for_releases(LIMIT));
}
