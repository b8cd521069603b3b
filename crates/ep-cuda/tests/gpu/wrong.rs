//! Calls that make no sense are refused, and say what is wrong; nothing is put in.

use crossrail_ep_cuda::{
    Config, DeviceBuffer, DeviceOptions, Enqueued, EpCombineArgs, EpDispatchArgs, Layout, Payload, Split,
};
use crossrail_types::{Error, ErrorKind, Result};

use crate::alone;
use crate::rank::{Case, F32, LIMIT, Rank, make_buffer, on_ranks, on_ranks_apart, options};
use crate::rounds::{Way, World, all_ways, expert_args, finish, put_combine_expert, put_dispatch_expert};
use crate::steady::launch;

fn refused<T>(result: Result<T>, kind: ErrorKind, text: &str) {
    let error: Error = result.err().unwrap_or_else(|| panic!("not refused: {text}"));
    assert!(error.kind == kind && error.to_string().contains(text), "{error}");
}

alone!(calls_that_make_no_sense, |gpus| on_ranks(&Case::new(Layout::Expert, Payload::Bf16), gpus, calls));

fn calls(rank: &Rank) {
    let (gpu, buffer, shape, way) = (&rank.gpu, &rank.buffer, rank.shape(), Way { early: true, ..Way::default() });
    let usage = |result: Result<Enqueued>, text: &str| refused(result, ErrorKind::Usage, text);
    let world = World::new(shape, 3, &way);
    gpu.reset();
    let args = expert_args(gpu, &shape, world.input(gpu, rank.me as usize, &way));
    let put = |args: &EpDispatchArgs, split| put_dispatch_expert(buffer, &gpu.stream, args, split);
    let mut wrong = args;
    wrong.common.tokens = shape.max_tokens + 1;
    usage(put(&wrong, Split::Whole), "more than max_tokens_per_rank, 14");
    usage(put(&EpDispatchArgs { idx_bytes: 2, ..args }, Split::Whole), "not 4 or 8");
    usage(put(&EpDispatchArgs { x_fp8: 1, ..args }, Split::Whole), "dispatch_dtype is bf16");
    usage(put(&EpDispatchArgs { x: args.x + 8, ..args }, Split::Whole), "not aligned to 16 bytes");
    refused(buffer.take_region(), ErrorKind::Usage, "not made for the rank layout");
    refused(buffer.disconnect(&[rank.me]), ErrorKind::Usage, "not another rank");
    refused(buffer.mask(&[9]), ErrorKind::Usage, "rank 9 is not a connected other rank");

    // What is sent is received in that order, and no more than two are under way.
    let first = put(&args, Split::Send).expect("the first");
    usage(put(&args, Split::Whole), "finish it first");
    let mut second = put(&args, Split::Send).expect("the second");
    usage(put(&args, Split::Send), "2 calls of dispatch were sent");
    let early = second.pending.as_mut().expect("a rest");
    refused(finish_in(early, rank), ErrorKind::Usage, "in the order of sending");
    let handle = finish(first, gpu);
    finish(second, gpu);
    gpu.wait();

    let other = make_buffer(&rank.case, &rank.group, &rank.context, "others", gpu.ordinal, rank.gpus);
    let stride = 2 * u64::from(shape.hidden);
    let y = gpu.room((shape.local_experts() * shape.ranks * shape.max_tokens) as usize * stride as usize);
    let result = gpu.room(shape.max_tokens as usize * stride as usize);
    let combine = EpCombineArgs { y, y_stride: stride, out: result, out_stride: stride, ..EpCombineArgs::ZERO };
    let theirs = put_combine_expert(&other, &gpu.stream, &combine, &handle, Split::Whole);
    usage(theirs, "the handle is of another buffer");
    // Nor can a graph be made of it; the capture is not broken by that, and is put to use.
    let mut captured = None;
    let graph = gpu.stream.record(|stream| {
        captured = put_combine_expert(&other, stream, &combine, &handle, Split::Whole).err();
        put_combine_expert(buffer, stream, &combine, &handle, Split::Whole).map(drop)
    });
    let captured: Error = captured.expect("refused in a capture too");
    assert!(captured.kind == ErrorKind::Usage && captured.to_string().contains("of another buffer"), "{captured}");
    rank.meet("captured", &rank.case.everybody());
    let graph = graph.expect("a graph");
    launch(&graph, gpu);
    gpu.wait();
    other.destroy().expect("destroy");
    let closed = put_dispatch_expert(&other, &gpu.stream, &args, Split::Whole);
    refused(closed, ErrorKind::Closed, "destroyed");
    put_combine_expert(buffer, &gpu.stream, &combine, &handle, Split::Whole).expect("combine");
    gpu.wait();
    all_ways(rank, 0..2, &[]);
}

#[allow(unsafe_code)]
fn finish_in(pending: &mut crossrail_ep_cuda::Pending, rank: &Rank) -> Result<crossrail_ep_cuda::Completion> {
    // SAFETY: the stream is the rank's own.
    unsafe { pending.finish_in(rank.gpu.stream.handle()) }
}

alone!(buffers_that_are_not_alike, |gpus| {
    on_ranks_apart(&Case::new(Layout::Rank, Payload::Bf16), gpus, |rank| {
        let gpu = &rank.gpu;
        let all = rank.case.everybody();
        for (name, differs) in [("more regions", "regions is "), ("fp8 rows", "dispatch_dtype is ")] {
            let (mut options, mut config): (DeviceOptions, Config) =
                (options(&rank.case, rank.me, gpu.ordinal, rank.gpus), rank.case.config());
            match (rank.me, differs) {
                (3, "regions is ") => options.regions = 3,
                (3, _) => config.payload = F32,
                _ => {}
            }
            let other = DeviceBuffer::new(&rank.group, &rank.context, name, config, options).expect("a buffer");
            refused(other.connect(&all, true, Some(LIMIT)), ErrorKind::Mismatch, differs);
            assert_eq!(other.connected(), [rank.me]);
            other.destroy().expect("destroy");
            refused(other.connect(&all, true, Some(LIMIT)), ErrorKind::Closed, "destroyed");
        }
        // The buffer that is alike on all is not touched by that.
        rank.connect(&all);
        all_ways(&rank, 0..2, &[]);
        rank.leave();
    });
});
