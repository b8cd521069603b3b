//! Where and when figures were made, in the fields of `crossrail-bench/1`, and the GPU.

use std::time::{SystemTime, UNIX_EPOCH};

use crossrail_cuda::Context;
use crossrail_cuda::nvrtc::Compiler;
use crossrail_types::{Result, Settings};
use serde_json::{Map, Value, json};

/// What a reader needs to judge whether two reports compare.
pub(crate) fn capture(context: &Context, compiler: &Compiler, settings: &Settings) -> Result<Value> {
    let device = context.device();
    let set: Map<String, Value> = settings
        .shown()
        .into_iter()
        .filter(|(name, _)| std::env::var_os(name).is_some())
        .map(|(name, value)| (name.to_owned(), json!(value)))
        .collect();
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (major, minor) = compiler.library().version();
    Ok(json!({
        "time": utc(seconds),
        "host": read("/proc/sys/kernel/hostname"),
        "kernel": format!("Linux {}", read("/proc/sys/kernel/osrelease")),
        "machine": std::env::consts::ARCH,
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": cores(&read("/sys/devices/system/cpu/online")).len(),
        "cores_allowed": cores(&field("/proc/self/status", "Cpus_allowed_list")),
        "governor": null_if_empty(read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "memory_gib": numbers(&field("/proc/meminfo", "MemTotal")).first().unwrap_or(&0.0) / f64::from(1 << 20),
        "load_average": numbers(&read("/proc/loadavg")).into_iter().take(3).collect::<Vec<_>>(),
        "python": "none",
        "crossrail": env!("CARGO_PKG_VERSION"),
        "commit": null_if_empty(std::env::var("COMMIT").unwrap_or_default()),
        "settings": set,
        "gpu": device.name()?,
        "gpu_arch": device.arch()?.to_string(),
        "gpu_memory_gib": device.memory()? as f64 / f64::from(1 << 30),
        "gpu_driver": read("/proc/driver/nvidia/version").lines().next().unwrap_or_default(),
        "gpu_driver_cuda": device.cuda().version(),
        "nvrtc": format!("{major}.{minor}"),
    }))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// What stands behind `name:` in a file of such lines; of several, the first.
fn field(path: &str, name: &str) -> String {
    let text = read(path);
    let value = text.lines().find_map(|line| line.split_once(':').filter(|(key, _)| key.trim() == name));
    value.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
}

fn null_if_empty(text: String) -> Value {
    if text.is_empty() { Value::Null } else { json!(text) }
}

fn numbers(text: &str) -> Vec<f64> {
    text.split_whitespace().flat_map(str::parse).collect()
}

/// The numbers of `0-3,8`.
fn cores(list: &str) -> Vec<u32> {
    let ranges = list.split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    });
    ranges.flatten().collect()
}

/// `2026-11-21T07:30:00+00:00` for seconds since 1970.
fn utc(seconds: u64) -> String {
    let (mut year, mut day) = (1970, seconds / 86_400);
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 1;
    for len in [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day < len {
            break;
        }
        day -= len;
        month += 1;
    }
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}+00:00", day + 1)
}
