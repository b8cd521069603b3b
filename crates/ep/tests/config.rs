//! Which configurations are refused.
#![allow(missing_docs)]

use std::time::Duration;

use crossrail_ep::{Config, Layout, MOST_RANKS, Payload, Scale};
use crossrail_types::ErrorKind;

fn config() -> Config {
    Config {
        ranks: 3,
        max_tokens: 5,
        hidden: 256,
        experts: 6,
        topk: 4,
        payload: Payload::Fp8(Scale::F32),
        layouts: vec![Layout::Expert, Layout::Rank],
        prereduce: true,
        share_node: true,
        timeout: Duration::from_secs(1),
        on_loss: crossrail_ep::OnLoss::Raise,
    }
}

#[test]
fn numbers_that_make_no_sense_are_named() {
    let wrong = [
        (Config { ranks: 0, ..config() }, "ranks"),
        (Config { ranks: MOST_RANKS as u32 + 1, ..config() }, "ranks"),
        (Config { experts: 7, ..config() }, "num_experts"),
        (Config { topk: 33, ..config() }, "topk"),
        (Config { topk: 7, ..config() }, "topk"),
        (Config { hidden: 200, ..config() }, "hidden"),
        (Config { hidden: 0, ..config() }, "hidden"),
        (Config { max_tokens: 0, ..config() }, "max_tokens"),
        (Config { layouts: vec![], ..config() }, "layouts"),
    ];
    for (config, name) in wrong {
        let error = config.check().expect_err(name);
        assert!(error.kind == ErrorKind::Usage && error.detail.contains(name), "{error}");
    }
    Config { payload: Payload::Bf16, hidden: 200, ..config() }.check().expect("bf16 has no blocks");
}
