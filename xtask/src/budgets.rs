//! Budgets that only shrink by themselves: code lines of every room, methods and files of large types, circles of imports.
//!
//! `xtask/budgets.toml` holds them. A feature enters when room is made, or raises a figure in the commit that needs it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use toml::Table;

use crate::rooms::ROOMS;
use crate::rust::{group, is_test, is_word, sources, tokens, without_tests};
use crate::{Problems, circles, files, shown};

pub(crate) const FILE: &str = "xtask/budgets.toml";
/// A type with more methods, or with inherent methods in as many files, is several types: it is listed.
const METHODS: usize = 60;
const IMPL_FILES: usize = 3;
/// The packages beside the crates, and their folders.
const PACKAGES: &[(&str, &str)] = &[
    ("xtask", "xtask/src"),
    ("crossrail", "python/crossrail"),
    ("crossrail_tools", "python/crossrail_tools"),
    ("benches", "benches"),
];

/// Figures of the repository as it is.
struct Figures {
    lines: BTreeMap<String, usize>,
    /// Methods of types, and files that have some, of those types that are too large.
    types: BTreeMap<String, (usize, usize)>,
}

/// Fails for what is above its budget, and for entries that are no longer needed.
pub(crate) fn check(root: &Path) -> Problems {
    let table = match std::fs::read_to_string(root.join(FILE))
        .map_err(|error| error.to_string())
        .and_then(|text| text.parse::<Table>().map_err(|error| error.message().to_owned()))
    {
        Ok(table) => table,
        Err(error) => return vec![format!("{FILE}: {error}")],
    };
    let figures = measure(root);
    let mut problems = Problems::new();
    let budget = |name: &str| number(table.get("lines").and_then(|lines| lines.get(name)));
    for (name, lines) in &figures.lines {
        match budget(name) {
            Some(most) if *lines <= most => {}
            Some(most) => problems.push(format!(
                "{name}: {lines} code lines, {most} are budgeted in {FILE}: make room, or raise it and say why"
            )),
            None => problems.push(format!("{name}: {lines} code lines, and no budget in {FILE}")),
        }
    }
    problems.extend(judge_types(&figures.types, table.get("types").and_then(toml::Value::as_table)));
    problems.extend(circles::check(root, &allowed_circles(&table)));
    problems
}

pub(crate) fn number(value: Option<&toml::Value>) -> Option<usize> {
    value?.as_integer()?.try_into().ok()
}

fn allowed_circles(table: &Table) -> Vec<Vec<String>> {
    let circles = table.get("circles").and_then(|circles| circles.as_array()).into_iter().flatten();
    circles
        .map(|circle| {
            circle.as_array().into_iter().flatten().filter_map(|file| Some(file.as_str()?.to_owned())).collect()
        })
        .collect()
}

fn judge_types(found: &BTreeMap<String, (usize, usize)>, listed: Option<&Table>) -> Problems {
    let mut problems = Problems::new();
    let budget = |name: &str| -> Option<(usize, usize)> {
        let entry = listed?.get(name)?;
        Some((number(entry.get("methods"))?, number(entry.get("files"))?))
    };
    for (name, (methods, in_files)) in found {
        match budget(name) {
            Some((most, most_files)) if *methods <= most && *in_files <= most_files => {}
            Some((most, most_files)) => problems.push(format!(
                "{name}: {methods} methods in {in_files} files, {most} in {most_files} are listed in {FILE}: it only shrinks"
            )),
            None => problems.push(format!(
                "{name}: {methods} methods in {in_files} files: more than {METHODS}, or {IMPL_FILES} files, are several types"
            )),
        }
    }
    let names: BTreeSet<&String> = listed.into_iter().flat_map(Table::keys).collect();
    problems.extend(
        names
            .into_iter()
            .filter(|name| !found.contains_key(*name))
            .map(|name| format!("{name}: is no large type any more: take it off {FILE}")),
    );
    problems
}

/// The figures beside their budgets.
pub(crate) fn table(root: &Path) -> String {
    let budgets = std::fs::read_to_string(root.join(FILE)).ok().and_then(|text| text.parse::<Table>().ok());
    let figures = measure(root);
    let mut text = format!("{:16} {:>8} {:>8}\n", "code lines", "now", "budget");
    for (name, lines) in &figures.lines {
        let budget = number(budgets.as_ref().and_then(|table| table.get("lines")?.get(name)));
        let budget = budget.map_or_else(|| "none".to_owned(), |most| most.to_string());
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:16} {lines:>8} {budget:>8}");
    }
    let _ = writeln!(text, "{:16} {:>8}", "all", figures.lines.values().sum::<usize>());
    text
}

/// Writes today's figures as the budgets. Circles stay as they are allowed, and so do the figures of prose.
pub(crate) fn record(root: &Path) -> Problems {
    let path = root.join(FILE);
    let before = std::fs::read_to_string(&path).unwrap_or_default();
    let old = before.parse::<Table>().unwrap_or_default();
    let figures = measure(root);
    let mut text = String::from(
        "# What each room may have: `cargo xtask budgets` prints it, `cargo xtask lint` fails above it. Code lines are those\n\
         # that are neither blank nor comments, without tests. A feature enters when room is made; a commit that raises a\n\
         # figure says why. `cargo xtask budgets --record` writes today's figures.\n\n[lines]\n",
    );
    for (name, lines) in &figures.lines {
        let _ = writeln!(text, "{name} = {lines}");
    }
    text.push_str(
        "\n# Types of more than 60 methods, or with methods in three files or more: they only shrink.\n[types]\n",
    );
    for (name, (methods, in_files)) in &figures.types {
        let _ = writeln!(text, "\"{name}\" = {{ methods = {methods}, files = {in_files} }}");
    }
    let mut circles = String::new();
    for circle in allowed_circles(&old) {
        let _ = writeln!(circles, "  {circle:?},");
    }
    let head = "# Modules that import each other; none is added.\ncircles = [\n";
    let text = text.replacen("[lines]\n", &format!("{head}{circles}]\n\n[lines]\n"), 1);
    let text = text + prose(&before);
    match std::fs::write(&path, text) {
        Ok(()) => Problems::new(),
        Err(error) => vec![format!("{FILE}: {error}")],
    }
}

/// The table of prose, the last one, with the comment above it.
fn prose(text: &str) -> &str {
    let table = text.find("\n[prose]\n");
    let start = table.and_then(|at| text[..at].rfind("\n\n"));
    start.map_or("", |start| &text[start + 1..])
}

fn measure(root: &Path) -> Figures {
    let mut figures = Figures { lines: BTreeMap::new(), types: BTreeMap::new() };
    for room in ROOMS {
        let folder = root.join("crates").join(room.name);
        let mut lines: usize = sources(&folder.join("src")).iter().map(|path| code_lines(path, "//")).sum();
        for suffix in [".cu", ".cuh"] {
            lines += files(&folder.join("csrc"), suffix).iter().map(|path| code_lines(path, "//")).sum::<usize>();
        }
        figures.lines.insert(room.name.to_owned(), lines);
        figures.types.extend(large_types(room.name, &folder.join("src")));
    }
    for (name, folder) in PACKAGES {
        let (suffix, comment) = if *name == "xtask" { (".rs", "//") } else { (".py", "#") };
        let mut lines = 0;
        let paths = files(&root.join(folder), suffix).into_iter();
        for path in paths.filter(|path| suffix != ".rs" || !is_test(path)) {
            lines += code_lines(&path, comment);
        }
        figures.lines.insert((*name).to_owned(), lines);
    }
    figures
}

/// Lines of a file that are neither blank nor only a comment, up to its tests.
fn code_lines(path: &Path, comment: &str) -> usize {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    count(&text, comment)
}

fn count(text: &str, comment: &str) -> usize {
    let tests = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..tests].lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(comment)).count()
}

/// Types of a crate with too many inherent methods, or with such in too many files.
fn large_types(room: &str, source: &Path) -> BTreeMap<String, (usize, usize)> {
    let mut found: BTreeMap<String, (usize, BTreeSet<String>)> = BTreeMap::new();
    for path in sources(source) {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        for (name, methods) in inherent_methods(&text) {
            let entry = found.entry(name).or_default();
            entry.0 += methods;
            entry.1.insert(shown(source, &path));
        }
    }
    found
        .into_iter()
        .filter(|(_, (methods, in_files))| *methods > METHODS || in_files.len() >= IMPL_FILES)
        .map(|(name, (methods, in_files))| (format!("{room}::{name}"), (methods, in_files.len())))
        .collect()
}

/// Types that a file has inherent implementations of, and how many methods those have.
fn inherent_methods(text: &str) -> Vec<(String, usize)> {
    let all = tokens(text);
    let tokens = without_tests(&all);
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let begins = at == 0 || ["}", ";", "]", "{", "unsafe"].contains(&tokens[at - 1]);
        if tokens[at] != "impl" || !begins {
            at += 1;
            continue;
        }
        let Some(open) = tokens[at..].iter().position(|token| *token == "{").map(|open| at + open) else { break };
        let end = group(&tokens, open);
        let mut head = &tokens[at + 1..open];
        if head.first() == Some(&"<") {
            head = after_generics(head);
        }
        let head = &head[..head.iter().position(|token| *token == "where").unwrap_or(head.len())];
        if !head.contains(&"for")
            && let Some(name) = type_name(head)
        {
            found.push((name, methods(&tokens[open + 1..end.saturating_sub(1).max(open + 1)])));
        }
        at = end;
    }
    found
}

fn after_generics<'a, 'b>(head: &'b [&'a str]) -> &'b [&'a str] {
    let mut depth = 0_usize;
    for (at, token) in head.iter().enumerate() {
        match *token {
            "<" => depth += 1,
            ">" if at > 0 && head[at - 1] != "-" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return &head[at + 1..];
        }
    }
    head
}

/// The last word of the type's path, before its arguments.
fn type_name(head: &[&str]) -> Option<String> {
    let path = head.iter().take_while(|token| **token != "<");
    path.filter(|token| is_word(token)).last().map(|name| (*name).to_owned())
}

fn methods(body: &[&str]) -> usize {
    let (mut at, mut number) = (0, 0);
    while at < body.len() {
        match body[at] {
            "fn" => {
                number += 1;
                at += 1;
            }
            "(" | "[" | "{" => at = group(body, at),
            _ => at += 1,
        }
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_blank_lines_and_tests_are_no_code() {
        let text =
            "//! Doc.\n\nfn a() {\n    // why\n    b(); // what\n}\n\n#[cfg(test)]\nmod tests {\n    fn c() {}\n}\n";
        assert_eq!(count(text, "//"), 3);
        assert_eq!(count("# why\nx = 1\n\n", "#"), 1);
    }

    #[test]
    fn inherent_methods_are_counted_and_those_of_traits_are_not() {
        let text = "impl<T: Into<u8>> crate::A<T> where T: Copy { pub fn a(&self, f: fn(u8)) { fn inner() {} } const fn b() {} }\n\
                    impl Drop for A { fn drop(&mut self) {} }\nimpl A { #[cfg(test)] fn c() {} fn d(x: impl Fn()) {} }";
        assert_eq!(inherent_methods(text), [("A".to_owned(), 2), ("A".to_owned(), 1)]);
    }

    #[test]
    fn the_table_of_prose_is_kept() {
        assert_eq!(prose("[types]\na = 1\n\n# Why.\n# More.\n[prose]\nb = 2\n"), "\n# Why.\n# More.\n[prose]\nb = 2\n");
        assert_eq!(prose("[types]\na = 1\n"), "");
    }

    #[test]
    fn types_are_listed_and_only_shrink() {
        let found = BTreeMap::from([("a::B".to_owned(), (70, 1))]);
        let listed: Table =
            "\"a::B\" = { methods = 69, files = 1 }\n\"a::C\" = { methods = 61, files = 2 }".parse().unwrap();
        let problems = judge_types(&found, Some(&listed));
        assert_eq!(problems.len(), 2);
        assert!(problems[0].starts_with("a::B: 70 methods in 1 files, 69 in 1 are listed"));
        assert!(problems[1].starts_with("a::C: is no large type any more"));
        assert!(judge_types(&found, None)[0].contains("are several types"));
        let listed: Table = "\"a::B\" = { methods = 70, files = 1 }".parse().unwrap();
        assert_eq!(judge_types(&found, Some(&listed)), Problems::new());
    }
}
