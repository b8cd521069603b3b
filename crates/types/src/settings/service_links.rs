//! The variables that Kubernetes sets in every pod for each Service of the namespace.

use std::net::{IpAddr, SocketAddr};

const PROTOCOLS: [&str; 3] = ["tcp", "udp", "sctp"];

/// Recognizes such a variable by its name and its value: `A_SERVICE_HOST`, `A_SERVICE_PORT`, `A_SERVICE_PORT_NAME`,
/// `A_PORT`, `A_PORT_7400_TCP`, and the latter with `_PROTO`, `_PORT` and `_ADDR`.
pub(super) fn is_service_link(name: &str, value: &str) -> bool {
    let (is_number, is_address) = (value.parse::<u16>().is_ok(), value.parse::<IpAddr>().is_ok());
    if name.ends_with("_SERVICE_HOST") {
        return is_address;
    }
    if let Some((_, port)) = name.rsplit_once("_SERVICE_PORT") {
        return is_number && (port.is_empty() || port.starts_with('_'));
    }
    let marker = "_PORT_";
    match name.match_indices(marker).find_map(|(at, _)| behind_protocol(&name[at + marker.len()..])) {
        Some("") => is_url(value),
        Some("_PROTO") => PROTOCOLS.contains(&value),
        Some("_PORT") => is_number,
        Some("_ADDR") => is_address,
        Some(_) => false,
        None => name.ends_with("_PORT") && is_url(value),
    }
}

/// Suffix after port and protocol, as in `7400_TCP_ADDR`. `None`: the text does not begin with these.
fn behind_protocol(text: &str) -> Option<&str> {
    let (port, rest) = text.split_once('_')?;
    port.parse::<u16>().ok()?;
    PROTOCOLS.iter().find_map(|protocol| rest.strip_prefix(protocol.to_ascii_uppercase().as_str()))
}

/// `tcp://10.96.0.17:7400`.
fn is_url(value: &str) -> bool {
    let split = value.split_once("://").filter(|(protocol, _)| PROTOCOLS.contains(protocol));
    split.is_some_and(|(_, at)| at.parse::<SocketAddr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_known_by_name_and_value() {
        for service in ["CROSSRAIL", "CROSSRAIL_STORE"] {
            for (name, value) in [
                ("SERVICE_HOST", "10.96.0.17"),
                ("SERVICE_HOST", "fd00::17"),
                ("SERVICE_PORT", "7400"),
                ("SERVICE_PORT_STORE", "7400"),
                ("PORT", "tcp://10.96.0.17:7400"),
                ("PORT", "udp://[fd00::17]:53"),
                ("PORT_7400_TCP", "tcp://10.96.0.17:7400"),
                ("PORT_7400_TCP_PROTO", "tcp"),
                ("PORT_7400_TCP_PORT", "7400"),
                ("PORT_7400_TCP_ADDR", "10.96.0.17"),
            ] {
                let name = format!("{service}_{name}");
                assert!(is_service_link(&name, value), "{name}={value}");
                assert!(!is_service_link(&name, "fast"), "{name} with a value of another kind");
            }
        }
        for (name, value) in [
            ("CROSSRAIL_PORTS", "7400"),
            ("CROSSRAIL_PORT", "7400"),
            ("CROSSRAIL_TIMEOUT", "10"),
            ("CROSSRAIL_SERVICE", "10.96.0.17"),
            ("CROSSRAIL_PORT_7400", "tcp://10.96.0.17:7400"),
            ("CROSSRAIL_STORE", "tcp://10.96.0.17:7400"),
        ] {
            assert!(!is_service_link(name, value), "{name}={value}");
        }
    }
}
