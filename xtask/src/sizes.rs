//! How long a source file may be. Past that, ask what it wants to become.

use std::path::Path;

use crate::{Problems, files, shown};

/// Lines of a source file, tests included: some 600, and no more than these.
const MOST_LINES: usize = 620;
/// What counts as source.
const SUFFIXES: [&str; 4] = [".rs", ".py", ".cu", ".cuh"];
/// Files that may be longer, and why.
const LONGER: &[(&str, &str)] = &[];

/// Checks every source file, and that each exception is still needed.
pub(crate) fn check(root: &Path) -> Problems {
    let mut problems = Problems::new();
    let mut excused = Vec::new();
    for path in SUFFIXES.iter().flat_map(|suffix| files(root, suffix)) {
        let name = shown(root, &path);
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let Some(problem) = judge(&name, text.lines().count()) else { continue };
        if LONGER.iter().any(|(longer, _)| *longer == name) {
            excused.push(name);
        } else {
            problems.push(problem);
        }
    }
    let unused = LONGER.iter().filter(|(longer, _)| !excused.iter().any(|name| name == longer));
    problems.extend(unused.map(|(name, _)| format!("{name}: is not too long: take it off the list of exceptions")));
    problems
}

fn judge(name: &str, lines: usize) -> Option<String> {
    (lines > MOST_LINES).then(|| format!("{name}: has {lines} lines, and {MOST_LINES} are the most"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_is_named_with_its_length() {
        assert_eq!(judge("a.rs", MOST_LINES), None);
        assert_eq!(judge("a.rs", 621).as_deref(), Some("a.rs: has 621 lines, and 620 are the most"));
    }
}
