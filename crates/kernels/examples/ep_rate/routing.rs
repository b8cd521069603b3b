//! Who goes where: the experts with the highest random scores, distinct; and their weights.

/// One rank's tokens.
pub(crate) struct Routing {
    /// [tokens][K].
    pub(crate) idx: Vec<i64>,
    /// [tokens][K].
    pub(crate) weights: Vec<f32>,
}

impl Routing {
    pub(crate) fn random(rank: u32, tokens: u32, topk: u32, experts: u32) -> Routing {
        let mut numbers = Numbers(u64::from(rank) + 1);
        let (mut idx, mut weights) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            let mut chosen: Vec<i64> = Vec::new();
            while chosen.len() < topk as usize {
                let expert = (numbers.next() % u64::from(experts)) as i64;
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                }
            }
            weights.extend(chosen.iter().map(|_| (numbers.next() % 1000 + 1) as f32 / 1000.0));
            idx.extend(chosen);
        }
        Routing { idx, weights }
    }

    pub(crate) fn idx_bytes(&self) -> Vec<u8> {
        self.idx.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    pub(crate) fn weight_bytes(&self) -> Vec<u8> {
        self.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect()
    }
}

/// Bytes of bf16 numbers between -2 and 2.
pub(crate) fn rows(seed: u32, tokens: u32, hidden: u32) -> Vec<u8> {
    let mut numbers = Numbers(u64::from(seed) + 77);
    let mut one = || {
        let value = (numbers.next() % 4001) as f32 / 1000.0 - 2.0;
        ((value.to_bits() >> 16) as u16).to_le_bytes()
    };
    (0..tokens * hidden).flat_map(|_| one()).collect()
}

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}
