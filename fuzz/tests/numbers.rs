//! Every target on its corpus with each number of each input replaced by others: no number that a peer names decides how
//! long a call takes, or what it allocates.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossrail_fuzz::TARGETS;

/// Replacements: more rows, bytes or repeats than there is memory or time for.
const NUMBERS: [u64; 6] = [1 << 32, 1 << 40, 1 << 53, 1 << 63, u64::MAX, (1 << 32) - 1];
/// Maximum time of one input, on a busy machine.
const LIMIT: Duration = Duration::from_secs(20);
/// Inputs up to here have every place replaced; of longer ones as many, evenly spread.
const PLACES: usize = 400;

/// Ends the process when an input has taken too long: a loop that does not end cannot be left.
struct Watch(Arc<AtomicU64>, Instant);

impl Watch {
    fn new() -> Watch {
        let (since, began) = (Arc::new(AtomicU64::new(0)), Instant::now());
        let seen = since.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_millis(500));
                let taken = began.elapsed().as_millis() as u64 - seen.load(Ordering::Relaxed);
                if taken > LIMIT.as_millis() as u64 {
                    eprintln!("an input has taken {taken} ms; it is in artifacts/number.bin");
                    std::process::abort();
                }
            }
        });
        Watch(since, began)
    }

    fn run(&self, entry: fn(&[u8]), input: &[u8]) {
        self.0.store(self.1.elapsed().as_millis() as u64, Ordering::Relaxed);
        entry(input);
    }
}

/// The input with the number at a place replaced, there and wherever else it is: both ends of a pair count alike.
fn replaced(input: &[u8], at: usize, number: u64) -> Vec<u8> {
    let (old, new) = (&input[at..at + 8], number.to_le_bytes());
    let mut output = input.to_vec();
    let mut place = 0;
    while place + 8 <= input.len() {
        if input[place..place + 8] == *old {
            output[place..place + 8].copy_from_slice(&new);
            place += 8;
        } else {
            place += 1;
        }
    }
    output
}

#[test]
fn no_number_decides_how_long_a_call_takes() {
    let watch = Watch::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    fs::create_dir_all(root.join("artifacts")).unwrap();
    for (name, entry) in TARGETS.iter().filter(|(name, _)| *name != "settings") {
        let mut files: Vec<_> =
            fs::read_dir(root.join("corpus").join(name)).unwrap().map(|of| of.unwrap().path()).collect();
        files.sort();
        let began = Instant::now();
        let mut count = 0;
        for file in files {
            let input = fs::read(&file).unwrap();
            let step = (input.len() / PLACES).max(1);
            for at in (0..input.len().saturating_sub(7)).step_by(step) {
                for number in NUMBERS {
                    let changed = replaced(&input, at, number);
                    if count % 4096 == 0 || changed.len() > 1 << 16 {
                        fs::write(root.join("artifacts/number.bin"), &changed).unwrap();
                    }
                    watch.run(*entry, &changed);
                    count += 1;
                }
            }
        }
        println!("{name}: {count} inputs in {:.1} s", began.elapsed().as_secs_f64());
    }
    fs::remove_file(root.join("artifacts/number.bin")).unwrap();
}
