//! The server's end of one client's connection: the handshake, then frames, and unsent bytes.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::TcpStream;

use crossrail_handshake::store::{Greeting, turn_away};
use crossrail_handshake::{Reject, Secret};

use super::frames::{self, Frame, Request};

/// Backlog, in bytes, beyond which a client is not read from.
const PAUSE: usize = 16 << 20;
/// Most bytes read from one client per pass, so that none starves the others.
const READ_MAX: usize = 256 << 10;
/// Empty buffers larger than this are freed.
const KEEP: usize = 256 << 10;

/// The stage of a client's connection.
#[derive(Debug)]
enum Stage {
    /// The challenge was sent.
    Greeting(Greeting),
    Proven,
    /// Closed once the unsent bytes are sent.
    Rejected,
}

/// One client's connection.
#[derive(Debug)]
pub(super) struct ClientConnection {
    pub(super) stream: TcpStream,
    stage: Stage,
    input: Vec<u8>,
    output: Vec<u8>,
    /// How much of `output` has been sent.
    sent: usize,
    /// The registered epoll interest: (readable, writable).
    pub(super) interest: (bool, bool),
    /// Whether it is in the server's list of clients with unsent bytes.
    pub(super) unsent: bool,
}

/// The connection has ended.
#[derive(Debug)]
pub(super) struct Disconnected;

impl ClientConnection {
    /// A new connection in nonblocking mode, whose challenge is pending.
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

    /// The wanted epoll interest: (readable, writable).
    pub(super) fn interests(&self) -> (bool, bool) {
        (self.backlog() <= PAUSE && !matches!(self.stage, Stage::Rejected), self.backlog() > 0)
    }

    /// Appends an answer.
    pub(super) fn push(&mut self, call: u64, answer: &frames::Answer<'_>) {
        if frames::encode(&mut self.output, call, answer).is_none() {
            // After the handshake there is no message that could carry a reason.
            self.stage = Stage::Rejected;
        }
    }

    /// Reads available bytes; `true` if the client has closed its end.
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

    /// Turns the client away during its handshake.
    pub(super) fn turn_away(&mut self, reject: &Reject) {
        self.output.extend_from_slice(&turn_away(reject));
        self.stage = Stage::Rejected;
    }

    /// Takes the input buffer, so that requests can be parsed without borrowing the connection.
    pub(super) fn take_input(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.input)
    }

    /// Puts the input buffer back, without the first `used` bytes.
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

    /// Writes as much as the socket accepts.
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

/// The next request in `input` and its length; `None` if it is incomplete.
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
