//! Import cycles between the modules of a folder, which prevent reading one after the other: a file with the folder of its
//! name is one module, and so is a folder. Where there are none, the modules of every folder have an order in which each
//! depends only on those before it.
//!
//! `use` and paths that begin with `crate`, `self`, `super` or a child module count, with re-exports followed to the file
//! that defines the name. Tests do not count, nor does a module's use of the one that contains it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::rust::{group, is_test, is_word, sources, tokens, without_tests};
use crate::{Problems, shown};

type Name = Vec<String>;
type Graph = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

/// One name that a `use` brings in.
struct Use {
    path: Name,
    name: String,
    public: bool,
}

/// A source file.
struct Module {
    path: PathBuf,
    uses: Vec<Use>,
    /// Paths of its body, and all words of that.
    paths: Vec<Name>,
    words: BTreeSet<String>,
    defined: BTreeSet<String>,
}

/// Cycles that are not in `allowed`, and entries of `allowed` that are no longer a cycle.
pub(crate) fn check(root: &Path, allowed: &[Vec<String>]) -> Problems {
    let found = all(root);
    let mut problems = Problems::new();
    for (circle, arrows) in found.iter().filter(|(circle, _)| !allowed.contains(circle)) {
        problems.push(format!("import cycle: {}\n  {}", circle.join(" "), arrows.join("\n  ")));
    }
    for circle in allowed.iter().filter(|circle| !found.iter().any(|(found, _)| found == *circle)) {
        problems.push(format!("no longer an import cycle, remove it from xtask/budgets.toml: {}", circle.join(" ")));
    }
    problems
}

/// All cycles in the repository's crates, as paths relative to the root, each with the files that import each other.
fn all(root: &Path) -> Vec<(Vec<String>, Vec<String>)> {
    let crates = std::fs::read_dir(root.join("crates")).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = crates.map(|entry| entry.path().join("src")).collect();
    folders.push(root.join("xtask/src"));
    folders.sort();
    let mut found = Vec::new();
    for folder in folders {
        let files = graph(&folder);
        for circle in levels(&folder, &files).iter().flat_map(circles) {
            let module = |file: &Path| circle.iter().position(|module| is_in(file, module));
            let all = files.iter().flat_map(|(file, used)| used.iter().map(move |other| (file, other)));
            let between = all.filter(|(file, other)| {
                let (from, to) = (module(file), module(other));
                from.is_some() && to.is_some() && from != to
            });
            let arrows = between.map(|(file, other)| format!("{} uses {}", shown(root, file), shown(root, other)));
            found.push((circle.iter().map(|module| shown(root, module)).collect(), arrows.collect()));
        }
    }
    found
}

/// True if `file` is the file of `module` or in its folder.
fn is_in(file: &Path, module: &Path) -> bool {
    file.with_extension("") == module || file.starts_with(module)
}

/// Which files of a crate use which others.
fn graph(source: &Path) -> Graph {
    let modules: BTreeMap<Name, Module> = sources(source)
        .into_iter()
        .filter_map(|path| {
            let mut name: Name = path
                .strip_prefix(source)
                .ok()?
                .with_extension("")
                .components()
                .map(|part| part.as_os_str().to_string_lossy().into_owned())
                .collect();
            let last = name.last().map_or("", String::as_str);
            if last == "main" && source.join("lib.rs").exists() {
                return None;
            }
            if ["lib", "main", "mod"].contains(&last) {
                name.pop();
            }
            let text = std::fs::read_to_string(&path).ok()?;
            Some((name, read(path, &text)))
        })
        .collect();
    let mut graph = Graph::new();
    for (name, module) in &modules {
        let mut used = BTreeSet::new();
        for path in named(module, name, &modules) {
            let Some(other) = resolved(name, &path, &modules, 0) else { continue };
            if !name.starts_with(&other) && !is_test(&modules[&other].path) {
                used.insert(modules[&other].path.clone());
            }
        }
        graph.insert(module.path.clone(), used);
    }
    graph
}

/// For each folder below `source`, which of its modules use which others. The folder's own file is none of them.
fn levels(source: &Path, graph: &Graph) -> Vec<Graph> {
    let mut levels: BTreeMap<&Path, Graph> = BTreeMap::new();
    let module = |folder: &Path, path: &Path| -> Option<PathBuf> {
        let first = path.strip_prefix(folder).ok()?.components().next()?;
        let name = Path::new(&first).with_extension("");
        (!["lib", "main", "mod"].iter().any(|own| name == Path::new(own))).then(|| folder.join(name))
    };
    for (file, used) in graph {
        for folder in file.ancestors().skip(1).take_while(|folder| folder.starts_with(source)) {
            let Some(of) = module(folder, file) else { continue };
            let others = used.iter().filter_map(|other| module(folder, other)).filter(|other| *other != of);
            levels.entry(folder).or_default().entry(of.clone()).or_default().extend(others);
        }
    }
    levels.into_values().collect()
}

fn read(path: PathBuf, text: &str) -> Module {
    let all = tokens(text);
    let tokens = without_tests(&all);
    let mut module =
        Module { path, uses: Vec::new(), paths: Vec::new(), words: BTreeSet::new(), defined: BTreeSet::new() };
    let mut body = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let public = tokens[at] == "pub";
        let keyword = match (public, tokens.get(at + 1)) {
            (true, Some(&"(")) => group(&tokens, at + 1),
            (true, _) => at + 1,
            (false, _) => at,
        };
        if tokens.get(keyword) == Some(&"use") {
            let end =
                tokens[keyword..].iter().position(|token| *token == ";").map_or(tokens.len(), |end| keyword + end);
            let mut found = Vec::new();
            expand(&[], &tokens[keyword + 1..end], &mut found);
            module.uses.extend(found.into_iter().map(|(path, name)| Use { path, name, public }));
            at = end + 1;
        } else if public && keyword > at + 1 {
            body.push(tokens[at]);
            at = keyword;
        } else {
            body.push(tokens[at]);
            at += 1;
        }
    }
    define(&tokens, &mut module.defined);
    module.words = body.iter().filter(|token| is_word(token)).map(|token| (*token).to_owned()).collect();
    let mut at = 0;
    while at < body.len() {
        let mut end = at + 1;
        let starts = is_word(body[at]) && (at == 0 || body[at - 1] != "::");
        while starts && body.get(end) == Some(&"::") && body.get(end + 1).is_some_and(|token| is_word(token)) {
            end += 2;
        }
        if end > at + 1 {
            module.paths.push(body[at..end].iter().step_by(2).map(|token| (*token).to_owned()).collect());
        }
        at = end;
    }
    module
}

/// Names that a file defines, at any depth.
fn define(tokens: &[&str], defined: &mut BTreeSet<String>) {
    let kinds = ["struct", "enum", "union", "trait", "type", "fn", "const", "static"];
    for (at, token) in tokens.iter().enumerate() {
        let after = |skipped: usize| tokens.get(at + skipped).copied().unwrap_or_default();
        let name = match *token {
            "mod" if after(2) == "{" => after(1),
            "macro_rules" => after(2),
            kind if kinds.contains(&kind) && after(1) == "mut" => after(2),
            kind if kinds.contains(&kind) => after(1),
            _ => continue,
        };
        if is_word(name) {
            defined.insert(name.to_owned());
        }
    }
}

/// The paths of the tree of a `use`, each with the name that it gets.
fn expand(before: &[String], tree: &[&str], found: &mut Vec<(Name, String)>) {
    let open = tree.iter().position(|token| *token == "{");
    let mut path = before.to_vec();
    let head = &tree[..open.unwrap_or(tree.len())];
    let alias = head.iter().position(|token| *token == "as");
    path.extend(
        head[..alias.unwrap_or(head.len())].iter().filter(|token| **token != "::").map(|token| (*token).to_owned()),
    );
    let Some(open) = open else {
        if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
            path.pop();
        }
        let Some(last) = path.last().cloned() else { return };
        let name = alias.and_then(|at| head.get(at + 1)).map_or(last, |name| (*name).to_owned());
        found.push((path, name));
        return;
    };
    let inner = &tree[open + 1..group(tree, open).saturating_sub(1).max(open + 1)];
    let (mut start, mut depth) = (0, 0_usize);
    for (at, token) in inner.iter().enumerate() {
        match *token {
            "{" => depth += 1,
            "}" => depth = depth.saturating_sub(1),
            "," if depth == 0 => {
                expand(&path, &inner[start..at], found);
                start = at + 1;
            }
            _ => {}
        }
    }
    if start < inner.len() {
        expand(&path, &inner[start..], found);
    }
}

/// Paths that a file names. A re-export alone is no use of what it exports.
fn named(module: &Module, name: &Name, modules: &BTreeMap<Name, Module>) -> Vec<Name> {
    let uses = module.uses.iter().filter(|one| !one.public || one.name == "*" || module.words.contains(&one.name));
    let mut found: Vec<Name> = uses.map(|one| one.path.clone()).collect();
    for path in &module.paths {
        if ["crate", "self", "super"].contains(&path[0].as_str()) {
            found.push(path.clone());
        } else if modules.contains_key(&[name.as_slice(), &path[..1]].concat()) {
            found.push([&["self".to_owned()][..], path].concat());
        }
    }
    found
}

/// The module that defines what `path` names in the module `at`; `None`: it is of another crate.
fn resolved(at: &Name, path: &[String], modules: &BTreeMap<Name, Module>, depth: usize) -> Option<Name> {
    let (first, mut rest) = path.split_first()?;
    let mut at = at.clone();
    match first.as_str() {
        "crate" => at.clear(),
        "self" => {}
        "super" => {
            at.pop();
            while rest.first().is_some_and(|next| next == "super") {
                at.pop();
                rest = &rest[1..];
            }
        }
        _ => {
            at.push(first.clone());
            if !modules.contains_key(&at) {
                return None;
            }
        }
    }
    while let Some(next) = rest.first() {
        at.push(next.clone());
        if !modules.contains_key(&at) {
            at.pop();
            break;
        }
        rest = &rest[1..];
    }
    let module = modules.get(&at)?;
    let Some(name) = rest.first() else { return Some(at) };
    if depth > 8 || name == "*" || module.defined.contains(name) {
        return Some(at);
    }
    if let Some(one) = module.uses.iter().find(|one| one.name == *name) {
        let inside = ["crate", "self", "super"].contains(&one.path[0].as_str())
            || modules.contains_key(&[at.as_slice(), &one.path[..1]].concat());
        return if inside { resolved(&at, &one.path, modules, depth + 1) } else { None };
    }
    for one in module.uses.iter().filter(|one| one.name == "*") {
        let path = [&one.path[..one.path.len() - 1], std::slice::from_ref(name)].concat();
        if let Some(found) = resolved(&at, &path, modules, depth + 1)
            && modules[&found].defined.contains(name)
        {
            return Some(found);
        }
    }
    Some(at)
}

/// Groups of files of which each reaches all others (Tarjan's algorithm).
fn circles(graph: &Graph) -> Vec<Vec<PathBuf>> {
    let mut walk =
        Walk { graph, order: BTreeMap::new(), lowest: BTreeMap::new(), stack: Vec::new(), found: Vec::new() };
    for file in graph.keys() {
        if !walk.order.contains_key(file.as_path()) {
            walk.visit(file);
        }
    }
    walk.found.sort();
    walk.found
}

struct Walk<'a> {
    graph: &'a Graph,
    order: BTreeMap<&'a Path, usize>,
    lowest: BTreeMap<&'a Path, usize>,
    stack: Vec<&'a Path>,
    found: Vec<Vec<PathBuf>>,
}

impl<'a> Walk<'a> {
    fn visit(&mut self, file: &'a Path) {
        let place = self.order.len();
        self.order.insert(file, place);
        self.lowest.insert(file, place);
        self.stack.push(file);
        for other in self.graph.get(file).into_iter().flatten() {
            if !self.order.contains_key(other.as_path()) {
                self.visit(other);
            }
            if self.stack.contains(&other.as_path()) {
                let lower = self.lowest[file].min(self.lowest[other.as_path()]);
                self.lowest.insert(file, lower);
            }
        }
        if self.lowest[file] == self.order[file]
            && let Some(at) = self.stack.iter().position(|one| *one == file)
        {
            let mut circle: Vec<PathBuf> = self.stack.drain(at..).map(Path::to_owned).collect();
            if circle.len() > 1 {
                circle.sort();
                self.found.push(circle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCES: &[(&str, &str)] = &[
        ("lib.rs", "mod a;\nmod b;\nmod c;\npub use c::{Third, inner::{self, Deep as Deeper}};"),
        ("a.rs", "use crate::b::Second;\npub struct First(Second);"),
        ("b.rs", "pub struct Second(pub Vec<super::Third>);"),
        ("c.rs", "pub mod inner;\npub struct Third;"),
        ("c/inner.rs", "pub struct Deep;"),
        ("d/mod.rs", "mod high;\npub mod low;"),
        ("d/high.rs", "pub struct High;"),
        ("d/low.rs", "pub struct Low;"),
        ("e.rs", "use crate::d::high::High;\npub struct Fifth(High);"),
    ];

    /// The circles of those sources when `file` has `text` in addition.
    fn found(file: &str, text: &str) -> Vec<Vec<String>> {
        let number = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        let folder = std::env::temp_dir().join(format!("crossrail-circles-{}-{number}", std::process::id()));
        for (name, before) in SOURCES {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{before}\n{}\n", if *name == file { text } else { "" })).unwrap();
        }
        let circles: Vec<_> = levels(&folder, &graph(&folder)).iter().flat_map(circles).collect();
        let names = circles.iter().map(|circle| circle.iter().map(|path| shown(&folder, path)).collect()).collect();
        std::fs::remove_dir_all(&folder).unwrap();
        names
    }

    #[test]
    fn circles_are_seen_through_uses_paths_and_reexports() {
        let three: &[&[&str]] = &[&["a", "b", "c"]];
        let two: &[&[&str]] = &[&["a", "b"]];
        let folders: &[&[&str]] = &[&["d", "e"]];
        for (file, text, expected) in [
            ("c.rs", "", &[][..]),
            ("c.rs", "fn f(_: crate::a::First) {}", three),
            ("c.rs", "use super::a::{self, First};", three),
            ("c.rs", "// crate::a::First\nconst TEXT: &str = \"crate::a::First\";", &[]),
            ("c.rs", "#[cfg(test)]\nmod tests { use crate::a::First; fn f() {} }", &[]),
            ("c/inner.rs", "use super::Third;", &[]),
            ("c/inner.rs", "use crate::b::Second;", &[&["b", "c"]]),
            ("b.rs", "use crate::Deeper;\nfn f(_: Deeper, _: crate::a::First) {}", two),
            ("a.rs", "use std::collections::b;", &[]),
            ("d/high.rs", "use super::low::Low;", &[]),
            ("d/low.rs", "use crate::e::Fifth;", folders),
        ] {
            assert_eq!(found(file, text), expected, "{file}: {text}");
        }
    }
}
