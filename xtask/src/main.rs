//! Checks and generated pages of this repository: `cargo xtask help`.

#![forbid(unsafe_code)]

mod budgets;
mod circles;
mod deps;
mod docs;
mod prose;
mod rooms;
mod rust;
mod sizes;
mod unsafe_code;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
cargo xtask lint            deps, sizes, budgets, prose and docs --check
cargo xtask deps            which room may use which, who may have unsafe code, what Python files may import
cargo xtask unsafe          how much unsafe code each crate has
cargo xtask sizes           ask about source files of more than 600 lines, fail for more than 900
cargo xtask budgets         code lines of every room beside its budget; fail above it, for large types, for circles
cargo xtask budgets --record  write today's figures into xtask/budgets.toml
cargo xtask prose           words and openings that a standard term replaces, per room; fail above the room's figure
cargo xtask prose ROOM      each of them in a room, with its place and what to write instead
cargo xtask prose --record  lower the figures in xtask/budgets.toml to today's
cargo xtask docs            write docs/settings.md, docs/metrics.md and the table of crates in CONTRIBUTING.md
cargo xtask docs --check    fail if a page is stale: settings reference, links, names of files and settings
";

/// Problems found, one per line; empty on success.
type Problems = Vec<String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = root();
    let problems = match arguments[..] {
        ["lint"] => {
            ask(&root);
            let words = [prose::check(&root), docs::check(&root)].concat();
            [deps::check(&root), sizes::check(&root), budgets::check(&root), words].concat()
        }
        ["sizes"] => {
            ask(&root);
            sizes::check(&root)
        }
        ["budgets"] => {
            print!("{}", budgets::table(&root));
            budgets::check(&root)
        }
        ["budgets", "--record"] => budgets::record(&root),
        ["prose"] => {
            print!("{}", prose::table(&root));
            prose::check(&root)
        }
        ["prose", "--record"] => prose::record(&root),
        ["prose", room] => match prose::places(&root, room) {
            Ok(places) => {
                print!("{places}");
                return ExitCode::SUCCESS;
            }
            Err(problem) => vec![problem],
        },
        ["deps"] => deps::check(&root),
        ["unsafe"] => {
            print!("{}", unsafe_code::table(&root));
            return ExitCode::SUCCESS;
        }
        ["docs"] => docs::write(&root),
        ["docs", "--check"] => docs::check(&root),
        ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    for problem in &problems {
        eprintln!("xtask: {problem}");
    }
    if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints findings that need a decision but do not fail the check.
fn ask(root: &Path) {
    for question in sizes::questions(root) {
        eprintln!("xtask: question: {question}");
    }
}

/// The repository that cargo runs this in; target folders may be shared between several.
fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let here = Path::new(&here);
    here.parent().unwrap_or(here).to_owned()
}

/// Every file below `folder` whose name ends in `suffix`, sorted; hidden folders and build outputs are passed over.
fn files(folder: &Path, suffix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir()
            && !name.starts_with('.')
            && !["target", "node_modules", "__pycache__"].contains(&name.as_str())
        {
            found.extend(files(&path, suffix));
        } else if name.ends_with(suffix) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// A path as seen from the repository, for messages.
fn shown(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_lists_every_command() {
        let source = include_str!("main.rs");
        let commands = source.lines().filter_map(|line| line.trim().strip_prefix("[\"")?.split_once(&['"'][..]));
        let commands: Vec<&str> = commands.map(|(command, _)| command).filter(|command| *command != "help").collect();
        assert!(commands.contains(&"prose") && commands.contains(&"lint"));
        for command in commands {
            assert!(HELP.contains(&format!("cargo xtask {command} ")), "{command} is not in the help");
        }
    }
}
