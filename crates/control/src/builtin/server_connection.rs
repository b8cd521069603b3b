//! One client's connection, as the server sees it: the greeting, then frames, and what could not be sent yet.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::TcpStream;

use crossrail_handshake::store::{Greeting, turn_away};
use crossrail_handshake::{Reject, Secret};

use super::frames::{self, Frame, Request};

/// A client that has this much to take is not read from until it has taken it.
const PAUSE: usize = 16 << 20;
/// Read from one client in one pass, so that none keeps the others waiting.
const READ_MAX: usize = 256 << 10;
/// Buffers above this are given back when they are empty.
const KEEP: usize = 256 << 10;

/// How far a client is.
#[derive(Debug)]
enum Stage {
    /// The challenge was sent.
    Greeting(Greeting),
    Proven,
    /// It gets what is left to send, and is closed.
    Rejected,
}

/// One client.
#[derive(Debug)]
pub(super) struct ClientConnection {
    pub(super) stream: TcpStream,
    stage: Stage,
    input: Vec<u8>,
    output: Vec<u8>,
    /// How much of `output` has been sent.
    sent: usize,
    /// What epoll was last asked for: (readable, writable).
    pub(super) interest: (bool, bool),
    /// It is in the server's list of peers with something to send.
    pub(super) unsent: bool,
}

/// The connection is over.
#[derive(Debug)]
pub(super) struct Disconnected;

impl ClientConnection {
    /// A new connection, in nonblocking mode; its challenge is ready to be sent.
    pub(super) fn new(stream: TcpStream, greeting: Greeting) -> ClientConnection {
        let output = greeting.challenge().to_vec();
        ClientConnection::at(Stage::Greeting(greeting), stream, output)
    }

    /// A connection that is turned away.
    pub(super) fn rejected(stream: TcpStream, reject: &Reject) -> ClientConnection {
        ClientConnection::at(Stage::Rejected, stream, turn_away(reject).to_vec())
    }

    fn at(stage: Stage, stream: TcpStream, output: Vec<u8>) -> ClientConnection {
        ClientConnection { stream, stage, input: Vec::new(), output, sent: 0, interest: (true, false), unsent: true }
    }

    pub(super) fn is_proven(&self) -> bool {
        matches!(self.stage, Stage::Proven)
    }

    pub(super) fn backlog(&self) -> usize {
        self.output.len() - self.sent
    }

    /// What epoll should tell: (readable, writable).
    pub(super) fn interests(&self) -> (bool, bool) {
        (self.backlog() <= PAUSE && !matches!(self.stage, Stage::Rejected), self.backlog() > 0)
    }

    /// Appends an answer.
    pub(super) fn push(&mut self, call: u64, answer: &frames::Answer<'_>) {
        if frames::encode(&mut self.output, call, answer).is_none() {
            // Behind the greeting there is no message that could carry a reason.
            self.stage = Stage::Rejected;
        }
    }

    /// Reads what is there; `true`: the client has closed its end, and what was read is its last.
    pub(super) fn read(&mut self) -> Result<bool, Disconnected> {
        let mut chunk = [0; 16 << 10];
        let mut left = READ_MAX;
        while left > 0 {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(true),
                Ok(read) => {
                    self.input.extend_from_slice(&chunk[..read]);
                    left = left.saturating_sub(read);
                    if read < chunk.len() {
                        break;
                    }
                }
                Err(e) if e.kind() == IoKind::WouldBlock => break,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(_) => return Err(Disconnected),
            }
        }
        Ok(false)
    }

    /// Checks the client's reply once it is complete: whether the client is proven now.
    pub(super) fn greet(&mut self, secret: &Secret) -> bool {
        let Stage::Greeting(greeting) = &self.stage else { return self.is_proven() };
        match greeting.check(secret, &self.input) {
            Ok(None) => {}
            Ok(Some(proven)) => {
                self.output.extend_from_slice(&proven.proof);
                self.input.drain(..proven.used);
                self.stage = Stage::Proven;
            }
            Err(reject) => {
                self.output.extend_from_slice(&turn_away(&reject));
                self.stage = Stage::Rejected;
            }
        }
        self.is_proven()
    }

    /// Takes what has been read, to look for requests in it without holding the connection.
    pub(super) fn take_input(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.input)
    }

    /// Gives the rest back, of which `used` bytes are done with.
    pub(super) fn put_input(&mut self, mut input: Vec<u8>, used: usize) {
        input.drain(..used);
        if input.is_empty() && input.capacity() > KEEP {
            input = Vec::new();
        }
        self.input = input;
    }

    pub(super) fn is_paused(&self) -> bool {
        self.backlog() > PAUSE
    }

    /// Sends what the socket takes.
    pub(super) fn write(&mut self) -> Result<(), Disconnected> {
        while self.sent < self.output.len() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => return Err(Disconnected),
                Ok(written) => self.sent += written,
                Err(e) if e.kind() == IoKind::WouldBlock => break,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(_) => return Err(Disconnected),
            }
        }
        if self.sent == self.output.len() {
            if matches!(self.stage, Stage::Rejected) {
                return Err(Disconnected);
            }
            self.output.clear();
            self.sent = 0;
            if self.output.capacity() > KEEP {
                self.output = Vec::new();
            }
        } else if self.sent > KEEP && self.sent > self.output.len() / 2 {
            self.output.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }
}

/// The next request in `input`, and how many bytes it takes. `None`: more must be read first.
pub(super) fn next_request(input: &[u8]) -> Result<Option<(Frame<Request<'_>>, usize)>, Disconnected> {
    match frames::split(input) {
        Ok(Some((body, used))) => match frames::decode_request(body) {
            Ok(frame) => Ok(Some((frame, used))),
            Err(_) => Err(Disconnected),
        },
        Ok(None) => Ok(None),
        Err(_) => Err(Disconnected),
    }
}
