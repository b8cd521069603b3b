//! A minimal HTTP/1.1 client for etcd's gateway. Our own, because every read must end by the deadline of its call, for
//! streamed watches as well as for single answers.

use std::io::{ErrorKind as Io, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

/// The head of an answer is shorter than this, and so is the frame of a chunk.
const LONGEST_HEAD: usize = 16 << 10;
/// An answer is shorter than this; lists and bursts of changes can be long.
const LONGEST_BODY: usize = 256 << 20;
const MOST_HEADERS: usize = 48;
const READ_SIZE: usize = 16 << 10;

/// Why an exchange with a member failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The member could not be reached; it has not received the request.
    Unreached(String),
    /// The connection ended before the answer; the request may have been executed.
    Broken(String),
    /// The deadline passed before the answer; the request may have been executed.
    Late,
    /// The answer is not etcd's.
    Foreign(String),
}

/// An answer that is complete.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Vec<u8>,
}

/// The head of an answer.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) status: u16,
    pub(super) content: Content,
    /// Whether the connection is kept alive.
    pub(super) stays: bool,
}

/// A connection to one member, with at most one outstanding request.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    host: String,
    /// Received bytes not yet consumed.
    unread: Vec<u8>,
}

impl Connection {
    /// Connects to the first of `addresses` that answers before `deadline`. `host` is what the user calls it.
    pub(super) fn open(host: &str, addresses: &[SocketAddr], deadline: Instant) -> Result<Connection, Failure> {
        let mut why = "no address".to_owned();
        for (tried, address) in addresses.iter().enumerate() {
            let left = (addresses.len() - tried) as u32;
            let Some(time) = remaining(deadline).map(|time| time / left).filter(|time| !time.is_zero()) else {
                why = "no answer in time".to_owned();
                break;
            };
            match TcpStream::connect_timeout(address, time).and_then(prepare) {
                Ok(stream) => return Ok(Connection { stream, host: host.to_owned(), unread: Vec::new() }),
                Err(e) => why = e.to_string(),
            }
        }
        Err(Failure::Unreached(why))
    }

    /// Whether the idle connection is usable: no unsolicited bytes, and not closed.
    pub(super) fn is_fresh(&self) -> bool {
        let waits = self.stream.set_nonblocking(true).is_ok()
            && matches!(self.stream.peek(&mut [0]), Err(e) if e.kind() == Io::WouldBlock);
        self.unread.is_empty() && self.stream.set_nonblocking(false).is_ok() && waits
    }

    /// Sends a request and reads the whole answer. Whether the connection can carry another one comes with it.
    pub(super) fn exchange(&mut self, path: &str, body: &[u8], deadline: Instant) -> Result<(Answer, bool), Failure> {
        let head = self.request(path, body, deadline)?;
        let stays = head.stays;
        let answer = self.finish(head, deadline)?;
        Ok((answer, stays && self.unread.is_empty()))
    }

    /// Reads what follows `head`.
    pub(super) fn finish(&mut self, mut head: Head, deadline: Instant) -> Result<Answer, Failure> {
        let mut answer = Answer { status: head.status, body: Vec::new() };
        loop {
            self.take(&mut head.content, &mut answer.body)?;
            if head.content.is_done() {
                return Ok(answer);
            }
            self.fill(remaining(deadline).ok_or(Failure::Late)?)?;
        }
    }

    /// Sends a request and reads the head of the answer.
    pub(super) fn request(&mut self, path: &str, body: &[u8], deadline: Instant) -> Result<Head, Failure> {
        // "hasleader" lets a watch end when its member has lost touch with the others, instead of falling silent.
        let mut text = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             Grpc-Metadata-hasleader: true\r\n\r\n",
            self.host,
            body.len()
        )
        .into_bytes();
        text.extend_from_slice(body);
        self.send(&text, deadline)?;
        loop {
            if let Some((used, head)) = parse_head(&self.unread)? {
                self.unread.drain(..used);
                return Ok(head);
            }
            self.fill(remaining(deadline).ok_or(Failure::Late)?)?;
        }
    }

    /// Reads once, for at most `time` (a millisecond at least).
    pub(super) fn fill(&mut self, time: Duration) -> Result<(), Failure> {
        let started = Instant::now();
        let time = time.max(Duration::from_millis(1));
        let old = self.unread.len();
        self.unread.resize(old + READ_SIZE, 0);
        let came = loop {
            let left = time.saturating_sub(started.elapsed()).max(Duration::from_millis(1));
            match self.stream.set_read_timeout(Some(left)).and_then(|()| self.stream.read(&mut self.unread[old..])) {
                Err(e) if e.kind() == Io::Interrupted => {}
                other => break other,
            }
        };
        self.unread.truncate(old + came.as_ref().copied().unwrap_or(0));
        match came {
            Ok(0) => Err(Failure::Broken("the connection was closed".to_owned())),
            Ok(_) => Ok(()),
            Err(e) if is_late(&e) => Err(Failure::Late),
            Err(e) => Err(Failure::Broken(e.to_string())),
        }
    }

    /// Moves received bytes of `content` to the end of `into`.
    pub(super) fn take(&mut self, content: &mut Content, into: &mut Vec<u8>) -> Result<(), Failure> {
        let used = content.decode(&self.unread, into)?;
        self.unread.drain(..used);
        if into.len() > LONGEST_BODY {
            return Err(Failure::Foreign(format!("an answer of more than {LONGEST_BODY} bytes")));
        }
        Ok(())
    }

    fn send(&mut self, mut text: &[u8], deadline: Instant) -> Result<(), Failure> {
        while !text.is_empty() {
            let time = remaining(deadline).ok_or(Failure::Late)?;
            match self.stream.set_write_timeout(Some(time)).and_then(|()| self.stream.write(text)) {
                Ok(count) => text = text.get(count..).unwrap_or_default(),
                Err(e) if e.kind() == Io::Interrupted => {}
                Err(e) if is_late(&e) => return Err(Failure::Late),
                Err(e) => return Err(Failure::Broken(e.to_string())),
            }
        }
        Ok(())
    }
}

/// The time left until `deadline`; `None` if it has passed.
pub(super) fn remaining(deadline: Instant) -> Option<Duration> {
    Some(deadline.saturating_duration_since(Instant::now())).filter(|time| !time.is_zero())
}

fn is_late(e: &std::io::Error) -> bool {
    matches!(e.kind(), Io::WouldBlock | Io::TimedOut)
}

fn prepare(stream: TcpStream) -> std::io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    // A machine that has vanished sends nothing, and a watch may wait for hours.
    let probes =
        TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(2)).with_retries(3);
    SockRef::from(&stream).set_tcp_keepalive(&probes)?;
    Ok(stream)
}

/// Parses a head; returns it with its length, or `None` if it is incomplete.
fn parse_head(text: &[u8]) -> Result<Option<(usize, Head)>, Failure> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut head = httparse::Response::new(&mut headers);
    let used = match head.parse(text) {
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) if text.len() > LONGEST_HEAD => {
            return Err(Failure::Foreign("an answer whose head does not end".to_owned()));
        }
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(e) => return Err(Failure::Foreign(format!("not HTTP: {e}"))),
    };
    let has = |name: &str, value: &str| {
        let mut named = head.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
        named.any(|header| header.value.eq_ignore_ascii_case(value.as_bytes()))
    };
    let content = if has("Transfer-Encoding", "chunked") {
        Content::Size
    } else {
        let length = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case("Content-Length"));
        let length = length.and_then(|header| std::str::from_utf8(header.value).ok()?.trim().parse().ok());
        Content::Rest(length.ok_or_else(|| Failure::Foreign("an answer of unknown length".to_owned()))?)
    };
    let status = head.code.ok_or_else(|| Failure::Foreign("an answer without a status".to_owned()))?;
    Ok(Some((used, Head { status, content, stays: !has("Connection", "close") })))
}

/// The rest of an answer's content.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// This many bytes.
    Rest(u64),
    /// Chunks: the size of the next one.
    Size,
    /// This many bytes of a chunk.
    Chunk(u64),
    /// The end of a chunk's line.
    ChunkEnd,
    /// Lines after the last chunk, up to an empty one.
    Trailer,
}

impl Content {
    /// Whether it is complete.
    pub(super) fn is_done(&self) -> bool {
        *self == Content::Rest(0)
    }

    /// Appends the content in `input` to `into`; returns the number of bytes consumed.
    fn decode(&mut self, input: &[u8], into: &mut Vec<u8>) -> Result<usize, Failure> {
        let bad = |what: &str| Failure::Foreign(format!("a chunk {what}"));
        let mut at = 0;
        while let Some(input) = input.get(at..).filter(|rest| !rest.is_empty()) {
            match self {
                Content::Rest(0) => break,
                Content::Rest(left) | Content::Chunk(left) => {
                    let part = &input[..input.len().min(usize::try_from(*left).unwrap_or(usize::MAX))];
                    into.extend_from_slice(part);
                    at += part.len();
                    *left -= part.len() as u64;
                    if *self == Content::Chunk(0) {
                        *self = Content::ChunkEnd;
                    }
                }
                Content::Size => match httparse::parse_chunk_size(input) {
                    Ok(httparse::Status::Complete((used, size))) => {
                        at += used;
                        *self = if size == 0 { Content::Trailer } else { Content::Chunk(size) };
                    }
                    Ok(httparse::Status::Partial) if input.len() < LONGEST_HEAD => break,
                    _ => return Err(bad("without a size")),
                },
                Content::ChunkEnd | Content::Trailer => {
                    let Some(end) = input.iter().position(|byte| *byte == b'\n') else {
                        if input.len() < LONGEST_HEAD {
                            break;
                        }
                        return Err(bad("whose line does not end"));
                    };
                    at += end + 1;
                    let is_empty = input[..end].trim_ascii().is_empty();
                    match self {
                        Content::Trailer if is_empty => *self = Content::Rest(0),
                        Content::Trailer => {}
                        _ if is_empty => *self = Content::Size,
                        _ => return Err(bad("longer than its size")),
                    }
                }
            }
        }
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A whole answer, given in pieces of `step` bytes: its status and content.
    fn decode(answer: &[u8], step: usize) -> Result<Option<(u16, Vec<u8>)>, Failure> {
        let (mut unread, mut head, mut body) = (Vec::new(), None, Vec::new());
        for piece in answer.chunks(step) {
            unread.extend_from_slice(piece);
            if head.is_none() {
                let Some((used, parsed)) = parse_head(&unread)? else { continue };
                unread.drain(..used);
                head = Some(parsed);
            }
            let Some(head) = &mut head else { continue };
            let used = head.content.decode(&unread, &mut body)?;
            unread.drain(..used);
            if head.content.is_done() {
                return Ok(Some((head.status, body)));
            }
        }
        Ok(None)
    }

    const CHUNKED: &[u8] = b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\nTrailer: Grpc\r\n\r\n\
        5\r\nhello\r\n7;x=y\r\n, world\r\n0\r\nGrpc: 1\r\n\r\n";
    const COUNTED: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";

    #[test]
    fn answers_are_read_however_they_are_cut() {
        for step in 1..CHUNKED.len() {
            assert_eq!(decode(CHUNKED, step).unwrap(), Some((404, b"hello, world".to_vec())), "in pieces of {step}");
            assert_eq!(decode(COUNTED, step).unwrap(), Some((200, b"hello".to_vec())), "in pieces of {step}");
        }
        assert_eq!(decode(&CHUNKED[..CHUNKED.len() - 2], 7).unwrap(), None, "the last line is missing");
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let endless = format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(LONGEST_HEAD));
        for text in [
            "SSH-2.0-OpenSSH_9.2\r\n",
            "HTTP/1.1 200 OK\r\n\r\nhello",
            "HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\nhello",
            &format!("{head}zz\r\n"),
            &format!("{head}5\r\nhello there\r\n"),
            &format!("{head}fffffffffffffffff\r\n"),
            &endless,
        ] {
            assert!(matches!(decode(text.as_bytes(), 4096), Err(Failure::Foreign(_))), "{text:?}");
        }
    }

    #[test]
    fn changed_answers_never_panic() {
        for (at, value) in (0..CHUNKED.len()).flat_map(|at| (0..=255u8).map(move |value| (at, value))) {
            let mut answer = CHUNKED.to_vec();
            answer[at] = value;
            if let Ok(Some((_, body))) = decode(&answer, 13) {
                assert!(body.len() <= CHUNKED.len(), "byte {at} = {value}");
            }
        }
    }
}
