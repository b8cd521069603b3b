//! A lane's connection to a far rank.
#![allow(unsafe_code)]

use std::sync::Arc;

use crossrail::placing::{Counter, Event, Extent, Key, Placing, WriteError};
use crossrail::placing::{LaneError, Loan};
use crossrail_kernels::ep::Command;
use crossrail_sight::{Histogram, now_ns};
use crossrail_types::{Error, ErrorKind, Result};

use crate::proxy::area::Area;
use crate::proxy::incoming::Incoming;
use crate::proxy::outgoing::{BURST_BYTES, BURSTS, NOTES, Outgoing, Targets};
use crate::proxy::shared::{FarRank, LaneReport};
use crate::proxy::sight::{FarRows, LaneTrace, Window};

/// Rails to a far rank whose memory is exposed, but whose targets are not known yet.
pub(crate) struct Offer {
    placing: Box<dyn Placing>,
    far: Arc<FarRank>,
    lane: usize,
    notes: Area,
    mine: Targets,
    /// Keep what is exposed until the rails are dropped.
    loans: [Arc<Loan>; 2],
}

/// Bytes of encoded targets.
const TARGETS: usize = 2 * 32 + 4 * BURSTS;

impl Targets {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = [self.inbox.0, self.notes.0].concat();
        bytes.extend(self.counters.iter().flat_map(|counter| counter.0.to_le_bytes()));
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Targets> {
        let (inbox, rest) = bytes.split_first_chunk::<32>()?;
        let (notes, rest) = rest.split_first_chunk::<32>()?;
        let numbers = rest.as_chunks::<4>().0;
        let counters =
            std::array::from_fn(|at| numbers.get(at).map_or(Counter(u32::MAX), |n| Counter(u32::from_le_bytes(*n))));
        (rest.len() == 4 * BURSTS).then_some(Targets { inbox: Key(*inbox), notes: Key(*notes), counters })
    }
}

impl Offer {
    /// Exposes what the far rank writes into.
    pub(crate) fn new(mut placing: Box<dyn Placing>, far: &Arc<FarRank>, lane: usize) -> Result<Offer> {
        let wrong =
            |why: String| Error::new(ErrorKind::Unsupported, "connect", why).with_peer(format!("rank {}", far.rank));
        let notes = Area::plain(BURSTS * BURST_BYTES);
        let loans: [Arc<Loan>; 2] = Default::default();
        let mut expose = |area: &Area, loan: &Arc<Loan>| -> Result<Key> {
            let extent = Extent::host(area.as_ptr(), area.len());
            // SAFETY: areas are kept longer than the rails, with which they are.
            unsafe { placing.expose(&extent, loan) }.map_err(wrong)
        };
        let (inbox, noted) = (expose(&far.receive, &loans[0])?, expose(&notes, &loans[1])?);
        let mut counters = [Counter(0); BURSTS];
        for counter in &mut counters {
            let made = placing.count(NOTES as u16 + 1);
            *counter = made.ok_or_else(|| wrong("no counter is left".to_owned()))?;
        }
        let mine = Targets { inbox, notes: noted, counters };
        Ok(Offer { placing, far: far.clone(), lane, notes, mine, loans })
    }

    /// This end's targets, for the far rank.
    pub(crate) fn targets(&self) -> Vec<u8> {
        self.mine.encode()
    }

    /// Bytes of that.
    pub(crate) const TARGETS: usize = TARGETS;

    /// Completes the link with the targets of the far rank.
    ///
    /// # Errors
    /// `Protocol` for invalid targets.
    pub(crate) fn accept(self, theirs: &[u8]) -> Result<Link> {
        let Offer { placing, far, lane, notes, mine, loans } = self;
        let wrong =
            |what: &str| Error::new(ErrorKind::Protocol, "connect", what).with_peer(format!("rank {}", far.rank));
        let targets = Targets::decode(theirs).ok_or_else(|| wrong("its keys have another length"))?;
        if targets.inbox.len() != far.send.len() as u64 || targets.notes.len() < (BURSTS * BURST_BYTES) as u64 {
            return Err(wrong(&format!("its inbox has {} bytes, not {}", targets.inbox.len(), far.send.len())));
        }
        let outgoing = Outgoing::new(far.clone(), lane, targets);
        let incoming = Incoming::new(far.clone(), mine.counters, notes);
        let bursts = Histogram::default();
        Ok(Link { placing, outgoing, incoming, far, lane, bursts, rows: None, _loans: loans })
    }
}

/// See the module.
pub(crate) struct Link {
    /// Dropped first: it accesses the others' memory.
    placing: Box<dyn Placing>,
    outgoing: Outgoing,
    incoming: Incoming,
    far: Arc<FarRank>,
    lane: usize,
    /// Durations of bursts.
    bursts: Histogram,
    /// The rank's rows of the page, which the first lane writes.
    rows: Option<FarRows>,
    _loans: [Arc<Loan>; 2],
}

impl Link {
    pub(crate) fn far(&self) -> &Arc<FarRank> {
        &self.far
    }

    /// A kernel has appended this command for the rank.
    pub(crate) fn push(&mut self, command: Command) {
        if self.outgoing.pending() == 0 {
            self.outgoing.since_ns = now_ns();
        }
        self.outgoing.push(command);
    }

    /// Reports what it does to the far rank, whose rows of the page the first lane writes.
    pub(super) fn show(&mut self, window: &Window) {
        let report = LaneReport {
            pending: self.outgoing.pending() as u64,
            in_flight: self.outgoing.in_flight() as u64,
            bursts: self.bursts.clone(),
            rails: self.placing.rails(),
        };
        self.far.report(self.lane, report);
        if self.lane == 0 {
            let rows = self.rows.get_or_insert_with(|| FarRows::new(window, self.far.rank));
            rows.write(window, &self.far);
        }
    }

    /// Sends and receives what it can without waiting. Returns whether anything moved.
    ///
    /// # Errors
    /// Why the rank cannot be reached any more.
    pub(super) fn advance(&mut self, mut trace: Option<&mut LaneTrace>) -> std::result::Result<bool, LaneError> {
        let Link { placing, outgoing, incoming, bursts, far, .. } = self;
        let mut moved = outgoing.flush(placing.as_mut())?;
        let mut wrong = None;
        let polled = placing.poll(&mut |event| match event {
            Event::Arrived(imm) => {
                if wrong.is_none() {
                    wrong = incoming.arrived(imm).err();
                }
            }
            Event::Ended { token, result: Ok(()) } => {
                if let Some((since_ns, bytes)) = outgoing.ended(token) {
                    bursts.add(now_ns().saturating_sub(since_ns));
                    if let Some(trace) = &mut trace {
                        trace.burst(far.rank, since_ns, bytes);
                    }
                }
            }
            // `poll` returns the end of the rails as an error.
            Event::Ended { result: Err(WriteError::Lost), .. } => {}
            Event::Ended { result: Err(WriteError::Revoked), .. } => {
                wrong = Some("it has ended the access to its memory".to_owned());
            }
        });
        moved |= *polled.as_ref().unwrap_or(&true);
        match wrong {
            Some(why) => Err(LaneError::Protocol(why)),
            None => polled.map(|_| moved),
        }
    }

    /// True while writes are pending or in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.outgoing.is_busy()
    }

    /// Its rails that were lost so far, with the reasons.
    pub(crate) fn lost_rails(&self) -> Vec<(String, String)> {
        self.placing.rails().into_iter().filter_map(|rail| Some((rail.name, rail.lost?))).collect()
    }
}
