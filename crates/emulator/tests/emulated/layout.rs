//! The kernel that counts tokens by where they go, against a count on the host.

use crossrail_kernels::ep::{EpLayoutArgs, LAYOUT, LayoutKernel};

use crossrail_emulator::{Build, Emulator, GpuMemory as _, Gpus as _, Numbers};

const SOURCE: &str = "kernels/ep_layout.cu";

/// Tokens, ids of each, ids from one token to the next, experts, ranks.
const SHAPES: [[u32; 5]; 6] = [
    [0, 8, 8, 16, 2],
    [1, 1, 1, 1, 1],
    [5, 2, 3, 8, 4],
    [130, 8, 8, 288, 8],
    [1500, 3, 4, 64, 64],
    [40, 17, 17, 12, 3],
];

/// Ids of which some are none of the experts.
fn ids(numbers: &mut Numbers, count: u32, experts: u32) -> Vec<i64> {
    let mut id = || match numbers.below(10) {
        0 => -1,
        1 => i64::from(experts) + numbers.below(3) as i64,
        2 => i64::MIN,
        _ => numbers.below(u64::from(experts)) as i64,
    };
    (0..count).map(|_| id()).collect()
}

/// Counts one batch; an error, or what came out wrong.
fn count(emulator: &mut Emulator, shape: [u32; 5], seed: u64) -> Result<(), String> {
    let [tokens, topk, stride, experts, ranks] = shape;
    let mut numbers = Numbers(seed);
    let chosen = ids(&mut numbers, (tokens * stride).max(1), experts);
    let (mut of_ranks, mut of_experts) = (vec![0u32; ranks as usize], vec![0u32; experts as usize]);
    let mut in_rank = vec![0u8; (tokens * ranks) as usize];
    for token in 0..tokens as usize {
        let row = &mut in_rank[token * ranks as usize..][..ranks as usize];
        for id in &chosen[token * stride as usize..][..topk as usize] {
            if let Some(counted) = usize::try_from(*id).ok().and_then(|id| of_experts.get_mut(id)) {
                *counted += 1;
                row[*id as usize / (experts / ranks) as usize] = 1;
            }
        }
        for (counted, goes) in of_ranks.iter_mut().zip(row) {
            *counted += u32::from(*goes);
        }
    }
    let given = emulator.memory_of("ids", &chosen);
    let out_ranks = emulator.memory("out_ranks", 4 * ranks as usize);
    let out_experts = emulator.memory("out_experts", 4 * experts as usize);
    let out_in_rank = emulator.memory("out_in_rank", in_rank.len().max(1));
    let args = EpLayoutArgs {
        topk_idx: given.address(),
        stride: stride.into(),
        out_ranks: out_ranks.address(),
        out_experts: out_experts.address(),
        out_in_rank: out_in_rank.address(),
        tokens,
        topk,
        experts,
        ranks,
    };
    emulator.launch(LAYOUT, &args, LayoutKernel::grid(experts, ranks));
    emulator.run(seed)?;
    let words = |bytes: &[u8]| bytes.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
    let came: [Vec<u32>; 2] = [words(&out_ranks.bytes()), words(&out_experts.bytes())];
    if came != [of_ranks, of_experts] || out_in_rank.bytes()[..in_rank.len()] != in_rank {
        return Err(format!("{shape:?}, seed {seed}: counts are wrong"));
    }
    Ok(())
}

#[test]
fn tokens_are_counted_by_where_they_go() {
    let Some(mut emulator) = Emulator::build(SOURCE, &[]) else { return };
    for shape in SHAPES {
        assert!(LayoutKernel::takes(shape[3], shape[4]), "{shape:?}");
        for seed in 0..2 {
            count(&mut emulator, shape, seed).unwrap();
        }
    }
}

#[test]
fn a_count_that_is_wrong_is_noticed() {
    for (from, to) in [
        ("if (chosen[i] >= args.experts) continue;", "if (chosen[i] == ~u64(0)) continue;"),
        ("atomicAdd(&of_ranks[rank], 1u)", "++of_ranks[rank]"),
        ("first < args.topk; first += LAYOUT_IDS", "first < LAYOUT_IDS; first += LAYOUT_IDS"),
    ] {
        let Some(mut emulator) = Build::new(&[SOURCE]).broken(SOURCE, from, to).emulator() else { return };
        let noticed =
            (0..3).any(|seed| [SHAPES[3], SHAPES[5]].iter().any(|shape| count(&mut emulator, *shape, seed).is_err()));
        assert!(noticed, "{to:?} was not noticed");
    }
}

#[test]
fn counters_are_of_shared_memory() {
    assert!(LayoutKernel::takes(12_224, 64) && !LayoutKernel::takes(12_288, 64), "48 KiB");
    assert!(!LayoutKernel::takes(8, 3) && !LayoutKernel::takes(0, 1) && !LayoutKernel::takes(130, 65));
}
