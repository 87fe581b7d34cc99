//! Where the server listens: one address, or parts of it from several layers.

use std::net::{IpAddr, Ipv6Addr};

use super::super::{ListenAddress, error::Violations, excerpt::shown, raw::RawServer};

const DEFAULT: (&str, u16) = ("127.0.0.1", 8000);
const KEY: &str = "server.listen";

pub(super) fn listen(raw: &RawServer, violations: &mut Violations) -> ListenAddress {
    let mut address = ListenAddress { host: DEFAULT.0.to_owned(), port: DEFAULT.1 };
    if let Some(given) = &raw.listen {
        match parse_listen(&given.value) {
            Some(parsed) => address = parsed,
            None => violations.add(
                KEY,
                &given.origin,
                format!("\"{}\" is no address to listen on", shown(&given.value)),
                "use HOST:PORT, such as \"127.0.0.1:8000\", \"[::1]:8000\" or \"0.0.0.0:8000\"",
            ),
        }
    }
    if let Some(given) = &raw.host {
        let inner = given.value.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = inner.unwrap_or(&given.value);
        if is_host(host) {
            address.host = host.to_owned();
        } else {
            let problem = format!("\"{}\" is no host", shown(&given.value));
            let remedy = match host.split_once('%') {
                Some(_) => "give the interface behind % by its number (`ip link` tells), as in fe80::1%2",
                None => "give a host name or an address, without a port",
            };
            violations.add(KEY, &given.origin, problem, remedy);
        }
    }
    if let Some(given) = &raw.port {
        match u16::try_from(given.value) {
            Ok(port) => address.port = port,
            Err(_) => {
                let problem = format!("{} is no port", given.value);
                violations.add(KEY, &given.origin, problem, "give a number from 0 to 65535");
            }
        }
    }
    address
}

fn parse_listen(text: &str) -> Option<ListenAddress> {
    let (host, port) = text.trim().rsplit_once(':')?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = match bracketed {
        Some(host) => host,
        None if host.contains(':') => return None,
        None => host,
    };
    Some(ListenAddress { host: is_host(host).then(|| host.to_owned())?, port: port.parse().ok()? })
}

fn is_host(host: &str) -> bool {
    let name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    // Link-local addresses name their interface, by its number.
    let scoped = host.split_once('%').is_some_and(|(address, scope)| {
        address.parse::<Ipv6Addr>().is_ok()
            && scope.bytes().all(|byte| byte.is_ascii_digit())
            && scope.parse::<u32>().is_ok()
    });
    scoped || host.parse::<IpAddr>().is_ok() || (!host.is_empty() && host.chars().all(name))
}
