//! Statistics of a connection, from the kernel.

use std::net::TcpStream;
use std::os::fd::AsRawFd;

use crate::sys;

/// The kernel's statistics of a connection (TCP_INFO).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// Smoothed round-trip time in microseconds.
    pub rtt_us: u32,
    /// Minimum recent round-trip time in microseconds.
    pub min_rtt_us: u32,
    /// Bytes acknowledged by the peer's kernel since the connection was opened.
    pub bytes_acked: u64,
    /// Segments retransmitted since the connection was opened.
    pub retransmits: u32,
    /// Segments in flight.
    pub unacked: u32,
    /// Unanswered probes of the peer's window while it is full.
    pub window_probes: u32,
    /// Bytes written but not sent yet.
    pub notsent_bytes: u32,
    /// Latest estimate of the path's rate in bytes per second; 0 before the first estimate.
    pub delivery_rate: u64,
    /// Maximum number of segments in flight.
    pub congestion_window: u32,
    /// Payload of a segment in bytes.
    pub segment_size: u32,
}

/// The kernel's current statistics of a connection; zeros if it provides none.
pub fn describe(stream: &TcpStream) -> TcpInfo {
    sys::tcp_info(stream.as_raw_fd()).map_or_else(|_| TcpInfo::default(), |bytes| read(&bytes))
}

/// Decodes a struct tcp_info.
pub(crate) fn read(bytes: &[u8; 256]) -> TcpInfo {
    // Offsets in struct tcp_info (linux/tcp.h), which is only ever extended at its end.
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
