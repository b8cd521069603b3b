use std::net::TcpStream;
use std::os::fd::AsRawFd;

use crate::sys;

/// What the kernel knows of a connection (TCP_INFO).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// Smoothed round-trip time, microseconds.
    pub rtt_us: u32,
    /// Smallest round-trip time seen lately, microseconds.
    pub min_rtt_us: u32,
    /// Bytes that the peer's kernel has acknowledged since the connection was opened.
    pub bytes_acked: u64,
    /// Segments sent again since the connection was opened.
    pub retransmits: u32,
    /// Segments on the way.
    pub unacked: u32,
    /// Probes of the peer's window, when that is full, that have not been answered.
    pub window_probes: u32,
    /// Bytes written and not sent yet.
    pub notsent_bytes: u32,
    /// Latest estimate of what the path carries, bytes per second; 0 before the first.
    pub delivery_rate: u64,
    /// Segments that may be on the way at once.
    pub congestion_window: u32,
    /// Payload of one segment, bytes.
    pub segment_size: u32,
}

/// The kernel's view of a connection at this moment; zeros when it gives none.
pub fn describe(stream: &TcpStream) -> TcpInfo {
    sys::tcp_info(stream.as_raw_fd()).map_or_else(|_| TcpInfo::default(), |bytes| read(&bytes))
}

/// The fields of a struct tcp_info.
pub(crate) fn read(bytes: &[u8; 256]) -> TcpInfo {
    // Offsets in struct tcp_info (linux/tcp.h), which only ever grows at its end.
    let u32_at = |at: usize| bytes[at..].first_chunk().map_or(0, |chunk| u32::from_ne_bytes(*chunk));
    let u64_at = |at: usize| bytes[at..].first_chunk().map_or(0, |chunk| u64::from_ne_bytes(*chunk));
    TcpInfo {
        window_probes: u32::from(bytes[3]),
        segment_size: u32_at(16),
        unacked: u32_at(24),
        rtt_us: u32_at(68),
        congestion_window: u32_at(80),
        retransmits: u32_at(100),
        bytes_acked: u64_at(120),
        notsent_bytes: u32_at(144),
        min_rtt_us: u32_at(148),
        delivery_rate: u64_at(160),
    }
}
