//! Addresses. Packets stay in the run's network namespaces.

use anyhow::Result;

use super::place::Space;

const SCRIPT: &str = include_str!("network.sh");

pub(crate) const CONTROL_NAME: &str = "control";
const CONTROL_NUMBER: u8 = 10;
pub(crate) const CONTROL: &str = "172.30.0.10";
pub(crate) const CONTROL_ADDRESSES: [&str; 2] = [CONTROL, "fd30::10"];

pub(crate) const PODS: [&str; 2] = ["10.244.0.0/16", "fd44::/48"];
pub(crate) const SERVICES: [&str; 2] = ["10.96.0.0/16", "fd96::/112"];
/// Of the service `kube-dns`, which exists with `--e2e`.
pub(crate) const DNS: [&str; 2] = ["10.96.0.10", "fd96::a"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) name: String,
    subnet: u8,
    number: u8,
}

impl Host {
    pub(crate) fn ipv4(&self) -> String {
        format!("172.3{}.0.{}", self.subnet, self.number)
    }

    pub(crate) fn ipv6(&self) -> String {
        format!("fd3{}::{}", self.subnet, self.number)
    }
}

/// The last of several nodes is behind the router and needs the overlay.
pub(crate) fn hosts(nodes: u8) -> Vec<Host> {
    (1..=nodes)
        .map(|n| Host { name: format!("node{n}"), subnet: u8::from(n == nodes && n > 1), number: CONTROL_NUMBER + n })
        .collect()
}

pub(crate) fn make(space: &Space, hosts: &[Host]) -> Result<()> {
    let mut words = vec!["-c".to_owned(), SCRIPT.to_owned(), "network".to_owned()];
    words.push(format!("{CONTROL_NAME}:0:{CONTROL_NUMBER}"));
    words.extend(hosts.iter().map(|host| format!("{}:{}:{}", host.name, host.subnet, host.number)));
    space.root().output("sh", &words.iter().map(String::as_str).collect::<Vec<_>>()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_node_is_in_another_subnet() {
        let addresses = |n| hosts(n).iter().map(Host::ipv4).collect::<Vec<_>>();
        assert_eq!(addresses(1), ["172.30.0.11"]);
        assert_eq!(addresses(3), ["172.30.0.11", "172.30.0.12", "172.31.0.13"]);
        assert_eq!(hosts(2).last().map(Host::ipv6).as_deref(), Some("fd31::12"));
    }
}
