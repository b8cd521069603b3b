use std::time::{Duration, Instant};

use super::super::frames::{Answer, Request, Value, decode_answer, encode, split};
use super::{Contents, Outbox};

/// What was answered, as text: `client.call: answer`.
#[derive(Default)]
struct Sent(Vec<String>);

impl Outbox for Sent {
    fn send(&mut self, client: u64, call: u64, answer: &Answer<'_>) {
        let mut frame = Vec::new();
        encode(&mut frame, call, answer).expect("it fits a frame");
        let (body, len) = split(&frame).unwrap().unwrap();
        assert_eq!(len, frame.len());
        assert_eq!(&decode_answer(body).unwrap().body, answer, "as it arrives");
        let text = match answer {
            Answer::Entries { items, more, .. } => {
                let items: Vec<_> = items.iter().map(|item| format!("{}@{}", item.key, item.revision)).collect();
                format!("[{}]{}", items.join(" "), if *more { "+" } else { "" })
            }
            Answer::Failed(failure) => format!("{:?}", failure.kind),
            other => format!("{other:?}"),
        };
        self.0.push(format!("{client}.{call}: {text}"));
    }

    fn backlog(&self, _client: u64) -> usize {
        0
    }
}

struct Bench {
    contents: Contents,
    sent: Sent,
    begun: Instant,
    now: Duration,
    calls: u64,
}

impl Bench {
    fn new() -> Bench {
        Bench {
            contents: Contents::new(0),
            sent: Sent::default(),
            begun: Instant::now(),
            now: Duration::ZERO,
            calls: 0,
        }
    }

    /// What a request of client 1 leads to.
    fn ask(&mut self, request: &Request<'_>) -> Vec<String> {
        self.ask_as(1, request)
    }

    fn ask_as(&mut self, client: u64, request: &Request<'_>) -> Vec<String> {
        self.calls += 1;
        self.contents.apply(self.begun + self.now, client, self.calls, request, &mut self.sent);
        std::mem::take(&mut self.sent.0)
    }

    fn put(&mut self, key: &str, lease: i64) -> Vec<String> {
        self.ask(&Request::Put { key, value: Value(b"x"), lease })
    }

    /// What is sent `millis` after the beginning.
    fn at(&mut self, millis: u64) -> Vec<String> {
        self.now = Duration::from_millis(millis);
        self.contents.expire(self.begun + self.now, &mut self.sent);
        std::mem::take(&mut self.sent.0)
    }

    fn next(&self) -> Option<u128> {
        self.contents.next_expiry().map(|next| (next - self.begun).as_millis())
    }
}

#[test]
fn leases_end_to_the_moment() {
    let mut bench = Bench::new();
    assert_eq!(bench.next(), None);
    assert_eq!(bench.ask(&Request::Grant(100_000)), ["1.1: Granted(1, 100000)"]);
    assert_eq!(bench.ask(&Request::Grant(1)), ["1.2: Granted(2, 50000)"], "lengthened");
    assert_eq!(bench.put("a", 1), ["1.3: Written(3)"]);
    assert_eq!(bench.put("b", 2), ["1.4: Written(4)"]);
    assert_eq!(bench.ask(&Request::Watch { prefix: "", after: 2 }).len(), 2);
    assert_eq!(bench.next(), Some(50));
    assert!(bench.at(49).is_empty());
    assert_eq!(bench.at(50), ["1.5: Changes([Gone { key: \"b\", revision: 5 }])"]);
    assert_eq!(bench.next(), Some(100));
    bench.at(90);
    assert_eq!(bench.ask(&Request::Renew(1)), ["1.6: Done"]);
    assert_eq!(bench.next(), Some(190));
    assert!(bench.at(189).is_empty());
    assert_eq!(bench.at(190), ["1.5: Changes([Gone { key: \"a\", revision: 6 }])"]);
    assert_eq!(bench.ask(&Request::Renew(1)), ["1.7: Closed"]);
    assert_eq!(bench.put("a", 1), ["1.8: Closed"]);
    assert_eq!(bench.next(), None);
    bench.contents.forget(1);
    assert!(bench.contents.is_idle());
}

#[test]
fn nobody_loses_a_lease_because_the_store_stood_still() {
    let mut bench = Bench::new();
    bench.ask(&Request::Grant(100_000));
    bench.ask(&Request::Grant(200_000));
    bench.put("a", 1);
    bench.put("b", 2);
    bench.contents.postpone(Duration::from_millis(500));
    assert_eq!(bench.next(), Some(600));
    bench.at(550);
    assert_eq!(bench.ask(&Request::Renew(1)), ["1.5: Done"]);
    assert_eq!(bench.next(), Some(650));
    bench.at(700);
    assert_eq!(bench.ask(&Request::Renew(1)), ["1.6: Closed"]);
    assert!(bench.contents.leases.is_empty() && bench.next().is_none());
}

#[test]
fn a_wait_ends_when_all_are_there_at_once() {
    let mut bench = Bench::new();
    let wait = Request::Wait { keys: vec!["a", "b", "a"], timeout_us: 10_000 };
    assert!(bench.ask_as(7, &wait).is_empty());
    bench.put("a", 0);
    // One goes as another comes.
    assert_eq!(bench.ask(&Request::Delete("a")), ["1.3: Deleted(1)"]);
    assert_eq!(bench.put("b", 0), ["1.4: Written(3)"]);
    assert_eq!(bench.put("b", 0), ["1.5: Written(4)"], "a second time");
    assert_eq!(bench.put("a", 0), ["1.6: Written(5)", "7.1: [a@5 b@4 a@5]"]);
    assert_eq!(bench.ask_as(7, &wait), ["7.7: [a@5 b@4 a@5]"]);
    bench.ask(&Request::DeletePrefix(""));
    assert!(bench.ask_as(7, &wait).is_empty());
    bench.put("b", 0);
    assert_eq!(bench.next(), Some(10));
    assert_eq!(bench.at(10), ["7.9: Missing([\"a\", \"a\"], 1)"]);
    assert!(bench.ask_as(7, &wait).is_empty());
    bench.contents.forget(7);
    assert_eq!(bench.put("a", 0), ["1.12: Written(9)"], "nobody is told that has gone");
    bench.ask(&Request::DeletePrefix(""));
    assert!(bench.contents.is_idle());
}

#[test]
fn long_lists_come_in_parts() {
    let mut bench = Bench::new();
    let value = vec![1; 64 << 10];
    for key in 0..40 {
        bench.ask(&Request::Put { key: &format!("{key:02}"), value: Value(&value), lease: 0 });
    }
    let parts = bench.ask(&Request::List(""));
    assert!(parts.len() > 2 && parts[..parts.len() - 1].iter().all(|part| part.ends_with("]+")), "{}", parts.len());
    assert!(parts.last().unwrap().ends_with(']'));
    let changes = bench.ask(&Request::Watch { prefix: "", after: 0 });
    assert!(changes.len() > 3, "and so do changes");
    let told = format!("1.42: Changes([{}])", gone(40));
    assert_eq!(bench.ask(&Request::DeletePrefix("")), ["1.43: Deleted(40)".to_owned(), told]);
    bench.contents.forget(1);
    assert!(bench.contents.is_idle());
}

fn gone(count: u64) -> String {
    let gone = (0..count).map(|key| format!("Gone {{ key: \"{key:02}\", revision: {} }}", count + 1 + key));
    gone.collect::<Vec<_>>().join(", ")
}
