//! Parsing the compiler's log: warnings, and the resource usage of each kernel.

/// The resource usage of a kernel, as reported by `ptxas -v`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelReport {
    /// The kernel's name.
    pub name: String,
    /// Registers per thread.
    pub registers: u32,
    /// Stack per thread, in bytes.
    pub stack: u32,
    /// Spilled registers stored to memory, in bytes.
    pub spill_stores: u32,
    /// Spilled registers loaded from memory, in bytes.
    pub spill_loads: u32,
}

/// The contents of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Warnings, one line each.
    pub warnings: Vec<String>,
    /// Kernels, in the order of compilation.
    pub kernels: Vec<KernelReport>,
}

impl Report {
    /// Parses a log. Unknown lines are skipped, because the format is not specified.
    pub fn of(log: &str) -> Report {
        let mut report = Report::default();
        for line in log.lines() {
            if line.contains("warning") && !line.starts_with("Remark:") {
                report.warnings.push(line.trim().to_owned());
            }
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let name = rest.split('\'').next().unwrap_or_default().to_owned();
                report.kernels.push(KernelReport { name, ..KernelReport::default() });
            }
            if let Some(kernel) = report.kernels.last_mut() {
                let read = |unit: &str, value: &mut u32| {
                    if let Some(number) = number_before(line, unit) {
                        *value = number;
                    }
                };
                read(" bytes stack frame", &mut kernel.stack);
                read(" bytes spill stores", &mut kernel.spill_stores);
                read(" bytes spill loads", &mut kernel.spill_loads);
                read(" registers", &mut kernel.registers);
            }
        }
        report
    }
}

/// The number before `unit`: 32 for ` registers` in `Used 32 registers, used 0 barriers`.
fn number_before(line: &str, unit: &str) -> Option<u32> {
    let (before, _) = line.split_once(unit)?;
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_and_kernels_are_parsed() {
        let log = "\
k.cu(1): warning #177-D: variable \"unused\" was declared but never referenced
Remark: The warnings can be suppressed with \"-diag-suppress <warning-number>\"
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     256 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 18 registers, used 0 barriers, 256 bytes cumulative stack size
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 368 bytes cmem[0]
";
        let report = Report::of(log);
        assert_eq!(report.warnings.len(), 1);
        assert!(report.warnings[0].contains("#177-D"));
        let first = KernelReport { name: "first".into(), registers: 18, stack: 256, spill_stores: 8, spill_loads: 12 };
        let second = KernelReport { name: "second".into(), registers: 255, ..KernelReport::default() };
        assert_eq!(report.kernels, [first, second]);
        assert_eq!(Report::of("nothing of all this"), Report::default());
    }
}
