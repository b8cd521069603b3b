//! The pages of other processes. None is trusted: whatever is read is checked, and text is made harmless.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

use crate::layout::{self, Form, Kind, RANKS_MAX, ROW_BYTES, ROW_WORDS, ROWS_MAX, TEXT_WORDS, header};
use crate::page::named;
use crate::process;

/// Attempts to read a row that is concurrently being written.
const ATTEMPTS: usize = 8;

/// One page of a folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Its file.
    pub path: PathBuf,
    /// The process that it is of, by its name.
    pub pid: u32,
    /// What it says, or why it cannot be read.
    pub page: Result<PageSnapshot, Unreadable>,
}

/// Why a page is not shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// Its process has ended.
    Dead,
    /// It is of another user.
    Forbidden,
    /// It is of another version of this layout, which is named.
    Version(u32),
    /// It is incomplete, or no page at all; the text says what is wrong.
    Malformed(String),
}

impl std::fmt::Display for Unreadable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unreadable::Dead => {
                f.write_str("its process has ended; the next process that uses Crossrail removes the page")
            }
            Unreadable::Forbidden => f.write_str("it is another user's; run `crossrail top` as that user, or as root"),
            Unreadable::Version(version) => write!(
                f,
                "its layout has version {version}, this program reads version {}; use the `crossrail` of that process",
                layout::VERSION
            ),
            Unreadable::Malformed(why) => write!(f, "it cannot be read: {why}"),
        }
    }
}

/// What a page says.
#[derive(Clone, Debug, PartialEq)]
pub struct PageSnapshot {
    /// Its process.
    pub pid: u32,
    /// The machine's name.
    pub host: String,
    /// The process's command line, cut.
    pub command: String,
    /// The clock of that machine ([`now_ns`](crate::now_ns)): when the page was made and when it was last written.
    pub born_ns: u64,
    /// See `born_ns`.
    pub written_ns: u64,
    /// Rows for which there was no room.
    pub dropped: u64,
    /// Its rows.
    pub rows: Vec<RowSnapshot>,
}

/// One row of a page.
#[derive(Clone, Debug, PartialEq)]
pub struct RowSnapshot {
    /// What it is about.
    pub kind: Kind,
    /// The same number in all rows of one worker or buffer.
    pub owner: u32,
    /// Its name.
    pub name: String,
    /// The peer, where one is concerned.
    pub peer: String,
    /// When it began, by the clock of that machine.
    pub born_ns: u64,
    /// Its oldest wait.
    pub wait: Option<WaitSnapshot>,
    /// Its values, in the order of [`Kind::fields`].
    pub values: Vec<Value>,
}

/// The oldest wait of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitSnapshot {
    /// Which operation waits.
    pub operation: String,
    /// Since when, by the clock of that machine.
    pub since_ns: u64,
    /// Its sequence number or tag.
    pub number: u64,
    /// Whom it waits for.
    pub whom: String,
    /// The first ranks that it waits for.
    pub ranks: Vec<u32>,
}

/// One value of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number, as its [`Form`] says.
    Number(u64),
    /// Several: errors by kind, or a histogram's buckets and, last, its sum.
    Numbers(Vec<u64>),
}

/// The pages in `folder`, those that cannot be read too. Only files that are called like pages count.
///
/// # Errors
/// When the folder cannot be read.
pub fn pages(folder: &Path) -> std::io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)?.flatten() {
        let Some((pid, start, space)) = named(&entry.file_name().to_string_lossy()) else { continue };
        let page = match read(&entry.path()) {
            // Its process has removed it meanwhile.
            Err(Refusal::Gone) => continue,
            Err(Refusal::Why(why)) => Err(why),
            Ok(_) if space == process::space() && process::started(pid) != Some(start) => Err(Unreadable::Dead),
            Ok(page) if page.pid != pid => Err(Unreadable::Malformed("its name and its contents disagree".to_owned())),
            Ok(page) => Ok(page),
        };
        found.push(Found { path: entry.path(), pid, page });
    }
    found.sort_by_key(|found| found.pid);
    Ok(found)
}

/// Whether user `me` trusts a page owned by user `owner`: in shared memory any user may create a file named like the
/// page of any process.
fn is_believed(owner: u32, me: u32) -> bool {
    owner == me || me == 0
}

enum Refusal {
    Gone,
    Why(Unreadable),
}

impl From<Unreadable> for Refusal {
    fn from(why: Unreadable) -> Refusal {
        Refusal::Why(why)
    }
}

fn read(path: &Path) -> Result<PageSnapshot, Refusal> {
    let refused = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => Refusal::Gone,
        ErrorKind::PermissionDenied => Unreadable::Forbidden.into(),
        _ => Unreadable::Malformed(error.to_string()).into(),
    };
    // Follow no symbolic link, and do not block on a FIFO.
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(refused)?;
    let about = file.metadata().map_err(refused)?;
    if !about.is_file() {
        return Err(Unreadable::Malformed("it is no file".to_owned()).into());
    }
    if !is_believed(about.uid(), nix::unistd::geteuid().as_raw()) {
        return Err(Unreadable::Forbidden.into());
    }
    let head = words_at(&file, 0, 1).map_err(refused)?;
    let (mut page, used) = parse_header(&head)?;
    // A seqlock's three steps: the sequence numbers, the rows, the sequence numbers again.
    let mut pending: Vec<usize> = (0..used).collect();
    for _ in 0..ATTEMPTS {
        let before = words_at(&file, ROW_BYTES, used).map_err(refused)?;
        fence(Ordering::Acquire);
        let rows = words_at(&file, ROW_BYTES, used).map_err(refused)?;
        fence(Ordering::Acquire);
        let after = words_at(&file, ROW_BYTES, used).map_err(refused)?;
        pending.retain(|at| {
            let words = |of: &[u64]| of.get(at * ROW_WORDS).copied();
            let still = words(&before).is_some_and(|number| number & 1 == 0 && words(&after) == Some(number));
            if still {
                page.rows.extend(rows.get(at * ROW_WORDS..(at + 1) * ROW_WORDS).and_then(parse_row));
            }
            !still
        });
        if pending.is_empty() {
            break;
        }
    }
    page.dropped = page.dropped.saturating_add(pending.len() as u64);
    Ok(page)
}

/// `rows` rows from that byte of the file on, as far as it goes.
fn words_at(file: &File, from: usize, rows: usize) -> std::io::Result<Vec<u64>> {
    let mut bytes = vec![0; rows * ROW_BYTES];
    let mut got = 0;
    while got < bytes.len() {
        match file.read_at(&mut bytes[got..], (from + got) as u64)? {
            0 => break,
            more => got += more,
        }
    }
    bytes.truncate(got);
    Ok(words(&bytes))
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect()
}

/// What the bytes of a [`summary`](crate::summary) say.
///
/// # Errors
/// Why they cannot be read.
pub fn parse(bytes: &[u8]) -> Result<PageSnapshot, Unreadable> {
    let words = words(bytes);
    let (mut page, used) = parse_header(words.get(..ROW_WORDS).unwrap_or_default())?;
    let rows = words[ROW_WORDS..].chunks_exact(ROW_WORDS);
    if rows.len() < used {
        return Err(Unreadable::Malformed(format!("{used} rows are announced and {} are there", rows.len())));
    }
    page.rows = rows.take(used).filter_map(parse_row).collect();
    Ok(page)
}

/// The header, and how many rows follow.
fn parse_header(words: &[u64]) -> Result<(PageSnapshot, usize), Unreadable> {
    let word = |at: usize| words.get(at).copied().unwrap_or_default();
    if words.len() < ROW_WORDS || word(header::MAGIC) == 0 {
        return Err(Unreadable::Malformed("it is incomplete: its process is making it, or died meanwhile".to_owned()));
    }
    if word(header::MAGIC) != layout::MAGIC {
        return Err(Unreadable::Malformed("it does not begin as a page does".to_owned()));
    }
    let (version, row_bytes) = (word(header::VERSION) as u32, word(header::VERSION) >> 32);
    if version != layout::VERSION {
        return Err(Unreadable::Version(version));
    }
    let used = word(header::USED);
    if row_bytes != ROW_BYTES as u64 || used > ROWS_MAX as u64 {
        return Err(Unreadable::Malformed(format!("it claims {used} rows of {row_bytes} bytes")));
    }
    let seen = PageSnapshot {
        pid: word(header::PID) as u32,
        host: text(&words[header::HOST..header::HOST + TEXT_WORDS]),
        command: text(&words[header::COMMAND..header::COMMAND + TEXT_WORDS]),
        born_ns: word(header::BORN),
        written_ns: word(header::WRITTEN),
        dropped: word(header::DROPPED),
        rows: Vec::new(),
    };
    Ok((seen, used as usize))
}

/// A row of a known kind; `None`: it is free, or of a kind that this version does not know.
fn parse_row(words: &[u64]) -> Option<RowSnapshot> {
    use layout::row;
    let kind = Kind::of(words[row::KIND] & 0xffff_ffff)?;
    let mut at = row::VALUES;
    let values = kind.fields().iter().map(|field| {
        let these = &words[at..at + field.form.words()];
        at += these.len();
        match field.form {
            Form::Errors | Form::Histogram => Value::Numbers(these.to_vec()),
            _ => Value::Number(these[0]),
        }
    });
    let values = values.collect();
    let ranks = words[row::RANKS..row::RANKS + RANKS_MAX / 2].iter();
    let ranks = ranks.flat_map(|pair| [*pair as u32, (*pair >> 32) as u32]).filter_map(|rank| rank.checked_sub(1));
    let wait = (words[row::SINCE] != 0).then(|| WaitSnapshot {
        operation: text(&words[row::WAIT..row::WAIT + 2]),
        since_ns: words[row::SINCE],
        number: words[row::NUMBER],
        whom: text(&words[row::WHOM..row::WHOM + TEXT_WORDS]),
        ranks: ranks.collect(),
    });
    Some(RowSnapshot {
        kind,
        owner: (words[row::KIND] >> 32) as u32,
        name: text(&words[row::NAME..row::NAME + TEXT_WORDS]),
        peer: text(&words[row::PEER..row::PEER + TEXT_WORDS]),
        born_ns: words[row::BORN],
        wait,
        values,
    })
}

/// Text up to its first zero. What could confuse a terminal is shown as `?`.
fn text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).chars().map(|char| if char.is_control() { '?' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::is_believed;

    #[test]
    fn other_users_pages_are_for_root_alone() {
        assert!(is_believed(1000, 1000) && is_believed(1000, 0) && is_believed(0, 0));
        assert!(!is_believed(1001, 1000) && !is_believed(0, 1000));
    }
}
