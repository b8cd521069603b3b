//! Which rail should have the connection for messages: one that is clearly faster, once the rails' rates are known.
//!
//! A short message, or the announcement of a longer one, waits for what its rail's queue holds. On a slow rail that is
//! long, and every later message waits too, as messages keep their order.

use std::time::Duration;

use crossrail_proto::Time;

/// Acknowledgements between two looks at the rates.
const LOOK_EVERY: u32 = 8;
/// Looks before a rail counts as known, and the weight of all earlier ones against a new one.
const LOOKS: u64 = 32;
/// Factor by which another rail must be faster than the present one: less is noise of the measurement.
const FASTER: u64 = 3;
/// The shortest time between two moves; each move doubles it, up to a limit, so that two ends that differ about the
/// fastest rail do not move for ever.
const REST: Duration = Duration::from_millis(500);
const DOUBLINGS_MAX: u32 = 8;

/// When to look at the rates, and what was seen.
#[derive(Debug, Default)]
pub(super) struct MessageRail {
    acknowledgements: u32,
    moves: u32,
    not_before: Time,
    /// Average time of each rail for its bytes.
    seen: Vec<Seen>,
}

/// The time that a rail takes. The rate of one batch of acknowledgements varies much, upwards above all, where several
/// arrive at once; so times are averaged, not rates.
#[derive(Debug)]
struct Seen {
    rail: u16,
    /// The last rate that counted: one that has not changed is of a rail that carried nothing meanwhile.
    rate: u64,
    looks: u64,
    /// Nanoseconds for a MiB.
    takes: u64,
}

impl MessageRail {
    /// Counts an acknowledgement; whether to look at the rates.
    #[inline]
    pub(super) fn counts(&mut self) -> bool {
        self.acknowledgements = self.acknowledgements.wrapping_add(1);
        self.acknowledgements.is_multiple_of(LOOK_EVERY)
    }

    /// The rail to move to from the `present` one. `rates`: of each rail in bytes per second now, 0 while unknown.
    pub(super) fn choose(&mut self, now: Time, present: u16, rates: &[(u16, u64)]) -> Option<u16> {
        self.seen.retain(|seen| rates.iter().any(|(rail, _)| *rail == seen.rail));
        for &(rail, rate) in rates.iter().filter(|(_, rate)| *rate > 0) {
            let takes = ((1 << 20) * 1_000_000_000 / u128::from(rate)) as u64;
            match self.seen.iter_mut().find(|seen| seen.rail == rail) {
                Some(seen) if seen.rate == rate => {}
                Some(seen) => {
                    seen.rate = rate;
                    let earlier = seen.looks.min(LOOKS - 1);
                    seen.takes = (seen.takes * earlier + takes) / (earlier + 1);
                    seen.looks += 1;
                }
                None => self.seen.push(Seen { rail, rate, looks: 1, takes }),
            }
        }
        let known = || self.seen.iter().filter(|seen| seen.looks >= LOOKS);
        let own = known().find(|seen| seen.rail == present)?.takes;
        let best = known().min_by_key(|seen| (seen.takes, seen.rail))?;
        if best.takes.saturating_mul(FASTER) > own || now < self.not_before {
            return None;
        }
        let rest = REST * (1 << self.moves.min(DOUBLINGS_MAX));
        self.not_before = Time(now.0.saturating_add(rest.as_nanos() as u64));
        self.moves += 1;
        Some(best.rail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Rates in MB/s that differ a little with each look.
    fn measured(look: u64, mb_per_s: &[u64]) -> Vec<(u16, u64)> {
        (0..).zip(mb_per_s.iter().map(|rate| rate * (1_000_000 - 1000 * (look % 2)))).collect()
    }

    /// The rail to which `looks` looks at these rates move messages from rail 0.
    fn after(looks: u64, rates: impl Fn(u64) -> Vec<(u16, u64)>) -> Option<u16> {
        let mut of = MessageRail::default();
        (0..looks).find_map(|look| of.choose(Time(0), 0, &rates(look)))
    }

    #[test]
    fn messages_move_to_a_rail_that_takes_a_third_of_the_time() {
        let uneven = |look| measured(look, &[50, 100, 400, 400]);
        assert_eq!(after(LOOKS - 1, uneven), None, "a few looks may see a burst");
        assert_eq!(after(LOOKS, uneven), Some(2), "of two that are as fast, the first");
        for rates in [[50, 149], [0, 149], [50, 0]] {
            assert_eq!(after(3 * LOOKS, |look| measured(look, &rates)), None, "{rates:?}");
        }
    }

    #[test]
    fn rates_of_bursts_and_of_rails_that_rest_move_nothing() {
        let bursts = |look| measured(look, &[100, if look % 4 == 0 { 100_000 } else { 100 }]);
        assert_eq!(after(10 * LOOKS, bursts), None);
        let rests = |look| vec![measured(look, &[100])[0], (1, 900_000_000)];
        assert_eq!(after(10 * LOOKS, rests), None);
    }

    #[test]
    fn messages_that_moved_stay_for_longer_and_longer() {
        let mut of = MessageRail::default();
        let mut moves = Vec::new();
        let mut present = 0;
        for tick in 0..4000 {
            let rates = measured(tick, if present == 0 { &[10, 90] } else { &[90, 10] });
            if let Some(rail) = of.choose(Time(tick * SECOND / 100), present, &rates) {
                present = rail;
                moves.push(tick);
            }
        }
        let rests: Vec<u64> = moves.windows(2).map(|two| two[1] - two[0]).collect();
        assert!(rests.len() > 3 && rests.iter().enumerate().all(|(at, rest)| *rest >= 50 << at), "{moves:?}");
    }

    #[test]
    fn rates_are_looked_at_once_in_so_many_acknowledgements() {
        let mut of = MessageRail::default();
        let looks = (0..LOOK_EVERY * 3).filter(|_| of.counts()).count();
        assert_eq!(looks, 3);
    }
}
