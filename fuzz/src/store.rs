use std::collections::HashMap;
use std::time::{Duration, Instant};

use crossrail_control::builtin::contents::{Contents, Outbox};
use crossrail_control::builtin::frames::{self, Answer, Change, Frame, Request};
use crossrail_handshake::Secret;
use crossrail_handshake::store::Greeting;
use crossrail_handshake::wire::STORE;

use crate::handshake::messages;
use crate::input::Input;

/// Clients that talk to the store by turns.
const CLIENTS: u8 = 4;

/// Untrusted bytes to the built-in store or from a store to its client: as each message of the greeting, as frames, and
/// as concurrent requests of several clients while time advances.
pub fn store(input: &[u8]) {
    messages(&STORE, input);
    answer(input);
    if let Ok(Some((body, len))) = frames::split(input) {
        assert!(len <= input.len() && len <= frames::FRAME_MAX + frames::HEAD);
        read_request(body);
        read_answer(body);
    }
    converse(&mut Input::new(input));
}

/// The store's answer to a reply that does not know the challenge: never a proof.
fn answer(input: &[u8]) {
    let Ok(greeting) = Greeting::new(&Secret::None) else { return };
    assert!(!matches!(greeting.check(&Secret::None, input), Ok(Some(_))), "{input:?} proves nothing");
}

/// Checks that a decoded request encodes and decodes to the same value.
fn read_request(body: &[u8]) -> Option<Frame<Request<'_>>> {
    let frame = frames::decode_request(body).ok()?;
    let mut again = Vec::new();
    assert!(frames::encode(&mut again, frame.call, &frame.body).is_some(), "{frame:?} does not fit a frame");
    let (body, _) = frames::split(&again).ok().flatten().unwrap_or_else(|| panic!("{frame:?} is not framed"));
    assert_eq!(frames::decode_request(body).as_ref(), Ok(&frame));
    Some(frame)
}

fn read_answer(body: &[u8]) {
    if let Ok(frame) = frames::decode_answer(body) {
        let mut again = Vec::new();
        assert!(frames::encode(&mut again, frame.call, &frame.body).is_some(), "{frame:?} does not fit a frame");
        let (body, _) = frames::split(&again).ok().flatten().unwrap_or_else(|| panic!("{frame:?} is not framed"));
        assert_eq!(frames::decode_answer(body), Ok(frame));
    }
}

/// The clients' side: answers are checked as they come.
#[derive(Default)]
struct Checked {
    /// The last revision that each watch was told.
    watches: HashMap<(u64, u64), u64>,
    /// Keys that each wait asked for.
    waits: HashMap<(u64, u64), Vec<String>>,
}

impl Outbox for Checked {
    fn send(&mut self, client: u64, call: u64, answer: &Answer<'_>) {
        let mut frame = Vec::new();
        assert!(frames::encode(&mut frame, call, answer).is_some(), "an answer fits a frame");
        match answer {
            Answer::Changes(changes) => {
                let last = self.watches.entry((client, call)).or_default();
                for change in changes {
                    let (Change::Put(frames::Item { revision, .. }) | Change::Gone { revision, .. }) = change;
                    assert!(*revision > *last, "{revision} after {last}");
                    *last = *revision;
                }
            }
            Answer::Entries { items, more: false, .. } => {
                if let Some(keys) = self.waits.remove(&(client, call)) {
                    assert!(items.iter().map(|item| item.key).eq(keys.iter().map(String::as_str)));
                }
            }
            Answer::Missing(missing, count) => {
                let keys = self.waits.remove(&(client, call)).unwrap_or_else(|| panic!("nobody waits"));
                assert!(*count > 0 && !missing.is_empty() && missing.iter().all(|key| keys.iter().any(|k| k == key)));
            }
            _ => {}
        }
    }

    fn backlog(&self, client: u64) -> usize {
        // One of the clients is always behind.
        if client == 3 { usize::MAX } else { 0 }
    }
}

/// Each step: who (and what), then the length of a request's body and the body.
fn converse(input: &mut Input<'_>) {
    let (mut contents, mut clients) = (Contents::new(0), Checked::default());
    let mut now = Instant::now();
    let mut call = 0;
    while !input.is_empty() {
        let who = input.byte();
        let client = u64::from(who % CLIENTS);
        match who >> 6 {
            0 => {
                now += Duration::from_millis(u64::from(input.byte()) * 10);
                contents.expire(now, &mut clients);
                assert!(contents.next_expiry().is_none_or(|next| next > now));
            }
            1 => {
                contents.forget(client);
                clients.watches.retain(|(known, _), _| *known != client);
                clients.waits.retain(|(known, _), _| *known != client);
            }
            _ => {
                let len = usize::from(input.byte());
                let body = input.bytes(len);
                let Some(frame) = read_request(&body) else { continue };
                // Calls have numbers of their own, as clients give them.
                call += 1;
                if let Request::Wait { keys, .. } = &frame.body {
                    clients.waits.insert((client, call), keys.iter().map(|key| (*key).to_owned()).collect());
                }
                contents.apply(now, client, call, &frame.body, &mut clients);
            }
        }
    }
    (0..u64::from(CLIENTS)).for_each(|client| contents.forget(client));
    contents.expire(now + Duration::from_secs(86_400), &mut Checked::default());
    contents.apply(now, 0, call + 1, &Request::DeletePrefix(""), &mut Checked::default());
    assert!(contents.is_idle(), "something is left of clients and leases that are gone: {contents:?}");
}
