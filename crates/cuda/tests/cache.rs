//! The kernel cache: hits, concurrent compilation, damaged entries, and disks that are full, read-only or owned by
//! another user. Requires NVRTC, but no GPU.

#[allow(dead_code)]
mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crossrail_cuda::Arch;
use crossrail_cuda::nvrtc::{Cache, Compiler, Library, Origin, Source};
use crossrail_types::{ErrorKind, Settings};
use support::Folder;

const LIMIT: Duration = Duration::from_secs(60);
const ARCH: Arch = Arch { major: 9, minor: 0, specific: true };
const TEXT: &str = "
#include \"three.cuh\"
extern \"C\" __global__ void add(unsigned long long place) { *(int *)place += THREE; }
";
const SOURCE: Source<'static> =
    Source { name: "add.cu", text: TEXT, headers: &[("three.cuh", "constexpr int THREE = 3;\n")] };
/// The environment variable with the cache folder of a child process.
const CHILD: &str = "CACHE_TEST_FOLDER";

fn compiler(library: &Library, folder: &Path) -> Compiler {
    Compiler::new(library.clone(), Some(Cache::open(folder).unwrap()))
}

#[test]
fn a_compiled_kernel_is_cached() {
    let Some(library) = support::nvrtc() else { return };
    let folder = Folder::new();
    let path = folder.0.join("new/deeper");
    let compiler = compiler(&library, &path);
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    let first = compiler.compile(&SOURCE, ARCH, &[], LIMIT).unwrap();
    assert_eq!(first.origin(), &Origin::Compiled);
    let without = Compiler::new(library.clone(), None).compile(&SOURCE, ARCH, &[], LIMIT).unwrap();
    assert_eq!(without.origin(), &Origin::NotCached(None));
    assert_eq!(&first.image()[..4], b"\x7fELF");
    assert_eq!(first.report().kernels[0].name, "add");
    let again = compiler.compile(&SOURCE, ARCH, &[], LIMIT).unwrap();
    assert_eq!(again.origin(), &Origin::Cache);
    assert_eq!((again.image(), again.log()), (first.image(), first.log()));
}

#[test]
fn every_input_is_part_of_the_key() {
    let Some(library) = support::nvrtc() else { return };
    let folder = Folder::new();
    let compiler = compiler(&library, &folder.0);
    let other_arch = Arch { major: 8, minor: 0, specific: false };
    let header = Source { headers: &[("three.cuh", "constexpr int THREE = 4;\n")], ..SOURCE };
    let text = format!("{TEXT}\n");
    let compile = |source: &Source<'_>, arch, options: &[&str]| {
        assert_eq!(compiler.compile(source, arch, options, LIMIT).unwrap().origin(), &Origin::Compiled);
    };
    compile(&SOURCE, ARCH, &[]);
    compile(&SOURCE, other_arch, &[]);
    compile(&SOURCE, ARCH, &["--maxrregcount=32"]);
    compile(&header, ARCH, &[]);
    compile(&Source { text: &text, ..SOURCE }, ARCH, &[]);
    assert_eq!(folder.names().iter().filter(|name| name.ends_with(".cubin")).count(), 5);
}

#[test]
fn a_compilation_error_has_the_log_and_caches_nothing() {
    let Some(library) = support::nvrtc() else { return };
    let folder = Folder::new();
    let compiler = compiler(&library, &folder.0);
    let bad = Source { name: "bad.cu", text: "__global__ void k() { no_such_thing(); }", headers: &[] };
    let error = compiler.compile(&bad, ARCH, &[], LIMIT).unwrap_err();
    assert_eq!((error.kind, error.operation.as_str()), (ErrorKind::Unsupported, "compile bad.cu"));
    assert!(error.detail.contains("nvrtcCompileProgram: NVRTC_ERROR_COMPILATION (6)"), "{error}");
    assert!(error.detail.contains("identifier \"no_such_thing\" is undefined"), "{error}");
    assert!(error.hint.unwrap().contains("sm_90a"));
    assert_eq!(folder.names(), ["lock"]);
    let options = compiler.compile(&SOURCE, ARCH, &["--no-such-option"], LIMIT).unwrap_err();
    assert!(options.to_string().contains("--no-such-option"), "{options}");
    let zero = Source { text: "int x;\0", ..bad };
    assert_eq!(compiler.compile(&zero, ARCH, &[], LIMIT).unwrap_err().kind, ErrorKind::Usage);
    assert_eq!(folder.names(), ["lock"]);
}

#[test]
fn a_damaged_entry_is_compiled_again() {
    let Some(library) = support::nvrtc() else { return };
    let folder = Folder::new();
    let compiler = compiler(&library, &folder.0);
    let image = compiler.compile(&SOURCE, ARCH, &[], LIMIT).unwrap().image().to_vec();
    let name = folder.names().into_iter().find(|name| name.ends_with(".cubin")).unwrap();
    let entry = folder.0.join(name);
    let whole = std::fs::read(&entry).unwrap();
    let mut changed = whole.clone();
    *changed.last_mut().unwrap() ^= 1;
    for damaged in [&whole[..whole.len() / 2], &[], &changed] {
        std::fs::write(&entry, damaged).unwrap();
        let compiled = compiler.compile(&SOURCE, ARCH, &[], LIMIT).unwrap();
        assert_eq!(compiled.origin(), &Origin::Compiled);
        assert!(compiled.image() == image);
        assert_eq!(compiler.compile(&SOURCE, ARCH, &[], LIMIT).unwrap().origin(), &Origin::Cache);
    }
    // A partial file left by a process that died is overwritten.
    let part = entry.with_extension("part");
    std::fs::remove_file(&entry).unwrap();
    std::fs::write(&part, b"half").unwrap();
    assert_eq!(compiler.compile(&SOURCE, ARCH, &[], LIMIT).unwrap().origin(), &Origin::Compiled);
    assert!(entry.exists() && !part.exists());
}

#[test]
fn the_settings_name_the_folder() {
    let folder = Folder::new();
    let settings = Settings::from_pairs([("CROSSRAIL_CACHE_DIR", folder.0.join("here").to_str().unwrap())]).unwrap();
    assert_eq!(Cache::of(&settings).unwrap().folder(), folder.0.join("here"));
    assert!(Cache::default_folder().is_none_or(|path| path.ends_with("crossrail")));
}

#[test]
fn a_folder_writable_by_others_is_rejected() {
    let folder = Folder::new();
    std::fs::set_permissions(&folder.0, PermissionsExt::from_mode(0o777)).unwrap();
    let why = Cache::open(&folder.0).unwrap_err();
    assert!(why.contains("writable by other users"), "{why}");
    std::fs::set_permissions(&folder.0, PermissionsExt::from_mode(0o755)).unwrap();
    assert!(Cache::open(&folder.0).is_ok());
    let file = folder.0.join("file");
    std::fs::write(&file, "").unwrap();
    let why = Cache::open(&file.join("below")).unwrap_err();
    assert!(why.contains("below"), "{why}");
}

/// Not a test by itself: the program of `child`.
#[test]
fn child_process() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let Some(library) = support::nvrtc() else { return };
    let origin = match Cache::open(Path::new(&folder)) {
        Ok(cache) => {
            let compiled = Compiler::new(library, Some(cache)).compile(&SOURCE, ARCH, &[], LIMIT).unwrap();
            assert_eq!(&compiled.image()[..4], b"\x7fELF");
            format!("{:?}", compiled.origin())
        }
        Err(why) => why,
    };
    println!("origin: {origin}");
}

fn child(folder: &Path, wrapper: &[&str]) -> Child {
    let own = std::env::current_exe().unwrap();
    let mut words: Vec<&str> = wrapper.to_vec();
    words.extend([own.to_str().unwrap(), "--exact", "child_process", "--nocapture"]);
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env(CHILD, folder).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn said(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let origin = text.lines().find_map(|line| line.split_once("origin: "));
    origin.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr))).1.to_owned()
}

#[test]
fn of_several_processes_one_compiles() {
    if support::nvrtc().is_none() {
        return;
    }
    let folder = Folder::new();
    let children: Vec<Child> = (0..6).map(|_| child(&folder.0, &[])).collect();
    let mut origins: Vec<String> = children.into_iter().map(said).collect();
    origins.sort();
    assert_eq!(origins, ["Cache", "Cache", "Cache", "Cache", "Cache", "Compiled"]);
    assert_eq!(folder.names().len(), 2, "one entry and the lock: {:?}", folder.names());
}

#[test]
fn threads_of_one_process_compile_once_too() {
    let Some(library) = support::nvrtc() else { return };
    let folder = Folder::new();
    let compiler = compiler(&library, &folder.0);
    let compile = || compiler.compile(&SOURCE, ARCH, &[], LIMIT).unwrap().origin().clone();
    let origins = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(compile)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(origins.iter().filter(|origin| **origin == Origin::Compiled).count(), 1, "{origins:?}");
    assert_eq!(origins.iter().filter(|origin| **origin == Origin::Cache).count(), 3, "{origins:?}");
}

#[test]
fn a_lock_held_forever_disables_only_the_cache() {
    let Some(library) = support::nvrtc() else { return };
    let folder = Folder::new();
    // Another process holds every byte of the lock.
    let held = std::fs::OpenOptions::new().create(true).truncate(true).write(true).open(folder.0.join("lock")).unwrap();
    let all = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    nix::fcntl::fcntl(&held, nix::fcntl::FcntlArg::F_OFD_SETLK(&all)).unwrap();
    let compiler = compiler(&library, &folder.0);
    let compiled = compiler.compile(&SOURCE, ARCH, &[], Duration::from_millis(50)).unwrap();
    let Origin::NotCached(Some(why)) = compiled.origin() else { panic!("{:?}", compiled.origin()) };
    assert!(why.contains("another process held the lock"), "{why}");
    drop(held);
    assert_eq!(compiler.compile(&SOURCE, ARCH, &[], LIMIT).unwrap().origin(), &Origin::Compiled);
}

/// Not a test by itself: compiles twice, with the cache that the environment's settings name.
#[test]
fn child_with_settings() {
    if std::env::var_os("CROSSRAIL_CACHE_DIR").is_none() {
        return;
    }
    let Some(library) = support::nvrtc() else { return };
    let settings = Settings::from_env().unwrap();
    for _ in 0..2 {
        Compiler::of(library.clone(), &settings).compile(&SOURCE, ARCH, &[], LIMIT).unwrap();
    }
}

#[test]
fn a_useless_cache_is_warned_about_once_unless_warnings_are_off() {
    if support::nvrtc().is_none() {
        return;
    }
    let (open, own) = (Folder::new(), Folder::new());
    std::fs::set_permissions(&open.0, PermissionsExt::from_mode(0o777)).unwrap();
    for (folder, log, lines) in [(&open, "warn", 1), (&open, "error", 0), (&own, "warn", 0)] {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_with_settings", "--nocapture"])
            .env("CROSSRAIL_CACHE_DIR", &folder.0)
            .env("CROSSRAIL_LOG", log)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{said}");
        let told: Vec<_> = said.lines().filter(|line| line.contains("compiled GPU kernels are not cached")).collect();
        assert_eq!(told.len(), lines, "{said}");
        assert!(told.iter().all(|line| line.contains("is writable by other users; chmod go-w")), "{said}");
    }
    assert_eq!(own.names().len(), 2, "one entry and the lock: {:?}", own.names());
}

/// Runs a child with a file system mounted over the folder; `None`, after a message, if this user cannot mount.
fn child_with_mount(folder: &Path, options: &str) -> Option<String> {
    let script = format!("mount -t tmpfs -o {options} none '{}' && exec \"$@\"", folder.display());
    let wrapper = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script.as_str(), "sh"];
    let probe = format!("mount -t tmpfs -o {options} none '{}'", folder.display());
    let probe = Command::new("unshare").args(["--mount", "--propagation", "private", "sh", "-c", &probe]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        support::skip("can't mount a file system of its own here (needs root and util-linux)");
        return None;
    }
    Some(said(child(folder, &wrapper)))
}

#[test]
fn a_full_disk_disables_only_the_cache() {
    if support::nvrtc().is_none() {
        return;
    }
    let folder = Folder::new();
    // One page: the lock file is empty, and the entry does not fit.
    let Some(origin) = child_with_mount(&folder.0, "size=4k,mode=700") else { return };
    assert!(origin.starts_with("NotCached(") && origin.contains("No space left"), "{origin}");
}

#[test]
fn a_read_only_disk_disables_only_the_cache() {
    if support::nvrtc().is_none() {
        return;
    }
    let folder = Folder::new();
    let Some(origin) = child_with_mount(&folder.0, "ro,mode=700") else { return };
    assert!(origin.starts_with("NotCached(") && origin.contains("Read-only"), "{origin}");
}
