//! Two processes: `two_processes listen` in one shell and `two_processes connect ADDR` in another, or alone.
use crossrail::{Context, Result, Worker, WorkerOptions};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let worker = Worker::new(&Context::from_env()?, WorkerOptions::default())?;
    if let [_, mode, address] = &arguments[..]
        && mode == "connect"
    {
        let endpoint = worker.connect(address.as_bytes(), &Default::default())?;
        return endpoint.send(b"hello from the other side".to_vec(), 7)?.wait(None).map(drop);
    }
    let address = worker.control_addresses()[0].to_string();
    println!("listening: {} connect {address}", arguments[0]);
    let alone = arguments.len() == 1;
    let other = alone.then(|| std::process::Command::new(&arguments[0]).args(["connect", &address]).spawn());
    let (endpoint, inbox) = (worker.accept(None)?, worker.recv(vec![0; 64], 7, u64::MAX, None)?);
    let receipt = inbox.wait(None)?;
    let text = inbox.into_vec().unwrap_or_default();
    println!(
        "{} ({} over {})",
        String::from_utf8_lossy(&text[..receipt.bytes as usize]),
        receipt.protocol,
        endpoint.explain().small
    );
    other
        .transpose()
        .and_then(|child| child.map(|mut child| child.wait()).transpose())
        .map(drop)
        .expect("the other end");
    Ok(())
}
