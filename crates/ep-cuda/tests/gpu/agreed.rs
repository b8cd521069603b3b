//! A rank that only one of the others has given up: all of them go on without it, by one view, and it is told. Then it
//! comes back.

use std::thread;
use std::time::{Duration, Instant};

use crossrail_ep_cuda::{Layout, Payload, Split};
use crossrail_types::ErrorKind;

use crate::alone;
use crate::rank::{Case, LIMIT, Rank, on_ranks};
use crate::rounds::{Way, all_ways, expert_args, put_dispatch_expert, unchecked};
use crate::steady::world_of;

/// How long rank 0 waits for another, and how long the others do.
const HASTY: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(8);

alone!(the_loss_of_one_rank_is_that_of_all, |gpus| {
    let case = Case { timeout: PATIENCE, hasty: Some(HASTY), ..Case::new(Layout::Expert, Payload::Bf16) };
    on_ranks(&case, gpus, one_loss);
});

fn one_loss(rank: &Rank) {
    let (all, others) = (rank.case.everybody(), if rank.me == 3 { &[0, 1, 2][..] } else { &[3] });
    all_ways(rank, 0..2, &[]);
    let view = rank.buffer.view();
    rank.meet("before", &all);
    if rank.me == 3 {
        stays_away(rank);
    } else {
        let began = Instant::now();
        unchecked(rank, 3);
        rank.gpu.wait();
        // Rank 0 tells the others, whose kernels wait on.
        assert_eq!(rank.buffer.masked(), [3], "rank {}", rank.me);
        let took = began.elapsed();
        assert!(took < PATIENCE / 2, "rank {} waited {took:?}, though rank 0 has told it", rank.me);
        assert_eq!((rank.buffer.view(), rank.buffer.faults().len()), (view + 1, 1), "rank {}", rank.me);
        if rank.me == 1 {
            println!("note: told of a lost rank after {:.1} ms", 1e3 * took.as_secs_f64());
        }
        rank.meet("without it", &[0, 1, 2]);
        all_ways(rank, 10..12, &[3]);
    }
    rank.meet("before it comes back", &all);
    rank.timed("1 is taken back", || rank.buffer.unmask(others).expect("unmask"));
    assert!(rank.buffer.masked().is_empty(), "rank {}", rank.me);
    rank.meet("together again", &all);
    all_ways(rank, 20..22, &[]);
}

/// A rank that lives, and comes to no operation until the others have gone on without it.
fn stays_away(rank: &Rank) {
    let began = Instant::now();
    while rank.buffer.masked() != [0, 1, 2] {
        assert!(began.elapsed() < LIMIT, "it was not told: {:?}", rank.buffer.masked());
        thread::sleep(Duration::from_millis(5));
    }
    let (gpu, shape, way) = (&rank.gpu, rank.shape(), Way { early: true, ..Way::default() });
    gpu.reset();
    let args = expert_args(gpu, &shape, world_of(shape, 3).input(gpu, rank.me as usize, &way));
    let error = put_dispatch_expert(&rank.buffer, &gpu.stream, &args, Split::Whole).expect_err("it is out");
    assert_eq!(error.kind, ErrorKind::PeerDead, "{error}");
    assert!(error.detail.contains("rank 3 is out of view"), "{error}");
    assert_eq!(rank.buffer.sync(Some(LIMIT)).expect_err("it is out").kind, ErrorKind::PeerDead);
    assert_eq!(rank.buffer.missing(), [0, 1, 2]);
}
