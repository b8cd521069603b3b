//! Words that a standard term replaces ([`words`]), counted in the prose of every room ([`passages`]): comments, doc
//! comments, messages and pages of Rust, Python, C++ and Markdown.
//!
//! The table `[prose]` of `xtask/budgets.toml` has how many each room may have. A figure only falls.

mod passages;
#[cfg(test)]
mod tests;
mod words;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use toml::Table;

use crate::budgets::{FILE, number};
use crate::{Problems, files, shown};
use passages::passages;
use words::{Finder, WORDS};

const HEAD: &str = "# Words and openings that a standard term replaces (`cargo xtask prose`). A figure only falls:\n\
                    # `cargo xtask prose --record` lowers them to today's.\n[prose]\n";
const SUFFIXES: [&str; 9] = [".rs", ".py", ".pyi", ".cu", ".cuh", ".cpp", ".c", ".h", ".md"];
/// Files that quote the words.
const QUOTING: [&str; 2] = ["xtask/src/prose/words.rs", "xtask/src/prose/tests.rs"];
/// Mark of generated pages, whose words are counted in the sources that they are generated from.
const GENERATED: &str = "Do not edit. -->";
/// The room of pages in the root.
const ROOT: &str = "root";
/// Characters of a line that are shown.
const SHOWN: usize = 160;

struct Place {
    /// The index in [`WORDS`].
    word: usize,
    path: String,
    line: usize,
    text: String,
}

/// Fails for rooms that have more words than their figure.
pub(crate) fn check(root: &Path) -> Problems {
    let counts = measure(root).into_iter().map(|(room, places)| (room, places.len())).collect();
    match allowed(root) {
        Ok(allowed) => judge(&counts, &allowed),
        Err(problem) => vec![problem],
    }
}

fn judge(counts: &BTreeMap<String, usize>, allowed: &BTreeMap<String, usize>) -> Problems {
    let above = counts.iter().filter_map(|(room, count)| match allowed.get(room) {
        Some(most) if count <= most => None,
        Some(most) => Some(format!(
            "{room}: {count} words and openings that a standard term replaces, at most {most} are allowed in {FILE}: \
             `cargo xtask prose {room}` lists them; reword as many"
        )),
        None => Some(format!("{room}: no figure in [prose] of {FILE}: run cargo xtask prose --record")),
    });
    let stale = allowed.keys().filter(|room| !counts.contains_key(*room));
    above.chain(stale.map(|room| format!("{room}: has no files: take it off [prose] of {FILE}"))).collect()
}

/// Table of counts and figures, with the count of each word.
pub(crate) fn table(root: &Path) -> String {
    let allowed = allowed(root).unwrap_or_default();
    let rooms = measure(root);
    let mut text = format!("{:16} {:>6} {:>8}  words\n", "prose", "now", "allowed");
    let mut all = BTreeMap::new();
    for (room, places) in &rooms {
        let most = allowed.get(room).map_or_else(|| "none".to_owned(), usize::to_string);
        let mut counts = BTreeMap::new();
        for place in places {
            *counts.entry(place.word).or_insert(0) += 1;
            *all.entry(place.word).or_insert(0) += 1;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{room:16} {:>6} {most:>8}  {}", places.len(), listed(&counts));
    }
    let (now, most) = (all.values().sum::<usize>(), allowed.values().sum::<usize>());
    let _ = writeln!(text, "{:16} {now:>6} {most:>8}  {}", "all", listed(&all));
    text
}

/// Words with their counts, the most frequent first.
fn listed(counts: &BTreeMap<usize, usize>) -> String {
    let mut counts: Vec<(usize, usize)> = counts.iter().map(|(word, count)| (*word, *count)).collect();
    counts.sort_by_key(|(word, count)| (std::cmp::Reverse(*count), *word));
    let counts = counts.into_iter().map(|(word, count)| format!("{} {count}", WORDS[word].name));
    counts.collect::<Vec<_>>().join(", ")
}

/// Each place of a room.
pub(crate) fn places(root: &Path, room: &str) -> Result<String, String> {
    let mut rooms = measure(root);
    let Some(places) = rooms.remove(room) else {
        let names = rooms.into_keys().collect::<Vec<_>>().join(", ");
        return Err(format!("{room} is not a room; the rooms are {names}"));
    };
    let mut text = String::new();
    for Place { word, path, line, text: excerpt } in places {
        let _ = writeln!(text, "{path}:{line}: {excerpt}  [{}: {}]", WORDS[word].name, WORDS[word].instead);
    }
    Ok(text)
}

/// Lowers each figure to today's count; a room without one gets it.
pub(crate) fn record(root: &Path) -> Problems {
    let counts: BTreeMap<String, usize> =
        measure(root).into_iter().map(|(room, places)| (room, places.len())).collect();
    let old = match allowed(root) {
        Ok(allowed) => allowed,
        Err(problem) => return vec![problem],
    };
    let new = lowered(&counts, &old);
    let path = root.join(FILE);
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    match std::fs::write(&path, replaced(&text, &new)) {
        Ok(()) => judge(&counts, &new),
        Err(error) => vec![format!("{FILE}: {error}")],
    }
}

fn lowered(counts: &BTreeMap<String, usize>, allowed: &BTreeMap<String, usize>) -> BTreeMap<String, usize> {
    let figure =
        |(room, count): (&String, &usize)| (room.clone(), allowed.get(room).map_or(*count, |most| *most.min(count)));
    counts.iter().map(figure).collect()
}

/// The budgets with the table of prose replaced; it is the last one.
fn replaced(text: &str, figures: &BTreeMap<String, usize>) -> String {
    let before = text.split(HEAD).next().unwrap_or_default();
    let before = before.split("[prose]\n").next().unwrap_or_default();
    format!("{}\n{}", before.trim_end(), section(figures))
}

/// The table of prose, below the others.
fn section(figures: &BTreeMap<String, usize>) -> String {
    let mut text = format!("\n{HEAD}");
    for (room, count) in figures {
        let _ = writeln!(text, "{room} = {count}");
    }
    text
}

fn allowed(root: &Path) -> Result<BTreeMap<String, usize>, String> {
    let text = std::fs::read_to_string(root.join(FILE)).map_err(|error| format!("{FILE}: {error}"))?;
    let table = text.parse::<Table>().map_err(|error| format!("{FILE}: {}", error.message()))?;
    Ok(figures(&table))
}

/// The figures in the parsed budgets.
fn figures(table: &Table) -> BTreeMap<String, usize> {
    let rooms = table.get("prose").and_then(toml::Value::as_table).into_iter().flatten();
    rooms.filter_map(|(room, figure)| Some((room.clone(), number(Some(figure))?))).collect()
}

/// Every room with its places.
fn measure(root: &Path) -> BTreeMap<String, Vec<Place>> {
    let mut rooms: BTreeMap<String, Vec<Place>> = BTreeMap::new();
    let finder = Finder::new();
    let paths = SUFFIXES.iter().flat_map(|suffix| files(root, suffix));
    for path in paths {
        let name = shown(root, &path);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        if QUOTING.contains(&name.as_str()) || (name.ends_with(".md") && text.contains(GENERATED)) {
            continue;
        }
        let places = rooms.entry(room(&name)).or_default();
        places.extend(of_file(&finder, &name, &text));
    }
    rooms
}

fn of_file(finder: &Finder, name: &str, text: &str) -> Vec<Place> {
    let lines: Vec<&str> = text.lines().collect();
    let found = passages(name, text).into_iter().flat_map(|passage| finder.find(&passage));
    found
        .map(|(word, line)| {
            let excerpt = lines.get(line - 1).map_or("", |line| line.trim());
            Place { word, path: name.to_owned(), line, text: excerpt.chars().take(SHOWN).collect() }
        })
        .collect()
}

/// A crate, a Python package, another folder of the root, or the root.
fn room(path: &str) -> String {
    let mut parts = path.split('/');
    let first = parts.next().unwrap_or_default();
    let inner = parts.next();
    match (first, inner) {
        (_, None) => ROOT.to_owned(),
        ("crates" | "python", Some(inner)) => inner.to_owned(),
        _ => first.to_owned(),
    }
}
