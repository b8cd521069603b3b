//! The table of transports.

use std::sync::Arc;

use super::cuda_ipc::CudaIpc;
use super::over_rails::OverRails;
use super::rails::CARRIERS;
use super::self_transport::SelfTransport;
use super::shm::Shm;
use super::transport::{Transport, Transports};

/// The transports, in the order in which they are tried. A new transport is added here, by one line, or to the
/// [`CARRIERS`] if it joins network devices; see docs/design/adding-a-transport.md.
pub(crate) fn registered() -> Transports {
    let mut all: Vec<Arc<dyn Transport>> = vec![
        Arc::new(SelfTransport), //
        Arc::new(Shm),           //
        Arc::new(CudaIpc),       //
    ];
    all.extend(CARRIERS.iter().map(|carrier| Arc::new(OverRails(*carrier)) as Arc<dyn Transport>));
    Transports(all)
}

#[cfg(test)]
mod tests {
    use crossrail_types::ErrorKind;

    use super::*;

    #[test]
    fn unknown_required_transports_are_named() {
        let transports = registered();
        assert!(transports.required(Some("tcp,shm")).unwrap().is_some());
        let error = transports.required(Some("tpc")).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
        assert!(error.detail.contains("tpc") && error.hint.is_some_and(|hint| hint.contains("tcp")));
    }

    #[test]
    fn the_settings_know_the_names_of_all_transports() {
        let names: Vec<_> = registered().iter().map(|transport| transport.name()).collect();
        assert_eq!(names, crossrail_types::TRANSPORTS);
    }
}
