//! Pages as other processes read them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crossrail_locks::Mutex;
use crossrail_types::{ErrorKind, Log, LogLevel};

use crate::layout::{ROW_BYTES, ROWS_MAX};
use crate::*;

/// A process has one page: tests that make one take turns.
static TURN: Mutex<()> = Mutex::new(());

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("crossrail-sight-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).expect("a new folder");
        Folder(path)
    }

    fn only(&self) -> Found {
        let mut found = pages(&self.0).expect("readable");
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn opened(folder: &Path) -> std::sync::Arc<Page> {
    open(folder, Log(LogLevel::Off)).expect("a page")
}

fn rows(found: &Found) -> &[RowSnapshot] {
    &found.page.as_ref().expect("readable").rows
}

#[test]
fn a_row_is_read_as_it_was_written_until_it_is_dropped() {
    let (_turn, folder) = (TURN.lock(), Folder::new("row"));
    let page = opened(&folder.0);
    let mut row = Row::new(Some(&page), Kind::Buffer, page.owner(), "a name", "");
    let wait = Wait { operation: "dispatch".into(), since_ns: 5, number: 7, whom: "rank 3".into(), ranks: vec![3, 9] };
    let mut took = Histogram::default();
    took.add(20_000);
    took.add(u64::MAX / 2);
    row.write(|writer| {
        writer.set(fields::buffer::ranks, 8);
        writer.histogram(fields::buffer::operation_seconds, &took);
        writer.wait(Some(&wait));
    });
    count_error(ErrorKind::Timeout);
    let found = folder.only();
    let [process, seen] = rows(&found) else { panic!("{found:?}") };
    assert_eq!(
        (process.kind, &process.values),
        (Kind::Process, &vec![Value::Numbers(vec![0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])])
    );
    assert_eq!((seen.kind, seen.name.as_str(), seen.peer.as_str()), (Kind::Buffer, "a name", ""));
    let shown = seen.wait.clone().expect("a wait");
    assert_eq!((shown.operation.as_str(), shown.since_ns, shown.number), ("dispatch", 5, 7));
    assert_eq!((shown.whom.as_str(), shown.ranks), ("rank 3", vec![3, 9]));
    assert_eq!(seen.values[1], Value::Number(8));
    let Some(Value::Numbers(histogram)) = seen.values.last() else { panic!("{seen:?}") };
    assert_eq!((histogram[1], histogram[HISTOGRAM_WORDS - 2]), (1, 1));
    row.write(|writer| writer.wait(None));
    assert_eq!(rows(&folder.only())[1].wait, None);
    drop(row);
    assert_eq!(rows(&folder.only()).len(), 1);
    drop(page);
    assert_eq!(pages(&folder.0).expect("readable"), []);
}

#[test]
fn a_reader_never_sees_half_of_a_row() {
    let (_turn, folder) = (TURN.lock(), Folder::new("half"));
    let page = opened(&folder.0);
    let mut row = Row::new(Some(&page), Kind::Peer, 1, "peer", "");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                row.write(|writer| {
                    writer.set(fields::peer::sent_frames, number);
                    writer.set(fields::peer::lanes, number);
                });
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        for _ in 0..500 {
            for seen in rows(&folder.only()).iter().filter(|row| row.kind == Kind::Peer) {
                assert_eq!(seen.values.first(), seen.values.last());
            }
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn rows_without_room_are_counted_and_the_others_work() {
    let (_turn, folder) = (TURN.lock(), Folder::new("full"));
    let page = opened(&folder.0);
    let made: Vec<Row> = (0..ROWS_MAX + 2).map(|_| Row::new(Some(&page), Kind::Link, 1, "link", "")).collect();
    assert_eq!(made.iter().filter(|row| !row.is_there()).count(), 3);
    let found = folder.only();
    assert_eq!(rows(&found).len(), ROWS_MAX);
    assert_eq!(found.page.expect("readable").dropped, 3);
    drop(made);
    assert!(Row::new(Some(&page), Kind::Link, 1, "link", "").is_there());
}

#[test]
fn a_summary_has_the_waits_and_fits_in_a_value_of_a_store() {
    let (_turn, folder) = (TURN.lock(), Folder::new("summary"));
    let page = opened(&folder.0);
    let _links: Vec<Row> = (0..200).map(|_| Row::new(Some(&page), Kind::Link, 1, "link", "")).collect();
    let _group = Row::new(Some(&page), Kind::Group, 2, "group", "");
    let bytes = summary();
    assert!(bytes.len() <= 64 << 10 && bytes.len().is_multiple_of(ROW_BYTES));
    let seen = parse(&bytes).expect("readable");
    assert!(seen.rows.iter().any(|row| row.kind == Kind::Group));
    assert_eq!(seen.rows.len() as u64 + seen.dropped, 202);
    for cut in 0..=ROW_BYTES * 2 {
        assert!(parse(&bytes[..cut]).is_err());
    }
}

#[test]
fn ranks_are_named_as_people_would() {
    let all: Vec<u32> = (0..32).collect();
    assert_eq!([&all[3..4], &all[..2]].map(ranks_text), ["rank 3", "ranks 0, 1"]);
    assert_eq!(ranks_text(&all), "ranks 0, 1, 2, 3, 4, 5 and 26 more");
}
