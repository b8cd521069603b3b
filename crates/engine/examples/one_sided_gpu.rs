//! One-sided writes from the memory of one GPU into that of another over libfabric, compared byte by byte.
//!
//! `one_sided_gpu [TLS] [SIZE] [FROM] [INTO]`: over `fabric:shm`, 64M from `cuda:0` into `cuda:0` by default; `cpu` is host
//! memory. Both ends are in this process. For GPUs the provider must have HMEM; otherwise the error names that.
#![allow(unsafe_code)] // exposes and writes memory of GPUs, which outlives the objects

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail::placing::{self, Event, Extent, Imm, Loan, Placing, Post};
use crossrail::{ConnectOptions, Context, Error, ErrorKind, Memory, Place, Result, Settings, Worker, WorkerOptions};

const LIMIT: Duration = Duration::from_secs(30);
/// Writes of the whole memory, the first of which is not timed.
const ROUNDS: u64 = 8;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let provider = arguments.next().unwrap_or_else(|| "fabric:shm".to_owned());
    let size: usize = arguments.next().map_or(Ok(64 << 20), |text| crossrail_types::parse_size(&text))? as usize;
    let mut place = || arguments.next().map_or(Ok(Place::Gpu(0)), |text| text.parse());
    let (from, into): (Place, Place) = (place()?, place()?);
    let mut settings = Settings::from_env()?;
    // Two ends within one process have no lane over libfabric's shm, so TCP carries the messages.
    settings.set("tls", &format!("tcp,{provider}"))?;
    let context = Context::new(settings)?;
    let worker = || Worker::new(&context, WorkerOptions::default());
    let (a, b) = (worker()?, worker()?);
    let dialled = a.connect(&b.address(), &ConnectOptions::default())?;
    let accepted = b.accept(Some(LIMIT))?;
    let (source, target) = (context.alloc_on(size, from)?, context.alloc_on(size, into)?);
    let (mut writer, mut reader) = std::thread::scope(|scope| {
        let other = scope.spawn(|| placing::open(&accepted, 0, LIMIT));
        let one = placing::open(&dialled, 0, LIMIT);
        Ok::<_, Error>((one?, other.join().expect("no panic")?))
    })?;
    let began = Instant::now();
    let extent = |memory: &Memory| {
        let gpu = if let Place::Gpu(ordinal) = memory.place() { Some(ordinal) } else { None };
        Extent { gpu, ..Extent::host(memory.ptr(), size) }
    };
    let exposed = |object: &mut Box<dyn Placing>, memory: &Extent| {
        // SAFETY: the objects are dropped before the memory.
        let key = unsafe { object.expose(memory, &Arc::new(Loan::default())) };
        key.map_err(|why| Error::new(ErrorKind::Unsupported, "expose", why))
    };
    // Memory that is written from is registered once by that, too.
    exposed(&mut writer, &extent(&source))?;
    let key = exposed(&mut reader, &extent(&target))?;
    println!("{}: {size} bytes of {from:?} and {into:?} exposed in {:?}", writer.rails()[0].name, began.elapsed());
    let counter = reader.count(1).expect("a counter");
    let (mut bytes, mut seen) = (vec![0u8; size], vec![0u8; size]);
    let mut fastest = Duration::MAX;
    for round in 0..ROUNDS {
        bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 + (at >> 11) + round as usize) as u8);
        source.fill_from(0, &bytes)?;
        let began = Instant::now();
        let imm = Imm { counter, piece: 0 };
        // SAFETY: as above.
        let posted = unsafe { writer.write(&[extent(&source)], &key, 0, imm, round) };
        assert_eq!(posted, Ok(Post::Held));
        let (mut arrived, mut ended) = (false, false);
        while !(arrived && ended) {
            let failed = |error: placing::LaneError| Error::new(ErrorKind::Io, "write", error.to_string());
            writer.poll(&mut |event| ended |= matches!(event, Event::Ended { result: Ok(()), .. })).map_err(failed)?;
            reader.poll(&mut |event| arrived |= event == Event::Arrived(imm)).map_err(failed)?;
            if began.elapsed() > LIMIT {
                return Err(Error::new(ErrorKind::Timeout, "write", "it did not arrive"));
            }
        }
        if round > 0 {
            fastest = fastest.min(began.elapsed());
        }
        target.copy_to(0, &mut seen)?;
        if let Some(at) = (0..size).find(|at| seen[*at] != bytes[*at]) {
            let detail = format!("byte {at} of round {round} is {}, not {}", seen[at], bytes[at]);
            return Err(Error::new(ErrorKind::Io, "write", detail));
        }
    }
    let rate = size as f64 / fastest.as_nanos() as f64;
    println!("{ROUNDS} rounds, all bytes compared; the fastest {fastest:?}, {rate:.2} GB/s");
    drop((writer, reader));
    Ok(())
}
