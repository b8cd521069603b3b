//! The ways to unpack, on a GPU where there is one.

use crossrail::unpack::cuda::Cuda;
use crossrail::{ErrorKind, Settings, Unpack};
use crossrail_bench::{Unobserved, UnpackFrom, UnpackPlan, unpack};

fn plan(size: usize, fragment: usize, from: UnpackFrom) -> UnpackPlan {
    let modes = vec![Unpack::Kernel, Unpack::D2d, Unpack::Host];
    UnpackPlan { ordinal: 0, size, fragment, from, modes, iters: 3, warmup: 1 }
}

#[test]
fn sizes_of_nothing_are_usage() {
    for (size, fragment) in [(0, 4096), (4096, 0)] {
        let error = unpack(&Settings::default(), &plan(size, fragment, UnpackFrom::Device), &mut Unobserved);
        assert_eq!(error.unwrap_err().kind, ErrorKind::Usage);
    }
}

#[test]
fn all_ways_do_the_same_or_the_reason_is_said() {
    let outcome = |size, fragment, from| unpack(&Settings::default(), &plan(size, fragment, from), &mut Unobserved);
    if let Err(absent) = Cuda::load() {
        let error = outcome(1 << 20, 4096, UnpackFrom::Device).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(absent.to_string().starts_with(&error.detail), "{error}");
        return;
    }
    for from in [UnpackFrom::Device, UnpackFrom::Pinned] {
        for (size, fragment) in [(1 << 20, 4096), (1_000_003, 5000), (777, 4096), (3 << 20, 1 << 16), (64, 1)] {
            let samples = outcome(size, fragment, from).unwrap();
            assert_eq!(samples.pieces, size.div_ceil(fragment));
            assert_eq!(samples.contiguous.samples_us.len(), 3);
            assert_eq!(samples.contiguous.gpu_us.len(), 3);
            let modes: Vec<_> = samples.modes.iter().map(|(mode, _)| *mode).collect();
            assert_eq!(modes, [Unpack::Kernel, Unpack::D2d, Unpack::Host]);
            for (mode, times) in &samples.modes {
                assert_eq!(times.samples_us.len(), 3);
                assert!(times.samples_us.iter().all(|us| *us > 0.0));
                assert_eq!(times.gpu_us.len(), if *mode == Unpack::Kernel { 3 } else { 0 });
            }
        }
    }
    let mut missing = plan(64, 64, UnpackFrom::Device);
    missing.ordinal = 999;
    assert_eq!(unpack(&Settings::default(), &missing, &mut Unobserved).unwrap_err().kind, ErrorKind::Usage);
}
