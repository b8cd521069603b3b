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
    use crossrail_types::{ErrorKind, Filter, Settings};

    use super::*;

    #[test]
    fn unknown_required_transports_are_named() {
        let transports = registered();
        let settings = Settings::default();
        assert!(transports.required(Some("tcp,shm"), &settings).unwrap().is_some());
        let error = transports.required(Some("tpc"), &settings).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
        assert!(error.detail.contains("tpc") && error.hint.is_some_and(|hint| hint.contains("tcp")));
        for list in ["all", "^tcp", "", "tcp,tcp"] {
            assert_eq!(transports.required(Some(list), &settings).unwrap_err().kind, ErrorKind::Usage, "{list}");
        }
    }

    #[test]
    fn a_provider_may_be_required_that_the_settings_have() {
        let transports = registered();
        let with = |tls: &str| Settings { tls: Filter::parse_transports(tls).unwrap(), ..Settings::default() };
        let required = |list: &str, tls: &str| transports.required(Some(list), &with(tls));
        assert_eq!(required("fabric:tcp", "fabric:tcp,self").unwrap(), Some(vec!["fabric".to_owned()]));
        assert_eq!(required("tcp,ucx:rc,ud", "tcp,ucx:rc,ud").unwrap(), Some(vec!["ucx".to_owned(), "tcp".to_owned()]));
        for (list, tls) in
            [("fabric:tcp", "all"), ("fabric:efa", "fabric:tcp"), ("ucx:tcp", "ucx:rc"), ("ucx:tcp", "ucx")]
        {
            let error = required(list, tls).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Usage);
            assert!(error.detail.contains(list) && error.detail.contains(tls), "{error}");
        }
    }

    #[test]
    fn the_settings_know_the_names_of_all_transports() {
        let names: Vec<_> = registered().iter().map(|transport| transport.name()).collect();
        assert_eq!(names, crossrail_types::TRANSPORTS);
    }
}
