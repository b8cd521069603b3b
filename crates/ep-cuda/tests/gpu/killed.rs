//! A rank whose process dies while the others wait for it, or whose GPU is lost: they go on without it, long before their
//! own limit.

use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use crossrail_ep_cuda::{Layout, Payload, Split};
use crossrail_types::Error;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::alone;
use crate::rank::{Case, LIMIT, Rank, on_these, store};
use crate::rounds::{Way, all_ways, expert_args, put_dispatch_expert, unchecked};
use crate::steady::world_of;

/// Where the store is that the process that dies joins, its layout, and what becomes of it.
const STORE: &str = "EP_GPU_VICTIM";
const LAYOUT: &str = "EP_GPU_VICTIM_LAYOUT";
const FATE: &str = "EP_GPU_VICTIM_FATE";
const KILLED: &str = "it is killed";
const LOST: &str = "its GPU is lost";
/// The others wait so long for a rank that lives.
const PATIENCE: Duration = Duration::from_secs(8);

struct Keeper(Child);

impl Keeper {
    fn ended(&mut self, limit: Duration) -> Option<ExitStatus> {
        let began = Instant::now();
        while began.elapsed() < limit {
            if let Some(status) = self.0.try_wait().expect("wait") {
                return Some(status);
            }
            thread::sleep(Duration::from_millis(2));
        }
        None
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn case(layout: Layout) -> Case {
    Case { timeout: PATIENCE, ..Case::new(layout, Payload::Bf16) }
}

alone!(others_go_on_in_the_expert_layout, |gpus| others_go_on(Layout::Expert, gpus, KILLED));
alone!(others_go_on_in_the_rank_layout, |gpus| others_go_on(Layout::Rank, gpus, KILLED));
alone!(a_lost_gpu_is_named_and_others_go_on, |gpus| others_go_on(Layout::Expert, gpus, LOST));

fn others_go_on(layout: Layout, gpus: u32, fate: &'static str) {
    let store = store();
    let victim = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "killed::role_victim", "--nocapture", "--test-threads", "1"])
        .env(STORE, store.address())
        .env(LAYOUT, layout.to_string())
        .env(FATE, fate)
        .spawn();
    let mut keeper = Keeper(victim.expect("a process"));
    on_these(&case(layout), 0..3, &store.address(), gpus, move |rank| {
        let all = rank.case.everybody();
        rank.connect(&all);
        all_ways(&rank, 0..3, &[]);
        // It may be dead before that was heard of.
        let _ = rank.group.barrier("before the end", &all, Some(LIMIT));
        let began = Instant::now();
        unchecked(&rank, 3);
        rank.gpu.wait();
        let took = began.elapsed();
        // The driver takes its time to tell of a GPU that is lost.
        let most = if fate == KILLED { PATIENCE / 2 } else { PATIENCE * 7 / 8 };
        assert!(took < most, "rank {} waited {took:?} for one that is gone", rank.me);
        // Whoever noticed it first, the operation that was done without it says so.
        assert_eq!(rank.buffer.masked(), [3]);
        assert!(fate != KILLED || rank.buffer.faults().len() == 1, "{:?}", rank.buffer.faults());
        if rank.me == 0 {
            println!("note: without a rank ({fate}) after {:.1} ms", 1e3 * took.as_secs_f64());
        }
        rank.meet("without it", &[0, 1, 2]);
        all_ways(&rank, 10..14, &[3]);
        let faults = rank.buffer.faults();
        assert!(faults.len() == 1 && faults[0].rank == 3 && faults[0].left == 3, "{faults:?}");
        // Whichever of its connections was seen to end first.
        let ends = ["its process has ended", "its process is gone", "control connection"];
        assert!(fate != KILLED || ends.iter().any(|end| faults[0].why.contains(end)), "{faults:?}");
        rank.buffer.disconnect(&[3]).expect("disconnect");
        all_ways(&rank, 20..22, &[3]);
        rank.buffer.sync(Some(LIMIT)).expect("sync");
        rank.leave();
    });
    if fate == LOST {
        // All that it was to find out it did, or it would have ended otherwise.
        let ended = keeper.ended(LIMIT).expect("an end in time");
        assert!(ended.success(), "the rank whose GPU is lost: {ended}");
    }
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
    if std::env::var(FATE).is_ok_and(|fate| fate == LOST) {
        lose_the_gpu(&rank);
        // What is left can be given back only by the driver.
        std::process::exit(0);
    }
    // No time to say goodbye, and no core file.
    let _ = kill(Pid::this(), Signal::SIGKILL);
    unreachable!("it is killed");
}

/// Gives the kernels an address where no memory is: the GPU's context, of this process alone, is lost.
fn lose_the_gpu(rank: &Rank) {
    const NOWHERE: u64 = 64;
    let (gpu, shape, way) = (&rank.gpu, rank.shape(), Way { early: true, ..Way::default() });
    gpu.reset();
    let mut args = expert_args(gpu, &shape, world_of(shape, 1).input(gpu, rank.me as usize, &way));
    args.x = NOWHERE;
    let put = || put_dispatch_expert(&rank.buffer, &gpu.stream, &args, Split::Whole);
    let named = |what: &str, error: Error| {
        let text = error.to_string();
        let ordinal = format!("cuda:{}", gpu.ordinal);
        assert!(text.contains("CUDA_ERROR_") && text.contains(&ordinal), "{what}: {text}");
    };
    let began = Instant::now();
    let sent = put().expect("a launch");
    named("its end", sent.done.synchronize(LIMIT).expect_err("there is no memory"));
    named("the next call", put().expect_err("the GPU is lost"));
    named("destroy", rank.buffer.destroy().expect_err("what kernels did is not known"));
    assert!(began.elapsed() < PATIENCE * 3 / 4, "it took {:?}", began.elapsed());
}
