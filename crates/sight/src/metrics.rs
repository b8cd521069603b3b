//! Pages as Prometheus reads them: its text format, version 0.0.4.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::layout::{ERRORS, Field, Form, HISTOGRAM_LIMITS_NS, HISTOGRAM_WORDS, KINDS, Kind};
use crate::read::{PageSnapshot, RowSnapshot, Value};

/// One metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name.
    pub name: String,
    /// Its type in Prometheus: `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Its labels beside `host` and `pid`.
    pub labels: Vec<&'static str>,
    /// What it means.
    pub doc: String,
}

/// Every metric, in the order in which they are exported.
pub fn reference() -> Vec<Metric> {
    let mut metrics = vec![
        Metric {
            name: INFO.to_owned(),
            kind: "gauge",
            labels: vec!["program"],
            doc: "1 for each process that keeps a page; its program's name, without arguments.".to_owned(),
        },
        Metric {
            name: DROPPED.to_owned(),
            kind: "gauge",
            labels: Vec::new(),
            doc: "Rows for which a process's page had no room; what they would count is missing.".to_owned(),
        },
        Metric {
            name: WAIT.to_owned(),
            kind: "gauge",
            labels: vec!["kind", "name", "operation"],
            doc: "Age of the oldest wait of each worker, expert buffer and group that waits.".to_owned(),
        },
    ];
    for kind in KINDS {
        metrics.extend(kind.fields().iter().map(|field| Metric {
            name: name(*kind, field),
            kind: type_of(field.form),
            labels: labels_of(*kind, field.form),
            doc: field.doc.trim().to_owned(),
        }));
    }
    metrics
}

const INFO: &str = "crossrail_process_info";
const DROPPED: &str = "crossrail_page_dropped_rows";
const WAIT: &str = "crossrail_oldest_wait_seconds";

fn name(kind: Kind, field: &Field) -> String {
    let base = format!("crossrail_{}_{}", kind.name(), field.name);
    match field.form {
        Form::Errors => "crossrail_errors_total".to_owned(),
        Form::Count | Form::CountBytes | Form::CountNs => format!("{base}_total"),
        Form::NowRate => format!("{base}_bytes_per_second"),
        Form::Now | Form::NowBytes | Form::Histogram => base,
    }
}

fn type_of(form: Form) -> &'static str {
    match form {
        Form::Count | Form::CountBytes | Form::CountNs | Form::Errors => "counter",
        Form::Now | Form::NowBytes | Form::NowRate => "gauge",
        Form::Histogram => "histogram",
    }
}

/// `owner` tells the workers and buffers of one process apart.
fn labels_of(kind: Kind, form: Form) -> Vec<&'static str> {
    match kind {
        _ if form == Form::Errors => vec!["reason"],
        Kind::Process => Vec::new(),
        Kind::Link | Kind::Gpu | Kind::Proxy | Kind::Exchange => vec!["owner", kind.name(), "peer"],
        _ => vec!["owner", kind.name()],
    }
}

/// The text for these pages. `now_ns`: the present time by their clock.
pub fn text(pages: &[PageSnapshot], now_ns: u64) -> String {
    let mut out = String::new();
    let mut families = reference().into_iter();
    for own in families.by_ref().take(3) {
        head(&mut out, &own);
        for page in pages {
            let process = process_labels(page);
            match own.name.as_str() {
                INFO => {
                    // Anyone who can reach the port can read this, and arguments may contain secrets.
                    let program = page.command.split(' ').next().unwrap_or_default();
                    let _ = writeln!(out, "{INFO}{{{process},program=\"{}\"}} 1", escaped(program));
                }
                DROPPED => {
                    let _ = writeln!(out, "{DROPPED}{{{process}}} {}", page.dropped);
                }
                _ => waits(&mut out, page, &process, now_ns),
            }
        }
    }
    for (kind, at, field) in
        KINDS.iter().flat_map(|kind| kind.fields().iter().enumerate().map(|(at, f)| (*kind, at, f)))
    {
        if let Some(metric) = families.next() {
            head(&mut out, &metric);
            samples(&mut out, &metric, &summed(pages, kind, at), field.form);
        }
    }
    out
}

fn head(out: &mut String, metric: &Metric) {
    let _ = writeln!(out, "# HELP {} {}\n# TYPE {} {}", metric.name, metric.doc, metric.name, metric.kind);
}

fn waits(out: &mut String, page: &PageSnapshot, process: &str, now_ns: u64) {
    let mut oldest: BTreeMap<String, u64> = BTreeMap::new();
    for row in page.rows.iter().filter(|row| matches!(row.kind, Kind::Worker | Kind::Buffer | Kind::Group)) {
        let Some(wait) = &row.wait else { continue };
        let (name, operation) = (escaped(&row.name), escaped(&wait.operation));
        let labels = format!("{process},kind=\"{}\",name=\"{name}\",operation=\"{operation}\"", row.kind.name());
        let age = oldest.entry(labels).or_default();
        *age = (*age).max(now_ns.saturating_sub(wait.since_ns));
    }
    for (labels, age) in oldest {
        let _ = writeln!(out, "{WAIT}{{{labels}}} {}", seconds(age));
    }
}

/// Values of one field, keyed by labels. Rows with equal labels, such as two lanes of one name to peers of one name,
/// are summed: a series must be unique.
fn summed(pages: &[PageSnapshot], kind: Kind, at: usize) -> BTreeMap<String, Vec<u64>> {
    let mut by_labels: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for page in pages {
        let process = process_labels(page);
        for row in page.rows.iter().filter(|row| row.kind == kind) {
            let values = match row.values.get(at) {
                Some(Value::Number(number)) => vec![*number],
                Some(Value::Numbers(numbers)) => numbers.clone(),
                None => continue,
            };
            let sum = by_labels.entry(format!("{process}{}", row_labels(row))).or_insert_with(|| vec![0; values.len()]);
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.wrapping_add(value));
        }
    }
    by_labels
}

fn samples(out: &mut String, metric: &Metric, values: &BTreeMap<String, Vec<u64>>, form: Form) {
    let name = &metric.name;
    for (labels, values) in values {
        match form {
            Form::Errors => {
                for (reason, count) in ERRORS.iter().zip(values) {
                    let _ = writeln!(out, "{name}{{{labels},reason=\"{reason}\"}} {count}");
                }
            }
            Form::Histogram => {
                let mut count: u64 = 0;
                for (at, bucket) in values.iter().take(HISTOGRAM_WORDS - 1).enumerate() {
                    count = count.wrapping_add(*bucket);
                    let limit = HISTOGRAM_LIMITS_NS.get(at).map_or_else(|| "+Inf".to_owned(), |ns| seconds(*ns));
                    let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{limit}\"}} {count}");
                }
                let sum = seconds(values.last().copied().unwrap_or_default());
                let _ = writeln!(out, "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}");
            }
            Form::CountNs => {
                let _ = writeln!(out, "{name}{{{labels}}} {}", seconds(values[0]));
            }
            _ => {
                let _ = writeln!(out, "{name}{{{labels}}} {}", values[0]);
            }
        }
    }
}

fn process_labels(page: &PageSnapshot) -> String {
    format!("host=\"{}\",pid=\"{}\"", escaped(&page.host), page.pid)
}

fn row_labels(row: &RowSnapshot) -> String {
    let mut labels = String::new();
    if row.kind != Kind::Process {
        let _ = write!(labels, ",owner=\"{}\",{}=\"{}\"", row.owner, row.kind.name(), escaped(&row.name));
    }
    if matches!(row.kind, Kind::Link | Kind::Gpu) {
        let _ = write!(labels, ",peer=\"{}\"", escaped(&row.peer));
    }
    labels
}

/// Escapes the value of a label. Reading the page has already replaced control characters.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

fn seconds(ns: u64) -> String {
    format!("{}", ns as f64 / 1e9)
}
