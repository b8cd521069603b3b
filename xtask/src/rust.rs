//! Rust sources as tokens: enough of the grammar to find items, methods and imports without a parser's weight.

use std::path::{Path, PathBuf};

use crate::files;

/// A piece of a source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece {
    Comment,
    /// A string or character with its quotes.
    Literal,
    /// An identifier, a number, `::`, or a single character.
    Token,
    /// A lifetime or white space.
    Other,
}

/// The tokens of `text` without comments and lifetimes: identifiers, `::`, and single characters. A literal with quotes
/// is `""`.
pub(crate) fn tokens(text: &str) -> Vec<&str> {
    let pieces = pieces(text).into_iter();
    pieces
        .filter_map(|(piece, _, token)| match piece {
            Piece::Literal => Some("\"\""),
            Piece::Token => Some(token),
            Piece::Comment | Piece::Other => None,
        })
        .collect()
}

/// `text` cut into pieces, each with its offset. Fits C++ as well, but for its raw strings.
pub(crate) fn pieces(text: &str) -> Vec<(Piece, usize, &str)> {
    let bytes = text.as_bytes();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let rest = &text[at..];
        let (piece, length) = match bytes[at] {
            b'/' if rest.starts_with("//") => (Piece::Comment, rest.find('\n').unwrap_or(rest.len())),
            b'/' if rest.starts_with("/*") => (Piece::Comment, rest.find("*/").map_or(rest.len(), |end| end + 2)),
            b'"' => (Piece::Literal, quoted(bytes, at, b'"') - at),
            b'\'' => {
                let escaped = bytes.get(at + 1) == Some(&b'\\');
                let character = rest[1..].chars().next().map_or(0, char::len_utf8);
                if escaped || bytes.get(at + 1 + character) == Some(&b'\'') {
                    (Piece::Literal, quoted(bytes, at, b'\'') - at)
                } else {
                    (Piece::Other, 1 + word(&rest[1..]))
                }
            }
            b'r' | b'b' if raw(rest).is_some() => (Piece::Literal, raw(rest).unwrap_or(rest.len())),
            b':' if rest.starts_with("::") => (Piece::Token, 2),
            _ if word(rest) > 0 => (Piece::Token, word(rest)),
            _ => {
                let blank = rest.len() - rest.trim_start().len();
                let letter = rest.chars().next().map_or(1, char::len_utf8);
                if blank > 0 { (Piece::Other, blank) } else { (Piece::Token, letter) }
            }
        };
        let length = length.max(1);
        found.push((piece, at, &rest[..length]));
        at += length;
    }
    found
}

/// Where a quoted literal that begins at `at` ends.
fn quoted(bytes: &[u8], at: usize, quote: u8) -> usize {
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != quote {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    (end + 1).min(bytes.len())
}

/// The length of a raw string literal at the start of `rest`, if one is there.
fn raw(rest: &str) -> Option<usize> {
    let after = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r'))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let body = after[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = body.find(&close)? + close.len();
    Some(rest.len() - body.len() + end)
}

/// The length of the identifier or number at the start of `rest`.
fn word(rest: &str) -> usize {
    rest.find(|letter: char| !(letter.is_alphanumeric() || letter == '_')).unwrap_or(rest.len())
}

/// Whether `token` is an identifier or keyword.
pub(crate) fn is_word(token: &str) -> bool {
    token.starts_with(|letter: char| letter.is_alphabetic() || letter == '_')
}

/// `tokens` without items that only tests have, which `#[cfg(test)]` or `#[cfg(all(test, ...))]` marks.
pub(crate) fn without_tests<'a>(tokens: &[&'a str]) -> Vec<&'a str> {
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        let marked = [&["#", "[", "cfg", "(", "test"][..], &["#", "[", "cfg", "(", "all", "(", "test"][..]];
        if marked.iter().any(|mark| tokens[at..].starts_with(mark))
            && let Some(end) = item(tokens, at)
        {
            at = end;
        } else {
            kept.push(tokens[at]);
            at += 1;
        }
    }
    kept
}

/// The end of the item whose attributes begin at `at`; `None`: what has them is no item.
fn item(tokens: &[&str], at: usize) -> Option<usize> {
    let mut start = at;
    while tokens.get(start) == Some(&"#") {
        start = group(tokens, start + 1);
    }
    if tokens.get(start) == Some(&"pub") {
        start += 1;
        if tokens.get(start) == Some(&"(") {
            start = group(tokens, start);
        }
    }
    let items = ["mod", "use", "impl", "fn", "struct", "enum", "const", "static", "type", "trait", "unsafe"];
    if !items.contains(tokens.get(start)?) {
        return None;
    }
    let ends_with_semicolon = ["use", "const", "static", "type"].contains(&tokens[start])
        && !["fn", "unsafe"].contains(tokens.get(start + 1)?);
    while start < tokens.len() {
        match tokens[start] {
            ";" => return Some(start + 1),
            "{" if !ends_with_semicolon => return Some(group(tokens, start)),
            "(" | "[" | "{" => start = group(tokens, start),
            _ => start += 1,
        }
    }
    Some(start)
}

/// The end of the bracketed group that begins at `at`.
pub(crate) fn group(tokens: &[&str], at: usize) -> usize {
    let mut depth = 0_usize;
    for (place, token) in tokens.iter().enumerate().skip(at) {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return place + 1;
        }
    }
    tokens.len()
}

/// Whether a file has tests only.
pub(crate) fn is_test(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let folder = path.parent().and_then(Path::file_name).unwrap_or_default();
    name.ends_with("tests") || ["models", "conformance", "example"].contains(&&*name) || folder == "tests"
}

/// The sources of a crate that are not tests.
pub(crate) fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = files(folder, ".rs");
    found.retain(|path| !is_test(path));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_literals_and_lifetimes_are_no_words() {
        let text = "fn f<'a>(x: &'a str) -> char { /* no */ '\\'' // no\n; \"n\\\"o\"; r#\"no \"# ; b\"no\"; a::b }";
        let words: Vec<_> = tokens(text).into_iter().filter(|token| is_word(token)).collect();
        assert_eq!(words, ["fn", "f", "x", "str", "char", "b", "a", "b"]);
    }

    #[test]
    fn items_of_tests_are_left_out() {
        let text = "#[cfg(test)]\n#[path = \"x\"]\nmod tests { fn a() {} }\n#[cfg(all(test, loom))] pub(crate) use b::{c};\n\
                    #[cfg(test)] const D: [u8; 2] = [0; 2];\nfn e(#[cfg(test)] f: u8) {}";
        let kept = without_tests(&tokens(text)).join(" ");
        assert_eq!(kept, "fn e ( # [ cfg ( test ) ] f : u8 ) { }");
    }
}
