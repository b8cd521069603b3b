#![allow(unsafe_code)] // exposes memory of this function to the object under test, which is dropped first

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, LazyLock, Mutex};

use crossrail_tcp::placing::{Connection, Door, Head, Kind, LINKS_MAX, TcpPlacing};
use crossrail_transport::Loan;
use crossrail_transport::placing::{Event, Extent, Imm, Key, Placing};
use nix::libc::linger;
use nix::sys::socket::{setsockopt, sockopt};

use crate::input::Input;

const RAILS: usize = 2;
/// Two exposures in one block, with guards around each.
const GUARD: usize = 256;
const LEN: usize = 4096;
const FRESH: u8 = 0xA5;
const PIECES: u16 = 8;

static LISTENER: LazyLock<Mutex<TcpListener>> =
    LazyLock::new(|| Mutex::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a loopback port")));

/// A hostile peer's frames for one-sided writes, over two connections, interleaved with local writes, revocations and
/// lost connections. Checks for every input: no panic, no byte written outside what is exposed or after access has ended,
/// no immediate reported that was not permitted, and that every local write ends once.
pub fn placing(input: &[u8]) {
    let mut input = Input::new(input);
    let (peers, placing) = connect();
    let mut end = End::new(peers, placing);
    while !input.is_empty() && end.step(&mut input) {}
    end.finish();
}

fn connect() -> (Vec<TcpStream>, TcpPlacing) {
    let listener = LISTENER.lock().expect("no panic inside");
    let to = listener.local_addr().expect("bound");
    let (mut peers, mut ours) = (Vec::new(), Vec::new());
    for id in 0..RAILS as u16 {
        let peer = TcpStream::connect(to).expect("loopback");
        peer.set_nonblocking(true).expect("fcntl");
        // Closes without TIME_WAIT: the number of ports is limited.
        setsockopt(&peer, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 }).expect("setsockopt");
        peers.push(peer);
        let stream = listener.accept().expect("loopback").0;
        ours.push(Connection {
            id,
            name: format!("rail {id}"),
            cost: id.into(),
            interface: Some(format!("eth{id}")),
            stream,
        });
    }
    let door = Arc::new(Door::new(LINKS_MAX).expect("a descriptor"));
    (peers, TcpPlacing::new("the peer", false, ours, door).expect("options"))
}

struct End {
    // Goes before the memory.
    placing: TcpPlacing,
    peers: Vec<TcpStream>,
    memory: Vec<u8>,
    keys: [Key; 2],
    loans: [Arc<Loan>; 2],
    /// Contents of an exposure when its access ended.
    ended: [Option<Vec<u8>>; 2],
    posted: BTreeSet<u64>,
    source: Vec<u8>,
    next: u64,
    failed: bool,
}

impl End {
    fn new(peers: Vec<TcpStream>, mut placing: TcpPlacing) -> End {
        let mut memory = vec![FRESH; 2 * LEN + 3 * GUARD];
        let loans = [Arc::new(Loan::default()), Arc::new(Loan::default())];
        let mut expose = |which: usize| {
            let extent = Extent::host(memory[range(which)].as_mut_ptr(), LEN);
            // SAFETY: the object is dropped before the memory.
            unsafe { placing.expose(&extent, &loans[which]) }.expect("a key")
        };
        let keys = [expose(0), expose(1)];
        placing.count(PIECES).expect("a counter");
        placing.count(1).expect("a counter");
        let (ended, source) = ([None, None], vec![7; 70_000]);
        End { placing, peers, memory, keys, loans, ended, posted: BTreeSet::new(), source, next: 0, failed: false }
    }

    /// One action; false: the object has failed.
    fn step(&mut self, input: &mut Input<'_>) -> bool {
        let action = input.byte();
        let rail = usize::from(action >> 3) % RAILS;
        match action & 7 {
            0..=2 => {
                let bytes = self.frame(action, input);
                self.send(rail, &bytes);
            }
            3 => {
                let len = usize::from(input.byte());
                let bytes = input.bytes(len.min(input.left()));
                self.send(rail, &bytes);
            }
            4 => self.write(input),
            5 => self.end_access(usize::from(action >> 4) & 1, action >> 5 & 1 == 1),
            6 if action >> 4 == 0 => drop(self.peers[rail].shutdown(Shutdown::Both)),
            _ => {}
        }
        self.poll();
        !self.failed
    }

    /// A frame with the fields of the input, mostly near what is valid.
    fn frame(&mut self, action: u8, input: &mut Input<'_>) -> Vec<u8> {
        let kind = [Kind::Part, Kind::Part, Kind::Ack, Kind::Discarded, Kind::Dropped, Kind::Ready, Kind::AckOf]
            [usize::from(action >> 4) % 7];
        let what = input.byte();
        let small = |input: &mut Input<'_>| u32::from(u16::from_le_bytes(input.array()));
        let mut head = Head { slot: (what >> 2 & 3).into(), ..Head::new(kind) };
        match kind {
            Kind::Part => {
                head.key = self.keys[usize::from(what & 1)].id();
                (head.at, head.len) = (small(input).into(), small(input) % 2048);
                head.whole = head.len + if what & 2 == 0 { 0 } else { small(input) };
                head.imm = u32::from(input.byte() % (PIECES as u8 + 1)) | u32::from(what >> 7) << 12;
                if what >> 4 & 7 == 7 {
                    head.key = u64::from_le_bytes(input.array());
                    head.at = u64::from_le_bytes(input.array());
                }
            }
            Kind::Ack => head.ack = small(input) % 4,
            Kind::Dropped | Kind::AckOf => (head.link, head.whole) = ((what & 3).into(), small(input) % 4),
            _ => head.link = small(input) as u16,
        }
        let mut bytes = head.encode().to_vec();
        bytes.resize(bytes.len() + head.len as usize, what);
        bytes
    }

    fn send(&mut self, rail: usize, bytes: &[u8]) {
        // What does not fit, or was shut down, is lost.
        let _ = (&self.peers[rail]).write(bytes);
    }

    fn write(&mut self, input: &mut Input<'_>) {
        let len = usize::from(u16::from_le_bytes(input.array()));
        let (imm, _) = Imm::of(u32::from(input.byte()));
        let to = Key::new(3, 65_536);
        // SAFETY: `source` is kept until the object is dropped.
        let posted = unsafe { self.placing.write(&[Extent::host(self.source.as_ptr(), len)], &to, 0, imm, self.next) };
        if matches!(posted, Ok(crossrail_transport::Post::Held)) {
            self.posted.insert(self.next);
            self.next += 1;
        }
    }

    fn end_access(&mut self, which: usize, recalls: bool) {
        if recalls {
            self.loans[which].recall();
        } else {
            self.placing.revoke(&self.keys[which]);
        }
        let now = self.memory[range(which)].to_vec();
        self.ended[which].get_or_insert(now);
    }

    fn poll(&mut self) {
        let posted = &mut self.posted;
        let result = self.placing.poll(&mut |event| match event {
            Event::Arrived(imm) => {
                let pieces = [PIECES, 1].get(imm.counter.0 as usize).copied();
                assert!(pieces.is_some_and(|pieces| imm.piece < pieces), "{imm} was not permitted");
            }
            Event::Ended { token, .. } => assert!(posted.remove(&token), "write {token} ended twice, or never was"),
        });
        match result {
            Err(error) => {
                self.failed = true;
                assert!(error.to_string().contains("the peer"), "{error} names nobody");
                assert!(self.posted.is_empty(), "writes are left after the end: {:?}", self.posted);
            }
            Ok(_) => assert!(!self.failed, "it continues after its end"),
        }
        self.check();
    }

    fn check(&self) {
        for at in [0, GUARD + LEN, 2 * (GUARD + LEN)] {
            assert!(self.memory[at..at + GUARD].iter().all(|byte| *byte == FRESH), "written outside what is exposed");
        }
        for (which, held) in self.ended.iter().enumerate() {
            let now = &self.memory[range(which)];
            assert!(held.as_ref().is_none_or(|held| held == now), "written after access had ended");
        }
    }

    /// The peer leaves.
    fn finish(&mut self) {
        self.peers.clear();
        for _ in 0..1000 {
            if self.failed {
                return;
            }
            self.poll();
            std::thread::yield_now();
        }
        panic!("the end of the peer was not noticed");
    }
}

fn range(which: usize) -> std::ops::Range<usize> {
    let from = GUARD + which * (LEN + GUARD);
    from..from + LEN
}
