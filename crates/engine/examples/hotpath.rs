//! N ping-pongs between two workers of one process, driven by one thread: what callgrind counts.
//!
//! `hotpath [N] [TRANSPORT] [SIZE] [IDLE]`: 10000 of 8 bytes over shm unless said otherwise, while the first worker has
//! IDLE other endpoints (0), over which nothing goes.

use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Endpoint, Memory, Request, Result, Settings, Worker, WorkerOptions};

/// Time between two looks for lanes to rest, at most; and the lanes that begin to rest in one of them, which is not the
/// first that finds them idle (engine/src/core/resting.rs).
const LOOK: Duration = Duration::from_millis(100);
const REST_AT_ONCE: u32 = 64;

struct End {
    worker: Worker,
    endpoint: Endpoint,
    into: Memory,
    out: Memory,
}

impl End {
    fn new(context: &Context, worker: Worker, endpoint: Endpoint, size: usize) -> Result<End> {
        Ok(End { worker, endpoint, into: context.alloc(size)?, out: context.alloc(size)? })
    }

    fn recv(&self) -> Result<Request> {
        self.worker.recv(&self.into, 1, u64::MAX, Some(&self.endpoint))
    }

    fn send(&self) -> Result<Request> {
        self.endpoint.send(&self.out, 1)
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let count: u64 = arguments.next().map_or(Ok(10_000), |text| crossrail_types::parse_size(&text))?;
    let transport = arguments.next().unwrap_or_else(|| "shm".to_owned());
    let mut settings = Settings::from_env()?;
    settings.set("tls", &transport)?;
    let size: usize = arguments.next().map_or(Ok(8), |text| crossrail_types::parse_size(&text))? as usize;
    let idle: usize = arguments.next().map_or(Ok(0), |text| crossrail_types::parse_size(&text))? as usize;
    let context = Context::new(settings)?;
    let options = || WorkerOptions { background: false, ..WorkerOptions::default() };
    let (a, b) = (Worker::new(&context, options())?, Worker::new(&context, options())?);
    let (dialled, accepted) = connect(&a, &b)?;
    let others = Worker::new(&context, options())?;
    let mut unused = Vec::new();
    for _ in 0..idle {
        unused.push(connect(&a, &others)?);
    }
    let driver = End::new(&context, a, dialled, size)?;
    let echo = End::new(&context, b, accepted, size)?;
    // A number of round trips would take less than one look on a fast machine.
    let settled = LOOK * (idle as u32).div_ceil(REST_AT_ONCE).saturating_mul(2);
    let began = Instant::now();
    while idle > 0 && began.elapsed() < settled + 2 * LOOK {
        round(&driver, &echo)?;
    }
    rounds(count, &driver, &echo)?;
    println!("{count} round trips of {size} bytes over {}, {idle} idle endpoints", driver.endpoint.explain().small);
    Ok(())
}

/// Connecting waits for the other end's handshake, so it happens on a thread of its own.
fn connect(a: &Worker, b: &Worker) -> Result<(Endpoint, Endpoint)> {
    std::thread::scope(|scope| {
        let dialling = scope.spawn(|| a.connect(&b.address(), &ConnectOptions::default()));
        let accepted = b.accept(None)?;
        let dialled = dialling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((dialled, accepted))
    })
}

/// What is counted with idle endpoints, without start and end (callgrind's --toggle-collect).
#[inline(never)]
fn rounds(count: u64, driver: &End, echo: &End) -> Result<()> {
    for _ in 0..count {
        round(driver, echo)?;
    }
    Ok(())
}

fn round(driver: &End, echo: &End) -> Result<()> {
    let (ping_in, pong_in) = (echo.recv()?, driver.recv()?);
    let ping = driver.send()?;
    finish(&ping_in, driver, echo)?;
    let pong = echo.send()?;
    finish(&pong_in, driver, echo)?;
    finish(&ping, driver, echo)?;
    finish(&pong, driver, echo)
}

fn finish(request: &Request, driver: &End, echo: &End) -> Result<()> {
    loop {
        if let Some(outcome) = request.test() {
            return outcome.map(drop);
        }
        driver.worker.progress();
        echo.worker.progress();
    }
}
