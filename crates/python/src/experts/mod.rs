//! Expert buffers in host memory and on GPUs, and calls prepared for PyTorch tensors.

mod arguments;
mod device;
mod device_args;
mod device_array;
mod device_region;
mod expert_calls;
mod expert_sets;
mod expert_target;
pub(crate) mod host;
mod other_arrays;
mod outputs;
mod rank_calls;
mod tensor_kinds;
mod token_layout;

use pyo3::prelude::*;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<host::ExpertBuffer>()?;
    module.add_class::<host::PendingDispatch>()?;
    module.add_class::<host::PendingCombine>()?;
    module.add_class::<host::Dispatched>()?;
    module.add_class::<host::Combined>()?;
    module.add_class::<host::Handle>()?;
    module.add_class::<device_array::DeviceArray>()?;
    module.add_class::<arguments::Arguments>()?;
    module.add_class::<device_args::CombineArgs>()?;
    module.add_class::<device_args::DispatchArgs>()?;
    module.add_class::<expert_calls::ExpertCalls>()?;
    module.add_class::<expert_calls::BesideEvent>()?;
    module.add_class::<expert_calls::Receive>()?;
    module.add_class::<outputs::Outputs>()?;
    module.add_class::<rank_calls::RankCalls>()?;
    module.add_class::<rank_calls::Recorder>()?;
    module.add_class::<token_layout::TokenLayout>()?;
    module.add_class::<device::DeviceBuffer>()?;
    module.add_class::<device::DeviceOperation>()?;
    module.add_class::<device::DeviceHandle>()?;
    module.add_class::<device::DeviceEvent>()?;
    module.add_class::<device_region::DeviceRegion>()?;
    module.add_function(wrap_pyfunction!(host::expert_plan, module)?)?;
    module.add_function(wrap_pyfunction!(device::device_plan, module)?)?;
    module.add_function(wrap_pyfunction!(device::device_of, module)?)?;
    module.add_function(wrap_pyfunction!(device::stream_of, module)?)
}
