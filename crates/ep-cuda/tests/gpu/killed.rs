//! A rank whose process dies while the others wait for it: they go on without it, long before their own limit.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crossrail_ep_cuda::{Layout, Payload};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::alone;
use crate::rank::{Case, LIMIT, Rank, on_these, store};
use crate::rounds::{all_ways, unchecked};

/// Where the store is that the process that dies joins, and its layout.
const STORE: &str = "EP_GPU_VICTIM";
const LAYOUT: &str = "EP_GPU_VICTIM_LAYOUT";
/// The others wait so long for a rank that lives.
const PATIENCE: Duration = Duration::from_secs(8);

struct Keeper(Child);

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn case(layout: Layout) -> Case {
    Case { timeout: PATIENCE, ..Case::new(layout, Payload::Bf16) }
}

alone!(others_go_on_in_the_expert_layout, |gpus| others_go_on(Layout::Expert, gpus));
alone!(others_go_on_in_the_rank_layout, |gpus| others_go_on(Layout::Rank, gpus));

fn others_go_on(layout: Layout, gpus: u32) {
    let store = store();
    let victim = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "killed::role_victim", "--nocapture", "--test-threads", "1"])
        .env(STORE, store.address())
        .env(LAYOUT, layout.to_string())
        .spawn();
    let _keeper = Keeper(victim.expect("a process"));
    on_these(&case(layout), 0..3, &store.address(), gpus, |rank| {
        let all = rank.case.everybody();
        rank.connect(&all);
        all_ways(&rank, 0..3, &[]);
        // It may be dead before that was heard of.
        let _ = rank.group.barrier("before the end", &all, Some(LIMIT));
        let began = Instant::now();
        unchecked(&rank, 3);
        rank.gpu.wait();
        let took = began.elapsed();
        assert!(took < PATIENCE / 2, "rank {} waited {took:?} for one that is gone", rank.me);
        assert_eq!(rank.buffer.masked(), [3]);
        let faults = rank.buffer.faults();
        assert!(faults.len() == 1 && faults[0].rank == 3 && faults[0].left == 3, "{faults:?}");
        // Whichever of its connections was seen to end first.
        let ends = ["its process has ended", "its process is gone", "control connection"];
        assert!(ends.iter().any(|end| faults[0].why.contains(end)), "{faults:?}");
        if rank.me == 0 {
            println!("note: without a rank that died after {:.1} ms", 1e3 * took.as_secs_f64());
        }
        rank.meet("without it", &[0, 1, 2]);
        all_ways(&rank, 10..14, &[3]);
        rank.buffer.disconnect(&[3]).expect("disconnect");
        all_ways(&rank, 20..22, &[3]);
        rank.buffer.sync(Some(LIMIT)).expect("sync");
        rank.leave();
    });
}

/// Not a test by itself: the process that dies.
#[test]
fn role_victim() {
    let (Ok(store), Ok(layout)) = (std::env::var(STORE), std::env::var(LAYOUT)) else { return };
    let layout = if layout == Layout::Rank.to_string() { Layout::Rank } else { Layout::Expert };
    let gpus = crossrail_cuda::Cuda::load().expect("CUDA").devices().expect("devices").len().min(4) as u32;
    let case = case(layout);
    let rank = Rank::join(&case, 3, &store, gpus);
    rank.connect(&case.everybody());
    all_ways(&rank, 0..3, &[]);
    rank.meet("before the end", &case.everybody());
    // No time to say goodbye, and no core file.
    let _ = kill(Pid::this(), Signal::SIGKILL);
    unreachable!("it is killed");
}
