//! Long copies that a kernel makes, as when a GPU sends to several others at once.

use std::sync::Arc;
use std::time::Instant;

use crossrail_cuda_ipc::{Copied, Domain, Link};
use crossrail_transport::Copy;
use crossrail_types::Settings;
use serde_json::json;

use crate::end::{LIMIT, Memory, pattern};
use crate::{KINDS, Two, second, support};

fn copied(two: &Two) -> Copied {
    two.own.domain.copied(0).expect("the GPU is in use")
}

#[test]
fn long_pushes_by_the_kernel_write_their_bytes_and_nothing_before_them() {
    let Some(mut two) = Two::new() else { return };
    let Some(cuda) = support::cuda() else { return };
    if second(&cuda).is_none() {
        return support::skip("needs two GPUs that reach each other");
    }
    let Ok(_kept) = crossrail_kernels::shared(&two.own.context, &Settings::default(), LIMIT) else {
        return support::skip("no kernels here");
    };
    let settings = Settings::from_pairs([("CROSSRAIL_GPU_COPY", "kernel")]).expect("a setting");
    // Nothing was said yet between the two.
    two.own.domain = Domain::new(&cuda, &settings).expect("a domain");
    two.own.link = Link::new(Arc::clone(&two.own.domain), LIMIT);
    let (whole, long) = (12 << 20, 1 << 20);
    let own = Memory::new(&two.own.context, "vmm", whole);
    for kind in KINDS {
        let index = two.alloc(kind, whole, 1);
        // No push waits for the kernels: they are loaded meanwhile.
        let started = Instant::now();
        loop {
            let remote = two.describe(index, 0, long);
            two.own.copy(Copy::Push, own.address(), remote, long).expect("a push");
            if copied(&two).by_kernel > 0 {
                break;
            }
            assert!(started.elapsed() < LIMIT, "{:?}", copied(&two));
        }
        let before = copied(&two);
        let places = [(0, 0), (16, 32), (5, 5), (1, 0), ((2 << 20) - 77, 5)];
        let lens = [9 << 20, (3 << 20) + 5, (1 << 20) + 1, (2 << 20) + 77, (512 << 10) + 1];
        for (seed, ((theirs, ours), len)) in (100..).zip(places.into_iter().zip(lens)) {
            two.own.ask(&json!({"do": "fill", "index": index, "len": whole, "seed": 1}));
            two.own.put(own.address() + ours, &pattern(seed, len));
            let remote = two.describe(index, theirs, len);
            two.own.copy(Copy::Push, own.address() + ours, remote, len).expect("a push");
            assert!(two.check(index, theirs, len, seed), "{kind}: push of {len} from {ours} to {theirs}");
            assert!(two.check(index, 0, theirs, 1), "{kind}: a push to {theirs} wrote before its place");
        }
        // Short ones, and what is read, are the engine's.
        let remote = two.describe(index, 0, 4096);
        two.own.copy(Copy::Push, own.address(), remote, 4096).expect("a push");
        let remote = two.describe(index, 0, long);
        two.own.copy(Copy::Pull, own.address(), remote, long).expect("a pull");
        let after = copied(&two);
        assert_eq!((after.by_kernel - before.by_kernel, after.by_engine - before.by_engine), (5, 2), "{kind}");
    }
}
