use super::*;

/// Pseudo-random numbers from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Strides that lie one behind the other, of equal rows or of any.
fn strides(random: &mut Random, even: bool) -> Vec<Stride> {
    let mut at = random.below(100);
    let (len, count) = (1 + random.below(9), 1 + random.below(5));
    (0..1 + random.below(6))
        .map(|_| {
            // Of rows of any length some have no bytes.
            let (len, count) = if even { (len, count) } else { (random.below(9), 1 + random.below(5)) };
            let gap = random.below(3);
            let stride = Stride { at, len, stride: len + gap, count };
            at += (len + gap) * count + random.below(4);
            stride
        })
        .collect()
}

fn index_of(random: &mut Random, rows: &Rows) -> Index {
    let per = rows.per_stride.unwrap_or(rows.rows);
    match random.below(3) {
        0 => Index::All,
        1 => Index::Some((0..1 + random.below(2 * rows.rows)).map(|_| random.below(rows.rows) as u32).collect()),
        _ => {
            let block: Vec<u64> = (0..1 + random.below(per)).map(|_| random.below(per)).collect();
            let index: Vec<u32> =
                (0..rows.rows / per).flat_map(|time| block.iter().map(move |row| (row + time * per) as u32)).collect();
            Index::compress(&index, rows)
        }
    }
}

/// The address of every byte of a list, by the rules of its parts.
fn bytes_of(list: &List) -> Vec<u64> {
    let all: Vec<(u64, u64)> =
        list.rows.strides.iter().flat_map(|s| (0..s.count).map(|k| (s.at + k * s.stride, s.len))).collect();
    let rows = (0..list.count).map(|at| all[list.index.get(at) as usize]);
    rows.flat_map(|(at, len)| at..at + len).collect()
}

#[test]
fn every_byte_of_a_list_is_where_its_row_says() {
    for seed in 0..400 {
        let mut random = Random(seed);
        let rows = Arc::new(Rows::new(strides(&mut random, seed % 2 == 0)).expect("rows"));
        let list = List::new(rows.clone(), index_of(&mut random, &rows)).expect("a list");
        let all = bytes_of(&list);
        assert_eq!(list.bytes(), all.len() as u64, "seed {seed}");
        let from = random.below(all.len() as u64 + 1);
        let mut cursor = list.cursor(from);
        let mut found = Vec::new();
        while let Some((at, len)) = cursor.piece(1 + random.below(12)) {
            found.extend(at..at + len);
        }
        assert_eq!(found, all[from as usize..], "seed {seed}");
        assert!(cursor.piece(9).is_none() && list.cursor(all.len() as u64).piece(9).is_none());
        for row in 0..=list.count() {
            let before: u64 = (0..row).map(|row| list.len_of(row)).sum();
            assert_eq!(list.position(row), before, "seed {seed}, row {row}");
        }
    }
}

#[test]
fn copies_between_lists_move_each_byte_to_its_place() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let rows = Arc::new(Rows::new(strides(&mut random, seed % 2 == 0)).expect("rows"));
        let source: Vec<u8> = (0..2000u64).map(|at| (at * 31 + seed) as u8).collect();
        let mut target = vec![0u8; 2000];
        let based = |rows: &Rows, base: u64| {
            Rows::new(rows.strides().iter().map(|s| Stride { at: s.at + base, ..*s }).collect()).expect("rows")
        };
        // Every row once: targets must not overlap.
        let from = List::new(Arc::new(based(&rows, source.as_ptr() as u64)), index_of(&mut random, &rows));
        let from = from.expect("a list");
        if from.bytes() == 0 {
            continue;
        }
        let to = Rows::new(vec![Stride { at: target.as_mut_ptr() as u64 + 3, len: from.bytes(), stride: 0, count: 1 }]);
        let to = List::new(Arc::new(to.expect("rows")), Index::All).expect("a list");
        let (at, len) = (random.below(from.bytes()), from.bytes());
        // SAFETY: all rows are inside the two vectors.
        unsafe { copy_between((&to, at), (&from, at), len) };
        let expected: Vec<u8> =
            bytes_of(&from).iter().map(|byte| source[(*byte - source.as_ptr() as u64) as usize]).collect();
        assert_eq!(target[3 + at as usize..3 + from.bytes() as usize], expected[at as usize..], "seed {seed}");
        assert!(target[..3 + at as usize].iter().all(|byte| *byte == 0));
        assert_eq!(target[3 + from.bytes() as usize], 0);
        let mut out = vec![0; from.bytes() as usize];
        // SAFETY: as above.
        unsafe { from.copy_out(at, out.as_mut_ptr(), from.bytes() - at) };
        assert_eq!(out[..expected.len() - at as usize], expected[at as usize..], "seed {seed}");
    }
}

#[test]
fn a_table_of_blocks_that_comes_again_is_kept_once() {
    let rows = Rows::new((0..4).map(|at| Stride { at: at * 1000, len: 8, stride: 16, count: 10 }).collect()).unwrap();
    let index: Vec<u32> = (0..4).flat_map(|layer| [7, 2, 2, 9].map(|block| layer * 10 + block)).collect();
    let Index::Repeated { block, step: 10, repeats: 4 } = Index::compress(&index, &rows) else { panic!("not found") };
    assert_eq!(*block, [7, 2, 2, 9]);
    let mut other = index.clone();
    other[9] += 1;
    assert!(matches!(Index::compress(&other, &rows), Index::Some(_)));
    assert!(matches!(Index::compress(&index[..15], &rows), Index::Some(_)));
    assert!(matches!(Index::compress(&[3, 2], &rows), Index::Some(_)));
}

#[test]
fn neighbours_on_both_sides_are_one_run() {
    let rows = Arc::new(Rows::new(vec![Stride { at: 0, len: 4, stride: 4, count: 10 }]).unwrap());
    let apart = Arc::new(Rows::new(vec![Stride { at: 0, len: 4, stride: 8, count: 10 }]).unwrap());
    let of = |rows: &Arc<Rows>, index: &[u32]| List::new(rows.clone(), Index::Some(index.into())).unwrap();
    let (one, two) = (of(&rows, &[0, 1, 2, 5, 6]), of(&rows, &[3, 4, 7, 8, 9]));
    assert_eq!((one.runs(&two), one.runs(&of(&apart, &[0, 1, 2, 3, 4]))), (3, 5));
}

#[test]
fn what_is_no_list_is_refused() {
    let row = Stride { at: 0, len: 8, stride: 8, count: 4 };
    let rows = Arc::new(Rows::new(vec![row]).unwrap());
    assert!(Rows::new(vec![]).is_none() && Rows::new(vec![Stride { count: 0, ..row }]).is_none());
    assert!(Rows::new(vec![Stride { count: u64::MAX, ..row }]).is_none());
    assert!(List::new(rows.clone(), Index::Some([4].into())).is_none());
    assert!(List::new(rows.clone(), Index::Some([].into())).is_none());
    let block: Arc<[u32]> = [0, 1].into();
    let repeated = |step, repeats| List::new(rows.clone(), Index::Repeated { block: block.clone(), step, repeats });
    assert!(repeated(2, 2).is_some() && repeated(2, 3).is_none() && repeated(u64::MAX, 3).is_none());
    assert!(repeated(0, 0).is_none() && repeated(1, u64::MAX).is_none());
    assert_eq!(Stride { at: u64::MAX - 3, ..row }.extent(), None);
    assert_eq!(Stride { at: 24, stride: 8u64.wrapping_neg(), ..row }.extent(), Some((0, 32)));
}

/// The lengths of all rows, one by one.
fn lens(list: &List) -> Vec<u64> {
    (0..list.count()).map(|at| list.len_of(at)).collect()
}

#[test]
fn lists_fit_exactly_if_their_rows_are_equally_long() {
    let (mut fitting, mut uneven) = (0, 0);
    for seed in 0..3000 {
        let mut random = Random(seed);
        let make = |random: &mut Random| {
            // Few lengths and counts, so that some pairs fit.
            let count = 1 + random.below(2);
            let strides = (0..1 + random.below(4)).map(|at| {
                let len = if seed % 3 == 0 { 2 } else { random.below(2) };
                Stride { at: at * 100, len, stride: 8, count }
            });
            let rows = Arc::new(Rows::new(strides.collect()).expect("rows"));
            let index = index_of(random, &rows);
            List::new(rows, index).expect("a list")
        };
        let (one, two) = (make(&mut random), make(&mut random));
        let equal = lens(&one) == lens(&two);
        assert_eq!(one.fits(&two), equal, "seed {seed}: {one:?} and {two:?}");
        assert_eq!(two.fits(&one), equal, "seed {seed}");
        fitting += usize::from(equal);
        uneven += usize::from(equal && one.rows.even.is_none());
    }
    assert!(fitting > 150 && uneven > 15, "{fitting} pairs fit, {uneven} of them of rows of any length");
}

#[test]
fn rows_of_any_length_that_come_again_are_kept_once() {
    // Two kinds of pages in each layer.
    let layers = (0..40).map(|at| Stride { at: at * 10_000, len: [64, 24][at as usize % 2], stride: 100, count: 50 });
    let rows = Arc::new(Rows::new(layers.collect()).expect("rows"));
    let index: Vec<u32> = (0..40).flat_map(|layer| [7, 3, 3, 20].map(|page| layer * 50 + page)).collect();
    let compressed = Index::compress(&index, &rows);
    assert!(matches!(compressed, Index::Repeated { repeats: 40, step: 50, .. }));
    let (short, long) = (List::new(rows.clone(), compressed), List::new(rows.clone(), Index::Some(index.into())));
    let (short, long) = (short.expect("a list"), long.expect("a list"));
    assert!(short.fits(&long) && long.fits(&short) && lens(&short) == lens(&long));
    for at in 0..=short.count() {
        assert_eq!(short.position(at), long.position(at));
        assert_eq!(short.place(short.position(at)), Some(at));
    }
    assert_eq!((short.place(1), short.bytes(), bytes_of(&short)), (None, long.bytes(), bytes_of(&long)));
    for from in [0, 63, 64, 300, 1000, short.bytes() - 1] {
        let (mut one, mut two) = (short.cursor(from), long.cursor(from));
        while let Some(piece) = one.piece(30) {
            assert_eq!(two.piece(30), Some(piece));
        }
        assert_eq!(two.piece(30), None);
    }
    let Index::Repeated { block, .. } = short.index().clone() else { panic!("an index that comes again") };
    let again = |step, repeats| List::new(rows.clone(), Index::Repeated { block: block.clone(), step, repeats });
    assert!(again(50, 39).is_some() && again(31, 2).is_none(), "a time that is in two strides");
}

/// What a peer can name with a few words. Compared row by row, these would take hours.
#[test]
fn numbers_of_rows_cost_nothing() {
    let began = std::time::Instant::now();
    let many = |count| {
        Rows::new(vec![Stride { at: 0, len: 64, stride: 0, count }, Stride { at: 0, len: 8, stride: 0, count: 1 }])
    };
    for count in [1 << 33, 1 << 40, 1 << 53] {
        assert!(many(count).is_none());
    }
    let rows = || Arc::new(many((1 << 32) - 1).expect("rows"));
    let whole = || List::new(rows(), Index::All).expect("a list");
    assert!(whole().fits(&whole()));
    let block: Arc<[u32]> = [0, 1].into();
    for repeats in [4097, 1 << 31, 1 << 53, u64::MAX] {
        for step in [0, 1, 1 << 20, 1 << 53] {
            assert!(List::new(rows(), Index::Repeated { block: block.clone(), step, repeats }).is_none());
        }
    }
    let even = Arc::new(Rows::new(vec![Stride { at: 0, len: 64, stride: 0, count: 1 << 32 }]).expect("rows"));
    let even = List::new(even, Index::All).expect("a list");
    assert!(even.fits(&even.clone()) && !even.fits(&whole()));
    // Of no bytes, before the only one that has some.
    let empty = [((1 << 32) - 1, 0), (1, 8)].map(|(count, len)| Stride { at: 0, len, stride: 0, count });
    let empty = Arc::new(Rows::new(empty.to_vec()).expect("rows"));
    let last = List::new(empty.clone(), Index::All).expect("a list");
    assert_eq!((last.cursor(0).piece(9), last.bytes(), last.runs(&last)), (Some((0, 8)), 8, 1));
    assert!(began.elapsed() < std::time::Duration::from_secs(2), "took {:?}", began.elapsed());
}
