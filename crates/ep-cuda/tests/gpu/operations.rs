//! Random rounds of every kind: both layouts, all payloads, in one part and in two, with what can be asked for.

use std::thread;
use std::time::Instant;

use crossrail::Context;
use crossrail_ep_cuda::{Layout, Payload};

use crate::alone;
use crate::rank::{Case, F32, PACKED, join_group, make_buffer, on_ranks, settings, store};
use crate::rounds::all_ways;

fn rounds(case: Case, gpus: u32, count: u64) {
    on_ranks(&case, gpus, move |rank| all_ways(rank, 0..count, &[]));
}

// The others need it: it runs before them, once.
alone!(all_kernels_compile, |gpus| {
    let threads = Case::all().into_iter().map(|case| {
        thread::spawn(move || {
            let began = Instant::now();
            let store = store();
            let group = join_group(&case, 0, &store.address());
            let context = Context::new(settings()).expect("a context");
            let buffer = make_buffer(&case, &group, &context, "experts", 0, gpus);
            let (layout, payload, took) = (case.layouts[0], case.payload, began.elapsed().as_secs_f64());
            println!("note: {layout} layout, {payload:?}, {} wide: ready after {took:.1} s", case.hidden);
            buffer.destroy().expect("destroy");
            group.leave().expect("leave");
        })
    });
    // All are begun before one is waited for.
    let threads: Vec<_> = threads.collect();
    let failed = threads.into_iter().filter_map(|thread| thread.join().err()).count();
    assert_eq!(failed, 0, "kernels that do not load");
});

alone!(expert_layout_in_bf16, |gpus| rounds(Case::new(Layout::Expert, Payload::Bf16), gpus, 12));
alone!(expert_layout_in_fp8_without_prereduction, |gpus| {
    rounds(Case { prereduce: false, ..Case::new(Layout::Expert, F32) }, gpus, 12);
});
alone!(expert_layout_with_packed_scales, |gpus| rounds(Case::new(Layout::Expert, PACKED), gpus, 8));
alone!(expert_layout_with_wide_rows, |gpus| rounds(Case::wide(Layout::Expert, F32), gpus, 4));
alone!(rank_layout_in_bf16, |gpus| rounds(Case::new(Layout::Rank, Payload::Bf16), gpus, 12));
alone!(rank_layout_in_fp8, |gpus| rounds(Case::new(Layout::Rank, F32), gpus, 12));
alone!(rank_layout_with_packed_scales, |gpus| rounds(Case::new(Layout::Rank, PACKED), gpus, 8));
alone!(rank_layout_with_wide_rows, |gpus| rounds(Case::wide(Layout::Rank, Payload::Bf16), gpus, 4));
