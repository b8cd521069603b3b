//! Two processes: `two_processes listen` and `two_processes connect ADDR`, or both without arguments.
use crossrail::{Context, Worker, WorkerOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let worker = Worker::new(&Context::from_env()?, WorkerOptions::default())?;
    if let [_, _, address] = &arguments[..] {
        let endpoint = worker.connect(address.as_bytes(), &Default::default())?;
        return Ok(endpoint.send(b"hello from the other side".to_vec(), 7)?.wait(None).map(drop)?);
    }
    let address = worker.control_addresses()[0].to_string();
    println!("listening: {} connect {address}", arguments[0]);
    let connect = || std::process::Command::new(&arguments[0]).args(["connect", &address]).spawn();
    let other = (arguments.len() == 1).then(connect);
    let (endpoint, inbox) = (worker.accept(None)?, worker.recv(vec![0; 64], 7, u64::MAX, None)?);
    let receipt = inbox.wait(None)?;
    let text = String::from_utf8_lossy(&inbox.into_vec().unwrap_or_default()[..receipt.bytes as usize]).into_owned();
    println!("{text} ({} over {})", receipt.protocol, endpoint.explain().small);
    Ok(other.map_or(Ok(()), |child| child?.wait().map(drop))?)
}
