//! An unusable driver is a state with a reason. Failing drivers are built here with the C compiler.

#[allow(dead_code)]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use crossrail_cuda::{Absent, Context, Cuda, IpcHandle, IpcMapping, MIN_DRIVER, Stream};
use crossrail_types::ErrorKind;
use support::Folder;

/// Compiles a driver library from C; `None`, after a message, without a compiler.
fn driver(folder: &Path, name: &str, code: &str) -> Option<PathBuf> {
    let (source, library) = (folder.join(format!("{name}.c")), folder.join(format!("lib{name}.so")));
    std::fs::write(&source, code).unwrap();
    match Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI=true, but there is no cc: {error}");
            support::skip("there is no C compiler");
            return None;
        }
    }
    Some(library)
}

/// A driver with all functions of the table. `init` and `count` are the results of `cuInit` and `cuDeviceGetCount`; all
/// other functions return "not supported".
fn whole_driver(init: u32, count: i32) -> String {
    let raw = include_str!("../src/raw.rs");
    let (_, table) = raw.split_once("\ntable! {\n").unwrap();
    driver_with(table, 801, init, count)
}

/// A driver with the required functions only, all of which succeed.
fn required_driver() -> String {
    let raw = include_str!("../src/raw.rs");
    let (_, table) = raw.split_once("\ntable! {\n").unwrap();
    let (required, optional) = table.split_once("\n    optional {\n").unwrap();
    assert!(optional.contains("cuIpcGetMemHandle"));
    driver_with(required, 0, 0, 1)
}

fn driver_with(table: &str, answer: u32, init: u32, count: i32) -> String {
    let names = table.lines().filter_map(|line| line.trim().split_once('(').map(|(name, _)| name));
    let own = ["cuInit", "cuDeviceGetCount"];
    let mut code: String = names
        .filter(|name| name.starts_with("cu") && !own.contains(name))
        .map(|name| format!("unsigned {name}(void) {{ return {answer}; }}\n"))
        .collect();
    code.push_str(&format!(
        "unsigned cuDriverGetVersion(int *v) {{ *v = 12080; return 0; }}
         unsigned cuInit(unsigned f) {{ return {init}; }}
         unsigned cuDeviceGetCount(int *n) {{ *n = {count}; return 0; }}
         unsigned cuGetErrorName(unsigned c, const char **t) {{ *t = c == 999 ? \"CUDA_ERROR_UNKNOWN\" : 0; return !*t; }}
         unsigned cuGetErrorString(unsigned c, const char **t) {{ *t = c == 999 ? \"unknown error\" : 0; return !*t; }}\n"
    ));
    code
}

fn load(library: &Path) -> Result<Cuda, Absent> {
    // SAFETY: the functions of the library are those above, which behave as `Cuda::load` requires.
    #[allow(unsafe_code)]
    unsafe {
        Cuda::load_from(library)
    }
}

#[test]
fn a_missing_driver_is_reported() {
    let why = load(Path::new("libcuda-that-nobody-has.so.1")).unwrap_err();
    assert!(matches!(&why, Absent::NoLibrary(text) if text.contains("libcuda-that-nobody-has.so.1")), "{why:?}");
    assert!(why.to_string().contains("install NVIDIA's driver"), "{why}");
    match Cuda::load() {
        Ok(cuda) => assert!(cuda.version() >= MIN_DRIVER),
        Err(why) => assert!(!why.to_string().is_empty()),
    }
}

#[test]
fn an_old_driver_is_reported_with_both_versions() {
    let folder = Folder::new();
    let code = "unsigned cuDriverGetVersion(int *v) { *v = 11040; return 0; }";
    let Some(library) = driver(&folder.0, "old", code) else { return };
    let why = load(&library).unwrap_err();
    assert_eq!(why, Absent::TooOld { found: 11_040 });
    assert!(why.to_string().contains("CUDA 11.4") && why.to_string().contains("12.0"), "{why}");
}

#[test]
fn an_incomplete_driver_is_reported_with_the_missing_function() {
    let folder = Folder::new();
    let Some(library) = driver(&folder.0, "none", "int x;") else { return };
    assert_eq!(load(&library).unwrap_err(), Absent::Incomplete("cuDriverGetVersion"));
    let code = "unsigned cuDriverGetVersion(int *v) { *v = 12000; return 0; }";
    let Some(library) = driver(&folder.0, "half", code) else { return };
    assert_eq!(load(&library).unwrap_err(), Absent::Incomplete("cuInit"));
}

#[test]
fn a_driver_that_fails_to_start_is_reported_with_the_reason() {
    let folder = Folder::new();
    let Some(library) = driver(&folder.0, "nodevice", &whole_driver(100, 0)) else { return };
    assert_eq!(load(&library).unwrap_err(), Absent::NoDevice);
    let Some(library) = driver(&folder.0, "empty", &whole_driver(0, 0)) else { return };
    assert_eq!(load(&library).unwrap_err(), Absent::NoDevice);
    let Some(library) = driver(&folder.0, "unknown", &whole_driver(999, 1)) else { return };
    let why = load(&library).unwrap_err().to_string();
    assert!(why.contains("cuInit: CUDA_ERROR_UNKNOWN (999): unknown error"), "{why}");
    // An error code newer than the bindings and the driver.
    let Some(library) = driver(&folder.0, "newer", &whole_driver(77_777, 1)) else { return };
    let why = load(&library).unwrap_err().to_string();
    assert!(why.contains("cuInit: unknown error code (77777)"), "{why}");
}

#[test]
fn a_compiler_newer_than_the_driver_is_rejected() {
    let Some(nvrtc) = support::nvrtc() else { return };
    let folder = Folder::new();
    let Some(library) = driver(&folder.0, "older", &whole_driver(0, 1)) else { return };
    let cuda = load(&library).unwrap();
    let (major, minor) = nvrtc.version();
    assert_eq!(nvrtc.check(&cuda).is_ok(), major <= 12);
    if let Err(error) = nvrtc.check(&cuda) {
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(error.detail.contains(&format!("NVRTC {major}.{minor}")), "{error}");
        assert!(error.detail.contains("CUDA 12.8 at most"), "{error}");
        assert!(error.hint.unwrap().contains("nvidia-cuda-nvrtc-cu12"));
    }
}

#[test]
fn an_error_has_the_name_and_code_of_the_call() {
    let folder = Folder::new();
    let Some(library) = driver(&folder.0, "failing", &whole_driver(0, 2)) else { return };
    let cuda = load(&library).unwrap();
    assert_eq!(cuda.version(), 12_080);
    let error = cuda.device(1).unwrap_err();
    assert_eq!((error.kind, error.operation.as_str()), (ErrorKind::Unsupported, "cuda:1"));
    assert!(error.detail.starts_with("cuDeviceGet: unknown error code (801)"), "{error}");
    let error = cuda.device(2).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Usage);
    assert!(error.detail.contains("2 visible to this process"), "{error}");
}

#[test]
fn a_missing_optional_function_disables_only_its_feature() {
    let folder = Folder::new();
    let Some(library) = driver(&folder.0, "required", &required_driver()) else { return };
    let cuda = load(&library).unwrap();
    let context = Context::primary(&cuda.device(0).unwrap()).unwrap();
    let stream = Stream::new(&context).unwrap();
    // Without the optional call this does nothing.
    drop((cuda.relaxed(), context.enter().unwrap()));
    let handle = IpcHandle::from_bytes([0; IpcHandle::LEN]);
    // SAFETY: this driver does nothing.
    #[allow(unsafe_code)]
    let refused = unsafe {
        [
            ("cuIpcGetMemHandle", IpcHandle::of(&context, 4096).map(drop)),
            ("cuIpcOpenMemHandle", IpcMapping::open(&context, &handle).map(drop)),
            ("cuStreamIsCapturing", stream.capture().map(drop)),
            ("cuStreamBeginCapture", stream.record(|_| Ok(())).map(drop)),
            ("cuStreamWriteValue64", stream.write_value64(4096, 1)),
            ("cuStreamWaitValue32", stream.wait_value32(4096, 1)),
        ]
    };
    for (call, outcome) in refused {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(error.detail.contains(&format!("lacks {call}")), "{error}");
    }
    stream.wait(std::time::Duration::from_secs(1)).unwrap();
}
