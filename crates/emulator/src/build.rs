//! Compiles kernels with the C++ compiler into a library, cached by content in the build folder.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_char;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::{Emulator, RawArea, RawLaunch};

/// A kernel of the library, which takes its argument struct.
pub(crate) type Entry = unsafe extern "C" fn(*const u8);
pub(crate) type Run = unsafe extern "C" fn(*const RawLaunch, usize, *const RawArea, usize, u64, u64) -> *mut c_char;
pub(crate) type Free = unsafe extern "C" fn(*mut c_char);

/// The parts of the machine, beside the kernels.
const MACHINE: [&str; 5] =
    ["emulate/machine.cpp", "emulate/warps.cpp", "emulate/bulk.cpp", "emulate/memory.cpp", "emulate/knowledge.cpp"];
/// `-ffp-contract=off`: sums and products are rounded one by one, as the code says.
const FLAGS: [&str; 14] = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wno-misleading-indentation",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-unused-but-set-variable",
];

/// What to compile.
#[derive(Clone)]
pub struct Build {
    sources: Vec<String>,
    defines: Vec<String>,
    /// Texts other than the folder's, by path.
    changed: HashMap<String, String>,
}

impl Build {
    /// Of these sources: paths below `csrc`.
    pub fn new(sources: &[&str]) -> Build {
        let sources = sources.iter().map(|source| (*source).to_owned()).collect();
        Build { sources, defines: Vec::new(), changed: HashMap::new() }
    }

    /// With these definitions: `NAME=VALUE`, `-DNAME=VALUE` or `--define-macro=NAME=VALUE`.
    pub fn defines(mut self, defines: &[String]) -> Build {
        self.defines.extend(defines.iter().map(|define| {
            let bare = define.strip_prefix("--define-macro=").or_else(|| define.strip_prefix("-D")).unwrap_or(define);
            bare.trim().to_owned()
        }));
        self
    }

    /// Plants a fault in a source or header: replaces every `from`, which must occur, with `to`.
    pub fn broken(mut self, path: &str, from: &str, to: &str) -> Build {
        let text = self.text(path);
        assert!(text.contains(from), "{path}: there is no {from:?} to break");
        self.changed.insert(path.to_owned(), text.replace(from, to));
        self
    }

    /// With a source that is not in the folder, or another text for one that is.
    pub fn with(mut self, path: &str, text: &str) -> Build {
        self.changed.insert(path.to_owned(), text.to_owned());
        self
    }

    /// An emulator with a library of this; see [`Emulator::build`].
    pub fn emulator(&self) -> Option<Emulator> {
        Some(Emulator::new(&self.library()?))
    }

    /// The library, compiled if it does not exist yet. Without a C++ compiler, prints that and returns `None`; panics
    /// with `CI=true`.
    ///
    /// # Panics
    /// With the compiler's output if compilation fails.
    pub fn library(&self) -> Option<Arc<Library>> {
        static KNOWN: Mutex<BTreeMap<u64, Arc<OnceLock<Arc<Library>>>>> = Mutex::new(BTreeMap::new());
        let compiler = compiler()?;
        let key = self.key(compiler);
        let entry = {
            let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(known.entry(key).or_default())
        };
        // Tests that need the same library wait for the one that compiles it; other libraries compile in parallel.
        let library = entry.get_or_init(|| {
            let path = folder().join(format!("{key:016x}.so"));
            if !path.exists() {
                self.compile(compiler, key, &path);
            }
            Arc::new(Library::open(path))
        });
        Some(Arc::clone(library))
    }

    fn text(&self, path: &str) -> String {
        if let Some(text) = self.changed.get(path) {
            return text.clone();
        }
        fs::read_to_string(source_path(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// What the library depends on, as one number.
    fn key(&self, compiler: &Compiler) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&compiler.version, FLAGS, MACHINE, &self.sources, &self.defines, REVISION).hash(&mut hasher);
        for path in self.included() {
            (&path, self.text(&path)).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// The paths of the machine, the sources, and all that they include; sorted.
    fn included(&self) -> BTreeSet<String> {
        let all: BTreeSet<String> = all_sources().into_iter().collect();
        let mut found: BTreeSet<String> = all.iter().filter(|path| path.starts_with("emulate/")).cloned().collect();
        let mut left: Vec<String> = found.iter().cloned().chain(self.sources.iter().cloned()).collect();
        while let Some(path) = left.pop() {
            let text = self.text(&path);
            found.insert(path);
            let names = text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.split('"').next());
            left.extend(names.filter(|name| all.contains(*name) && !found.contains(*name)).map(str::to_owned));
        }
        found
    }

    /// Compiles into a private folder and then renames, so that concurrent processes do not conflict.
    fn compile(&self, compiler: &Compiler, key: u64, path: &Path) {
        let work = folder().join(format!("{key:016x}-{}", std::process::id()));
        let overlay = work.join("csrc");
        let names: BTreeSet<String> = all_sources().into_iter().chain(self.changed.keys().cloned()).collect();
        for name in names {
            let text = self.text(&name);
            if self.changed.contains_key(&name) || text.contains("__shared__") {
                let place = overlay.join(&name);
                fs::create_dir_all(place.parent().unwrap()).unwrap();
                fs::write(place, shared_replaced(&text)).unwrap();
            }
        }
        let mut jobs = Vec::new();
        for (index, source) in self.sources.iter().enumerate() {
            let unit = work.join(format!("unit{index}.cc"));
            fs::create_dir_all(&work).unwrap();
            fs::write(&unit, unit_text(index, source, &self.text(source))).unwrap();
            let mut command = compiler.command(&overlay);
            // Each plain load and store is reported, to emulate/memory.cpp.
            command.args(["-fsanitize=thread", "-c", "-o"]).arg(unit.with_extension("o")).arg(&unit);
            command.args(self.defines.iter().map(|define| format!("-D{define}")));
            jobs.push(Job::start(source, command));
        }
        let machine = machine_objects(compiler);
        jobs.into_iter().for_each(Job::finish);
        let made = work.join("made.so");
        let mut link = compiler.link();
        link.args(["-shared", "-o"]).arg(&made).args(machine);
        link.args((0..self.sources.len()).map(|index| work.join(format!("unit{index}.o"))));
        Job::start("the library", link).finish();
        fs::rename(&made, path).unwrap();
        let _ = fs::remove_dir_all(&work);
    }
}

/// How long a library is kept.
const KEPT: Duration = Duration::from_secs(3 * 24 * 3600);
/// Raised when what this file writes for the compiler changes.
const REVISION: u32 = 3;

/// The machine's objects, cached as the libraries are. The first caller compiles them.
fn machine_objects(compiler: &Compiler) -> &'static [PathBuf] {
    static OBJECTS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    OBJECTS.get_or_init(|| compile_machine(compiler))
}

fn compile_machine(compiler: &Compiler) -> Vec<PathBuf> {
    let mut hasher = DefaultHasher::new();
    (&compiler.version, FLAGS, REVISION).hash(&mut hasher);
    for path in all_sources().iter().filter(|path| path.starts_with("emulate/")) {
        fs::read_to_string(source_path(path)).unwrap().hash(&mut hasher);
    }
    let key = hasher.finish();
    let (mut objects, mut jobs) = (Vec::new(), Vec::new());
    for part in MACHINE {
        let name = part.replace(['/', '.'], "-");
        let object = folder().join(format!("{key:016x}-{name}.o"));
        if !object.exists() {
            let mut command = compiler.command(Path::new("/nonexistent"));
            let begun = folder().join(format!("{key:016x}-{name}-{}.o", std::process::id()));
            command.arg("-O3").args(["-c", "-o"]).arg(&begun).arg(source_path(part));
            let mut job = Job::start(part, command);
            job.rename = Some((begun, object.clone()));
            jobs.push(job);
        }
        objects.push(object);
    }
    jobs.into_iter().for_each(Job::finish);
    objects
}

/// The machine's sources.
fn csrc() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc")
}

/// The kernels' sources.
fn kernels_csrc() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/csrc")
}

/// Where a source is, by its path below either `csrc`.
fn source_path(path: &str) -> PathBuf {
    if path.starts_with("emulate/") { csrc().join(path) } else { kernels_csrc().join(path) }
}

/// The build folder: this program is in `target/PROFILE/deps` (an example in `examples`).
fn target() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    program.ancestors().nth(3).expect("a program in the build folder").to_owned()
}

/// Where libraries are cached. Those that were not rebuilt for some days are removed, once per process.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = target().join("tmp").join("emulate");
        fs::create_dir_all(&folder).unwrap();
        for entry in fs::read_dir(&folder).unwrap().flatten() {
            let made = entry.metadata().and_then(|about| about.modified()).ok();
            let age = made.and_then(|made| made.elapsed().ok());
            if age.is_some_and(|age| age > KEPT) {
                let path = entry.path();
                let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
            }
        }
        folder
    })
}

/// The paths of all files below both `csrc`, sorted.
fn all_sources() -> Vec<String> {
    fn visit(folder: &Path, prefix: &str, paths: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if entry.file_type().unwrap().is_dir() {
                visit(&entry.path(), &format!("{name}/"), paths);
            } else {
                paths.push(name);
            }
        }
    }
    let mut paths = Vec::new();
    visit(&csrc(), "", &mut paths);
    visit(&kernels_csrc(), "", &mut paths);
    paths.sort();
    paths
}

/// One source in a namespace of its own, so that two that name something alike don't meet; and ways in.
fn unit_text(index: usize, source: &str, text: &str) -> String {
    let mut unit = format!("#include \"emulate/cuda.h\"\nnamespace unit{index} {{\n#include \"{source}\"\n}}\n");
    let kernels = kernels(text);
    assert!(!kernels.is_empty(), "{source}: no kernel: nothing like `__global__ ... name(const __grid_constant__`");
    for kernel in kernels {
        unit.push_str(&format!("EMULATE_ENTRY(unit{index}::{kernel}, {})\n", symbol(&kernel)));
    }
    unit
}

/// Qualified names of a source's kernels: the words before `(const __grid_constant__`.
fn kernels(text: &str) -> Vec<String> {
    let starts = text.match_indices("(const __grid_constant__").map(|(at, _)| text[..at].trim_end());
    let name = |before: &str| {
        let name = before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next()?.to_owned();
        let opened = before.rfind("\nnamespace ").map(|at| &before[at + "\nnamespace ".len()..]);
        match opened.filter(|opened| !opened.contains("\n}  // namespace")).and_then(|opened| opened.split_once(" {")) {
            Some((space, _)) => Some(format!("{space}::{name}")),
            None => Some(name),
        }
    };
    starts.filter_map(name).collect()
}

/// A kernel's name as part of the names of the functions through which it is reached.
fn symbol(kernel: &str) -> String {
    kernel.replace("::", "_")
}

/// Turns declarations of shared memory, which C++ does not have, into pointers into the block's:
///
/// ```text
/// extern __shared__ __align__(128) u8 ring[]   ->  u8 *const ring = ...
/// __shared__ u64 barriers[STAGES]              ->  u64 *const barriers = ...
/// __shared__ u32 count                         ->  u32 &count = ...
/// ```
fn shared_replaced(text: &str) -> String {
    const WORD: &str = "__shared__";
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(WORD) {
        let (before, after) = (&rest[..at], &rest[at + WORD.len()..]);
        let line = before.rfind('\n').map_or(0, |end| end + 1);
        if before[line..].contains("//") {
            out.push_str(&rest[..at + WORD.len()]);
            rest = after;
            continue;
        }
        let kept = before.strip_suffix("extern ");
        out.push_str(kept.unwrap_or(before));
        let end = after.find([';', '\n']).expect("the end of a declaration of shared memory");
        out.push_str(&declaration(after[..end].trim(), kept.is_some()));
        rest = &after[end..];
    }
    out.push_str(rest);
    out
}

/// What stands for a declaration, without its `__shared__`.
fn declaration(text: &str, dynamic: bool) -> String {
    let plain = match text.find("__align__(") {
        Some(at) => format!("{}{}", &text[..at], &text[at + text[at..].find(')').unwrap() + 1..]),
        None => text.to_owned(),
    };
    let (named, count) = match plain.find('[') {
        Some(at) => (&plain[..at], Some(plain[at + 1..].trim_end_matches(']').trim())),
        None => (plain.as_str(), None),
    };
    let (kind, name) = named.trim().rsplit_once(' ').expect("a type and a name");
    let kind = kind.trim();
    let place = match (dynamic, count) {
        (true, _) => "emulate::shared_memory()".to_owned(),
        (false, count) => {
            let count = count.unwrap_or("1");
            format!(
                "emulate::shared_static([]() -> const void * {{ static char key; return &key; }}(), sizeof({kind}) * ({count}))"
            )
        }
    };
    match count {
        Some(_) => format!("{kind} *const {name} = static_cast<{kind} *>({place})"),
        None => format!("{kind} &{name} = *static_cast<{kind} *>({place})"),
    }
}

/// A C++ compiler, and what it calls itself.
struct Compiler {
    program: String,
    version: String,
}

impl Compiler {
    fn command(&self, overlay: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.args(FLAGS).arg("-I").arg(overlay).arg("-I").arg(csrc().join("emulate")).arg("-I").arg(csrc());
        command.arg("-I").arg(kernels_csrc());
        command
    }

    fn link(&self) -> Command {
        Command::new(&self.program)
    }
}

/// `$CXX`, else `c++`.
fn compiler() -> Option<&'static Compiler> {
    static FOUND: OnceLock<Option<Compiler>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let program = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let output = Command::new(&program).arg("--version").output().ok().filter(|output| output.status.success())?;
        Some(Compiler { program, version: String::from_utf8_lossy(&output.stdout).into_owned() })
    });
    let known = cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")));
    if found.is_none() || !known {
        use std::io::Write;
        let why =
            if known { "there is no C++ compiler (c++, or what CXX names)" } else { "not written for this machine" };
        assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{why}");
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        let _ = std::io::stderr().write_all(format!("skipped: {test}: {why}\n").as_bytes());
        return None;
    }
    found.as_ref()
}

/// A compiler that runs.
struct Job {
    what: String,
    child: Child,
    rename: Option<(PathBuf, PathBuf)>,
}

impl Job {
    fn start(what: &str, mut command: Command) -> Job {
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the C++ compiler starts");
        Job { what: what.to_owned(), child, rename: None }
    }

    fn finish(self) {
        let output = self.child.wait_with_output().expect("the C++ compiler ends");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: does not compile for emulation:\n{words}", self.what);
        if !words.trim().is_empty() {
            println!("{}:\n{words}", self.what);
        }
        if let Some((from, to)) = self.rename {
            fs::rename(from, to).unwrap();
        }
    }
}

/// Compiled kernels and the machine that runs them, loaded. Usable from any thread.
pub struct Library {
    code: libloading::Library,
    path: PathBuf,
}

impl Library {
    fn open(path: PathBuf) -> Library {
        // SAFETY: made by us; it does nothing when it is loaded.
        let code = unsafe { libloading::Library::new(&path) };
        Library { code: code.unwrap_or_else(|error| panic!("{}: {error}", path.display())), path }
    }

    /// A message with lines of the sources in place of addresses: ` @{1a2b,3c4d}`, the innermost call first.
    pub(crate) fn located(&self, message: &str) -> String {
        let mut out = String::new();
        let mut rest = message;
        while let Some((before, after)) = rest.split_once(" @{") {
            let Some((addresses, after)) = after.split_once('}') else { break };
            out.push_str(before);
            let lines = self.lines(addresses);
            if !lines.is_empty() {
                out.push_str(&format!(" ({})", lines.join(" < ")));
            }
            rest = after;
        }
        out + rest
    }

    /// Lines of kernels, as `file:line`, without what is the machine's.
    fn lines(&self, addresses: &str) -> Vec<String> {
        let mut command = Command::new("addr2line");
        command.arg("-i").arg("-e").arg(&self.path).args(addresses.split(','));
        let Ok(output) = command.output() else { return vec![addresses.to_owned()] };
        let text = String::from_utf8_lossy(&output.stdout);
        let lines = text.lines().filter(|line| !line.contains("/csrc/emulate/") && line.contains("/csrc/"));
        let short = lines.map(|line| {
            let line = line.split(" (discriminator").next().unwrap_or(line);
            line.rsplit('/').next().unwrap_or(line).to_owned()
        });
        short.collect()
    }

    fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the types of the functions below are those of the sources.
        *unsafe { self.code.get::<T>(name) }.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub(crate) fn kernel(&self, name: &str) -> (Entry, usize) {
        let bytes: unsafe extern "C" fn() -> usize = self.symbol(&format!("emulate_bytes_{}", symbol(name)));
        // SAFETY: it gives back a number.
        (self.symbol(&format!("emulate_entry_{}", symbol(name))), unsafe { bytes() })
    }

    pub(crate) fn run(&self) -> Run {
        self.symbol("emulate_run")
    }

    pub(crate) fn free(&self) -> Free {
        self.symbol("emulate_free")
    }
}
