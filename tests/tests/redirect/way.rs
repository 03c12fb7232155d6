//! The node's part of redirects, by the tools `ip` and `nft`: these scenarios write the rows of redirects themselves,
//! so the agent, which knows of none, does not make it. `tests/tests/l7` has the agent's own,
//! `crates/datapath/tests/redirects.rs` its parts.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use aya::maps::{Array, Map, MapData};
use nix::net::if_::if_nametoindex;
use wharf_common::{ABI_VERSION, EndpointConfig, EndpointProfile, map, policy::MARK_PORT_SHIFT};
use wharf_tests::{
    Node,
    process::{command_in, ip, run},
};

/// The router's link.
const LINK: &str = "wharf0";

/// Makes the way to proxies that listen at these ports.
pub(crate) fn prepare(node: &Node, ports: &[u16]) -> Result<()> {
    let listens = |port: &u16| {
        let mark = u32::from(port.to_be()) << MARK_PORT_SHIFT;
        [("tcp", "ip", "127.0.0.1"), ("tcp", "ip6", "[::1]"), ("udp", "ip", "127.0.0.1"), ("udp", "ip6", "[::1]")]
            .map(|(protocol, family, loopback)| {
                let version = if family == "ip" { "ipv4" } else { "ipv6" };
                format!(
                    "meta mark & 0x80 != 0 meta mark & 0xffff0000 == {mark:#x} meta nfproto {version} meta l4proto {protocol}
                     tproxy {family} to {loopback}:{port} meta mark set meta mark & 0xffff"
                )
                .replace('\n', " ")
            })
            .join("\n")
    };
    let rules = format!(
        "table inet redirects {{
           chain untracked {{ type filter hook prerouting priority -300; meta mark & 0x80 != 0 meta mark & 0x400 != 0 notrack; }}
           chain redirected {{ type filter hook prerouting priority -60;
             {}
             meta mark & 0x80 != 0 meta mark & 0xffff0000 != 0 drop
             meta mark & 0x80 != 0 meta l4proto tcp socket transparent 0 drop
           }}
           chain answers {{ type filter hook prerouting priority -50;
             fib daddr type local return
             socket wildcard 1 return
             meta l4proto udp socket mark & 0x300 == 0 return
             socket transparent 1 meta mark set meta mark & 0xff7f ^ 0x80
           }}
           chain lost {{ type filter hook forward priority 0; meta mark & 0x80 != 0 drop; }}
         }}",
        ports.iter().map(listens).collect::<Vec<_>>().join("\n")
    );
    let mut command = command_in(node.space(), "nft")?;
    command.args(["-f", "-"]);
    run(command, rules.as_bytes(), Duration::from_secs(10))?.ok()?;
    for family in ["-4", "-6"] {
        ip(node.space(), &format!("{family} rule add fwmark 0x80/0xffff0080 lookup 99 pref 85"))?;
        ip(node.space(), &format!("{family} rule add fwmark 0x80/0x80 blackhole pref 86"))?;
        ip(node.space(), &format!("{family} route add local default dev {LINK} table 99"))?;
    }
    let row = node.space().run(|| {
        for (setting, value) in [("src_valid_mark", "1"), ("accept_local", "1"), ("rp_filter", "2")] {
            fs::write(format!("/proc/sys/net/ipv4/conf/{LINK}/{setting}"), value).context(setting)?;
        }
        let config = EndpointConfig { ifindex: if_nametoindex(LINK)?, ..EndpointConfig::default() };
        anyhow::Ok(EndpointProfile { config, ..EndpointProfile::default() })
    })??;
    let row = EndpointProfile { host_mac: mac(node)?, ..row };
    let path = node.dirs().bpffs.join(format!("wharf/v{ABI_VERSION}/shared/{}", map::PROFILES));
    let mut profiles: Array<MapData, EndpointProfile> = Map::Array(MapData::from_pin(&path)?).try_into()?;
    Ok(profiles.set(0, row, 0)?)
}

/// MAC address of the router's link.
fn mac(node: &Node) -> Result<[u8; 6]> {
    let text = ip(node.space(), &format!("-o link show {LINK}"))?;
    let mac = text.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).context("a MAC address")?;
    let octets: Vec<u8> = mac.split(':').map(|octet| u8::from_str_radix(octet, 16)).collect::<Result<_, _>>()?;
    octets.try_into().ok().context("six octets")
}

/// Makes the kernel check that answers to a source leave by the link that a packet came by (RFC 3704, strict).
pub(crate) fn check_sources(node: &Node) -> Result<()> {
    let path = "/proc/sys/net/ipv4/conf/all/rp_filter";
    node.space().run(|| fs::write(path, "1"))?.context(path)
}
