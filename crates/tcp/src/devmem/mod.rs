//! Receiving into device memory (devmem TCP, Linux 6.12 and later): the NIC writes payload into memory of a GPU.
//!
//! [`probe`] says whether a network device can do it, or what is missing. [`Binding::new`] lends a dmabuf to receive
//! queues of the device. [`Receiver::receive`] then says where the bytes of a connection lie, as [`Fragment`]s, which
//! their reader copies out, by the unpack kernel for one, and returns by [`Receiver::give_back`].
//!
//! No lane uses it. The headers of our frames are payload to the NIC, so they too would lie in device memory, and no NIC
//! that offers this has run it yet. `examples/devmem_receive.rs` does, where a NIC does; docs/guides/devmem.md says what
//! that takes.

mod message;
mod netlink;
mod probe;
mod receive;

pub use message::Fragment;
pub use probe::{Missing, Ready, probe};
pub use receive::{Binding, Receiver};

/// The netlink family of network devices.
const NETDEV: &str = "netdev";
/// Its request that binds a dmabuf to receive queues, and the attributes of that.
const BIND_RX: u8 = 13;
const IFINDEX: u16 = 1;
const QUEUES: u16 = 2;
const DMABUF_FD: u16 = 3;
const DMABUF_ID: u16 = 4;
/// Its request for queues, and their attributes.
const QUEUE_GET: u8 = 10;
const QUEUE_ID: u16 = 1;
const QUEUE_IFINDEX: u16 = 2;
const QUEUE_TYPE: u16 = 3;
/// The type of receive queues.
const RX: u32 = 0;

use netlink::Attributes;

/// A request to bind `dmabuf` to `queues` of the device.
fn binding(ifindex: u32, queues: &[u32], dmabuf: i32) -> Attributes {
    let request = Attributes::default().u32(IFINDEX, ifindex).u32(DMABUF_FD, dmabuf.cast_unsigned());
    queues.iter().fold(request, |request, queue| {
        request.nested(QUEUES, &Attributes::default().u32(QUEUE_ID, *queue).u32(QUEUE_TYPE, RX))
    })
}
