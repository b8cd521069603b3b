//! Variables that Kubernetes sets in every pod for each Service of the namespace, and Docker for each linked container.

use std::net::{IpAddr, SocketAddr};

const PROTOCOLS: [&str; 3] = ["tcp", "udp", "sctp"];

/// Recognizes such a variable by its name and its value: `A_SERVICE_HOST`, `A_SERVICE_PORT`, `A_SERVICE_PORT_NAME`,
/// `A_PORT`, `A_PORT_7400_TCP`, and the latter with `_PROTO`, `_PORT` and `_ADDR`. Docker has the last three too, with
/// `_START` and `_END` for ranges of ports, `A_NAME`, and `A_ENV_B` for every variable `B` of the other container.
pub(super) fn is_service_link(name: &str, value: &str) -> bool {
    if is_linked_variable(name) {
        return true;
    }
    if let Some(alias) = name.strip_suffix("_NAME") {
        return is_link_name(alias, value);
    }
    let (is_number, is_address) = (value.parse::<u16>().is_ok(), value.parse::<IpAddr>().is_ok());
    if name.ends_with("_SERVICE_HOST") {
        return is_address;
    }
    if let Some((_, port)) = name.rsplit_once("_SERVICE_PORT") {
        return is_number && (port.is_empty() || port.starts_with('_'));
    }
    let marker = "_PORT_";
    match name.match_indices(marker).find_map(|(at, _)| behind_protocol(&name[at + marker.len()..])) {
        Some("" | "_START" | "_END") => is_url(value),
        Some("_PROTO") => PROTOCOLS.contains(&value),
        Some("_PORT" | "_PORT_START" | "_PORT_END") => is_number,
        Some("_ADDR") => is_address,
        Some(_) => false,
        None => name.ends_with("_PORT") && is_url(value),
    }
}

/// `A_ENV_B`: Docker's copy of a linked container's variable, whose value may be anything.
fn is_linked_variable(name: &str) -> bool {
    name.split_once("_ENV_").is_some_and(|(_, variable)| !variable.is_empty())
}

/// `/web/a`: container `a` as a container `web` is linked to it; `alias` is `A`.
fn is_link_name(alias: &str, value: &str) -> bool {
    let parts = value.strip_prefix('/').and_then(|rest| rest.split_once('/'));
    parts.is_some_and(|(from, to)| !from.is_empty() && to.to_ascii_uppercase().replace('-', "_") == alias)
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
                ("PORT_7400_TCP_START", "tcp://172.17.0.2:7400"),
                ("PORT_7409_TCP_END", "tcp://172.17.0.2:7409"),
                ("PORT_7400_TCP_PORT_START", "7400"),
                ("PORT_7400_TCP_PORT_END", "7409"),
            ] {
                let name = format!("{service}_{name}");
                assert!(is_service_link(&name, value), "{name}={value}");
                assert!(!is_service_link(&name, "fast"), "{name} with a value of another kind");
            }
        }
        for (name, value) in [
            ("CROSSRAIL_NAME", "/web/crossrail"),
            ("CROSSRAIL_STORE_NAME", "/web-1/crossrail-store"),
            ("CROSSRAIL_ENV_PYTHON_VERSION", "3.11"),
            ("CROSSRAIL_STORE_ENV_CROSSRAIL_PORTS", "fast"),
            ("CROSSRAIL_ENV_EMPTY", ""),
        ] {
            assert!(is_service_link(name, value), "{name}={value}");
        }
        for (name, value) in [
            ("CROSSRAIL_NAME", "/web/other"),
            ("CROSSRAIL_NAME", "//crossrail"),
            ("CROSSRAIL_NAME", "crossrail"),
            ("CROSSRAIL_ENV_", "fast"),
            ("CROSSRAIL_ENV", "fast"),
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
