//! Descriptors and mappings all come back. Alone in its process: the counts are the process's.
#![allow(unsafe_code)]

mod common;

use std::os::fd::AsFd;

use common::{Keeper, Piece, pair_in, receive_direct, send_direct};
use crossrail_shm::{Arena, Options};
use crossrail_transport::Lane;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

fn mappings() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc");
    maps.lines().filter(|line| line.contains("memfd:crossrail")).map(String::from).collect()
}

fn use_lanes() {
    let (here, there) = (Arena::new(), Arena::new());
    let (mut a, mut b) = pair_in(&Options::default(), here.clone(), there.clone());
    for round in 0..5 {
        let (source, target) = (here.alloc(1 << 20).expect("alloc"), there.alloc(1 << 20).expect("alloc"));
        let (from, to) = (source.ptr() as usize, target.ptr() as usize);
        let piece = |ptr: usize| Piece { ptr: ptr as *mut u8, len: 1 << 20, both: true };
        std::thread::scope(|scope| {
            scope.spawn(|| send_direct(&mut a, &mut Keeper::default(), &piece(from)));
            receive_direct(&mut b, &mut Keeper::default(), &piece(to));
        });
        let (reader, writer) = std::io::pipe().expect("a pipe");
        for _ in 0..4 {
            assert_eq!(a.send_note(b"a note", &[reader.as_fd(), writer.as_fd()]), Ok(true));
            assert_eq!(b.send_note(b"another", &[writer.as_fd()]), Ok(true));
        }
        assert_eq!(b.recv_note().map(|passed| passed.files.len()), Some(2));
        if round == 4 {
            // The lanes go first this time, with segments that nobody asked for and notes that nobody took.
            drop((a, b));
            return;
        }
    }
}

#[test]
fn nothing_is_left_behind() {
    use_lanes();
    let before = descriptors();
    assert_eq!(mappings(), Vec::<String>::new());
    for _ in 0..20 {
        use_lanes();
        assert_eq!(mappings(), Vec::<String>::new());
    }
    assert_eq!(descriptors(), before);
}
