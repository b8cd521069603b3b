//! Which rail carries the messages of an endpoint over TCP, and how long they are.

use crossrail_types::Checksum;

use super::costs::EAGER_LIMIT;
use super::explain::{self, Candidate};
use super::rail_pairs::RailPair;
use super::transport::{Choice, Turn};

/// How the messages of an endpoint travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Messages {
    /// The number of the rail that has the connection for them.
    pub(super) rail: u16,
    /// Messages up to here go with their first frame.
    pub(super) eager_max: usize,
    /// The caller's messages take turns between endpoints, which loads the rails evenly: they stay on their rail, whole.
    pub(super) turns: bool,
}

impl Messages {
    /// Over these rails. `unasked`: they can carry long messages without asking the receiver first. Chunks are spread
    /// by what each rail carries, messages are not: where the rails' speeds differ, or some would carry more of the
    /// turns than others, long messages are left to chunks.
    pub(super) fn over(rails: &[RailPair], turn: Turn, unasked: bool) -> Messages {
        let speed = |rail: &RailPair| [rail.mine.speed_mbps, rail.theirs.speed_mbps].into_iter().flatten().min();
        let alike = rails.windows(2).all(|two| speed(&two[0]) == speed(&two[1]));
        let rail = if alike { turn.index % rails.len().max(1) } else { 0 };
        let even = alike && turn.of.is_multiple_of(rails.len());
        let eager_max = if even && unasked { turn.eager_max } else { turn.eager_max.min(EAGER_LIMIT) };
        Messages { rail: rail as u16, eager_max, turns: even && turn.of > 1 }
    }
}

/// The row of a rail that is used. `small`: it carries the messages, too.
pub(super) fn used(row: Candidate, small: bool) -> Candidate {
    row.chosen(if small { &["small", "large"] } else { &["large"] })
}

/// What an endpoint uses whose rows are these.
pub(super) fn choice(rows: Vec<Candidate>, eager_max: usize, checksum: Checksum) -> Choice {
    let chosen: Vec<_> = rows.iter().filter(|row| !row.chosen_for.is_empty()).collect();
    let small = chosen.iter().find(|row| row.chosen_for.iter().any(|what| what == "small"));
    let small = small.map(|row| row.lane.clone()).unwrap_or_default();
    let names: Vec<_> = chosen.iter().map(|row| row.lane.as_str()).collect();
    let mut large = explain::from_size(eager_max, &names.join(" "));
    if checksum != Checksum::Off {
        large.push_str(&format!(" (checksum {checksum})"));
    }
    Choice { small, large, rows }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use crossrail_handshake::Device;
    use crossrail_topology::NetDevice;

    use super::*;

    fn rails(speeds: &[(Option<u32>, Option<u32>)]) -> Vec<RailPair> {
        let rail = |(at, (mine, theirs)): (usize, &(Option<u32>, Option<u32>))| {
            let (name, address) = (format!("eth{at}"), IpAddr::from([10, 0, at as u8, 1]));
            let theirs = Device { name: name.clone(), address, port: 1, speed_mbps: *theirs, loopback: false };
            let mine = NetDevice {
                interface: name.clone(),
                name,
                address,
                addresses: vec![address],
                index: 1,
                speed_mbps: *mine,
                loopback: false,
                numa_node: None,
            };
            RailPair { mine, from: address, theirs }
        };
        speeds.iter().enumerate().map(rail).collect()
    }

    /// The rail of each of so many endpoints, and whether long messages go unasked.
    fn turns(speeds: &[(Option<u32>, Option<u32>)], of: usize) -> (Vec<u16>, bool) {
        const LONG: usize = 2 * EAGER_LIMIT;
        let rails = rails(speeds);
        let all: Vec<_> =
            (0..of).map(|index| Messages::over(&rails, Turn { index, of, eager_max: LONG }, true)).collect();
        let long = all[0].eager_max == LONG;
        assert!(all.iter().all(|messages| messages.eager_max == if long { LONG } else { EAGER_LIMIT }));
        assert!(all.iter().all(|messages| messages.turns == (long && of > 1)), "{of} turns");
        (all.iter().map(|messages| messages.rail).collect(), long)
    }

    #[test]
    fn rails_of_one_speed_carry_messages_by_turns() {
        let fast = (Some(100_000), Some(100_000));
        assert_eq!(turns(&[fast; 4], 4), (vec![0, 1, 2, 3], true));
        assert_eq!(turns(&[fast; 2], 4), (vec![0, 1, 0, 1], true));
        assert_eq!(turns(&[(None, None); 1], 3), (vec![0; 3], true));
        // What is not known does not differ, and the slower end of a rail is its speed.
        assert_eq!(turns(&[(None, None), (None, None)], 2), (vec![0, 1], true));
        assert_eq!(turns(&[fast, (Some(200_000), Some(100_000))], 2), (vec![0, 1], true));
    }

    #[test]
    fn long_messages_are_asked_for_where_turns_would_load_rails_unevenly() {
        let fast = (Some(100_000), Some(100_000));
        for of in [1, 2, 3, 5] {
            let (rails, long) = turns(&[fast; 4], of);
            assert_eq!((rails, long), ((0..of as u16).map(|index| index % 4).collect(), false), "{of} turns");
        }
        for slow in [(Some(10_000), Some(100_000)), (Some(100_000), Some(10_000)), (None, None)] {
            assert_eq!(turns(&[fast, slow], 2), (vec![0, 0], false), "{slow:?}");
        }
        let short = Turn { eager_max: 1000, ..Turn::default() };
        assert_eq!(Messages::over(&rails(&[fast; 4]), short, true).eager_max, 1000);
        // Turns load rails evenly however long messages are that go unasked.
        let turn = Turn { index: 1, of: 4, eager_max: 1000 };
        assert_eq!(Messages::over(&rails(&[fast; 4]), turn, false), Messages { rail: 1, eager_max: 1000, turns: true });
        let long = Turn { eager_max: 2 * EAGER_LIMIT, ..Turn::default() };
        assert_eq!(Messages::over(&rails(&[fast]), long, false).eager_max, EAGER_LIMIT);
    }
}
