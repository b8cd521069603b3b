//! How long a source file may be. Past some length, ask what it wants to become.

use std::path::Path;

use crate::{Problems, files, shown};

/// Lines of a source file, tests included, above which `cargo xtask lint` asks what it wants to become.
const ASKED_LINES: usize = 600;
/// No source file has more.
const MOST_LINES: usize = 900;
/// What counts as source.
const SUFFIXES: [&str; 4] = [".rs", ".py", ".cu", ".cuh"];

/// Source files that are too long.
pub(crate) fn check(root: &Path) -> Problems {
    let long = sized(root).into_iter().filter(|(_, lines)| *lines > MOST_LINES);
    long.map(|(name, lines)| format!("{name}: has {lines} lines, and {MOST_LINES} are the most")).collect()
}

/// Source files that are long, which is a question and no fault.
pub(crate) fn questions(root: &Path) -> Vec<String> {
    let long = sized(root).into_iter().filter(|(_, lines)| (ASKED_LINES + 1..=MOST_LINES).contains(lines));
    long.map(|(name, lines)| format!("{name}: has {lines} lines: which type or module is missing?")).collect()
}

fn sized(root: &Path) -> Vec<(String, usize)> {
    let paths = SUFFIXES.iter().flat_map(|suffix| files(root, suffix));
    paths.filter_map(|path| Some((shown(root, &path), std::fs::read_to_string(&path).ok()?.lines().count()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_is_asked_about_and_a_very_long_one_is_refused() {
        let folder = std::env::temp_dir().join(format!("crossrail-sizes-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, lines) in [("a.rs", 600), ("b.py", 601), ("c.cu", 901), ("d.md", 2000)] {
            std::fs::write(folder.join(name), "\n".repeat(lines)).unwrap();
        }
        let found = (questions(&folder), check(&folder));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.0, ["b.py: has 601 lines: which type or module is missing?"]);
        assert_eq!(found.1, ["c.cu: has 901 lines, and 900 are the most"]);
    }
}
