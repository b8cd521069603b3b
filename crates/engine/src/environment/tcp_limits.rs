//! Numbers of TCP connections and threads: from the settings, or derived from the processors.

use crossrail_topology::NetDevice;
use crossrail_types::{Channels, IoThreads, Settings};

/// Threads that pump connections, unless the user asks for more.
const THREADS_MAX: usize = 16;
/// Maximum connections per rail: more have not gained anything on any machine.
const CHANNELS_MAX: usize = 8;
/// Connections to one peer that carry chunks until something was measured.
const BEGIN_WITH: usize = 8;
/// As `BEGIN_WITH`, for one rail.
const BEGIN_WITH_ON_ONE: usize = 4;

/// Limits of a worker's TCP connections and of the threads that pump them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TcpLimits {
    /// Connections that a rail may have: as set, or with `auto` as many as there are threads for.
    pub(crate) channels: u8,
    /// Connections of each rail that carry chunks until something was measured.
    pub(crate) begin_with: u16,
    /// Connection threads, each started with its first connection; one: callers do all the work.
    pub(crate) threads: usize,
    /// Callers pump the first connection to a peer, although the others have threads.
    pub(crate) pumps_first: bool,
}

impl TcpLimits {
    /// The limits for these settings, with that many processors and these rails.
    pub(crate) fn of(settings: &Settings, cores: usize, rails: &[NetDevice]) -> TcpLimits {
        // Half of the cores, because the peer may be on this machine.
        let half = (cores / 2).max(1);
        // Rails that lead to one peer: the loopback devices, or the others.
        let loopback = rails.iter().filter(|rail| rail.loopback).count();
        let at_once = loopback.max(rails.len() - loopback).max(1);
        match settings.channels {
            Channels::Count(count) => {
                let connections = rails.len().max(1) * count as usize;
                let threads = match settings.io_threads {
                    IoThreads::Count(threads) => threads as usize,
                    IoThreads::Auto => connections.min(half).clamp(1, 8),
                };
                let channels = u8::try_from(count).unwrap_or(u8::MAX);
                TcpLimits { channels, begin_with: 1, threads, pumps_first: false }
            }
            Channels::Auto => {
                let (threads, is_set) = match settings.io_threads {
                    IoThreads::Count(threads) => (threads as usize, true),
                    IoThreads::Auto => (half.min(THREADS_MAX), false),
                };
                // More connections than threads are slower than as many.
                let channels = (threads.min(half) / at_once).clamp(1, CHANNELS_MAX);
                let begin_with = (BEGIN_WITH / at_once).clamp(1, BEGIN_WITH_ON_ONE).min(channels);
                TcpLimits {
                    channels: channels as u8,
                    begin_with: begin_with as u16,
                    threads: if is_set { threads } else { threads.min(at_once * channels) },
                    pumps_first: !is_set && at_once == 1,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(channels: Channels, io_threads: IoThreads, cores: usize, rails: u8) -> (u8, u16, usize, bool) {
        let device = |at: u8| NetDevice {
            name: format!("127.0.0.{at}"),
            interface: "lo".to_owned(),
            address: [127, 0, 0, at].into(),
            addresses: Vec::new(),
            index: 1,
            speed_mbps: None,
            numa_node: None,
            loopback: true,
        };
        let settings = Settings { channels, io_threads, ..Settings::default() };
        let rails: Vec<NetDevice> = (1..=rails).map(device).collect();
        let TcpLimits { channels, begin_with, threads, pumps_first } = TcpLimits::of(&settings, cores, &rails);
        (channels, begin_with, threads, pumps_first)
    }

    #[test]
    fn connections_and_threads_follow_the_processors() {
        let auto = |cores, rails| limits(Channels::Auto, IoThreads::Auto, cores, rails);
        for cores in 0..=3 {
            assert_eq!(auto(cores, 1), (1, 1, 1, true), "{cores} cores: callers do it all");
            assert_eq!(auto(cores, 4), (1, 1, 1, false), "more rails than cores");
        }
        assert_eq!([auto(4, 1), auto(8, 1), auto(16, 1)], [(2, 2, 2, true), (4, 4, 4, true), (8, 4, 8, true)]);
        assert_eq!([auto(16, 0), auto(32, 1), auto(512, 1)], [(8, 4, 8, true); 3]);
        assert_eq!([auto(16, 2), auto(32, 2), auto(32, 4)], [(4, 4, 8, false), (8, 4, 16, false), (4, 2, 16, false)]);
        assert_eq!([auto(4, 4), auto(32, 20)], [(1, 1, 2, false), (1, 1, 16, false)]);
    }

    #[test]
    fn numbers_that_are_set_are_kept() {
        let auto = |threads, cores| limits(Channels::Auto, IoThreads::Count(threads), cores, 1);
        assert_eq!([auto(1, 32), auto(3, 32), auto(64, 2)], [(1, 1, 1, false), (3, 3, 3, false), (1, 1, 64, false)]);
        let set = |channels, cores, rails| limits(Channels::Count(channels), IoThreads::Auto, cores, rails);
        assert_eq!(
            [set(1, 32, 1), set(4, 2, 1), set(4, 32, 4)],
            [(1, 1, 1, false), (4, 1, 1, false), (4, 1, 8, false)]
        );
        assert_eq!(limits(Channels::Count(2), IoThreads::Count(5), 2, 1), (2, 1, 5, false));
    }
}
