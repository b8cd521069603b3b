//! Receives one connection into memory that the NIC writes itself (devmem TCP), and says how many bytes it placed.
//!
//! `cargo run --release -p crossrail-tcp --example devmem_receive -- DEVICE ADDRESS:PORT QUEUE` as root.
//! It binds 64 MiB of udmabuf, which stands for a GPU's dmabuf, to the receive queue, listens, and compares what arrives
//! with bytes 0, 1, ... 250, 0, ... of any sender. docs/guides/devmem.md has the `ethtool` commands that steer the
//! connection to the queue. Where something is missing it says what and ends with status 1.

#![allow(unsafe_code)] // maps the memory that the NIC writes

use std::error::Error;
use std::fs::OpenOptions;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crossrail_tcp::devmem::{Binding, Fragment, Receiver, probe};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::net::if_::if_nametoindex;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use nix::unistd::ftruncate;

const BYTES: usize = 64 << 20;
const PERIOD: usize = 251;

/// struct udmabuf_create.
#[repr(C)]
pub struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

nix::ioctl_write_ptr!(
    /// Makes a dmabuf of a memfd.
    udmabuf_create,
    b'u',
    0x42,
    Create
);

/// A dmabuf of ordinary memory, and where this process sees it.
fn memory() -> Result<(OwnedFd, *const u8), Box<dyn Error>> {
    let memfd = memfd_create("devmem", MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_CLOEXEC)?;
    ftruncate(&memfd, BYTES as i64)?;
    fcntl(&memfd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK))?;
    let device = OpenOptions::new().read(true).write(true).open("/dev/udmabuf");
    let device = device.map_err(|error| format!("/dev/udmabuf: {error}: a kernel with CONFIG_UDMABUF is needed"))?;
    let create = Create { memfd: memfd.as_raw_fd().cast_unsigned(), flags: 1, offset: 0, size: BYTES as u64 };
    // SAFETY: `create` is the structure that the request takes; its result is a new descriptor of this process.
    let dmabuf = unsafe { OwnedFd::from_raw_fd(udmabuf_create(device.as_raw_fd(), &create)?) };
    let len = BYTES.try_into()?;
    // SAFETY: a new mapping at an address of the kernel's choice; the memfd can't shrink.
    let seen = unsafe { mmap(None, len, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &memfd, 0)? };
    Ok((dmabuf, seen.as_ptr().cast_const().cast()))
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, address, queue] = &arguments[..] else {
        return Err("usage: devmem_receive DEVICE ADDRESS:PORT QUEUE".into());
    };
    let (address, queue): (SocketAddr, u32) = (address.parse()?, queue.parse()?);
    let index = if_nametoindex(device.as_str())?;
    let ready = probe(device, index).map_err(|missing| {
        let fix = missing.fix.map_or_else(String::new, |fix| format!("; try: {fix}"));
        format!("{device} can't receive into device memory: {}{fix}", missing.reason)
    })?;
    println!("{device}: {} receive queues, headers split; binding queue {queue}", ready.queues);
    let (dmabuf, seen) = memory()?;
    let binding = Binding::new(index, &[queue], dmabuf.as_fd(), BYTES as u64)?;
    let mut receiver = Receiver::new(&binding);
    let listener = TcpListener::bind(address)?;
    println!("listening on {address}");
    let (stream, peer) = listener.accept()?;
    let (mut at, mut device_bytes, mut wrong) = (0usize, 0usize, 0usize);
    loop {
        let (fragments, mut host) = receiver.receive(&stream)?;
        if fragments.is_empty() {
            break;
        }
        for fragment in &fragments {
            let len = fragment.len() as usize;
            let bytes = match fragment {
                Fragment::Device { offset, .. } => {
                    device_bytes += len;
                    // SAFETY: `receive` has checked that the fragment lies within the mapping, and the NIC writes
                    // there again only after `give_back`.
                    unsafe { std::slice::from_raw_parts(seen.add(*offset as usize), len) }
                }
                Fragment::Host { .. } => {
                    let (bytes, rest) = host.split_at(len);
                    host = rest;
                    bytes
                }
            };
            wrong += bytes.iter().enumerate().filter(|(i, byte)| **byte as usize != (at + i) % PERIOD).count();
            at += len;
        }
        receiver.give_back(&stream, &fragments)?;
    }
    println!("{at} bytes from {peer}, {device_bytes} of them placed by the NIC, {wrong} wrong");
    if wrong > 0 { Err("the data differs".into()) } else { Ok(()) }
}

fn main() {
    if let Err(error) = run() {
        eprintln!("devmem_receive: {error}");
        std::process::exit(1);
    }
}
