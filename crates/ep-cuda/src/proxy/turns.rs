//! Lanes that a test drives, in place of threads.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use super::area::Area;
use super::link::Link;
use super::ring::Ring;
use super::worker::Lane;
use super::{Change, Common, Window};

pub(crate) struct Turns {
    lanes: Vec<Lane>,
    common: Common,
    lost: Arc<Mutex<Vec<(u32, String)>>>,
}

impl Turns {
    pub(crate) fn new() -> Turns {
        let lost: Arc<Mutex<Vec<(u32, String)>>> = Arc::default();
        let heard = lost.clone();
        let common = Common {
            ending: AtomicBool::new(false),
            graphs: AtomicBool::new(false),
            bells: Vec::new(),
            lost: Box::new(move |rank, _, why| heard.lock().unwrap().push((rank, why.to_owned()))),
            window: Window::default(),
        };
        Turns { lanes: Vec::new(), common, lost }
    }

    /// Adds a lane that reads `ring`, of a rank of `ranks`.
    pub(crate) fn add(&mut self, ring: Area, ranks: u32) {
        self.lanes.push(Lane::new(Ring::new(ring), ranks, 0, &Window::default()));
    }

    pub(crate) fn connect(&mut self, lane: usize, link: Link) {
        self.lanes[lane].change(Change::Connect(Box::new(link), channel().0));
    }

    /// All lanes take a turn. Returns whether anything moved.
    pub(crate) fn turn(&mut self) -> bool {
        self.lanes.iter_mut().map(|lane| lane.advance(&self.common)).max() == Some(true)
    }

    /// Ranks that lanes have lost, and why.
    pub(crate) fn lost(&self) -> Vec<(u32, String)> {
        self.lost.lock().unwrap().clone()
    }
}
