//! The receiving half of a link to a peer: applies the batches that arrive in its inbox, in the order of their numbers.
//!
//! ```text
//! arrived ─ apply: copies enqueued, words of signals read if they are unknown ─ words stored ─ placed ─ answered
//! ```
//!
//! The receiver adds up signals itself and stores the sums after the copies, in the same stream. A word of a window that
//! kernels reset has to be read first; one that only signals write is read once.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use crossrail::placing::{Counter, Event, Extent, Imm, Loan, Placing, Post, WriteError};
use crossrail_types::{Error, ErrorKind, Result};

use super::batch::{self, ANSWER, Answer, Kind, LINE, RECORDS, Record, Refusal, SLOT};
use super::gpu::{Copier, Work};
use super::memory::{Area, Region, add_word, copy_words};
use super::outgoing::{Answers, Inbox, lost, write};
use super::shared::{Found, Op, Shared, Source, ToSending};

/// Bytes of the pinned memory into which words are read.
pub(crate) const SCRATCH: usize = 8 * RECORDS;

/// State of the receiving thread for all peers: its stream, and words of signals.
pub(crate) struct Applier {
    pub(crate) copier: Copier,
    work: Work,
    /// Words that only signals write, by registration and offset.
    known: HashMap<(u32, u64), u64>,
    /// A batch is reading words into the scratch memory; no other batch may, as this one will store them.
    reads: bool,
    scratch: Arc<Area>,
}

impl Applier {
    pub(crate) fn new(scratch: Arc<Area>) -> Applier {
        Applier { copier: Copier::default(), work: Work::default(), known: HashMap::new(), reads: false, scratch }
    }

    /// A registration has ended: its number is not used again.
    pub(crate) fn forget(&mut self, shared: &Shared) {
        self.known.retain(|(number, _), _| matches!(shared.region(*number), Found::Known(_)));
    }
}

/// See the module. Driven by one thread.
pub(crate) struct Incoming {
    shared: Arc<Shared>,
    rank: u32,
    /// `None`: the peer is lost.
    wire: Option<Box<dyn Placing>>,
    inbox: Arc<Area>,
    /// Answers that refuse something, by slot.
    lines: Area,
    data: Counter,
    theirs: Answers,
    slots: usize,
    arrived: Vec<bool>,
    /// Number of the next batch to be applied.
    next: u64,
    applying: VecDeque<Applying>,
    /// Since when that batch waits for registrations.
    waits: Option<Instant>,
}

/// A batch that was applied, up to its answer.
struct Applying {
    number: u64,
    phase: Phase,
    answer: Option<Answer>,
    /// Tags of gets, and bytes of them.
    got: Vec<(u64, u64)>,
    /// Signals in GPU memory, while their words are being read.
    words: Vec<Word>,
    /// Signals in host memory, added once everything is placed.
    added: Vec<Word>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Until that point is reached, the scratch memory is being filled.
    Reading(u64),
    /// Until that point is reached, copies and stores are in flight.
    Writing(u64),
    /// To be answered.
    Placed,
}

/// Signals of one word that follow each other.
struct Word {
    region: Arc<Region>,
    offset: u64,
    value: u64,
    /// By number of the record of the first of them.
    record: usize,
    /// Index of the word in the scratch memory.
    read_at: Option<usize>,
}

/// A checked record.
enum Action {
    Put { record: Record, region: Arc<Region>, to: u64 },
    Reply { record: Record, region: Arc<Region>, to: u64 },
    Get { record: Record, region: Arc<Region> },
}

/// A checked batch.
#[derive(Default)]
struct Plan {
    actions: Vec<Action>,
    words: Vec<Word>,
    added: Vec<Word>,
    answer: Option<Answer>,
}

impl Plan {
    fn refuse(&mut self, record: usize, why: Refusal) {
        match &mut self.answer {
            Some(answer) => answer.refuse(record),
            none => *none = Some(Answer::refusing(record, why)),
        }
    }
}

/// An [`Incoming`] before the peer's half is known: its memory is exposed, its counters are open.
pub(crate) struct IncomingOffer {
    wire: Box<dyn Placing>,
    inbox: Arc<Area>,
    slots: usize,
    pub(crate) mine: Inbox,
}

impl IncomingOffer {
    /// # Errors
    /// Why the memory cannot be exposed.
    #[allow(unsafe_code)]
    pub(crate) fn new(mut wire: Box<dyn Placing>, inbox: Arc<Area>) -> Result<IncomingOffer> {
        let wrong = |why: String| Error::new(ErrorKind::Unsupported, "connect", why);
        let slots = inbox.len() / SLOT;
        let extent = Extent::host(inbox.at(0, inbox.len()), inbox.len());
        // SAFETY: the area is kept with the rails, and dropped after them.
        let key = unsafe { wire.expose(&extent, &Arc::new(Loan::default())) }.map_err(wrong)?;
        let data = wire.count(slots as u16).ok_or_else(|| wrong("no counter is left".to_owned()))?;
        Ok(IncomingOffer { wire, inbox, slots, mine: Inbox { key, data } })
    }

    /// Completes it with the peer's half.
    ///
    /// # Errors
    /// `Exhausted`.
    pub(crate) fn accept(self, shared: &Arc<Shared>, rank: u32, theirs: Answers) -> Result<Incoming> {
        let IncomingOffer { wire, inbox, slots, mine } = self;
        Ok(Incoming {
            shared: Arc::clone(shared),
            rank,
            wire: Some(wire),
            inbox,
            lines: Area::new(slots * ANSWER)?,
            data: mine.data,
            theirs,
            slots,
            arrived: vec![false; slots],
            next: 0,
            applying: VecDeque::new(),
            waits: None,
        })
    }
}

impl Incoming {
    pub(crate) fn wire(&self) -> Option<&dyn Placing> {
        self.wire.as_deref()
    }

    pub(crate) fn arm(&mut self) -> bool {
        self.wire.as_mut().is_none_or(|wire| wire.arm())
    }

    /// Something waits that no event announces.
    pub(crate) fn is_busy(&self) -> bool {
        self.wire.is_some() && (!self.applying.is_empty() || self.waits.is_some())
    }

    /// Moves what can move.
    ///
    /// # Errors
    /// Why the peer is lost.
    pub(crate) fn advance(&mut self, applier: &mut Applier) -> Result<bool> {
        if self.wire.is_none() {
            return Ok(false);
        }
        if let Some(error) = self.shared.lost(self.rank) {
            return Err(error.clone());
        }
        let mut moved = self.poll()?;
        while self.arrived[self.slot(self.next)] && self.apply(applier)? {
            moved = true;
        }
        moved |= self.finish(applier)?;
        Ok(moved)
    }

    /// The peer is lost. What was to be read is not stored.
    pub(crate) fn fail(&mut self, applier: &mut Applier) {
        self.wire = None;
        if self.applying.iter().any(|batch| matches!(batch.phase, Phase::Reading(_))) {
            applier.reads = false;
        }
        self.applying.clear();
    }

    fn slot(&self, number: u64) -> usize {
        (number % self.slots as u64) as usize
    }

    fn protocol(&self, why: String) -> Error {
        Error::new(ErrorKind::Protocol, "RMA", why).with_peer(format!("rank {}", self.rank))
    }

    fn poll(&mut self) -> Result<bool> {
        let Some(wire) = self.wire.as_mut() else { return Ok(false) };
        let (arrived, mut wrong) = (&mut self.arrived, None);
        let polled = wire.poll(&mut |event| match event {
            Event::Arrived(imm) if imm.counter == self.data => match arrived.get_mut(usize::from(imm.piece)) {
                Some(slot) if !*slot => *slot = true,
                _ => wrong = Some(format!("a batch arrives in slot {} that is in use", imm.piece)),
            },
            Event::Arrived(imm) => wrong = Some(format!("a batch counts as {imm}")),
            Event::Ended { result: Err(WriteError::Revoked), .. } => {
                wrong = Some("it has ended the access to its answers".to_owned());
            }
            Event::Ended { .. } => {}
        });
        let moved = polled.map_err(|error| lost(wire.as_ref(), &error))?;
        match wrong {
            Some(why) => Err(self.protocol(why)),
            None => Ok(moved),
        }
    }

    // ---- applying

    /// Applies the next batch. False: not yet.
    fn apply(&mut self, applier: &mut Applier) -> Result<bool> {
        // Its words are stored only once they are read.
        if self.applying.back().is_some_and(|batch| matches!(batch.phase, Phase::Reading(_))) {
            return Ok(false);
        }
        let base = self.slot(self.next) * SLOT;
        let head = batch::Head::decode(&self.inbox.read(base)).map_err(|why| self.protocol(why))?;
        if head.number != self.next {
            return Err(self.protocol(format!("batch {} arrives in the place of {}", head.number, self.next)));
        }
        let record = |at: u32| Record::decode(&self.inbox.read(base + LINE * (at as usize + 1)), head.payload);
        let records: std::result::Result<Vec<Record>, String> = (0..head.records).map(record).collect();
        let records = records.map_err(|why| self.protocol(why))?;
        if self.must_wait(&records) {
            return Ok(false);
        }
        let mut plan = self.plan(&records);
        let unknown = applier.locate(&mut plan.words);
        if unknown > 0 && applier.reads {
            return Ok(false);
        }
        let payload = base + LINE * (head.records as usize + 1);
        let mut got = Vec::new();
        for action in plan.actions {
            self.act(applier, action, payload, &mut got);
        }
        let phase = if unknown > 0 {
            applier.reads = true;
            Phase::Reading(applier.read(&plan.words)?)
        } else {
            Phase::Writing(applier.store(&plan.words, &mut plan.answer)?)
        };
        self.waits = None;
        let slot = self.slot(self.next);
        self.arrived[slot] = false;
        let words = if unknown > 0 { plan.words } else { Vec::new() };
        let (answer, added) = (plan.answer, plan.added);
        self.applying.push_back(Applying { number: self.next, phase, answer, got, words, added });
        self.next += 1;
        Ok(true)
    }

    /// The peer may register memory before this rank does.
    fn must_wait(&mut self, records: &[Record]) -> bool {
        let is_missing = |number: u32| matches!(self.shared.region(number), Found::NotYet);
        let misses = |record: &Record| {
            let target = record.kind == Kind::Get || (record.kind == Kind::Put && record.len > 0);
            (target && is_missing(record.registration))
                || record.signal.is_some_and(|signal| is_missing(signal.registration))
        };
        if !records.iter().any(misses) {
            return false;
        }
        self.waits.get_or_insert_with(Instant::now).elapsed() < self.shared.patience
    }

    fn plan(&self, records: &[Record]) -> Plan {
        let mut plan = Plan::default();
        let known = |number: u32| match self.shared.region(number) {
            Found::Known(region) => Ok(region),
            Found::Gone | Found::NotYet => Err(Refusal::Unregistered),
        };
        for (at, record) in records.iter().enumerate() {
            let action = match record.kind {
                Kind::Put if record.len == 0 => Ok(None),
                Kind::Put => known(record.registration).and_then(|region| {
                    let to = region.range(record.offset, record.len)?;
                    Ok(Some(Action::Put { record: *record, region, to }))
                }),
                Kind::Get => known(record.registration).and_then(|region| {
                    region.range(record.offset, record.len)?;
                    Ok(Some(Action::Get { record: *record, region }))
                }),
                Kind::Reply => self.reply(record).map(Some),
            };
            let signal = record.signal.map(|signal| {
                let region = known(signal.registration)?;
                region.word(signal.offset)?;
                Ok::<_, Refusal>(Word { region, offset: signal.offset, value: signal.value, record: at, read_at: None })
            });
            match (action, signal.transpose()) {
                (Ok(action), Ok(signal)) => {
                    plan.actions.extend(action);
                    if let Some(word) = signal {
                        let words = if word.region.gpu.is_some() { &mut plan.words } else { &mut plan.added };
                        let is_same =
                            |last: &&mut Word| last.offset == word.offset && last.region.number == word.region.number;
                        match words.last_mut().filter(is_same) {
                            Some(last) => last.value = last.value.wrapping_add(word.value),
                            None => words.push(word),
                        }
                    }
                }
                (Err(why), _) | (_, Err(why)) => plan.refuse(at, why),
            }
        }
        plan
    }

    fn reply(&self, record: &Record) -> std::result::Result<Action, Refusal> {
        let (region, offset, len) = self.shared.get_target(record.tag, self.rank).ok_or(Refusal::Tag)?;
        match record.offset.checked_add(record.len) {
            Some(end) if end <= len => {}
            _ => return Err(Refusal::Outside),
        }
        let to = region.range(offset + record.offset, record.len);
        match to {
            Ok(to) => Ok(Action::Reply { record: *record, region, to }),
            Err(why) => {
                let error = Error::new(ErrorKind::Region, "iget", format!("the target: {}", Refusal::text(why as u8)));
                self.shared.fail_get(record.tag, error);
                Err(why)
            }
        }
    }

    fn act(&self, applier: &mut Applier, action: Action, payload: usize, got: &mut Vec<(u64, u64)>) {
        match action {
            Action::Put { record, region, to } => applier.place(&self.inbox, payload, &record, &region, to),
            Action::Reply { record, region, to } => {
                applier.place(&self.inbox, payload, &record, &region, to);
                got.push((record.tag, record.len));
            }
            Action::Get { record, region } => {
                let op = Op {
                    peer: self.rank,
                    kind: Kind::Reply,
                    source: Source::Memory(region, record.offset),
                    registration: 0,
                    offset: 0,
                    len: record.len,
                    signal: None,
                    tag: record.tag,
                    ticket: None,
                };
                self.shared.sending.push(ToSending::Op(op));
            }
        }
    }

    // ---- the end of a batch

    fn finish(&mut self, applier: &mut Applier) -> Result<bool> {
        let mut moved = false;
        while let Some(batch) = self.applying.front_mut() {
            match batch.phase {
                Phase::Reading(point) if applier.copier.has_reached(point) => {
                    applier.collect(&batch.words);
                    batch.phase = Phase::Writing(applier.store(&batch.words, &mut batch.answer)?);
                    applier.reads = false;
                }
                Phase::Writing(point) if applier.copier.has_reached(point) => {
                    for word in batch.added.drain(..) {
                        match word.region.word(word.offset) {
                            Ok(at) => add(at, word.value),
                            Err(why) => refuse(&mut batch.answer, word.record, why),
                        }
                    }
                    batch.got.drain(..).for_each(|(tag, bytes)| self.shared.got(tag, bytes));
                    batch.phase = Phase::Placed;
                }
                Phase::Placed => {
                    if !self.answer()? {
                        break;
                    }
                    self.applying.pop_front();
                }
                Phase::Reading(_) | Phase::Writing(_) => break,
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Answers the first batch. False: the rails have no room.
    fn answer(&mut self) -> Result<bool> {
        let (Some(wire), Some(batch)) = (self.wire.as_mut(), self.applying.front()) else { return Ok(false) };
        let slot = (batch.number % self.slots as u64) as usize;
        let mut from = [Extent::host(self.lines.at(slot * ANSWER, ANSWER), 0)];
        let counter = match &batch.answer {
            None => self.theirs.accepted,
            Some(answer) => {
                self.lines.write(slot * ANSWER, &answer.encode());
                from[0].len = ANSWER;
                self.theirs.refused
            }
        };
        let from = if batch.answer.is_some() { &from[..] } else { &[] };
        let imm = Imm { counter, piece: slot as u16 };
        match write(wire.as_mut(), from, (&self.theirs.key, (slot * ANSWER) as u64), imm, batch.number) {
            Ok(Post::Full) => Ok(false),
            Ok(_) => Ok(true),
            Err(error) => Err(lost(wire.as_ref(), &error)),
        }
    }
}

fn refuse(answer: &mut Option<Answer>, record: usize, why: Refusal) {
    match answer {
        Some(answer) => answer.refuse(record),
        none => *none = Some(Answer::refusing(record, why)),
    }
}

impl Applier {
    /// Has the bytes of a record placed.
    fn place(&mut self, inbox: &Area, payload: usize, record: &Record, region: &Region, to: u64) {
        let (at, len) = (payload + record.at as usize, record.len as usize);
        let from = inbox.at(at, len);
        if region.gpu.is_none() {
            copy_host(to, from, len);
        } else if len == 8 && to.is_multiple_of(8) {
            // A value that kernels may poll: stored at once.
            self.work.stores.push((to, u64::from_le_bytes(inbox.read(at))));
        } else if len > 0 {
            self.work.copies.push((to, from as u64, len));
        }
    }

    /// Numbers the words that must be read first; how many.
    fn locate(&self, words: &mut [Word]) -> usize {
        let mut places: HashMap<(u32, u64), usize> = HashMap::new();
        for word in words {
            let key = (word.region.number, word.offset);
            if !self.known.contains_key(&key) {
                let next = places.len();
                word.read_at = Some(*places.entry(key).or_insert(next));
            }
        }
        places.len()
    }

    /// Enqueues the pending work, and reads of the unknown words; returns the point after them.
    fn read(&mut self, words: &[Word]) -> Result<u64> {
        let mut read = 0;
        for word in words {
            // In order of their first use, so that each is read once.
            if word.read_at == Some(read)
                && let Ok(from) = word.region.word(word.offset)
            {
                self.work.copies.push((self.scratch.at(8 * read, 8) as u64, from, 8));
            }
            read += usize::from(word.read_at == Some(read));
        }
        self.copier.submit(&mut self.work)
    }

    /// Takes the words that were read.
    fn collect(&mut self, words: &[Word]) {
        for word in words {
            if let Some(at) = word.read_at {
                let value = u64::from_le_bytes(self.scratch.read(8 * at));
                self.known.entry((word.region.number, word.offset)).or_insert(value);
            }
        }
    }

    /// Enqueues the pending work, and stores of the words, in order; returns the point after them.
    fn store(&mut self, words: &[Word], answer: &mut Option<Answer>) -> Result<u64> {
        for word in words {
            let value = self.known.entry((word.region.number, word.offset)).or_default();
            *value = value.wrapping_add(word.value);
            match word.region.word(word.offset) {
                Ok(to) => self.work.stores.push((to, *value)),
                Err(why) => refuse(answer, word.record, why),
            }
        }
        // Kernels may reset these.
        for word in words.iter().filter(|word| !word.region.is_never_reset()) {
            self.known.remove(&(word.region.number, word.offset));
        }
        self.copier.submit(&mut self.work)
    }
}

#[allow(unsafe_code)]
fn copy_host(to: u64, from: *const u8, len: usize) {
    // SAFETY: both were checked, and the region is registered: it is retired only after this thread's answer.
    unsafe { copy_words(to as usize as *mut u8, from, len) };
}

#[allow(unsafe_code)]
fn add(at: u64, value: u64) {
    // SAFETY: as above; the word is aligned.
    unsafe { add_word(at, value) };
}
