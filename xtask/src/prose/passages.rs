//! Prose of a source file or page: comments, doc comments, messages and paragraphs, without the code in them.

use crate::rust::{Piece, pieces};

/// The fewest words of a string that is a message.
const WORDS: usize = 3;
/// A line break of the source that is none of the text: a string that is continued on the next line.
const SOFT_BREAK: char = '\u{b}';

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Doc,
    Comment,
    Message,
    Page,
}

/// A run of prose.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Passage {
    pub(crate) kind: Kind,
    /// The line of the file where it begins, from 1.
    line: usize,
    /// As many lines as in the file; code is replaced by `=`, which is not a word.
    text: String,
}

impl Passage {
    /// Its lines with their numbers.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.split(['\n', SOFT_BREAK]).enumerate().map(|(at, text)| (self.line + at, text))
    }
}

/// The passages of a file, by its suffix; none if files of this kind are not read.
pub(crate) fn passages(name: &str, text: &str) -> Vec<Passage> {
    let mut found = match name.rsplit_once('.').map_or("", |(_, suffix)| suffix) {
        "rs" => of_braces(text, |comment, _| {
            (comment.starts_with("///") && !comment.starts_with("////"))
                || ["//!", "/**", "/*!"].iter().any(|mark| comment.starts_with(mark))
        }),
        "cu" | "cuh" | "cpp" | "c" | "h" => of_braces(text, |_, column| column == 0),
        "py" | "pyi" => of_python(text),
        "md" => vec![Passage { kind: Kind::Page, line: 1, text: text.to_owned() }],
        _ => Vec::new(),
    };
    for passage in &mut found {
        passage.text = without_code(&passage.text, passage.kind);
    }
    found
}

/// Collects passages. A comment directly below another one continues it, and so does a string next to another one.
#[derive(Default)]
struct Collector {
    found: Vec<Passage>,
    /// Line and mark of the last comment, if it has the line to itself.
    last: Option<(usize, String)>,
    /// The last string and the line of its end, while only white space and comments follow.
    open: Option<(Passage, usize)>,
}

impl Collector {
    fn comment(&mut self, kind: Kind, line: usize, mark: &str, text: &str, own_line: bool) {
        let continues = self.last.as_ref().is_some_and(|(last, other)| own_line && last + 1 == line && other == mark);
        match self.found.last_mut() {
            Some(passage) if continues => {
                passage.text.push('\n');
                passage.text.push_str(text);
            }
            _ => self.found.push(Passage { kind, line, text: text.to_owned() }),
        }
        self.last = own_line.then(|| (line, mark.to_owned()));
    }

    /// `lines`: the line breaks of its source.
    fn string(&mut self, kind: Kind, line: usize, text: &str, lines: usize) {
        let (mut passage, last) = self.open.take().unwrap_or((Passage { kind, line, text: String::new() }, line));
        passage.text.extend(std::iter::repeat_n(SOFT_BREAK, line - last));
        passage.text.push_str(text);
        self.open = Some((passage, line + lines));
    }

    fn close(&mut self) {
        if let Some((passage, _)) = self.open.take()
            && (passage.kind == Kind::Doc || is_message(&passage.text))
        {
            self.found.push(passage);
            self.last = None;
        }
    }

    fn finish(mut self) -> Vec<Passage> {
        self.close();
        self.found
    }
}

/// Rust and C++: `is_doc` is asked about each comment and its column.
fn of_braces(text: &str, is_doc: impl Fn(&str, usize) -> bool) -> Vec<Passage> {
    let mut collector = Collector::default();
    let (mut line, mut line_starts) = (1, 0);
    for (piece, at, part) in pieces(text) {
        match piece {
            Piece::Literal if part.len() > 1 && part.trim_end_matches('#').ends_with('"') => {
                collector.string(Kind::Message, line, &message(part), newlines(part));
            }
            Piece::Literal | Piece::Token => collector.close(),
            Piece::Comment => {
                let own_line = text[line_starts..at].trim().is_empty();
                let kind = if own_line && is_doc(part, at - line_starts) { Kind::Doc } else { Kind::Comment };
                let (mark, body) = part.split_at(part.find(|letter| !"/*!<".contains(letter)).unwrap_or(part.len()));
                if mark.starts_with("/*") {
                    let lines = body.trim_end_matches("*/").split('\n');
                    let lines: Vec<&str> = lines.map(|line| line.trim_start().trim_start_matches('*')).collect();
                    collector.comment(kind, line, mark, &lines.join("\n"), false);
                } else {
                    collector.comment(kind, line, mark, body, own_line);
                }
            }
            Piece::Other => {}
        }
        line += newlines(part);
        line_starts = part.rfind('\n').map_or(line_starts, |end| at + end + 1);
    }
    collector.finish()
}

/// Python: a string that is a statement is a doc comment.
fn of_python(text: &str) -> Vec<Passage> {
    let mut collector = Collector::default();
    let (mut at, mut line, mut depth) = (0, 1, 0_usize);
    // Whether only white space stands before this place on its line.
    let mut begins = true;
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        let word = rest.find(|letter: char| !(letter.is_alphanumeric() || letter == '_')).unwrap_or(rest.len());
        let prefix = if rest[..word].chars().all(|letter| "rRbBfFuU".contains(letter)) { word } else { 0 };
        let length = match rest[prefix..].chars().next() {
            Some(quote @ ('"' | '\'')) => {
                let raw = rest[..prefix].contains(['r', 'R']);
                let (length, body) = python_string(&rest[prefix..], quote, raw);
                let length = prefix + length;
                let kind = if begins && depth == 0 { Kind::Doc } else { Kind::Message };
                collector.string(kind, line, &body, newlines(&rest[..length]));
                begins = false;
                length
            }
            Some('#') if prefix == 0 => {
                let length = rest.find('\n').unwrap_or(rest.len());
                collector.comment(Kind::Comment, line, "#", rest[1..length].trim_start_matches(':'), begins);
                length
            }
            _ if first == '\n' => {
                if depth == 0 {
                    collector.close();
                }
                begins = true;
                1
            }
            _ if first.is_whitespace() => first.len_utf8(),
            _ => {
                match first {
                    '(' | '[' | '{' => depth += 1,
                    ')' | ']' | '}' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                collector.close();
                begins = false;
                word.max(first.len_utf8())
            }
        };
        line += newlines(&rest[..length]);
        at += length;
    }
    collector.finish()
}

/// Length and text of the Python string at the start of `rest`, whose prefix has been read.
fn python_string(rest: &str, quote: char, raw: bool) -> (usize, String) {
    let triple: String = std::iter::repeat_n(quote, 3).collect();
    let mark = if rest.starts_with(&triple) { triple } else { quote.to_string() };
    let bytes = rest.as_bytes();
    let mut end = mark.len();
    while end < bytes.len() && !bytes[end..].starts_with(mark.as_bytes()) {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    let body = rest.get(mark.len()..end).unwrap_or_default();
    let body = if raw { body.to_owned() } else { without_escapes(body) };
    ((end + mark.len()).min(rest.len()), without_fields(&body))
}

/// The text of a Rust or C++ string.
fn message(literal: &str) -> String {
    let raw = !literal.starts_with('"');
    let body = literal.trim_start_matches(['b', 'r', '#']).trim_end_matches('#');
    let body = body.strip_prefix('"').unwrap_or(body);
    let body = body.strip_suffix('"').unwrap_or(body);
    without_fields(&if raw { body.to_owned() } else { without_escapes(body) })
}

/// Escapes become spaces, and a continuation a soft break. The number of line breaks stays.
fn without_escapes(body: &str) -> String {
    let mut text = String::new();
    let mut letters = body.chars();
    while let Some(letter) = letters.next() {
        match (letter, if letter == '\\' { letters.next() } else { None }) {
            ('\\', Some('\n')) => text.push(SOFT_BREAK),
            ('\\', Some('\'')) => text.push('\''),
            ('\\', _) => text.push_str("  "),
            _ => text.push(letter),
        }
    }
    text
}

/// Fields of a format string become `=`.
fn without_fields(body: &str) -> String {
    let body = body.replace("{{", "  ").replace("}}", "  ");
    let mut text = String::new();
    let mut depth = 0_usize;
    for letter in body.chars() {
        match letter {
            '{' => {
                depth += 1;
                text.push('=');
            }
            '}' if depth > 0 => depth -= 1,
            '\n' | SOFT_BREAK => text.push(letter),
            _ if depth == 0 => text.push(letter),
            _ => {}
        }
    }
    text
}

/// True for a string that people read: some words, and not a program.
fn is_message(text: &str) -> bool {
    let is_word = |chunk: &&str| {
        let chunk = chunk.trim_end_matches([',', '.', ';', ':', '?', '!']);
        !chunk.is_empty() && chunk.chars().all(|letter| letter.is_alphabetic() || letter == '\'')
    };
    text.split_whitespace().filter(is_word).count() >= WORDS && !is_program(text)
}

fn is_program(text: &str) -> bool {
    let begins = ["import ", "#include", "#!", "#define", "extern ", "def ", "fn ", "use ", "let "];
    let mut lines = text.lines().map(str::trim);
    let several = text.trim().contains('\n');
    text.trim_start().starts_with("import ")
        || several
            && lines.any(|line| {
                begins.iter().any(|start| line.starts_with(start))
                    || line.ends_with([';', '{', '}'])
                    || line.ends_with("):")
            })
}

fn newlines(text: &str) -> usize {
    text.matches('\n').count()
}

/// `text` without fenced, quoted and indented code, generated tables, tags and targets of links; the lines stay.
fn without_code(text: &str, kind: Kind) -> String {
    let mut fenced = false;
    let mut listed = false;
    let mut blank = true;
    let mut generated = false;
    let mut lines: Vec<&str> = Vec::new();
    let mut marks = text.lines().filter(|line| line.starts_with("<!--")).skip(1);
    for line in text.split('\n') {
        if kind == Kind::Page && line.starts_with("<!--") {
            generated = marks.next() == Some("<!-- end -->");
        }
        let start = line.trim_start();
        let fence = start.starts_with("```") || start.starts_with("~~~");
        let indented = kind == Kind::Page && blank && !listed && line.starts_with("    ");
        let session = start.starts_with(">>> ") || start.starts_with("... ");
        let is_code = generated || fenced || fence || indented || session;
        fenced ^= fence;
        if !indented {
            blank = start.is_empty();
        }
        if !start.is_empty() && !line.starts_with(' ') {
            listed = line.starts_with("- ") || line.starts_with(|letter: char| letter.is_ascii_digit());
        }
        lines.push(if is_code { "" } else { line });
    }
    let text = lines.join("\n");
    let text = without_spans(&text);
    if kind == Kind::Page { without_tags(&text) } else { text }
}

/// Code between backticks becomes `=`. A span ends with its paragraph.
fn without_spans(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some(start) = rest.find('`') {
        let ticks = rest[start..].len() - rest[start..].trim_start_matches('`').len();
        let mark = &rest[start..start + ticks];
        kept.push_str(&rest[..start]);
        let after = &rest[start + ticks..];
        let paragraph = after.find("\n\n").unwrap_or(after.len());
        let Some(end) = after[..paragraph].find(mark) else {
            rest = after;
            continue;
        };
        kept.push('=');
        kept.extend(after[..end].chars().filter(|letter| ['\n', SOFT_BREAK].contains(letter)));
        rest = &after[end + ticks..];
    }
    kept + rest
}

/// Comments, tags and targets of links are left out.
fn without_tags(text: &str) -> String {
    let mut kept = String::new();
    let mut at = 0;
    while let Some(letter) = text[at..].chars().next() {
        let length = skipped(&text[at..]);
        if length == 0 {
            kept.push(letter);
        }
        kept.extend(text[at..at + length].chars().filter(|letter| *letter == '\n'));
        at += length.max(letter.len_utf8());
    }
    kept
}

fn skipped(rest: &str) -> usize {
    let is_tag = |inside: &str| inside.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '/');
    let close = match rest {
        comment if comment.starts_with("<!--") => "-->",
        link if link.starts_with("](") => ")",
        tag if tag.strip_prefix('<').is_some_and(is_tag) => ">",
        _ => return 0,
    };
    rest.find(close).map_or(0, |end| end + close.len())
}
