//! The measuring loops of `crossrail-bench`, run detached.

mod control;
mod ep;
mod ep_cuda;
mod mesh;
mod point_to_point;
mod unpack;
mod watch;

use pyo3::prelude::*;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(point_to_point::bench_latency, module)?)?;
    module.add_function(wrap_pyfunction!(point_to_point::bench_bandwidth, module)?)?;
    module.add_function(wrap_pyfunction!(point_to_point::bench_p2p, module)?)?;
    module.add_function(wrap_pyfunction!(point_to_point::bench_write, module)?)?;
    module.add_function(wrap_pyfunction!(point_to_point::bench_net_plugin, module)?)?;
    module.add_function(wrap_pyfunction!(point_to_point::bench_raw_tcp, module)?)?;
    module.add_function(wrap_pyfunction!(mesh::bench_mesh_all, module)?)?;
    module.add_function(wrap_pyfunction!(mesh::bench_mesh_pair, module)?)?;
    module.add_function(wrap_pyfunction!(unpack::bench_unpack, module)?)?;
    module.add_function(wrap_pyfunction!(control::bench_control, module)?)?;
    module.add_function(wrap_pyfunction!(ep::bench_ep, module)?)?;
    module.add_class::<ep::Alltoallv>()?;
    module.add_class::<ep_cuda::DeviceEp>()
}
