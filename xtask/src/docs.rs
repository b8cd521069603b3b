//! Generated pages, and checks that links, files and settings named in pages exist.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use crossrail_types::Settings;

use crate::rooms::ROOMS;
use crate::{Problems, files, shown};

const PAGE: &str = "docs/settings.md";
const METRICS: &str = "docs/metrics.md";
/// The page with the table of crates, between these lines.
const CRATES: &str = "CONTRIBUTING.md";
const CRATES_FIRST: &str = "<!-- crates: written by cargo xtask docs from xtask/src/rooms.rs -->\n";
const CRATES_LAST: &str = "<!-- end -->\n";
/// Top-level folders: a path in a page that starts with one of these is relative to the repository root.
const FOLDERS: [&str; 8] = ["benches", "crates", "docs", "examples", "fuzz", "python", "tests", "xtask"];
/// Suffixes of source files: a name with one of these is a file of this repository, even without its folder.
const SOURCES: [&str; 5] = [".rs", ".py", ".cu", ".cuh", ".sh"];

/// Writes the generated pages.
pub(crate) fn write(root: &Path) -> Problems {
    let mut problems = Problems::new();
    for (name, text) in [(PAGE, page()), (METRICS, metrics_page()), (CRATES, crates_page(root))] {
        let path = root.join(name);
        let folder = path.parent().unwrap_or(root);
        if let Err(error) = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text)) {
            problems.push(format!("{name}: {error}"));
        }
    }
    problems
}

/// Checks that the generated pages are up to date, and that links, files and settings named in any page exist.
pub(crate) fn check(root: &Path) -> Problems {
    let mut problems = Problems::new();
    for (name, page) in [(PAGE, page()), (METRICS, metrics_page()), (CRATES, crates_page(root))] {
        match std::fs::read_to_string(root.join(name)) {
            Ok(text) if text == page => {}
            Ok(_) => problems.push(format!("{name}: is stale; run cargo xtask docs")),
            Err(error) => problems.push(format!("{name}: {error}; run cargo xtask docs")),
        }
    }
    let there: BTreeSet<String> = files(root, "").iter().map(|path| shown(root, path)).collect();
    for path in files(root, ".md") {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let folder = path.parent().unwrap_or(root);
        let name = shown(root, &path);
        problems.extend(
            links(&text)
                .filter(|link| !folder.join(link).exists())
                .map(|link| format!("{name}: links to {link}, which does not exist")),
        );
        problems.extend(
            files_named(&text)
                .filter(|file| !is_there(&there, file))
                .map(|file| format!("{name}: names {file}, which does not exist")),
        );
        problems.extend(
            settings_named(&prose(&name, &text))
                .filter(|word| !Settings::NAMES.contains(word))
                .map(|word| format!("{name}: names {word}, which is not a setting")),
        );
    }
    problems
}

/// CONTRIBUTING.md with the table of crates as `rooms.rs` has it.
fn crates_page(root: &Path) -> String {
    let text = std::fs::read_to_string(root.join(CRATES)).unwrap_or_default();
    let Some((before, rest)) = text.split_once(CRATES_FIRST) else { return format!("{text}{CRATES_FIRST}") };
    let after = rest.split_once(CRATES_LAST).map_or("", |(_, after)| after);
    let mut table = String::from("\n| crate | may use | purpose |\n|---|---|---|\n");
    for room in ROOMS {
        let for_tests = |name: &&&str| ROOMS.iter().any(|other| other.name == **name && other.for_tests);
        let (tests, always): (Vec<&&str>, Vec<&&str>) = room.uses.iter().partition(|name| for_tests(name));
        let list = |names: Vec<&&str>| names.into_iter().copied().collect::<Vec<_>>().join(", ");
        let mut uses = if always.is_empty() { "-".to_owned() } else { list(always) };
        if !tests.is_empty() {
            let _ = write!(uses, "; {} in tests", list(tests));
        }
        let _ = writeln!(table, "| {} | {uses} | {} |", room.name, room.purpose);
    }
    format!("{before}{CRATES_FIRST}{table}\n{CRATES_LAST}{after}")
}

fn metrics_page() -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         <!-- Written by `cargo xtask docs` from crates/sight/src/layout.rs and metrics.rs. Do not edit. -->\n\n\
         With `CROSSRAIL_METRICS=:9400` a process answers `GET /metrics` on that port of loopback with the metrics of all\n\
         processes of its user on this machine. If the port is taken, a line says so and the program goes on; a process\n\
         that waits for the port takes it over when its owner ends. With `CROSSRAIL_METRICS=file:FOLDER` each process\n\
         writes a file of its own into the folder of node_exporter's textfile collector, every 15 s, and removes it when\n\
         it ends. Off by default.\n\n\
         **Who can read them:** with `:9400` every user of this machine and every container that shares its network,\n\
         with `0.0.0.0:9400` whoever reaches the machine, without any secret; a file whoever may read it (the process's\n\
         umask decides). They read counters, process ids, and names: of the host, of programs, devices and peers, and\n\
         those that workers, buffers and groups were given. Arguments of programs are left out; `crossrail top`, which\n\
         reads pages of mode 0600, has them.\n\n\
         The figures are those of the pages that `crossrail top` reads ([top.md](top.md)), up to 50 ms old. Every metric\n\
         has the labels `host` and `pid`; `owner` tells the workers and buffers of a process apart. Counters and\n\
         histograms can be added over all labels; the series of a lane or peer ends with it, while those of its rail\n\
         go on, with all that its lanes have carried. Histograms of transfers leave out\n\
         messages short enough to go with their first frame.\n\n\
         [examples/cluster/grafana.json](../examples/cluster/grafana.json) is a dashboard.\n\n\
         | metric | type | labels | meaning |\n|---|---|---|---|\n",
    );
    for metric in crossrail_sight::metrics::reference() {
        let labels = metric.labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
        let _ = writeln!(page, "| `{}` | {} | {labels} | {} |", metric.name, metric.kind, metric.doc);
    }
    page
}

fn page() -> String {
    let mut page = String::from(
        "# Settings\n\n\
         <!-- Written by `cargo xtask docs` from crates/types/src/settings.rs. Do not edit. -->\n\n\
         Every setting is an environment variable, a field of `crossrail_types::Settings`, and a keyword argument of\n\
         `crossrail.Context` in Python. A value set in code takes precedence over the environment. An unknown\n\
         `CROSSRAIL_` variable or an invalid value is an error. Sizes are powers of two: `64K`, `2M`, `1G`.\n\n\
         | variable | field | default | accepted | description |\n|---|---|---|---|---|\n",
    );
    for setting in Settings::reference() {
        let default = setting.default.map_or_else(|| "unset".to_owned(), |value| format!("`{value}`"));
        let cells = [
            format!("`{}`", setting.name),
            format!("`{}`", setting.field),
            default,
            setting.accepts.to_owned(),
            setting.doc,
        ];
        let _ = writeln!(page, "| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "));
    }
    page
}

/// The link targets of a page that are files of this repository.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| {
        let target = rest.split(')').next()?.split('#').next()?.trim();
        (!target.is_empty() && !target.contains("://") && !target.starts_with("mailto:")).then_some(target)
    })
}

/// The words between backticks that look like files or folders of this repository. Patterns are skipped.
fn files_named(text: &str) -> impl Iterator<Item = &str> {
    let code = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    code.flat_map(str::split_whitespace).filter_map(|word| {
        let word = word.split("::").next()?.trim_matches([',', ';', ':', '(', ')', '"', '\'']);
        let plain =
            word.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c)) && !word.starts_with(['/', '.']);
        let first = word.split_once('/').map(|(first, _)| first);
        let names = first.is_some_and(|first| FOLDERS.contains(&first))
            || SOURCES.iter().any(|suffix| word.strip_suffix(suffix).is_some_and(|stem| !stem.is_empty()));
        (plain && names).then_some(word)
    })
}

/// Whether a name is a file, a folder, or the end of a file's path.
fn is_there(there: &BTreeSet<String>, name: &str) -> bool {
    let name = name.trim_end_matches('/');
    let (inside, below) = (format!("{name}/"), format!("/{name}"));
    there.iter().any(|path| path == name || path.starts_with(&inside) || path.ends_with(&below))
}

/// The part of a page that describes this version. Tables of results and the change log may name settings of earlier
/// versions, so they are left out.
fn prose(name: &str, text: &str) -> String {
    if name == "CHANGELOG.md" {
        return String::new();
    }
    let (mut kept, mut inside) = (String::new(), false);
    for line in text.lines() {
        inside = if inside { line != "<!-- end -->" } else { line.starts_with("<!-- table of ") };
        if !inside {
            kept += line;
            kept.push('\n');
        }
    }
    kept
}

/// The words of a page that look like settings.
fn settings_named(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.strip_prefix("CROSSRAIL_").is_some_and(|rest| !rest.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_files_are_found() {
        let text = "[a](docs/a.md) [b](https://example.org/b) ![c](img/c.svg#x) [d](#here) [e](mailto:x@example.org)";
        assert_eq!(links(text).collect::<Vec<_>>(), ["docs/a.md", "img/c.svg"]);
    }

    #[test]
    fn settings_of_earlier_versions_may_stand_in_results_and_in_the_change_log() {
        let page = "CROSSRAIL_A\n<!-- table of x.json -->\n| CROSSRAIL_B |\n<!-- end -->\nCROSSRAIL_C\n";
        assert_eq!(settings_named(&prose("docs/a.md", page)).collect::<Vec<_>>(), ["CROSSRAIL_A", "CROSSRAIL_C"]);
        assert_eq!(prose("CHANGELOG.md", page), "");
    }

    #[test]
    fn files_are_found() {
        let text = "`crates/types/src/lib.rs`, `xtask/`; `run tests/gpu/run.py --out x`, `core.rs::f`, not `crates/*/src`,\n\
                    `a/b`, `<crates/x>`, crates/y, `/tests/z.py` or `report.json`. `.sh` `scripts/a.sh`";
        let found: Vec<_> = files_named(text).collect();
        assert_eq!(found, ["crates/types/src/lib.rs", "xtask/", "tests/gpu/run.py", "core.rs", "scripts/a.sh"]);
    }

    #[test]
    fn a_file_is_there_by_its_path_its_folder_or_its_end() {
        let there = BTreeSet::from(["crates/a/src/lib.rs".to_owned(), "benches/run.py".to_owned()]);
        for name in ["crates/a/src/lib.rs", "crates/a/", "crates", "lib.rs", "src/lib.rs", "run.py"] {
            assert!(is_there(&there, name), "{name}");
        }
        for name in ["crates/b", "ib.rs", "crates/a/src/li", "a/run.py"] {
            assert!(!is_there(&there, name), "{name}");
        }
    }

    #[test]
    fn settings_are_found() {
        let text = "set `CROSSRAIL_TLS=shm` or CROSSRAIL_LOGS; `CROSSRAIL_` alone is a prefix";
        assert_eq!(settings_named(text).collect::<Vec<_>>(), ["CROSSRAIL_TLS", "CROSSRAIL_LOGS"]);
    }

    #[test]
    fn the_page_has_a_row_per_setting() {
        let page = page();
        for name in Settings::NAMES {
            assert!(page.contains(&format!("| `{name}` |")), "{name}");
        }
        assert_eq!(page.lines().filter(|line| line.starts_with("| `")).count(), Settings::NAMES.len());
    }
}
