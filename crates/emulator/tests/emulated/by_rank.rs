//! What holds for both kinds of kernels of the rank layout.

use crossrail_emulator::job::Job;
use crossrail_emulator::job_rank::ByRank;
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::{GpuMemory as _, Gpus as _, Numbers};
use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, EP_STAGE_BACK_ROW, EP_STAGE_ROOM};

/// All phases of a dispatch.
pub(crate) const ALL: u32 = EP_ANNOUNCE | EP_SEND | EP_RECEIVE;
/// All phases of a combine.
pub(crate) const BOTH: u32 = EP_SEND | EP_RECEIVE;

/// All operations are queued at once: ranks run ahead of each other as far as slots let them. Regions take turns, so that
/// only the last two results are looked at.
pub(crate) fn follow_each_other(job: &mut Job) {
    let shape = job.shape;
    for seed in 70..73 {
        let mut numbers = Numbers(seed);
        let operations: Vec<ByRank> = (0..7)
            .map(|number| {
                let routing = Routing::random(&mut numbers, &shape);
                ByRank::new(job, &mut numbers, routing, number % 2)
            })
            .collect();
        for operation in &operations {
            operation.dispatch(job, 2, ALL);
            operation.combine(job, 2, BOTH, 0);
        }
        job.gpus.run(seed).unwrap();
        for (number, operation) in operations.iter().enumerate() {
            if number >= 5 {
                operation.check_dispatch(job).unwrap();
            }
            operation.check_combine(job).unwrap();
        }
    }
}

/// Two operations are sent before the first is received; and phases are apart, as ranks that are not mapped need it.
pub(crate) fn two_under_way(job: &mut Job) {
    let shape = job.shape;
    for seed in 80..84 {
        let mut numbers = Numbers(seed);
        let [first, second] = [0, 1].map(|region| {
            let routing = Routing::random(&mut numbers, &shape);
            ByRank::new(job, &mut numbers, routing, region)
        });
        let steps: &[u32] =
            if seed % 2 == 0 { &[EP_ANNOUNCE | EP_SEND, EP_RECEIVE] } else { &[EP_ANNOUNCE, EP_SEND, EP_RECEIVE] };
        if seed < 82 {
            for phases in steps {
                first.dispatch(job, 2, *phases);
                second.dispatch(job, 3, *phases);
            }
        } else {
            steps.iter().for_each(|phases| first.dispatch(job, 2, *phases));
            steps.iter().for_each(|phases| second.dispatch(job, 2, *phases));
        }
        for phases in [EP_SEND, EP_RECEIVE] {
            first.combine(job, 3, phases, 0);
            second.combine(job, 3, phases, 0);
        }
        job.gpus.run(seed).unwrap();
        for operation in [first, second] {
            operation.check_dispatch(job).unwrap();
            operation.check_combine(job).unwrap();
        }
    }
}

pub(crate) fn masked(job: &mut Job) {
    let shape = job.shape;
    let mut numbers = Numbers(90);
    for round in 0..4 {
        let routing = Routing::of(&mut numbers, &shape, &[36, 4, 25], Choice::Even).without(&[1]);
        [0, 2].into_iter().for_each(|rank| job.mask(rank, 1));
        let operation = ByRank::new(job, &mut numbers, routing, 0);
        operation.dispatch(job, 2, ALL);
        operation.combine(job, 2, BOTH, 0);
        job.gpus.run(round).unwrap();
        operation.check_dispatch(job).unwrap();
        operation.check_combine(job).unwrap();
        assert!(job.faults(0).is_empty() && job.faults(2).is_empty());
    }
}

/// A rank that dies costs the others the limit once; what the others sent each other is there.
pub(crate) fn never_comes(job: &mut Job, stage: u32) {
    let shape = job.shape;
    let mut numbers = Numbers(100);
    let routing = Routing::of(&mut numbers, &shape, &[36, 4, 25], Choice::Even);
    let operation = ByRank::new(job, &mut numbers, routing.without(&[2]), 0);
    operation.dispatch(job, 2, ALL);
    job.gpus.run(0).unwrap();
    operation.check_dispatch(job).unwrap();
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, stage)]);
        assert_eq!(job.masked(rank), [2]);
        // Who was waited for, and how long.
        let waited = job.ranks[rank].waits.read::<i64>(0, 3);
        assert!(waited[2] >= job.limit_ns as i64 && waited[..2].iter().all(|ns| *ns < waited[2]), "{waited:?}");
    }
    operation.combine(job, 2, BOTH, 0);
    job.gpus.run(1).unwrap();
    operation.check_combine(job).unwrap();
    assert_eq!((job.faults(0).len(), job.faults(1).len()), (1, 1));
}

/// More rows come to a rank than the caller has room for: that is told, and nothing beyond the caller's arrays is read.
pub(crate) fn no_room(job: &mut Job) {
    let shape = job.shape;
    let mut numbers = Numbers(130);
    for round in 0..4 {
        let routing = Routing::of(&mut numbers, &shape, &[36, 14, 25], Choice::Even);
        let mut operation = ByRank::new(job, &mut numbers, routing, 0);
        let (hidden, topk) = (shape.hidden as usize, shape.topk as usize);
        let rows = operation.ranks[1].y.len() / (2 * hidden);
        let room = [rows - 1, rows / 2, 1, rows][round];
        operation.ranks[1].dispatch.max_rows = room as u64;
        operation.ranks[1].combine.y_rows = room as u64;
        operation.dispatch(job, 2, ALL);
        operation.combine(job, 2, BOTH, 0);
        job.gpus.run(round as u64).unwrap();
        operation.check_dispatch(job).unwrap();
        operation.ranks[1].y.write(2 * hidden * room, &vec![0u16; hidden * (rows - room)]);
        operation.ranks[1].y_weights.write(4 * topk * room, &vec![0f32; topk * (rows - room)]);
        operation.check_combine(job).unwrap();
        let told = job.faults(1);
        assert_eq!(told.len(), (round + 1).min(3));
        assert!(told.iter().all(|fault| *fault == (1, EP_STAGE_ROOM)), "{told:?}");
        assert!((0..3).all(|rank| job.masked(rank).is_empty()));
        assert!(job.faults(0).is_empty() && job.faults(2).is_empty());
    }
}

/// A rank that dies between dispatch and combine: others wait for what it would have sent back, once.
pub(crate) fn dies_before_combine(job: &mut Job) {
    let shape = job.shape;
    let mut numbers = Numbers(120);
    let routing = Routing::of(&mut numbers, &shape, &[40, 40, 40], Choice::Even);
    let mut operation = ByRank::new(job, &mut numbers, routing, 0);
    operation.dispatch(job, 2, ALL);
    job.gpus.run(0).unwrap();
    operation.check_dispatch(job).unwrap();
    operation.routing.active[2] = false;
    operation.combine(job, 2, BOTH, 0);
    job.gpus.run(1).unwrap();
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, EP_STAGE_BACK_ROW)]);
        assert_eq!(job.masked(rank), [2]);
    }
}

/// The tests above for the kernels of one module, which has `job` and `SHAPE`; `$stage` is where the others wait for a
/// rank that never comes.
macro_rules! tests_of_both {
    ($stage:expr) => {
        $crate::by_rank::tests_of_both! {
            operations_follow_each_other_without_waiting_for_the_host: $crate::by_rank::follow_each_other,
            two_may_be_under_way_and_phases_apart: $crate::by_rank::two_under_way,
            masked_ranks_are_left_out: $crate::by_rank::masked,
            a_rank_that_never_comes_is_masked_and_told_of: |job| $crate::by_rank::never_comes(job, $stage),
            rows_for_which_there_is_no_room_are_told_of_and_count_as_zeros: $crate::by_rank::no_room,
            a_rank_that_dies_before_the_combine_is_masked_once: $crate::by_rank::dies_before_combine,
        }
    };
    ($($name:ident: $test:expr),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                if let Some(mut job) = job(SHAPE) {
                    ($test)(&mut job);
                }
            }
        )+
    };
}
pub(crate) use tests_of_both;
