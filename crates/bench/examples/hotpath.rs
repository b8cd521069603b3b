//! N ping-pongs of 8 bytes between two workers of one process, driven by one thread: what callgrind counts.
//!
//! `hotpath [N] [TRANSPORT]`: 10000 over shm unless said otherwise.

use crossrail::{ConnectOptions, Context, Endpoint, Memory, Request, Result, Settings, Worker, WorkerOptions};

struct End {
    worker: Worker,
    endpoint: Endpoint,
    into: Memory,
    out: Memory,
}

impl End {
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
    let context = Context::new(settings)?;
    let options = || WorkerOptions { background: false, ..WorkerOptions::default() };
    let (a, b) = (Worker::new(&context, options())?, Worker::new(&context, options())?);
    let (dialled, accepted) = connect(&a, &b)?;
    let end = |worker, endpoint| {
        Ok::<_, crossrail::Error>(End { worker, endpoint, into: context.alloc(8)?, out: context.alloc(8)? })
    };
    let (driver, echo): (End, End) = (end(a, dialled)?, end(b, accepted)?);
    for _ in 0..count {
        round(&driver, &echo)?;
    }
    println!("{count} round trips of 8 bytes over {}", driver.endpoint.explain().small);
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
