//! Checks of dependencies: manifests against the table in `rooms.rs`, and imports of Python files.

use std::path::Path;

use toml::Table;

use crate::rooms::{DOORS, LOCKED_STATICS, PYTHON, ROOMS, Room, WORDS};
use crate::{Problems, files, shown};

/// Checks all rules of `rooms.rs`.
pub(crate) fn check(root: &Path) -> Problems {
    let mut problems = unlisted(root);
    for room in ROOMS {
        problems.extend(manifest(root, room));
        if room.forbids_unsafe {
            let lib = root.join("crates").join(room.name).join("src/lib.rs");
            if !read(&lib).contains("#![forbid(unsafe_code)]") {
                problems.push(format!("{}: must contain #![forbid(unsafe_code)]", shown(root, &lib)));
            }
        }
    }
    for (folder, words, why) in WORDS {
        for path in files(&root.join(folder), ".rs") {
            if path.file_stem().is_some_and(|name| name.to_string_lossy().ends_with("tests")) {
                continue;
            }
            problems.extend(
                forbidden_words(&read(&path), words)
                    .into_iter()
                    .map(|(line, word)| format!("{}:{line}: {word}: {why}", shown(root, &path))),
            );
        }
    }
    for path in files(&root.join("crates"), ".rs") {
        let shown = shown(root, &path);
        if !LOCKED_STATICS.iter().any(|known| shown.starts_with(known)) && !shown.contains("tests") {
            problems.extend(locked_statics(&read(&path)).into_iter().map(|line| {
                format!(
                    "{shown}:{line}: a static with a lock, which a thread may have at a fork: use locks::PerProcess"
                )
            }));
        }
    }
    for (folder, modules, why) in PYTHON {
        for path in files(&root.join(folder), ".py") {
            let within = path.strip_prefix(root).unwrap_or(&path).to_string_lossy();
            if DOORS.contains(&&*within) || !is_innermost(folder, &within) {
                continue;
            }
            problems.extend(
                forbidden_imports(&read(&path), modules)
                    .into_iter()
                    .map(|(line, module)| format!("{}:{line}: imports {module}: {why}", shown(root, &path))),
            );
        }
    }
    problems
}

/// Whether no other rule is about a folder of `folder` that contains the Python file `path`.
fn is_innermost(folder: &str, path: &str) -> bool {
    let within = |inner: &str, outer: &str| inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'));
    !PYTHON.iter().any(|(inner, ..)| within(inner, folder) && within(path, inner))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Crates that are missing in the table.
fn unlisted(root: &Path) -> Problems {
    files(&root.join("crates"), "Cargo.toml")
        .iter()
        .filter_map(|path| {
            let folder = path.parent()?.file_name()?.to_string_lossy().into_owned();
            let listed = ROOMS.iter().any(|room| room.name == folder);
            (!listed).then(|| format!("crates/{folder}: not in the table of xtask/src/rooms.rs"))
        })
        .collect()
}

fn manifest(root: &Path, room: &Room) -> Problems {
    let path = format!("crates/{}/Cargo.toml", room.name);
    let table = match read(&root.join(&path)).parse::<Table>() {
        Ok(table) if !table.is_empty() => table,
        Ok(_) => return vec![format!("{path}: missing or empty")],
        Err(error) => return vec![format!("{path}: {}", error.message())],
    };
    let mut problems = Problems::new();
    if table.get("package").and_then(|package| package.get("name")?.as_str()) != Some(room.package) {
        problems.push(format!("{path}: the package must be called {}", room.package));
    }
    for dependency in dependencies(&table) {
        problems.extend(judge(room, &dependency).map(|why| format!("{path}: {why}")));
    }
    problems
}

/// A dependency of a manifest.
#[derive(Debug, PartialEq, Eq)]
struct Dependency {
    package: String,
    for_tests: bool,
}

/// The reason why `room` may not have this dependency; `None` if it may.
fn judge(room: &Room, dependency: &Dependency) -> Option<String> {
    let package = &dependency.package;
    if let Some(other) = ROOMS.iter().find(|other| other.package == package) {
        if other.for_tests && !dependency.for_tests {
            return Some(format!("only tests may use {}, not {}", other.name, room.name));
        }
        let allowed = other.name == room.name || room.uses.contains(&other.name);
        return (!allowed).then(|| match room.uses {
            [] => format!("{} may use no other room, not {}", room.name, other.name),
            uses => format!("{} may use {}, not {}", room.name, uses.join(", "), other.name),
        });
    }
    match room.outside {
        Some(known) if !dependency.for_tests && !known.contains(&package.as_str()) => {
            Some(format!("{} may use the external crates {known:?}, not {package}", room.name))
        }
        _ => None,
    }
}

/// All dependencies of all sections, including target-specific ones, by their package names.
fn dependencies(table: &Table) -> Vec<Dependency> {
    let targets = table.get("target").and_then(|targets| targets.as_table());
    let tables = targets.into_iter().flat_map(|targets| targets.values().filter_map(|value| value.as_table()));
    let mut found = Vec::new();
    for table in std::iter::once(table).chain(tables) {
        for (section, for_tests) in [("dependencies", false), ("build-dependencies", false), ("dev-dependencies", true)]
        {
            let Some(section) = table.get(section).and_then(|section| section.as_table()) else { continue };
            found.extend(section.iter().map(|(name, value)| {
                let package = value.get("package").and_then(|package| package.as_str()).unwrap_or(name);
                Dependency { package: package.to_owned(), for_tests }
            }));
        }
    }
    found
}

/// The lines of code (from 1) that contain one of `words`. Comments, and everything after `#[cfg(test)]`, are skipped.
fn forbidden_words<'a>(source: &str, words: &[&'a str]) -> Vec<(usize, &'a str)> {
    let code = source.lines().enumerate().take_while(|(_, line)| line.trim() != "#[cfg(test)]");
    code.flat_map(|(number, line)| {
        let line = line.split("//").next().unwrap_or_default();
        words.iter().filter(|word| line.contains(**word)).map(move |word| (number + 1, *word)).collect::<Vec<_>>()
    })
    .collect()
}

/// Lines (from 1) with a static that is a lock.
fn locked_statics(source: &str) -> Vec<usize> {
    const LOCKS: &[&str] = &["Mutex<", "RwLock<", "OnceLock<", "LazyLock<", "Once ", "Condvar "];
    let code = source.lines().enumerate().take_while(|(_, line)| line.trim() != "#[cfg(test)]");
    code.filter(|(_, line)| {
        let line = line.trim();
        let declared = line.find("static ").filter(|at| *at == 0 || line.starts_with("pub"));
        let kind = declared.and_then(|_| line.split_once(": ")).map(|(_, kind)| kind);
        kind.is_some_and(|kind| LOCKS.iter().any(|lock| kind.starts_with(lock)))
    })
    .map(|(number, _)| number + 1)
    .collect()
}

/// The import statements (lines from 1) of a Python file that import one of `modules`, in any spelling.
fn forbidden_imports<'a>(source: &str, modules: &[&'a str]) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    let mut lines = source.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let mut statement = line.trim().to_owned();
        if !statement.starts_with("import ") && !statement.starts_with("from ") {
            continue;
        }
        while (statement.contains('(') && !statement.contains(')')) || statement.ends_with('\\') {
            let Some((_, more)) = lines.next() else { break };
            statement = format!("{} {}", statement.trim_end_matches('\\'), more.split('#').next().unwrap_or_default());
        }
        let statement = statement.split('#').next().unwrap_or_default();
        let mut words = statement.split(|c: char| !c.is_alphanumeric() && c != '_');
        found.extend(
            words.find_map(|word| modules.iter().find(|module| **module == word)).map(|module| (number + 1, *module)),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(room: &str, package: &str, for_tests: bool) -> Option<String> {
        let room = ROOMS.iter().find(|known| known.name == room).unwrap();
        judge(room, &Dependency { package: package.into(), for_tests })
    }

    #[test]
    fn the_rule_of_an_inner_folder_replaces_that_of_an_outer_one() {
        let (cli, doctor) = ("python/crossrail_tools/cli", "python/crossrail_tools/cli/doctor");
        assert!(is_innermost(cli, "python/crossrail_tools/cli/plan.py"));
        assert!(is_innermost(cli, "python/crossrail_tools/cli/doctor.py"));
        assert!(!is_innermost(cli, "python/crossrail_tools/cli/doctor/gpus.py"));
        assert!(is_innermost(doctor, "python/crossrail_tools/cli/doctor/gpus.py"));
    }

    #[test]
    fn statics_with_locks_are_found() {
        let source = "static A: Mutex<u8> = x;\n  pub(crate) static B: OnceLock<u8> = x;\nstatic C: PerProcess<Mutex<u8>> = x;\n\
                      fn f(c: &'static str, d: Mutex<u8>) {}\n#[cfg(test)]\nstatic T: Mutex<u8> = x;";
        assert_eq!(locked_statics(source), [1, 2]);
    }

    #[test]
    fn the_table_goes_down_only() {
        for (place, room) in ROOMS.iter().enumerate() {
            for used in room.uses {
                assert!(ROOMS[..place].iter().any(|lower| lower.name == *used), "{} uses {used}", room.name);
            }
        }
    }

    #[test]
    fn the_rules_that_matter_hold() {
        for (room, package) in [
            ("types", "crossrail-proto"),
            ("proto", "crossrail-transport"),
            ("transport", "crossrail-proto"),
            ("shm", "crossrail-tcp"),
            ("tcp", "crossrail-shm"),
            ("topology", "crossrail"),
            ("engine", "crossrail-bench"),
            ("bench", "crossrail-tcp"),
            ("python", "crossrail-shm"),
        ] {
            assert!(judged(room, package, false).is_some(), "{room} -> {package}");
            assert!(judged(room, package, true).is_some(), "{room} -> {package}, even for tests");
        }
        assert_eq!(judged("engine", "crossrail-tcp", false), None);
        assert_eq!(judged("engine", "anything", false), None);
        assert!(judged("proto", "nix", false).is_some());
        assert_eq!(judged("proto", "slab", false), None);
        assert_eq!(judged("proto", "proptest", true), None);
        assert_eq!(judged("ep-cuda", "crossrail-emulator", true), None);
        assert!(judged("ep-cuda", "crossrail-emulator", false).is_some());
    }

    #[test]
    fn every_section_and_spelling_of_a_dependency_is_seen() {
        let table: Table = r#"
            [dependencies]
            a.workspace = true
            renamed = { package = "b", version = "1" }
            [dependencies.c]
            version = "1"
            [dev-dependencies]
            d = "1"
            [target.'cfg(unix)'.dependencies]
            e = "1"
        "#
        .parse()
        .unwrap();
        let mut found: Vec<_> = dependencies(&table).into_iter().map(|d| (d.package, d.for_tests)).collect();
        found.sort();
        let expected = [("a", false), ("b", false), ("c", false), ("d", true), ("e", false)];
        assert_eq!(found, expected.map(|(name, for_tests)| (name.to_owned(), for_tests)));
    }

    #[test]
    fn imports_are_seen_however_spelled() {
        let bad = "import crossrail._native\n\
                   from .. import _native\n\
                   from crossrail._native import Context\n\
                   def late():\n    from .. import (\n        errors,\n        _native,\n    )\n\
                   from .. \\\n    import _native\n";
        let lines: Vec<usize> = forbidden_imports(bad, &["_native"]).into_iter().map(|(line, _)| line).collect();
        assert_eq!(lines, [1, 2, 3, 5, 9]);
        let good = "import json  # not _native\n\"\"\"_native\"\"\"\nfrom .units import not_native\nx = '_native'\n";
        assert_eq!(forbidden_imports(good, &["_native"]), []);
    }

    #[test]
    fn words_are_seen_in_code_only() {
        let source = "use std::net::IpAddr; // here\n// std::net is not used\nlet now = Instant::now();\n#[cfg(test)]\nuse std::net;\n";
        assert_eq!(forbidden_words(source, &["std::net", "Instant::now"]), [(1, "std::net"), (3, "Instant::now")]);
    }
}
