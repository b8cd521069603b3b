use std::cell::RefCell;
use std::io::Write;
thread_local! { static T: RefCell<Vec<(u64, u8, u32, u32, u32)>> = const { RefCell::new(Vec::new()) }; }
fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64
}
pub(crate) fn on() -> bool {
    static ON: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *ON.get_or_init(|| std::env::var_os("CR_TRACE").is_some())
}
pub(crate) fn add(kind: u8, a: u32, b: u32, c: u32) {
    if !on() { return; }
    let t = now();
    T.with(|v| { let mut v = v.borrow_mut(); if v.len() < 3_000_000 { v.push((t, kind, a, b, c)) } });
}
static MARKS: std::sync::OnceLock<super::Area> = std::sync::OnceLock::new();
pub(crate) fn set_marks(area: super::Area) { if on() { let _ = MARKS.set(area); } }
pub(crate) fn marks() -> u64 { MARKS.get().map_or(0, super::Area::address) }
fn show_marks() {
    let Some(area) = MARKS.get() else { return };
    let names = ["begun", "counted", "announced", "heard", "planned", "first", "sent", "details", "sum", "sums", "done", "came", "over"];
    for (what, at) in [("dispatch", 0u64), ("combine", 32768)] {
        let word = |b: u64, m: u64| area.word(at + (b * 16 + m) * 8).load(std::sync::atomic::Ordering::Relaxed);
        let Some(start) = (0..256).map(|b| word(b, 0)).filter(|t| *t != 0).min() else { continue };
        let mut line = format!("marks of the last {what}: ");
        for (m, name) in names.iter().enumerate() {
            let mut v: Vec<u64> = (0..256).map(|b| word(b, m as u64)).filter(|t| *t >= start).map(|t| t - start).collect();
            v.sort();
            if v.is_empty() { continue; }
            line += &format!("{name} {:.1}/{:.1}/{:.1} ({}); ", v[0] as f64 / 1e3, v[v.len() / 2] as f64 / 1e3, v[v.len() - 1] as f64 / 1e3, v.len());
        }
        eprintln!("{line}");
    }
}
pub(crate) fn dump(thread: usize) {
    if thread == 0 && on() { show_marks(); }
    let Some(path) = std::env::var_os("CR_TRACE") else { return };
    T.with(|v| {
        let v = v.borrow();
        if v.is_empty() { return; }
        let name = format!("{}.{}.{}.{}", path.to_string_lossy(), std::process::id(), thread, now() % 1_000_000);
        let mut f = std::io::BufWriter::new(std::fs::File::create(name).unwrap());
        for (t, k, a, b, c) in v.iter() { let _ = writeln!(f, "{t} {} {a} {b} {c}", *k as char); }
    });
}
pub(crate) fn knob(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(usual)
}

pub(crate) fn read_at_once(usual: usize) -> usize {
    static V: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *V.get_or_init(|| knob("CR_READ", usual as u64) as usize)
}
