//! Every kernel compiles, for every architecture that is promised, without warnings and without spilled registers.
//! Needs NVRTC, but no GPU. What was compiled is kept in the build folder: a second run compiles what has changed.

#[path = "../../cuda/tests/support/mod.rs"]
#[allow(dead_code)]
mod support;

use std::path::Path;
use std::time::Duration;

use crossrail_cuda::Arch;
use crossrail_cuda::nvrtc::{Cache, Compiler, Library, Origin, Report, Source};
use crossrail_kernels::ep::{
    EXPERT_COMBINE, EXPERT_COMBINE_FP8, EXPERT_COMBINE_LOGFMT10, EXPERT_DISPATCH, EpCombineArgs, EpDispatchArgs,
    Payload, RANK_COMBINE, RANK_DISPATCH, Scale, Shape, Tuning,
};
use crossrail_kernels::{mangled, sources};

const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];
const LIMIT: Duration = Duration::from_secs(60);

/// Keeps what it compiles by the hash of all that it was made from, with the log that the tests read.
fn compiler(library: Library) -> Compiler {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    Compiler::new(library, Some(Cache::open(&folder).unwrap()))
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(library) = support::nvrtc() else { return };
    let by = format!("{library:?}");
    println!("{:<8} {:<24} {:>9} {:>5} {:>6}", "arch", "kernel", "registers", "stack", "spills");
    let compiler = compiler(library);
    let (mut problems, mut count) = (Vec::new(), 0);
    for arch in ARCHITECTURES {
        let parsed: Arch = arch.parse().unwrap();
        assert_eq!(parsed.to_string(), arch);
        for source in sources::all() {
            let compiled = compiler.compile(&source, parsed, &[], LIMIT).unwrap();
            assert!(matches!(compiled.origin(), Origin::Cache | Origin::Compiled), "{:?}", compiled.origin());
            let report = compiled.report();
            problems.extend(report.warnings.iter().map(|warning| format!("{arch}: {warning}")));
            assert!(!report.kernels.is_empty(), "{}: no kernel in the log:\n{}", source.name, compiled.log());
            problems.extend(print(arch, &report));
            count += report.kernels.len();
        }
    }
    tell(count, &ARCHITECTURES.join(", "), &by, &problems);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn kernels_of_expert_parallelism_compile_for_shapes() {
    let Some(library) = support::nvrtc() else { return };
    let decode = Shape {
        hidden: 7168,
        topk: 8,
        experts: 288,
        ranks: 4,
        max_tokens: 128,
        payload: Payload::Fp8(Scale::F32),
        prereduce: true,
        expert_layout: true,
        rank_layout: true,
        regions: 2,
        tuning: Tuning::default(),
    };
    // More ranks than lanes, a row that is not a multiple of a piece, more than one step in a piece.
    let tuning = Tuning { piece: 2048, ..Tuning::default() };
    let wide = Shape { hidden: 5128, topk: 6, experts: 320, ranks: 64, payload: Payload::Bf16, tuning, ..decode };
    let packed = Shape { payload: Payload::Fp8(Scale::Ue8m0), ..decode };
    compile(
        library,
        &[
            ("sm_80", Shape { prereduce: false, ..decode }),
            ("sm_90a", decode),
            ("sm_90a", Shape { prereduce: false, ..wide }),
            ("sm_100a", packed),
            ("sm_90a", Shape { tuning: Tuning { marks: true, ..Tuning::USUAL }, ..decode }),
            ("sm_100a", Shape { tuning: Tuning { early: true, ..Tuning::USUAL }, ..decode }),
        ],
    );
}

/// Rows that go once to each node: two and four nodes, and as many ranks as there may be.
#[test]
fn kernels_that_forward_compile() {
    let Some(library) = support::nvrtc() else { return };
    let once = |node: u32| Tuning { node, early: true, ..Tuning::USUAL };
    let decode = Shape {
        hidden: 7168,
        topk: 8,
        experts: 256,
        ranks: 16,
        max_tokens: 128,
        payload: Payload::Fp8(Scale::F32),
        prereduce: true,
        expert_layout: true,
        rank_layout: false,
        regions: 0,
        tuning: once(8),
    };
    let wide = Shape { hidden: 5128, topk: 6, ranks: 64, payload: Payload::Bf16, tuning: once(16), ..decode };
    let both = |shape: Shape| Shape { rank_layout: true, regions: 2, ..shape };
    // More ranks than a word has bits, on as many nodes as kernels take.
    let many =
        |node: u32| both(Shape { ranks: 32 * node, experts: 1024, max_tokens: 64, tuning: once(node), ..decode });
    // They keep some registers in local memory: docs/design/once-per-node.md. Not counted, as no GPU has timed them.
    compile_with(
        library,
        &[
            ("sm_80", both(decode)),
            ("sm_90a", both(decode)),
            ("sm_90a", both(wide)),
            ("sm_100a", decode),
            ("sm_90a", many(8)),
            ("sm_90a", many(32)),
        ],
        true,
    );
}

/// As far as the limits go: the longest rows, the most experts of a token, of a rank, and the most ranks.
#[test]
fn kernels_of_expert_parallelism_compile_for_the_largest_shapes() {
    let Some(library) = support::nvrtc() else { return };
    let most = Shape {
        hidden: 16384,
        topk: 32,
        experts: 64 * 1024,
        ranks: 64,
        max_tokens: 65535,
        payload: Payload::Fp8(Scale::F32),
        prereduce: true,
        expert_layout: true,
        rank_layout: true,
        regions: 64,
        tuning: Tuning::default(),
    };
    let alone = Shape { payload: Payload::Bf16, ranks: 1, experts: 32, prereduce: false, ..most };
    // What a block may have of a multiprocessor's shared memory: without bulk copies, and with them.
    const OF_SM_80: u32 = 163 << 10;
    const OF_SM_90: u32 = 227 << 10;
    /// The most tokens of a rank for which there are slots, of as many ranks as there may be.
    const SLOTTED_TOKENS: u32 = 64;
    for shape in [most, alone, Shape { payload: Payload::Fp8(Scale::Ue8m0), ..most }] {
        let with = shape.expert_shared().into_iter().chain(shape.rank_shared(true));
        let without = shape.expert_shared().into_iter().chain(shape.rank_shared(false));
        let slots = Shape { max_tokens: SLOTTED_TOKENS, ..shape }.slot_shared();
        assert!(slots.into_iter().all(|bytes| bytes <= OF_SM_80), "{slots:?}");
        assert!(with.clone().all(|bytes| bytes <= OF_SM_90), "{:?}", with.collect::<Vec<_>>());
        assert!(without.clone().all(|bytes| bytes <= OF_SM_80), "{:?}", without.collect::<Vec<_>>());
    }
    compile(library, &[("sm_90a", most), ("sm_80", alone)]);
}

/// Compiles both layouts of these shapes, and looks at what that says.
fn compile(library: Library, shapes: &[(&str, Shape)]) {
    compile_with(library, shapes, false);
}

/// `may_spill`: registers in local memory are printed, and are no error.
fn compile_with(library: Library, shapes: &[(&str, Shape)], may_spill: bool) {
    let by = format!("{library:?}");
    let compiler = compiler(library);
    let (mut problems, mut count) = (Vec::new(), 0);
    for (arch, shape) in shapes {
        shape.check().unwrap();
        let parsed: Arch = arch.parse().unwrap();
        let expert = shape.defines(sources::has_bulk(parsed));
        let rank = shape.rank_defines(sources::has_bulk(parsed));
        let (dispatch, combine) = (mangled::<EpDispatchArgs>, mangled::<EpCombineArgs>);
        let mut layouts = vec![(sources::EP_EXPERT, &expert, [dispatch(EXPERT_DISPATCH), combine(EXPERT_COMBINE)])];
        let slots = shape.slot_defines(sources::has_bulk(parsed));
        // Between nodes there are slots alone.
        if shape.rank_layout && shape.tuning.node == 0 {
            layouts.push((sources::EP_RANK, &rank, [dispatch(RANK_DISPATCH), combine(RANK_COMBINE)]));
        }
        if shape.rank_layout {
            layouts.push((sources::EP_SLOTS, &slots, [dispatch(RANK_DISPATCH), combine(RANK_COMBINE)]));
        }
        if shape.has_coded() {
            let names = [combine(EXPERT_COMBINE_LOGFMT10), combine(EXPERT_COMBINE_FP8)];
            layouts.push((sources::EP_CODED, &expert, names));
        }
        for (source, defines, expected) in layouts {
            let options: Vec<&str> = defines.iter().map(String::as_str).collect();
            let compiled = compiler.compile(&source, parsed, &options, LIMIT).unwrap();
            let report = compiled.report();
            problems.extend(report.warnings.iter().map(|warning| format!("{arch}: {warning}")));
            for name in expected {
                let found = report.kernels.iter().any(|kernel| kernel.name == name);
                assert!(found, "{}: no kernel {name} in the log:\n{}", source.name, compiled.log());
            }
            let spilled = print(arch, &report);
            problems.extend(spilled.into_iter().filter(|_| !may_spill));
            count += report.kernels.len();
        }
    }
    tell(count, "shapes of expert parallelism", &by, &problems);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Says, past the harness's capture, what was compiled and how many warnings and spills there were.
fn tell(count: usize, what: &str, by: &str, problems: &[String]) {
    use std::io::Write;
    let line = format!("kernels: {count} compiled for {what} by {by}: {} warnings and spills\n", problems.len());
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Prints what the kernels take, and gives back what is wrong with them.
fn print(arch: &str, report: &Report) -> Vec<String> {
    for kernel in &report.kernels {
        let spills = kernel.spill_stores + kernel.spill_loads;
        println!("{arch:<8} {:<24} {:>9} {:>5} {spills:>6}", kernel.name, kernel.registers, kernel.stack);
    }
    let wrong = report.kernels.iter().filter(|kernel| kernel.stack + kernel.spill_stores + kernel.spill_loads > 0);
    wrong.map(|kernel| format!("{arch}: {}: uses local memory: {kernel:?}", kernel.name)).collect()
}

#[test]
fn a_layout_that_differs_from_the_hosts_does_not_compile() {
    let Some(library) = support::nvrtc() else { return };
    let text = crossrail_kernels::layout();
    let longer = text.replace("u64 count;", "u64 count, another;");
    assert_ne!(text, longer);
    let mut headers = sources::UNPACK.headers.to_vec();
    headers.iter_mut().find(|header| header.0 == "layout/args.cuh").unwrap().1 = &longer;
    let source = Source { headers: &headers, ..sources::UNPACK };
    let error = Compiler::new(library, None).compile(&source, "sm_90a".parse().unwrap(), &[], LIMIT).unwrap_err();
    assert!(error.detail.contains("static assertion failed"), "{error}");
    assert!(error.detail.contains("UnpackArgs"), "{error}");
}
