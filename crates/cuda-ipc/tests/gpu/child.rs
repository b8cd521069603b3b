//! The other process, which executes commands of the test.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command};

use crossrail_cuda::Cuda;
use crossrail_cuda_ipc::Link;
use crossrail_kernels::PutArgs;
use crossrail_transport::{Copy, Descriptor, Domain};
use crossrail_types::Settings;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use serde_json::{Value, json};

use crate::end::{End, LIMIT, Memory, pattern};

const SOCKET: &str = "GPU_TEST_SOCKET";
const ORDINAL: &str = "GPU_TEST_ORDINAL";

/// Kills the child process on drop.
pub(crate) struct ChildGuard(pub(crate) Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An end in this process on GPU `own`, and one in a child process on GPU `other`.
pub(crate) fn pair(cuda: &Cuda, own: u32, other: u32) -> (End, ChildGuard) {
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).expect("a pair of sockets");
    // A duplicate without close-on-exec, for the child only. Tests start their children one at a time.
    let passed = nix::unistd::dup(&theirs).expect("dup");
    let child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "child::role_other_process", "--nocapture", "--test-threads", "1"])
        .env(SOCKET, passed.as_raw_fd().to_string())
        .env(ORDINAL, other.to_string())
        .spawn()
        .expect("spawn");
    drop((passed, theirs));
    (End::new(cuda, own, ours), ChildGuard(child))
}

/// Not a test by itself: the other process.
#[test]
fn role_other_process() {
    let (Ok(socket), Ok(ordinal)) = (std::env::var(SOCKET), std::env::var(ORDINAL)) else { return };
    // SAFETY: the parent passed the descriptor to this process, where nothing else uses it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket.parse().expect("a number")) };
    let cuda = Cuda::load().expect("CUDA");
    let mut end = End::new(&cuda, ordinal.parse().expect("a number"), socket);
    let mut memory: Vec<Option<Memory>> = Vec::new();
    while let Some(command) = end.receive() {
        let answer = execute(&mut end, &mut memory, &command);
        // Notes that the answer depends on are sent first.
        end.pump();
        end.send_message(&answer);
    }
}

pub(crate) fn number(command: &Value, name: &str) -> u64 {
    command[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {command}"))
}

fn execute(end: &mut End, memory: &mut Vec<Option<Memory>>, command: &Value) -> Value {
    let index = command["index"].as_u64().unwrap_or(0) as usize;
    let (offset, len) = (command["offset"].as_u64().unwrap_or(0), command["len"].as_u64().unwrap_or(0) as usize);
    let address = memory.get(index).and_then(Option::as_ref).map_or(0, Memory::address) + offset;
    let seed = command["seed"].as_u64().unwrap_or(0);
    match command["do"].as_str().expect("a command") {
        "alloc" => {
            let new = Memory::new(&end.context, command["kind"].as_str().expect("a kind"), len);
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
            Ok((descriptor, _)) => json!({"descriptor": descriptor}),
            Err(why) => json!({"why": why}),
        },
        "free" => {
            let freed = memory[index].take().expect("memory");
            if command["announced"] == true {
                end.link.freed(freed.address(), freed.len() as u64);
            }
            drop(freed);
            assert!(crossrail_cuda::wait_for_releases(LIMIT));
            json!({})
        }
        "tidy" => json!({"more": end.link.tidy()}),
        "pull" | "push" => {
            let copy = if command["do"] == "pull" { Copy::Pull } else { Copy::Push };
            let result = end.copy(copy, address, descriptor(command), len);
            json!({"why": result.err()})
        }
        "free bytes" => {
            assert!(crossrail_cuda::wait_for_releases(LIMIT));
            json!({"free": end.free()})
        }
        "load kernels" => json!({"loaded": end.has_kernels()}),
        "new link" => {
            end.link = Link::new(end.gpus.clone(), LIMIT);
            json!({})
        }
        "lose the context" => {
            let kernels = crossrail_kernels::shared(&end.context, &Settings::default(), LIMIT).expect("kernels");
            // SAFETY: deliberately violated: the kernel writes to unmapped memory, which destroys this process's
            // context.
            let launched = unsafe {
                kernels.put(end.stream(), &PutArgs { dst: 64, src: address, len: 64, ..PutArgs::ZERO }, None)
            };
            let failed = launched.and_then(|()| end.stream().wait(LIMIT));
            json!({"why": failed.expect_err("no memory is there").to_string()})
        }
        "abort" => std::process::abort(),
        other => panic!("unknown command {other}"),
    }
}

pub(crate) fn descriptor(answer: &Value) -> Descriptor {
    let bytes = answer["descriptor"].as_array().unwrap_or_else(|| panic!("no descriptor: {answer}"));
    std::array::from_fn(|index| bytes[index].as_u64().expect("a byte") as u8)
}
