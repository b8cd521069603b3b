//! Python bindings: conversion, the GIL and exceptions. What is done is done in the engine.
//!
//! Rules that hold throughout:
//! - whatever may wait or move much data runs detached (other Python threads run), and a signal that Python has a
//!   handler for ends every wait of the main thread at once ([`wait`], [`signals`]);
//! - no thread that holds an engine lock ever waits for the GIL: buffers are handed back by [`lent`], callbacks run
//!   without engine locks;
//! - when the interpreter ends, every worker is closed first, and threads that wait in here do not return ([`gate`]).

mod awaited;
mod bench;
mod bench_control;
mod bench_ep;
mod bench_ep_cuda;
mod bench_mesh;
mod bench_unpack;
mod cai;
mod context;
mod device_args;
mod device_array;
mod device_region;
mod dlpack;
mod endpoint;
mod errors;
mod exchange;
mod expert_calls;
mod expert_sets;
mod expert_target;
mod experts;
mod experts_device;
mod export;
mod flag;
mod gate;
mod group;
mod layout;
mod lent;
mod lifecycle;
mod mapped;
mod memory;
mod moves;
mod number;
mod operand;
mod options;
mod outputs;
mod place;
mod rank_calls;
mod receipt;
mod region;
mod request;
mod rows;
mod sight;
mod signals;
mod span;
mod store;
mod stream;
mod tensor_kinds;
mod token_layout;
mod wait;
mod worker;
mod worker_methods;

use pyo3::prelude::*;

/// The native half of Crossrail, re-exported by `crossrail`.
///
/// Sizes and offsets are bytes. Times that go in are seconds (`None`: the context's CROSSRAIL_TIMEOUT), times that
/// come out are microseconds (`_us`). Every object may be used from any thread at any time. Calls that wait or move
/// much data let other Python threads run, and Ctrl-C ends every wait. Every error is a `crossrail.CrossrailError`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    crossrail_locks::watch_forks();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("ALL_BITS", u64::MAX)?;
    module.add_class::<context::Context>()?;
    module.add_class::<worker::Worker>()?;
    module.add_class::<endpoint::Endpoint>()?;
    module.add_class::<endpoint::Explain>()?;
    module.add_class::<region::Region>()?;
    module.add_class::<region::RegionKey>()?;
    module.add_class::<request::Request>()?;
    module.add_class::<moves::Description>()?;
    module.add_class::<moves::Layout>()?;
    module.add_class::<moves::Move>()?;
    module.add_function(wrap_pyfunction!(moves::merged_rows, module)?)?;
    module.add_class::<mapped::Mapped>()?;
    module.add_class::<awaited::Awaited>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<store::StoreServer>()?;
    module.add_class::<receipt::Receipt>()?;
    module.add_class::<experts::ExpertBuffer>()?;
    module.add_class::<experts::PendingDispatch>()?;
    module.add_class::<experts::PendingCombine>()?;
    module.add_class::<experts::Dispatched>()?;
    module.add_class::<experts::Combined>()?;
    module.add_class::<experts::Handle>()?;
    module.add_class::<device_array::DeviceArray>()?;
    module.add_class::<device_args::CombineArgs>()?;
    module.add_class::<device_args::DispatchArgs>()?;
    module.add_class::<expert_calls::ExpertCalls>()?;
    module.add_class::<expert_calls::BesideEvent>()?;
    module.add_class::<expert_calls::Receive>()?;
    module.add_class::<outputs::Outputs>()?;
    module.add_class::<rank_calls::RankCalls>()?;
    module.add_class::<rank_calls::Recorder>()?;
    module.add_class::<token_layout::TokenLayout>()?;
    module.add_class::<experts_device::DeviceBuffer>()?;
    module.add_class::<experts_device::DeviceOperation>()?;
    module.add_class::<experts_device::DeviceHandle>()?;
    module.add_class::<experts_device::DeviceEvent>()?;
    module.add_class::<device_region::DeviceRegion>()?;
    module.add_class::<span::Span>()?;
    module.add_function(wrap_pyfunction!(experts::expert_plan, module)?)?;
    module.add_function(wrap_pyfunction!(experts_device::device_plan, module)?)?;
    module.add_function(wrap_pyfunction!(experts_device::device_of, module)?)?;
    module.add_function(wrap_pyfunction!(experts_device::stream_of, module)?)?;
    module.add_function(wrap_pyfunction!(span::_borrow, module)?)?;
    module.add_function(wrap_pyfunction!(span::_borrow_device, module)?)?;
    module.add("Memory", memory::memory_type(module.py())?)?;
    module.add_function(wrap_pyfunction!(request::wait_all, module)?)?;
    module.add_function(wrap_pyfunction!(options::settings_reference, module)?)?;
    module.add_function(wrap_pyfunction!(sight::read_pages, module)?)?;
    module.add_function(wrap_pyfunction!(sight::read_job, module)?)?;
    module.add_function(wrap_pyfunction!(sight::remove_pages, module)?)?;
    module.add_function(wrap_pyfunction!(context::host_memory, module)?)?;
    module.add_function(wrap_pyfunction!(context::cpu_quota, module)?)?;
    module.add_function(wrap_pyfunction!(context::loopback, module)?)?;
    module.add_function(wrap_pyfunction!(options::parse_size, module)?)?;
    module.add_function(wrap_pyfunction!(options::parse_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(options::format_size, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_latency, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_bandwidth, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_p2p, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_write, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_net_plugin, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_raw_tcp, module)?)?;
    module.add_function(wrap_pyfunction!(bench_mesh::bench_mesh, module)?)?;
    module.add_function(wrap_pyfunction!(bench_unpack::bench_unpack, module)?)?;
    module.add_function(wrap_pyfunction!(bench_control::bench_control, module)?)?;
    module.add_function(wrap_pyfunction!(bench_ep::bench_ep, module)?)?;
    module.add_class::<bench_ep::Alltoallv>()?;
    module.add_class::<bench_ep_cuda::DeviceEp>()?;
    lifecycle::at_exit(module)
}
