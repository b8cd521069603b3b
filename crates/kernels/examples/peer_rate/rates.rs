//! Rates: one pair, both directions, everybody to everybody.

use crossrail_types::{format_size, parse_size};
use serde_json::{Value, json};

use crate::rig::{Link, MOST, Rig, Way};
use crate::{Outcome, figures, percentile, with};

const SMALLEST: usize = 4 << 10;
const WARMUP: usize = 2;
const SAMPLES: usize = 12;
/// About how many bytes a link sends for one sample, in at most so many sends.
const SAMPLE_BYTES: usize = 512 << 20;
const MOST_SENDS: usize = 64;
/// The size at which the number of blocks of bulk copies is tried out.
const TRIED: usize = 64 << 20;
const TRIED_BLOCKS: [u32; 5] = [4, 8, 16, 21, 32];

/// Sizes for which receivers fetch, too.
const PULLED: [usize; 4] = [64 << 10, 1 << 20, 16 << 20, 64 << 20];

/// Who sends to whom.
struct Pattern<'a> {
    name: &'static str,
    /// `push`: senders do it; `pull`: receivers.
    direction: &'static str,
    links: Vec<&'a Link>,
    /// How many links each GPU has on which it sends (and as many on which it receives).
    fan: usize,
}

/// One case.
struct Case<'a> {
    pattern: &'a Pattern<'a>,
    way: Way,
    size: usize,
    blocks: Option<u32>,
}

/// One of the sizes that are tried.
pub(crate) fn size(text: &str) -> Outcome<usize> {
    let size = usize::try_from(parse_size(text)?)?;
    sizes().find(|tried| *tried == size).ok_or_else(|| {
        let tried: Vec<String> = sizes().map(|size| format_size(size as u64)).collect();
        format!("--size {text}: sizes are {}", tried.join(", ")).into()
    })
}

fn sizes() -> impl Iterator<Item = usize> {
    std::iter::successors(Some(SMALLEST), |size| Some(4 * size)).take_while(|size| *size <= MOST)
}

/// All cases, or those of one size.
pub(crate) fn rows(rig: &Rig, only: Option<usize>) -> Outcome<Vec<Value>> {
    println!(
        "{:<5} {:<4} {:<10} {:>7} {:>7} {:>11} {:>11} {:>13}",
        "what", "how", "by", "size", "blocks", "p50 us", "GB/s", "of the engine"
    );
    let mut rows = Vec::new();
    for pattern in patterns(rig) {
        let sizes = sizes().filter(|size| only.is_none_or(|only| only == *size));
        for size in sizes.filter(|size| pattern.direction == "push" || PULLED.contains(size)) {
            let mut engine = None;
            for way in [Way::Engine, Way::Copy, Way::Put, Way::Bulk] {
                let blocks = share(rig, way, pattern.fan);
                let row = row(rig, &Case { pattern: &pattern, way, size, blocks }, engine)?;
                engine = engine.or(row["gb_per_s"].as_f64());
                rows.push(row);
            }
            for blocks in TRIED_BLOCKS.into_iter().filter(|_| size == TRIED) {
                rows.push(row(rig, &Case { pattern: &pattern, way: Way::Bulk, size, blocks: Some(blocks) }, engine)?);
            }
        }
    }
    Ok(rows)
}

fn patterns(rig: &Rig) -> Vec<Pattern<'_>> {
    let mut patterns = Vec::new();
    for (direction, links) in [("push", &rig.pushes), ("pull", &rig.pulls)] {
        let among = |pairs: &[(usize, usize)]| -> Vec<&Link> {
            links.iter().filter(|link| pairs.contains(&(link.from, link.to))).collect()
        };
        patterns.push(Pattern { name: "one", direction, links: among(&[(0, 1)]), fan: 1 });
        patterns.push(Pattern { name: "both", direction, links: among(&[(0, 1), (1, 0)]), fan: 1 });
        if rig.gpus.len() > 2 {
            patterns.push(Pattern { name: "all", direction, links: links.iter().collect(), fan: rig.gpus.len() - 1 });
        }
    }
    patterns
}

/// The blocks of one link's launch, so that those of all of a GPU's links fit on it at once.
fn share(rig: &Rig, way: Way, fan: usize) -> Option<u32> {
    let kernels = &rig.gpus[0].kernels;
    let fan = u32::try_from(fan).unwrap_or(u32::MAX).max(1);
    match way {
        Way::Engine => None,
        Way::Copy => Some((kernels.most_blocks() / fan).max(1)),
        Way::Put | Way::PutTwice | Way::Bulk => Some((kernels.multiprocessors() / fan).max(1)),
    }
}

/// One case, verified and timed; `engine`: the copy engine's rate.
fn row(rig: &Rig, case: &Case<'_>, engine: Option<f64>) -> Outcome<Value> {
    let Case { pattern, way, size, blocks } = *case;
    rig.verify(&pattern.links, way, size, blocks)?;
    let sends = (SAMPLE_BYTES / size).clamp(4, MOST_SENDS);
    let mut samples = Vec::new();
    for i in 0..WARMUP + SAMPLES {
        let time = rig.timed(&pattern.links, |link| (0..sends).try_for_each(|_| rig.send(link, way, size, blocks)))?;
        if i >= WARMUP {
            samples.push(time / sends as f64);
        }
    }
    let p50 = percentile(&samples, 0.5);
    let rate = (size * pattern.fan) as f64 / p50 / 1e3;
    let ratio = engine.map(|engine| rate / engine);
    println!(
        "{:<5} {:<4} {:<10} {:>7} {:>7} {:>11.2} {:>11.1} {:>13}",
        pattern.name,
        pattern.direction,
        way.name(),
        format_size(size as u64),
        blocks.map_or("-".to_owned(), |blocks| blocks.to_string()),
        p50,
        rate,
        ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
    );
    let facts = json!({
        "what": "peer", "transport": "cuda", "pattern": pattern.name, "direction": pattern.direction, "method": way.name(), "size": size,
        "gpus": if pattern.fan > 1 { rig.gpus.len() } else { 2 }, "blocks": blocks, "sends_per_sample": sends,
        "bytes_logical": size * pattern.links.len(), "gb_per_s": rate, "rate_is": "sent by each GPU, slowest, p50",
        "verified": true, "ratio": {"engine": ratio},
    });
    Ok(with(figures(&samples), facts))
}
