//! Well-formed inputs to start from: recorded conversations, messages, addresses, settings.

use crossrail_control::builtin::frames::{self, Answer, Change, Item, Request, Value};
use crossrail_handshake::wire::{
    Challenge, Confirm, HelloHead, LaneHello, Proof, Reject, RejectCode, Reply, STORE, WORKER,
};
use crossrail_handshake::{Address, Device, Hello, LanePurpose};
use crossrail_proto::{Body, frame};
use crossrail_types::Checksum;

use crate::input::Input;
use crate::protocol::End;

/// Magic number and version in front of an address's fields.
pub(crate) const ADDRESS_START: &[u8] = b"\xc5XRA\x01";

/// Every seed: the target, the file's name, its bytes.
pub fn seeds() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for (name, kind, script) in SCRIPTS {
        for (who, log) in converse(*kind, script).into_iter().enumerate() {
            seeds.push(("protocol", format!("{name}-{}", ["a", "b"][who]), log));
        }
        seeds.push(("ends", (*name).to_owned(), crate::ends::script(*kind, script)));
    }
    seeds.push(("protocol", "acks-of-other-lanes".to_owned(), acks_of_other_lanes()));
    for (name, bytes) in ADMISSIONS {
        seeds.push(("admission", (*name).to_owned(), bytes.to_vec()));
    }
    for (name, bytes) in PLUGINS {
        seeds.push(("plugin", (*name).to_owned(), bytes.to_vec()));
    }
    seeds.push(("plugin", "fragments".to_owned(), fragments()));
    for (name, bytes) in PLACINGS {
        seeds.push(("placing", (*name).to_owned(), bytes.to_vec()));
    }
    for (name, bytes) in crossrail_fabric::fuzzing::seeds() {
        seeds.push(("fabric", name.to_owned(), bytes));
    }
    for (name, bytes) in messages() {
        seeds.push(("handshake", name.to_owned(), bytes));
    }
    let address = hello().address().encode();
    seeds.push(("address", "full".to_owned(), address[ADDRESS_START.len()..address.len() - 8].to_vec()));
    let bare = Address { unix: None, control: Vec::new(), name: String::new(), ..hello().address() }.encode();
    seeds.push(("address", "bare".to_owned(), bare[ADDRESS_START.len()..bare.len() - 8].to_vec()));
    for (place, text) in SETTINGS.iter().enumerate() {
        seeds.push(("settings", format!("text-{place:02}"), text.as_bytes().to_vec()));
    }
    for (name, bytes) in store_seeds() {
        seeds.push(("store", name.to_owned(), bytes));
    }
    for (name, bytes) in crossrail_cuda_ipc::fuzzing::seeds() {
        seeds.push(("gpu", name.to_owned(), bytes));
    }
    for (name, bytes) in crossrail::fuzzing::seeds() {
        seeds.push(("lists", name.to_owned(), bytes));
    }
    seeds
}

/// Greetings, frames, and conversations of the built-in store with its clients.
fn store_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let challenge = Challenge { version: 1, flags: 1, id: None, nonce: [3; 32] };
    let reply = Reply { version: 1, flags: 1, nonce: [4; 32], mac: [5; 32] };
    let reject = Reject::new(RejectCode::Refused, "wrong secret");
    let put = |key, lease| Request::Put { key, value: Value(b"value"), lease };
    let set = Request::CompareAndSet { key: "a", expected: 0, value: Value(b"v"), lease: 0 };
    let wait = Request::Wait { keys: vec!["a", "a/b", "c"], timeout_us: 50_000 };
    let watch = Request::Watch { prefix: "a", after: 0 };
    let frame = |request: &Request<'_>| {
        let mut bytes = Vec::new();
        frames::encode(&mut bytes, 7, request).unwrap_or_else(|| unreachable!("it is short"));
        bytes
    };
    let item = Item { key: "a", value: Value(b"value"), revision: 9 };
    let answer = |answer: &Answer<'_>| {
        let mut bytes = Vec::new();
        frames::encode(&mut bytes, 7, answer).unwrap_or_else(|| unreachable!("it is short"));
        bytes
    };
    let changes = answer(&Answer::Changes(vec![Change::Put(item), Change::Gone { key: "a", revision: 10 }]));
    let entries = answer(&Answer::Entries { items: vec![item], revision: 9, more: false });
    vec![
        ("challenge", challenge.encode(&STORE).to_vec()),
        ("reply", reply.encode(&STORE).to_vec()),
        ("proof", Proof { mac: [9; 32] }.encode(&STORE).to_vec()),
        ("reject", reject.encode(&STORE).to_vec()),
        ("frame-put", frame(&put("a", 1))),
        ("frame-wait", frame(&wait)),
        ("frame-changes", changes),
        ("frame-entries", entries),
        (
            "keys",
            asks(&[
                (0, put("a", 0)),
                (0, set),
                (1, Request::Get("a")),
                (1, Request::List("")),
                (2, Request::Delete("a")),
            ]),
        ),
        ("leases", asks(&[(0, Request::Grant(90_000)), (0, put("a", 1)), (1, Request::Renew(1)), (0, put("a/b", 1))])),
        ("revoked", asks(&[(0, Request::Grant(90_000)), (0, put("a", 1)), (0, Request::Revoke(1)), (0, put("a", 1))])),
        ("waits", asks(&[(0, wait.clone()), (1, put("a", 0)), (1, put("c", 0)), (3, wait), (2, put("a/b", 0))])),
        (
            "watches",
            asks(&[(0, put("a", 0)), (0, watch.clone()), (3, watch), (1, put("a/b", 0)), (0, Request::Unwatch(2))]),
        ),
        ("prefix", asks(&[(0, put("a/1", 0)), (0, put("a/2", 0)), (1, Request::DeletePrefix("a/"))])),
    ]
}

/// Requests by turns, then some time.
fn asks(requests: &[(u8, Request<'_>)]) -> Vec<u8> {
    let mut log = Vec::new();
    for (client, request) in requests {
        let mut frame = Vec::new();
        frames::encode(&mut frame, 7, request).unwrap_or_else(|| unreachable!("it is short"));
        let body = &frame[frames::HEAD..];
        log.push(0x80 | client);
        log.push(body.len() as u8);
        log.extend_from_slice(body);
    }
    log.extend_from_slice(&[0, 5, 0, 10, 0x40]);
    log
}

const SETTINGS: &[&str] = &[
    "shm,tcp",
    "^tcp",
    "all",
    "127.0.0.1,127.0.0.2",
    "2M",
    "64KiB",
    "1:4M",
    "1,2,64K",
    "1.5",
    "500ms",
    "2m",
    "auto",
    "16",
    "debug",
    "CROSSRAIL_TLS=shm\nCROSSRAIL_CHUNK=4K\nCROSSRAIL_SECRET=a\nCROSSRAIL_LOG=info\n",
];

/// Which of the two protocols; then faults: which way and what, the byte at which it happens, how much.
/// As `placing.rs` reads them: parts of 16 and more bytes, of one write or several, over both connections; with local
/// writes, ends of access and lost connections in between.
const PLACINGS: &[(&str, &[u8])] = &[
    ("one", &[0, 0, 0, 0, 16, 0, 1, 7]),
    ("two-rails", &[0, 0, 8, 0, 16, 0, 1, 8, 1, 0, 1, 64, 0, 2, 7, 7]),
    ("parts", &[0, 2, 0, 0, 16, 0, 16, 0, 1, 8, 2, 16, 0, 16, 0, 16, 0, 1, 7]),
    ("written", &[4, 0, 1, 1, 4, 255, 255, 2, 7, 32, 0, 1, 0, 7]),
    ("revoked", &[0, 0, 0, 0, 16, 0, 1, 5, 0, 0, 0, 0, 16, 0, 1, 7]),
    ("recalled", &[0, 2, 0, 0, 16, 0, 16, 0, 1, 37, 8, 2, 16, 0, 16, 0, 16, 0, 1, 7]),
    ("dropped", &[4, 0, 64, 1, 64, 1, 0, 0, 7, 0, 0, 0, 0, 16, 0, 1, 7]),
    ("lost", &[4, 0, 64, 1, 6, 7, 72, 0, 0, 0, 7, 8, 0, 0, 0, 16, 0, 1, 7]),
    ("half", &[3, 40, 1, 0, 0, 0, 16, 0, 0, 0, 7, 14]),
    ("ready", &[80, 0, 2, 0, 48, 0, 0, 0, 7]),
];

const ADMISSIONS: &[(&str, &[u8])] = &[
    ("workers", &[0]),
    ("stores", &[1]),
    ("workers-flips", &[0, 0, 20, 0, 1, 1, 30, 0, 128]),
    ("workers-hello", &[0, 0, 160, 0, 4, 1, 130, 0, 2]),
    ("workers-drop", &[0, 6, 90, 0, 3]),
    ("workers-double", &[0, 9, 60, 0, 7]),
    ("workers-reflect", &[0, 11, 70, 0, 31]),
    ("workers-move", &[0, 12, 10, 0, 8, 14, 200, 0, 0]),
    ("stores-flips", &[1, 0, 20, 0, 1, 1, 60, 0, 128]),
    ("stores-reflect", &[1, 11, 50, 0, 31, 6, 70, 0, 2]),
];

/// Version, devices, channels, window, chunk; then what the plugin's functions return: 0 where nothing is unusual.
const PLUGINS: &[(&str, &[u8])] = &[
    ("v4", &[0, 2, 2, 16, 64]),
    ("v8", &[1, 2, 1, 8, 16]),
    ("v12", &[2, 1, 2, 32, 8]),
    ("refuses", &[2, 2, 2, 16, 64, 0, 0, 0, 0, 0, 0, 0, 0, 250]),
];

/// A plugin whose device leaves lists of fragments: the first four have one whole chunk each.
fn fragments() -> Vec<u8> {
    let mut bytes = vec![1, 1, 1, 4, 64];
    // What its functions return up to the receiver's connection, which has the device.
    bytes.resize(bytes.len() + 44, 0);
    bytes.push(200);
    bytes.extend([1, 0, 0, 0].repeat(4));
    bytes.resize(bytes.len() + 32, 0);
    bytes
}

/// A receiver of chunks acknowledges those of either lane over the other one: late, as they are, of no lane, too many.
fn acks_of_other_lanes() -> Vec<u8> {
    let script: Script = &[(1, &[5, 0, 7, 0, 0xf0]), (0, &[4, SEND, 7, 0, 0xa0])];
    let [mut log, _] = converse(2, script);
    for (over, lane, count) in [(8, 1, 0), (0, 2, 1), (8, 9, 1), (0, 2, 1000)] {
        log.push(over);
        log.extend_from_slice(&frame::encode_head(&frame::Frame::ChunkAck { count, lane }, 0).0);
    }
    log
}

/// Which end does what; all that follows from it is carried over before the next.
type Script = &'static [(usize, &'static [u8])];

const SEND: u8 = 2;
const OFFERED: u8 = 16;
const SLOT: u8 = 32;
/// Never with a first frame.
const CHUNKS: u8 = 64;

/// Name, kind of connection (see [`End::new`]), script. Actions: 4 starts (what, tag, length), 5 receives
/// (how, tag, capacity), 6 the rest (which).
const SCRIPTS: &[(&str, u8, Script)] = &[
    ("eager", 0, &[(1, &[5, 0, 7, 0, 2]), (0, &[4, SEND, 7, 100, 0]), (0, &[4, SEND, 8, 0, 0]), (1, &[5, 1, 8, 0, 1])]),
    ("eager-reliable", 1, &[(0, &[4, SEND, 7, 100, 0]), (1, &[5, 2, 0, 0, 1])]),
    ("chunks", 0, &[(1, &[5, 0, 7, 0, 0xf0]), (0, &[4, SEND, 7, 0, 0xa0])]),
    ("small-chunks", 2, &[(0, &[4, SEND, 7, 0, 0x30]), (1, &[5, 1, 7, 0, 0xf0])]),
    (
        "truncated",
        0,
        &[(1, &[5, 0, 7, 10, 0]), (0, &[4, SEND, 7, 0, 0xa0]), (0, &[4, SEND, 7, 90, 0]), (1, &[5, 0, 7, 5, 0])],
    ),
    ("write", 4, &[(0, &[4, 4, 1, 0, 0x40]), (0, &[4, 4, 2, 64, 0]), (0, &[4, 8, 0, 64, 0])]),
    ("read", 0, &[(0, &[4, 1, 1, 0, 0x40]), (0, &[4, 1, 2, 64, 0]), (1, &[6, 11]), (0, &[4, 1, 2, 64, 0])]),
    (
        "direct",
        1,
        &[(1, &[5, 0, 7, 0, 0xf0]), (0, &[4, SEND | OFFERED | SLOT, 7, 0, 0xa0]), (0, &[4, 1 | OFFERED, 1, 0, 0x40])],
    ),
    ("direct-write", 1, &[(0, &[4, 4 | OFFERED | SLOT, 1, 0, 0x40])]),
    ("cancel", 0, &[(0, &[4, SEND, 7, 0, 0xa0]), (0, &[6, 1]), (1, &[5, 0, 7, 0, 0xf0]), (1, &[6, 1])]),
    (
        "lane-lost",
        2,
        &[
            (1, &[5, 0, 7, 0, 0xf0]),
            (0, &[4, SEND, 7, 0, 0x60]),
            (0, &[6, 3]),
            (0, &[4, SEND, 7, 50, 0]),
            (1, &[14, 3]),
        ],
    ),
    (
        "slots",
        2,
        &[
            (1, &[6, 12]),
            (1, &[5, 0, 7, 0, 0xf0]),
            (0, &[4, SEND | CHUNKS, 7, 0, 0x10]),
            (1, &[6, 13 | 1 << 4]),
            (1, &[6, 13]),
            (1, &[6, 13]),
            (1, &[6, 1]),
            (1, &[6, 13]),
        ],
    ),
    (
        "slots-fail",
        2,
        &[
            (0, &[6, 12]),
            (1, &[6, 12]),
            (0, &[4, 4 | CHUNKS, 1, 0, 8]),
            (1, &[6, 14 | 1 << 4]),
            (0, &[4, 1 | 8 | CHUNKS, 1, 0, 8]),
            (0, &[6, 14 | 8 << 4]),
            (0, &[6, 13]),
            (0, &[6, 13]),
            (1, &[6, 13]),
        ],
    ),
    ("close", 0, &[(0, &[4, SEND, 7, 100, 0]), (0, &[6, 6]), (1, &[6, 6])]),
];

struct Talk {
    ends: [End; 2],
    logs: [Vec<u8>; 2],
}

/// What each of two ends did and heard while they followed the script.
fn converse(kind: u8, script: Script) -> [Vec<u8>; 2] {
    let mut talk = Talk { ends: [End::new(kind), End::new(kind)], logs: [vec![kind], vec![kind]] };
    for (who, action) in script {
        talk.act(*who, action);
        for _ in 0..100 {
            if !talk.pass() {
                break;
            }
        }
    }
    talk.logs
}

impl Talk {
    /// One action, logged as far as it was read.
    fn act(&mut self, who: usize, action: &[u8]) -> bool {
        let mut input = Input::new(action);
        let frames = self.ends[who].step(&mut input);
        self.logs[who].extend_from_slice(&action[..action.len() - input.left()]);
        let lane = action[0] & 8;
        for frame in &frames {
            let mut incoming = vec![lane];
            incoming.extend_from_slice(&frame.head.0);
            if let Body::Inline { bytes, len } = frame.body {
                incoming.extend_from_slice(&bytes[..usize::from(len)]);
            }
            if !self.ends[1 - who].over {
                self.act(1 - who, &incoming);
            }
        }
        !frames.is_empty()
    }

    /// Lets both ends say on both lanes what they have to say; whether anything was said.
    fn pass(&mut self) -> bool {
        let mut said = false;
        for who in 0..2 {
            if self.ends[who].has_job() {
                said |= !self.ends[who].over;
                self.act(who, &[6, 7, 0]);
            }
            self.act(who, &[6, 0]);
            for lane in [0, 8] {
                if !self.ends[who].over {
                    said |= self.act(who, &[7 | lane | 0x30]);
                }
            }
        }
        said
    }
}

fn hello() -> Hello {
    let address = "127.0.0.2".parse().unwrap_or_else(|_| unreachable!("an address"));
    Hello {
        worker: [1; 16],
        name: "host:42".to_owned(),
        boot_id: "41620232-b951-4e03-9345-e3839a356ba4".to_owned(),
        pid: 42,
        release: "0.1.0".to_owned(),
        transports: vec!["self".to_owned(), "shm".to_owned(), "tcp".to_owned()],
        devices: vec![Device {
            name: "127.0.0.2".to_owned(),
            address,
            port: 4242,
            speed_mbps: Some(10_000),
            loopback: true,
        }],
        chunk: 2 << 20,
        window: 16,
        channels: 1,
        unix: Some("crossrail-0102".to_owned()),
        token: [2; 16],
        control: vec![(address, 4242).into()],
        replaces: None,
        channels_max: 2,
        checksum: Checksum::Off,
        network: 4_026_531_840,
        node: Some("rack-7".to_owned()),
    }
}

fn messages() -> Vec<(&'static str, Vec<u8>)> {
    let challenge = Challenge { version: 1, flags: 1, id: Some([1; 16]), nonce: [3; 32] };
    let reply = Reply { version: 1, flags: 1, nonce: [4; 32], mac: [5; 32] };
    let lane = LaneHello {
        version: 1,
        purpose: LanePurpose::Bulk,
        rail: 2,
        channel: 0,
        session: [6; 16],
        nonce: [7; 32],
        mac: [8; 32],
    };
    let reject = Reject::new(RejectCode::Mismatch, "chunk 2097152 here, 4096 there");
    let body = hello().encode().unwrap_or_default();
    let bare = Hello { devices: Vec::new(), control: Vec::new(), unix: None, replaces: Some([9; 16]), ..hello() };
    let checked = Hello { checksum: Checksum::Crc, ..hello() };
    vec![
        ("challenge", challenge.encode(&WORKER).to_vec()),
        ("reply", reply.encode(&WORKER).to_vec()),
        ("lane-hello", lane.encode().to_vec()),
        ("proof", Proof { mac: [9; 32] }.encode(&WORKER).to_vec()),
        ("hello-head", HelloHead { length: body.len() as u32, mac: [1; 32] }.encode().to_vec()),
        ("confirm", Confirm.encode(&WORKER).to_vec()),
        ("reject", reject.encode(&WORKER).to_vec()),
        ("hello", body),
        ("hello-bare", bare.encode().unwrap_or_default()),
        ("hello-checksum", checked.encode().unwrap_or_default()),
    ]
}
