//! How much unsafe code there is, and where.

use std::fmt::Write as _;
use std::ops::AddAssign;
use std::path::Path;

use crate::files;
use crate::rooms::ROOMS;

/// Uses of the keyword, by what follows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Uses {
    blocks: usize,
    /// Functions, and types of functions.
    functions: usize,
    /// Implementations and traits.
    impls: usize,
}

impl Uses {
    fn all(self) -> usize {
        self.blocks + self.functions + self.impls
    }
}

impl AddAssign for Uses {
    fn add_assign(&mut self, other: Uses) {
        self.blocks += other.blocks;
        self.functions += other.functions;
        self.impls += other.impls;
    }
}

/// A line for each crate, those with most of it first, and one for all.
pub(crate) fn table(root: &Path) -> String {
    let mut rows: Vec<(&str, Uses, usize)> = ROOMS
        .iter()
        .map(|room| {
            let (mut uses, mut lines) = (Uses::default(), 0);
            for path in files(&root.join("crates").join(room.name).join("src"), ".rs") {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                lines += text.lines().count();
                uses += count(&text);
            }
            (room.name, uses, lines)
        })
        .collect();
    rows.sort_by_key(|(name, uses, _)| (std::cmp::Reverse(uses.all()), *name));
    let mut all = (Uses::default(), 0);
    let mut table = format!("{:12} {:>7} {:>10} {:>6} {:>8}\n", "unsafe code", "blocks", "functions", "impls", "lines");
    let mut line = |name: &str, uses: Uses, lines: usize| {
        let Uses { blocks, functions, impls } = uses;
        // Writing to a string cannot fail.
        let _ = writeln!(table, "{name:12} {blocks:>7} {functions:>10} {impls:>6} {lines:>8}");
    };
    for (name, uses, lines) in rows {
        all.0 += uses;
        all.1 += lines;
        line(name, uses, lines);
    }
    line("all", all.0, all.1);
    table
}

/// Those of a source file: its comments and the attributes that allow or forbid them do not count.
fn count(text: &str) -> Uses {
    let mut uses = Uses::default();
    for line in text.lines() {
        let code = line.split("//").next().unwrap_or_default();
        let mut words = code.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '{'));
        while let Some(word) = words.next() {
            if word != "unsafe" {
                continue;
            }
            match words.find(|word| !word.is_empty()) {
                Some("fn" | "extern") => uses.functions += 1,
                Some("impl" | "trait") => uses.impls += 1,
                _ => uses.blocks += 1,
            }
        }
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_functions_and_impls_count_and_comments_do_not() {
        let text = "#![allow(unsafe_code)]\n// unsafe { }\nunsafe impl Send for A {}\nlet a = unsafe { b() } + unsafe { c() };\n\
                    pub unsafe fn d() {}\nlet e: unsafe extern \"C\" fn();";
        assert_eq!(count(text), Uses { blocks: 2, functions: 2, impls: 1 });
    }
}
