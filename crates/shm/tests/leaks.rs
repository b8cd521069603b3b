//! Descriptors and mappings all come back. Alone in its process: the counts are the process's.
#![allow(unsafe_code)]

mod common;

use common::{Keeper, Piece, pair_in, receive_direct, send_direct};
use crossrail_shm::{Arena, Options};

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
        if round == 4 {
            // The lanes go first this time, and one with segments that its peer never asked for.
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
