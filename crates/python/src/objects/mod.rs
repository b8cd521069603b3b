//! Contexts, workers, peers, memory and what is done with them: the objects of `crossrail`.

mod awaited;
pub(crate) mod context;
pub(crate) mod endpoint;
mod fabric;
pub(crate) mod group;
mod mapped;
pub(crate) mod memory;
mod metadata;
mod moves;
mod notice;
pub(crate) mod operand;
mod options;
pub(crate) mod receipt;
mod region;
mod request;
mod sight;
pub(crate) mod span;
mod store;
pub(crate) mod worker;
mod worker_methods;

use pyo3::prelude::*;

use crate::borrow::export::Exporter;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
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
    module.add_class::<Exporter>()?;
    module.add_class::<mapped::Mapped>()?;
    module.add_class::<awaited::Awaited>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<store::StoreServer>()?;
    module.add_class::<metadata::MetadataListener>()?;
    module.add_class::<metadata::MetadataInquiry>()?;
    module.add_function(wrap_pyfunction!(metadata::ask_metadata, module)?)?;
    module.add_class::<receipt::Receipt>()?;
    module.add_class::<span::Span>()?;
    module.add_function(wrap_pyfunction!(moves::_deregister, module)?)?;
    module.add_function(wrap_pyfunction!(span::_borrow, module)?)?;
    module.add("Memory", memory::memory_type(module.py())?)?;
    module.add("Notice", notice::notice_type(module.py())?)?;
    module.add_function(wrap_pyfunction!(request::wait_all, module)?)?;
    module.add_function(wrap_pyfunction!(options::settings_reference, module)?)?;
    module.add_function(wrap_pyfunction!(sight::read_pages, module)?)?;
    module.add_function(wrap_pyfunction!(sight::read_job, module)?)?;
    module.add_function(wrap_pyfunction!(sight::remove_pages, module)?)?;
    module.add_function(wrap_pyfunction!(group::launch_of, module)?)?;
    module.add_function(wrap_pyfunction!(context::host_memory, module)?)?;
    module.add_function(wrap_pyfunction!(context::cpu_quota, module)?)?;
    module.add_function(wrap_pyfunction!(context::loopback, module)?)?;
    module.add_function(wrap_pyfunction!(fabric::fabric_state, module)?)?;
    module.add_function(wrap_pyfunction!(fabric::fabric_test, module)?)?;
    module.add_function(wrap_pyfunction!(fabric::fabric_write_into, module)?)?;
    module.add_function(wrap_pyfunction!(options::parse_size, module)?)?;
    module.add_function(wrap_pyfunction!(options::parse_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(options::format_size, module)?)
}
