//! What the engine reports, as text for people and as JSON.

use crossrail::{Explain, MoveExplain, Receipt};
use crossrail_ep_host::{Fault, Link, LinkKind, Plan};
use serde_json::{Value, json};

use crate::abi::{JSON, TEXT};
use crate::failure::{Failure, usage};

/// `text` or `json`, as the caller has asked.
pub(crate) fn formatted(
    operation: &str,
    format: i32,
    text: impl FnOnce() -> String,
    json: impl FnOnce() -> Value,
) -> Result<String, Box<Failure>> {
    match format {
        TEXT => Ok(text()),
        JSON => Ok(json().to_string()),
        _ => Err(usage(operation, format!("format {format}: XRAIL_TEXT or XRAIL_JSON"))),
    }
}

pub(crate) fn explain_json(explain: &Explain) -> Value {
    let candidate = |way: &crossrail::Candidate| {
        json!({
            "lane": way.lane, "transport": way.transport, "device": way.device, "chosen_for": way.chosen_for,
            "latency_us": way.latency_us, "gb_per_s": way.gb_per_s, "score_us": way.score_us, "reason": way.reason,
            "missed": way.missed,
        })
    };
    json!({
        "peer": explain.peer, "small": explain.small, "large": explain.large, "available": explain.available,
        "selected": explain.selected, "candidates": explain.candidates.iter().map(candidate).collect::<Vec<_>>(),
    })
}

pub(crate) fn receipt_json(receipt: &Receipt) -> Value {
    let lane = |lane: crossrail::LaneShare| {
        let crossrail::LaneShare { name, bytes, chunks, resent } = lane;
        json!({ "name": &*name, "bytes": bytes, "chunks": chunks, "resent": resent })
    };
    let held = receipt.held();
    json!({
        "bytes": receipt.bytes, "tag": receipt.tag, "peer": &*receipt.peer(), "protocol": receipt.protocol.to_string(),
        "lanes": receipt.lanes().into_iter().map(lane).collect::<Vec<_>>(), "match_us": receipt.match_us,
        "window_us": receipt.window_us, "wire_us": receipt.wire_us, "copy_us": receipt.copy_us,
        "pushed": receipt.pushed, "pack_us": receipt.pack_us, "unpack_us": receipt.unpack_us,
        "slot_us": receipt.slot_us,
        "held": { "pack_us": held.pack_us, "unpack_us": held.unpack_us, "slot_us": held.slot_us },
        "notes": receipt.notes(),
    })
}

pub(crate) fn receipt_text(receipt: &Receipt) -> String {
    let lanes: Vec<String> = receipt.lanes().iter().map(|lane| format!("{} {}", lane.name, lane.bytes)).collect();
    let Receipt { bytes, protocol, match_us, window_us, wire_us, copy_us, .. } = receipt;
    let mut text = format!(
        "{bytes} bytes, {protocol}, peer {}, lanes [{}], match {match_us:.1} us, window {window_us:.1} us, wire \
         {wire_us:.1} us, copy {copy_us:.1} us",
        receipt.peer(),
        lanes.join(", ")
    );
    receipt.notes().iter().for_each(|note| text.extend(["; ", note]));
    text
}

pub(crate) fn move_json(explain: &MoveExplain) -> Value {
    let MoveExplain { how, why, lane, rows, runs, nbytes } = explain;
    json!({ "how": how, "why": why, "lane": lane, "rows": rows, "runs": runs, "nbytes": nbytes })
}

pub(crate) fn move_text(explain: &MoveExplain) -> String {
    let MoveExplain { how, why, lane, rows, runs, nbytes } = explain;
    format!("{how}: {why} ({rows} rows in {runs} runs, {nbytes} bytes, {lane})")
}

/// A text of one line for each.
pub(crate) fn lines(all: impl Iterator<Item = String>) -> String {
    all.collect::<Vec<_>>().join("\n")
}

fn kind_of(link: &Link) -> &'static str {
    match link.kind {
        LinkKind::Myself => "self",
        LinkKind::Heap => "heap",
        LinkKind::Network => "network",
    }
}

pub(crate) fn link_json(link: &Link) -> Value {
    let lane = |lane: &crossrail::LaneReport| {
        let crossrail::LaneReport { name, transport, alive, tx_bytes, rx_bytes, retransmits } = lane;
        json!({
            "name": name, "transport": transport, "alive": alive, "tx_bytes": tx_bytes, "rx_bytes": rx_bytes,
            "retransmits": retransmits,
        })
    };
    json!({
        "rank": link.rank, "kind": kind_of(link), "masked": link.masked,
        "lanes": link.lanes.iter().map(lane).collect::<Vec<_>>(), "missed": link.missed,
    })
}

pub(crate) fn link_text(link: &Link) -> String {
    let masked = if link.masked { ", masked" } else { "" };
    let mut text = format!("rank {}: {}{masked}", link.rank, kind_of(link));
    for lane in &link.lanes {
        let lost = if lane.alive { "" } else { ", lost" };
        text.push_str(&format!("; {} sent {} received {} bytes{lost}", lane.name, lane.tx_bytes, lane.rx_bytes));
    }
    link.missed.iter().for_each(|(name, why)| text.push_str(&format!("; not {name}: {why}")));
    text
}

pub(crate) fn fault_json(fault: &Fault) -> Value {
    let Fault { rank, operation, number, stage, why, left, masked } = fault;
    json!({
        "rank": rank, "operation": operation, "number": number, "stage": stage, "why": why, "left": left,
        "masked": masked, "text": fault.to_string(),
    })
}

pub(crate) fn plan_json(plan: &Plan) -> Value {
    let kinds: serde_json::Map<String, Value> =
        plan.kinds.iter().map(|(kind, bytes)| ((*kind).to_owned(), json!(bytes))).collect();
    let Plan { sharing, free, largest_tokens, .. } = plan;
    json!({
        "bytes": kinds, "total": plan.total(), "local_ranks": sharing, "free": free, "largest_tokens": largest_tokens,
    })
}
