//! The measuring loops of `crossrail-bench`, run detached.

mod alltoallv;
mod ep_cuda;
mod run;
mod watch;

use pyo3::prelude::*;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(run::bench, module)?)?;
    module.add_class::<alltoallv::Alltoallv>()?;
    module.add_class::<ep_cuda::DeviceEp>()
}
