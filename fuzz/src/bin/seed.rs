//! Writes the seeds into the corpora: `cargo run --bin seed`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    for (target, name, bytes) in crossrail_fuzz::seeds() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}
