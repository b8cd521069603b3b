//! The tensors of measured operations in GPU memory.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail::unpack::cuda::{DeviceMemory, Stream};
use crossrail_ep::{Config, Layout, Payload, Scale};
use crossrail_ep_cuda::{EpCommon, EpDispatchArgs};
use crossrail_ep_host::rows::Kernels;
use crossrail_types::{Error, ErrorKind, Result};

/// Size of the memory that is filled to flush the GPU's cache: larger than the cache. Filling it takes longer than the host
/// takes to enqueue an iteration.
const FLUSH: usize = 256 << 20;

/// The data of this rank for every iteration, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceEpWork<'a> {
    /// The layout of the dispatch.
    pub layout: Layout,
    /// Whether the caller casts rows to fp8 before the dispatch; otherwise the dispatch does.
    pub cast_before: bool,
    /// bf16 `[tokens, hidden]`.
    pub x: &'a [u8],
    /// i64 `[tokens, topk]`.
    pub topk_idx: &'a [u8],
    /// f32 `[tokens, topk]`.
    pub topk_weights: &'a [u8],
    /// bf16 `[n, hidden]`: row i of the experts' outputs is row i mod n of these.
    pub outputs: &'a [u8],
}

/// The tensors of one rank. Those that the layout does not use are empty.
pub(crate) struct Tensors {
    _input: [DeviceMemory; 4],
    pub(crate) y: DeviceMemory,
    pub(crate) sums: DeviceMemory,
    pub(crate) rows: DeviceMemory,
    pub(crate) scales: DeviceMemory,
    pub(crate) counts: DeviceMemory,
    pub(crate) ranges: DeviceMemory,
    pub(crate) source: DeviceMemory,
    /// Counts and ranges of the dispatch without tokens that synchronises the ranks.
    pub(crate) meeting: [DeviceMemory; 2],
    pub(crate) flush: DeviceMemory,
}

impl Tensors {
    pub(crate) fn new(
        stream: &Stream,
        limit: Duration,
        config: &Config,
        work: &DeviceEpWork<'_>,
    ) -> Result<(EpDispatchArgs, Tensors)> {
        let (gpu, row, topk) = (stream.context(), 2 * config.hidden, config.topk);
        let tokens = work.x.len() / row;
        let fits = work.x.len() == tokens * row
            && work.topk_idx.len() == tokens * topk * 8
            && work.topk_weights.len() == tokens * topk * 4
            && !work.outputs.is_empty()
            && work.outputs.len().is_multiple_of(row);
        if !fits || tokens > config.max_tokens {
            return Err(usage(ErrorKind::Usage, "the tensors do not fit the buffer".to_owned()));
        }
        let empty = |bytes: usize| DeviceMemory::new(gpu, bytes.max(16));
        let filled = |bytes: &[u8]| {
            let memory = empty(bytes.len())?;
            fill(stream, limit, &memory, bytes).map(|()| memory)
        };
        let cast = (work.cast_before && config.payload != Payload::Bf16).then(|| cast(work.x, config));
        let (x, scales) = cast.as_ref().map_or((work.x, &[][..]), |(rows, scales)| (rows, scales));
        let input = [filled(x)?, filled(scales)?, filled(work.topk_idx)?, filled(work.topk_weights)?];
        let count = u32::try_from(tokens).map_err(|_| usage(ErrorKind::Usage, "too many tokens".to_owned()))?;
        let args = EpDispatchArgs {
            common: EpCommon { tokens: count, ..EpCommon::ZERO },
            x: input[0].address(),
            x_stride: if cast.is_some() { config.hidden as u64 } else { row as u64 },
            x_fp8: cast.is_some().into(),
            x_scales: input[1].address(),
            x_scale_strides: dense_scale_strides(config),
            topk_idx: input[2].address(),
            idx_bytes: 8,
            topk_weights: input[3].address(),
            expert_alignment: 1,
            ..EpDispatchArgs::ZERO
        };
        let (local, ranks) = (config.local_experts(), config.ranks as usize);
        let is_expert = work.layout == Layout::Expert;
        let results = if is_expert { local * most_rows(config) } else { 0 };
        let ranges = if is_expert { local * ranks * 8 } else { (ranks + 1) * 8 };
        let outputs = if is_expert { results } else { most_rows(config) };
        let exactly = |bytes: usize| DeviceMemory::new(gpu, bytes);
        let memory = Tensors {
            _input: input,
            y: empty(outputs * row)?,
            sums: empty(tokens * row)?,
            rows: empty(results * config.payload.row_bytes(config.hidden))?,
            scales: empty(if is_expert { results * scale_columns(config) * 4 } else { 0 })?,
            counts: exactly(local * 4)?,
            ranges: exactly(ranges)?,
            source: empty(results * 4)?,
            meeting: [exactly(local * 4)?, exactly(ranges)?],
            flush: empty(FLUSH)?,
        };
        repeat(stream, limit, &memory.y, work.outputs)?;
        Ok((args, memory))
    }
}

/// Strides of contiguous scales, row by row: four bytes per block, or per four blocks of ue8m0.
fn dense_scale_strides(config: &Config) -> [u64; 2] {
    [config.payload.scale_bytes(config.hidden) as u64, 4]
}

/// Columns of an expert's scales, of four bytes each.
pub(crate) fn scale_columns(config: &Config) -> usize {
    match config.payload {
        Payload::Bf16 => 0,
        Payload::Fp8(Scale::Ue8m0) => (config.hidden / crossrail_ep::BLOCK).div_ceil(4),
        Payload::Fp8(_) => config.hidden / crossrail_ep::BLOCK,
    }
}

pub(crate) fn most_rows(config: &Config) -> usize {
    config.ranks as usize * config.max_tokens
}

/// Casts rows to fp8; returns them and their scales.
fn cast(x: &[u8], config: &Config) -> (Vec<u8>, Vec<u8>) {
    let Payload::Fp8(kind) = config.payload else { return (Vec::new(), Vec::new()) };
    let (hidden, scale) = (config.hidden, config.payload.scale_bytes(config.hidden));
    let kernels = Kernels::detect();
    let tokens = x.len() / (2 * hidden);
    let (mut rows, mut scales) = (vec![0; tokens * hidden], vec![0; tokens * scale]);
    let parts = x.chunks_exact(2 * hidden).zip(rows.chunks_exact_mut(hidden)).zip(scales.chunks_exact_mut(scale));
    for ((row, to), factors) in parts {
        // SAFETY: a row of `hidden` values, and as much room as it and its scales take.
        unsafe { kernels.cast_row(row.as_ptr().cast(), hidden, to.as_mut_ptr(), factors.as_mut_ptr(), kind) };
    }
    (rows, scales)
}

fn fill(stream: &Stream, limit: Duration, memory: &DeviceMemory, bytes: &[u8]) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    // SAFETY: the memory is at least as long; both stay until the stream was waited for.
    unsafe { stream.copy_in(memory.address(), bytes.as_ptr(), bytes.len())? };
    stream.wait(limit)
}

/// Fills the memory with repetitions of `bytes`.
fn repeat(stream: &Stream, limit: Duration, memory: &DeviceMemory, bytes: &[u8]) -> Result<()> {
    let mut done = bytes.len().min(memory.len());
    fill(stream, limit, memory, &bytes[..done])?;
    while done < memory.len() {
        let more = done.min(memory.len() - done);
        // SAFETY: both parts are of the memory and do not overlap; it stays until the stream was waited for.
        unsafe { stream.copy_within(memory.address() + done as u64, memory.address(), more)? };
        done += more;
    }
    stream.wait(limit)
}

pub(crate) fn usage(kind: ErrorKind, text: String) -> Error {
    Error::new(kind, "bench ep", text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(payload: Payload) -> Config {
        Config {
            ranks: 2,
            max_tokens: 8,
            hidden: 640,
            experts: 4,
            topk: 2,
            payload,
            layouts: vec![Layout::Expert],
            prereduce: true,
            share_node: true,
            timeout: Duration::from_secs(1),
            on_loss: crossrail_ep::OnLoss::Raise,
        }
    }

    #[test]
    fn scales_of_a_row_take_words_and_packed_ones_whole_words() {
        let columns = [Payload::Bf16, Payload::Fp8(Scale::F32), Payload::Fp8(Scale::Ue8m0)];
        assert_eq!(columns.map(|payload| scale_columns(&config(payload))), [0, 5, 2]);
    }

    #[test]
    fn scales_of_given_rows_go_by_words() {
        for (scale, row) in [(Scale::F32, 20), (Scale::Ue8m0, 5)] {
            assert_eq!(dense_scale_strides(&config(Payload::Fp8(scale))), [row, 4], "{scale:?}");
        }
    }

    #[test]
    fn rows_are_cast_one_by_one() {
        let ones: Vec<u8> = 0x3F80_u16.to_le_bytes().repeat(640);
        let twos: Vec<u8> = 0x4000_u16.to_le_bytes().repeat(640);
        let (rows, scales) = cast(&[ones, twos].concat(), &config(Payload::Fp8(Scale::F32)));
        assert_eq!(rows, vec![0x7E; 2 * 640], "448, the largest e4m3");
        let scales: Vec<f32> = scales.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let expected = [1.0 / 448.0, 2.0 / 448.0].map(|scale: f32| [scale; 5]).concat();
        assert_eq!(scales, expected);
        assert_eq!(cast(&[0; 1280], &config(Payload::Bf16)), (Vec::new(), Vec::new()));
    }
}
