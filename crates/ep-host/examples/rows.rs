//! What the row kernels reach on one core of this machine, against memcpy in the same run, alternating:
//! `cargo run --release --example rows` (with `--json`: one object per line instead of the table).
//!
//! GB/s (1e9 bytes) counts the bytes read: of the source, of all rows of a sum. Sources and destinations are shared
//! memory, as in a heap. Rows to be cast follow each other; rows to be summed are scattered, and so are those copied in
//! comparison. The ratio is the median over rounds of the rate to that of memcpy.
#![allow(unsafe_code)]

use std::error::Error;
use std::io;
use std::ptr::null_mut;
use std::time::Instant;

use crossrail_ep_host::rows::Kernels;
use crossrail_ep_host::{BLOCK, Scale};

/// Elements of a row.
const HIDDEN: [usize; 3] = [1024, 4096, 7168];
/// Bytes of the source: in the second cache of most machines, and beyond every cache.
const PLACES: [(&str, usize); 2] = [("cache", 256 << 10), ("memory", 192 << 20)];
/// Bytes that are read in one sample.
const PASS: usize = 192 << 20;
const ROUNDS: usize = 9;

/// Shared memory of this process.
struct Mapping {
    ptr: *mut u8,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> io::Result<Mapping> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, wherever there is room.
        let ptr = unsafe { libc::mmap(null_mut(), len, access, flags, -1, 0) };
        if ptr == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { ptr: ptr.cast(), len })
    }

    /// Row `index` of as many as there are of `wide` bytes.
    fn row(&self, index: usize, wide: usize) -> *mut u8 {
        self.ptr.wrapping_add(index % (self.len / wide) * wide)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and rows are not used any more.
        unsafe { libc::munmap(self.ptr.cast(), self.len) };
    }
}

/// What is measured.
#[derive(Clone, Copy)]
enum Work {
    /// memcpy; of rows in scattered order or one after the other.
    Copy(bool),
    Cast(Scale),
    Uncast,
    Sum(usize, bool),
}

impl Work {
    const ALL: [Work; 10] = [
        Work::Cast(Scale::F32),
        Work::Cast(Scale::Ue8m0),
        Work::Uncast,
        Work::Sum(1, false),
        Work::Sum(2, false),
        Work::Sum(4, false),
        Work::Sum(8, false),
        Work::Sum(2, true),
        Work::Sum(4, true),
        Work::Sum(8, true),
    ];

    fn name(self) -> String {
        match self {
            Work::Copy(_) => "copy_row".into(),
            Work::Cast(kind) => format!("cast_row {kind:?}"),
            Work::Uncast => "uncast_row F32".into(),
            Work::Sum(rows, weighted) => format!("reduce_rows {rows}{}", if weighted { " weighted" } else { "" }),
        }
    }

    /// Bytes that are read for row after row.
    fn reads(self, hidden: usize) -> usize {
        match self {
            Work::Uncast => hidden,
            Work::Sum(rows, _) => rows * hidden * 2,
            _ => hidden * 2,
        }
    }

    /// Does it for row `index`.
    fn once(self, kernels: &Kernels, bench: &Bench, index: usize, hidden: usize) {
        let wide = hidden * 2;
        let (from, to) = (bench.src.row(index, wide), bench.dst.row(index, wide));
        let scales = bench.scales.row(index, hidden / BLOCK * 4);
        // SAFETY: rows of these mappings; nobody else uses them.
        unsafe {
            match self {
                Work::Copy(scattered) => {
                    let from = if scattered { bench.scattered(index, wide) } else { from };
                    kernels.copy_row(to, from, wide);
                }
                Work::Cast(kind) => kernels.cast_row(from.cast(), hidden, to, scales, kind),
                Work::Uncast => {
                    let from = bench.src.row(index, hidden);
                    kernels.uncast_row(from, scales, hidden, to.cast(), Scale::F32);
                }
                Work::Sum(count, weighted) => {
                    let weights = [0.5f32; 8];
                    let mut rows = [std::ptr::null(); 8];
                    for (i, row) in rows[..count].iter_mut().enumerate() {
                        *row = bench.scattered(index * count + i, wide).cast_const().cast();
                    }
                    kernels.reduce_rows(to.cast(), &rows[..count], weighted.then_some(&weights[..count]), hidden);
                }
            }
        }
    }

    /// Microseconds for as many rows as make one pass.
    fn sample(self, kernels: &Kernels, bench: &Bench, hidden: usize) -> f64 {
        let began = Instant::now();
        for index in 0..PASS / self.reads(hidden) {
            self.once(kernels, bench, index, hidden);
        }
        began.elapsed().as_secs_f64() * 1e6
    }
}

/// The memory that one place's figures are measured in.
struct Bench {
    src: Mapping,
    dst: Mapping,
    scales: Mapping,
}

impl Bench {
    fn new(len: usize) -> io::Result<Bench> {
        let bench = Bench { src: Mapping::new(len)?, dst: Mapping::new(len)?, scales: Mapping::new(len / 32)? };
        for index in 0..len / 2 {
            // Finite, of both signs and some octaves.
            let bits = 0x3f00 ^ (index.wrapping_mul(0x9e37_79b9) >> 16) as u16 & 0x81ff;
            // SAFETY: inside the mapping.
            unsafe { bench.src.ptr.cast::<u16>().add(index).write(bits) };
        }
        for mapping in [&bench.dst, &bench.scales] {
            // SAFETY: the whole mapping, so that its pages are there.
            unsafe { mapping.ptr.write_bytes(0x3c, mapping.len) };
        }
        Ok(bench)
    }

    /// Row `index` of the source in an order in which no row follows the one before it, as those of several experts.
    fn scattered(&self, index: usize, wide: usize) -> *mut u8 {
        self.src.row(index.wrapping_mul(7919), wide)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let json = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => false,
        [only] if only == "--json" => true,
        _ => return Err("usage: rows [--json]".into()),
    };
    if !json {
        println!("{:8} {:10} {:6} {:20} {:>8} {:>9}", "kernels", "where", "hidden", "what", "GB/s", "x memcpy");
    }
    for (place, len) in PLACES {
        let bench = Bench::new(len)?;
        for kernels in Kernels::available() {
            for hidden in HIDDEN {
                for work in Work::ALL {
                    measure(kernels, &bench, (place, hidden, work), json);
                }
            }
        }
    }
    Ok(())
}

fn measure(kernels: &Kernels, bench: &Bench, (place, hidden, work): (&str, usize, Work), json: bool) {
    let copy = Work::Copy(matches!(work, Work::Sum(..)));
    let (mut plain, mut samples) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        plain.push(copy.sample(kernels, bench, hidden));
        samples.push(work.sample(kernels, bench, hidden));
    }
    let rate = |work: Work, time: f64| (PASS / work.reads(hidden) * work.reads(hidden)) as f64 / time / 1e3;
    let ratios = plain.iter().zip(&samples).map(|(p, s)| rate(work, *s) / rate(copy, *p)).collect();
    let (gb_per_s, ratio) = (rate(work, median(samples.clone())), median(ratios));
    let (kernels, what) = (kernels.name(), work.name());
    if json {
        println!(
            "{{\"what\": \"{what}\", \"kernels\": \"{kernels}\", \"where\": \"{place}\", \"hidden\": {hidden}, \
             \"samples_us\": {samples:?}, \"gb_per_s\": {gb_per_s:.3}, \"ratio\": {{\"memcpy\": {ratio:.3}}}}}"
        );
    } else {
        println!("{kernels:8} {place:10} {hidden:<6} {what:20} {gb_per_s:8.2} {ratio:9.2}");
    }
}
