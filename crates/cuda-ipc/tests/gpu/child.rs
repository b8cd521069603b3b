//! The other process: it does what it is told, word by word.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command};

use crossrail_cuda::Cuda;
use crossrail_cuda_ipc::Link;
use crossrail_kernels::CopyArgs;
use crossrail_transport::{Copy, Descriptor, Direct};
use crossrail_types::Settings;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use serde_json::{Value, json};

use crate::end::{End, LIMIT, Memory, pattern};

const SOCKET: &str = "GPU_TEST_SOCKET";
const ORDINAL: &str = "GPU_TEST_ORDINAL";

/// Ends the child, whatever becomes of the test.
pub(crate) struct Keeper(pub(crate) Child);

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// This process on `own`, another one on `other`.
pub(crate) fn pair(cuda: &Cuda, own: u32, other: u32) -> (End, Keeper) {
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).expect("a pair of sockets");
    // A copy without close-on-exec, for the child alone; other tests' children start one at a time.
    let passed = nix::unistd::dup(&theirs).expect("dup");
    let child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "child::role_other_process", "--nocapture", "--test-threads", "1"])
        .env(SOCKET, passed.as_raw_fd().to_string())
        .env(ORDINAL, other.to_string())
        .spawn()
        .expect("spawn");
    drop((passed, theirs));
    (End::new(cuda, own, ours), Keeper(child))
}

/// Not a test by itself: the other process.
#[test]
fn role_other_process() {
    let (Ok(socket), Ok(ordinal)) = (std::env::var(SOCKET), std::env::var(ORDINAL)) else { return };
    // SAFETY: our parent made it for us, and nobody else here knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket.parse().expect("a number")) };
    let cuda = Cuda::load().expect("CUDA");
    let mut end = End::new(&cuda, ordinal.parse().expect("a number"), socket);
    let mut memory: Vec<Option<Memory>> = Vec::new();
    while let Some(word) = end.hear() {
        let answer = obey(&mut end, &mut memory, &word);
        // What the answer is about has been told when it comes.
        end.pump();
        end.say(&answer);
    }
}

pub(crate) fn number(word: &Value, name: &str) -> u64 {
    word[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {word}"))
}

fn obey(end: &mut End, memory: &mut Vec<Option<Memory>>, word: &Value) -> Value {
    let index = word["index"].as_u64().unwrap_or(0) as usize;
    let (offset, len) = (word["offset"].as_u64().unwrap_or(0), word["len"].as_u64().unwrap_or(0) as usize);
    let address = memory.get(index).and_then(Option::as_ref).map_or(0, Memory::address) + offset;
    let seed = word["seed"].as_u64().unwrap_or(0);
    match word["do"].as_str().expect("what to do") {
        "alloc" => {
            let new = Memory::new(&end.context, word["kind"].as_str().expect("a kind"), len);
            let address = new.address();
            end.put(address, &pattern(seed, len));
            memory.push(Some(new));
            json!({"index": memory.len() - 1, "address": address})
        }
        "fill" => {
            end.put(address, &pattern(seed, len));
            json!({})
        }
        "check" => json!({"good": end.take(address, len) == pattern(seed, len)}),
        "describe" => match end.link.describe(address as usize as *const u8, len) {
            Some((descriptor, _)) => json!({"descriptor": descriptor}),
            None => json!({"why": end.link.why_not()}),
        },
        "free" => {
            let gone = memory[index].take().expect("memory");
            if word["said"] == true {
                end.link.freed(gone.address(), gone.len() as u64);
            }
            drop(gone);
            assert!(crossrail_cuda::wait_for_releases(LIMIT));
            json!({})
        }
        "tidy" => json!({"more": end.link.tidy()}),
        "pull" | "push" => {
            let copy = if word["do"] == "pull" { Copy::Pull } else { Copy::Push };
            let result = end.copy(copy, address, descriptor(word), len);
            json!({"why": result.err()})
        }
        "free bytes" => {
            assert!(crossrail_cuda::wait_for_releases(LIMIT));
            json!({"free": end.free()})
        }
        "load kernels" => json!({"loaded": end.has_kernels()}),
        "new link" => {
            end.link = Link::new(end.domain.clone(), LIMIT);
            json!({})
        }
        "lose the context" => {
            let kernels = crossrail_kernels::shared(&end.context, &Settings::default(), LIMIT).expect("kernels");
            // SAFETY: none: the kernel writes where no memory is, and the context is lost, in this process alone.
            let launched = unsafe { kernels.copy(end.stream(), &CopyArgs { dst: 64, src: address, len: 64 }, None) };
            let failed = launched.and_then(|()| end.stream().wait(LIMIT));
            json!({"why": failed.expect_err("no memory is there").to_string()})
        }
        "abort" => std::process::abort(),
        other => panic!("what is {other}?"),
    }
}

pub(crate) fn descriptor(answer: &Value) -> Descriptor {
    let bytes = answer["descriptor"].as_array().unwrap_or_else(|| panic!("no descriptor: {answer}"));
    std::array::from_fn(|index| bytes[index].as_u64().expect("a byte") as u8)
}
