//! Parses the service's answers: hostile input.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
};

use ipnet::IpNet;
use wharf_api::{ContainerRoute, EndpointDns};
use wharf_core::{
    endpoint::MAX_ROUTES,
    ids::{Attachment, ContainerId, IfName, MacAddr, NetworkName},
    mtu::MAX_MTU,
};
use wharf_delegate::v1;

/// CNI code of an unknown attachment.
pub const UNKNOWN_CONTAINER: u32 = 3;
const MAX_MESSAGE: usize = 1_024;
const MAX_DETAILS: usize = 4_096;
const MAX_TEXT: usize = 253;
const MAX_NAMESERVERS: usize = 8;
const MAX_DOMAINS: usize = 32;
const MAX_FINDINGS: usize = 64;
/// Minimum MTU of IPv4 (RFC 791), bytes.
const MIN_MTU: u32 = 68;
/// `PATH_MAX`, bytes.
const MAX_PATH: usize = 4_096;
/// Milliseconds; the plugin bounds it too.
const MAX_RETRY_MS: u32 = 60_000;

/// A broken rule of the interface.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// No outcome, or a later version's.
    #[error("it has no outcome that is known here")]
    Empty,
    /// Longer than the limit.
    #[error("it is longer than {} bytes", crate::delegate::service::MAX_ANSWER)]
    TooLong,
    /// A missing field.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// Field name, first 80 characters, broken rule.
    #[error("{0} {1:?}: {2}")]
    Field(&'static str, String, String),
    /// List name, length, limit.
    #[error("{0}: {1} of them, at most {2} are taken")]
    Many(&'static str, usize, usize),
    /// Addresses or gateways: actual, leased.
    #[error("it has {0}, and the IPAM plugin leased {1}")]
    NotLeased(String, String),
    /// It is about another attachment.
    #[error("it is about {0}, which was not asked for")]
    Other(String),
}

/// A failure that the service reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// CNI error code, not 0.
    pub code: u32,
    /// Cause.
    pub message: String,
    /// Hint; may be empty.
    pub details: String,
    /// Delay, milliseconds.
    pub retry_after_ms: Option<u32>,
}

/// An attachment of the service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    /// Key.
    pub attachment: Attachment,
    /// Network namespace.
    pub netns: PathBuf,
    pub container: Link,
    /// On the node.
    pub host: Option<(IfName, Link)>,
    /// IPv4.
    pub v4: Option<Address>,
    /// IPv6.
    pub v6: Option<Address>,
    pub routes: Vec<ContainerRoute>,
    /// Resolver settings of the container.
    pub dns: EndpointDns,
}

/// Properties of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// If any.
    pub mac: Option<MacAddr>,
    /// Bytes.
    pub mtu: u32,
}

/// A container's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// With prefix length.
    pub net: IpNet,
    /// Of the same family.
    pub gateway: Option<IpAddr>,
}

/// Result of Check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Attachment.
    pub made: Made,
    /// Problems found.
    pub findings: Vec<String>,
}

/// Content, or the service's failure.
pub type Read<T> = Result<Result<T, Failed>, AnswerError>;

/// Parses the answer of Add.
pub fn made(answer: v1::AddResponse, asked: &v1::AttachmentKey) -> Read<Made> {
    match answer.outcome.ok_or(AnswerError::Empty)? {
        v1::add_response::Outcome::Added(attachment) => Ok(Ok(attached(attachment, asked)?)),
        v1::add_response::Outcome::Failure(failure) => failed(failure).map(Err),
    }
}

/// Parses the answer of Del.
pub fn deleted(answer: v1::DelResponse) -> Read<()> {
    match answer.outcome.ok_or(AnswerError::Empty)? {
        v1::del_response::Outcome::Deleted(v1::Deleted {}) => Ok(Ok(())),
        v1::del_response::Outcome::Failure(failure) => failed(failure).map(Err),
    }
}

/// Parses the answer of Check.
pub fn seen(answer: v1::CheckResponse, asked: &v1::AttachmentKey) -> Read<Seen> {
    let v1::Checked { attachment, findings } = match answer.outcome.ok_or(AnswerError::Empty)? {
        v1::check_response::Outcome::Checked(checked) => checked,
        v1::check_response::Outcome::Failure(failure) => return failed(failure).map(Err),
    };
    let made = attached(attachment.ok_or(AnswerError::Missing("attachment"))?, asked)?;
    few("findings", findings.len(), MAX_FINDINGS)?;
    let findings = findings.into_iter().map(|text| sentence("finding", text, MAX_MESSAGE)).collect::<Result<_, _>>()?;
    Ok(Ok(Seen { made, findings }))
}

/// Parses the answer of Gc.
pub fn collected(answer: v1::GcResponse) -> Read<u32> {
    match answer.outcome.ok_or(AnswerError::Empty)? {
        v1::gc_response::Outcome::Collected(v1::Collected { removed }) => Ok(Ok(removed)),
        v1::gc_response::Outcome::Failure(failure) => failed(failure).map(Err),
    }
}

/// Parses the answer of Status.
pub fn ready(answer: v1::StatusResponse) -> Read<String> {
    match answer.outcome.ok_or(AnswerError::Empty)? {
        v1::status_response::Outcome::Ready(v1::Ready { service }) => Ok(Ok(text("service", service, MAX_TEXT)?)),
        v1::status_response::Outcome::Failure(failure) => failed(failure).map(Err),
    }
}

fn failed(failure: v1::Failure) -> Result<Failed, AnswerError> {
    let v1::Failure { code, message, details, retry_after_ms } = failure;
    if code == 0 {
        return Err(field("failure.code", "0", "a failure has a code other than 0"));
    }
    Ok(Failed {
        code,
        message: sentence("failure.message", message, MAX_MESSAGE)?,
        details: text("failure.details", details, MAX_DETAILS)?,
        retry_after_ms: (retry_after_ms > 0).then_some(retry_after_ms.min(MAX_RETRY_MS)),
    })
}

/// The key may lack the network.
fn attached(there: v1::Attachment, asked: &v1::AttachmentKey) -> Result<Made, AnswerError> {
    let v1::Attachment { key, netns, container, host, addresses, routes, dns } = there;
    let v1::AttachmentKey { network, container_id, interface } = key.ok_or(AnswerError::Missing("key"))?;
    let attachment = Attachment {
        network: NetworkName::parse(&network).map_err(|e| field("key.network", &network, e))?,
        container_id: ContainerId::parse(&container_id).map_err(|e| field("key.container_id", &container_id, e))?,
        ifname: IfName::parse(&interface).map_err(|e| field("key.interface", &interface, e))?,
    };
    let is_asked = container_id == asked.container_id
        && interface == asked.interface
        && (asked.network.is_empty() || network == asked.network);
    if !is_asked {
        return Err(AnswerError::Other(attachment.to_string()));
    }
    let netns = text("netns", netns, MAX_PATH)?;
    if !netns.starts_with('/') {
        return Err(field("netns", &netns, "must be an absolute path"));
    }
    let container = container.ok_or(AnswerError::Missing("container"))?;
    if container.name != interface {
        return Err(field("container.name", &container.name, "must be the interface that was asked for"));
    }
    let host = match host {
        None => None,
        Some(host) => {
            let name = IfName::parse(&host.name).map_err(|e| field("host.name", &host.name, e))?;
            Some((name, link("host", &host)?))
        }
    };
    few("addresses", addresses.len(), 2)?;
    let (mut v4, mut v6) = (None, None);
    for address in &addresses {
        let read = host_address(address)?;
        let slot = if read.net.addr().is_ipv4() { &mut v4 } else { &mut v6 };
        if slot.replace(read).is_some() {
            return Err(field("addresses", &address.address, "at most one of each family"));
        }
    }
    Ok(Made {
        container: link("container", &container)?,
        attachment,
        netns: netns.into(),
        host,
        v4,
        v6,
        routes: route_list(&routes)?,
        dns: resolver(dns.unwrap_or_default())?,
    })
}

/// The addresses must equal the IPAM plugin's lease.
pub fn as_leased(made: &Made, request: &v1::AddRequest) -> Result<(), AnswerError> {
    if request.ipam.is_none() {
        return Ok(());
    }
    let of = |texts: Vec<String>| texts.into_iter().collect::<std::collections::BTreeSet<_>>();
    let has = || [made.v4, made.v6].into_iter().flatten();
    let (addresses, leased) = (of(has().map(|a| a.net.addr().to_string()).collect()), of(request.addresses.clone()));
    let told = |texts: std::collections::BTreeSet<String>| {
        if texts.is_empty() { "no address".to_owned() } else { texts.into_iter().collect::<Vec<_>>().join(", ") }
    };
    if addresses != leased {
        return Err(AnswerError::NotLeased(told(addresses), told(leased)));
    }
    let family = |text: &String| text.contains(':');
    let other = has().filter_map(|a| a.gateway).map(|gateway| gateway.to_string()).find(|gateway| {
        let mut named = request.gateways.iter().filter(|there| family(there) == family(gateway)).peekable();
        named.peek().is_some() && !named.any(|there| there == gateway)
    });
    match other {
        Some(gateway) => Err(AnswerError::NotLeased(format!("the gateway {gateway}"), request.gateways.join(", "))),
        None => Ok(()),
    }
}

fn link(name: &'static str, interface: &v1::Interface) -> Result<Link, AnswerError> {
    let mac = match interface.mac.as_str() {
        "" => None,
        mac => Some(mac.parse().map_err(|e| field(if name == "host" { "host.mac" } else { "container.mac" }, mac, e))?),
    };
    if !(MIN_MTU..=MAX_MTU).contains(&interface.mtu) {
        let rule = format!("mtu must be {MIN_MTU} to {MAX_MTU}");
        return Err(field(name, &interface.mtu.to_string(), rule));
    }
    Ok(Link { mac, mtu: interface.mtu })
}

fn host_address(address: &v1::Address) -> Result<Address, AnswerError> {
    let bad = |rule: String| field("address", &address.address, rule);
    let ip: IpAddr = address.address.parse().map_err(|e: std::net::AddrParseError| bad(e.to_string()))?;
    if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || ip == IpAddr::V4(Ipv4Addr::BROADCAST) {
        return Err(bad("is no address that one host can have".to_owned()));
    }
    let prefix = u8::try_from(address.prefix_len).ok().and_then(|length| IpNet::new(ip, length).ok());
    let net = prefix.ok_or_else(|| bad(format!("prefix length {} is longer than the address", address.prefix_len)))?;
    let gateway = address.gateway.as_deref().map(|text| gateway(text, ip.is_ipv4())).transpose()?;
    Ok(Address { net, gateway })
}

fn gateway(text: &str, v4: bool) -> Result<IpAddr, AnswerError> {
    let ip: IpAddr = text.parse().map_err(|e| field("gateway", text, e))?;
    if ip.is_ipv4() != v4 {
        return Err(field("gateway", text, "is of the other family"));
    }
    if ip.is_unspecified() || ip.is_multicast() {
        return Err(field("gateway", text, "is no address of a host"));
    }
    Ok(ip)
}

fn route_list(routes: &[v1::Route]) -> Result<Vec<ContainerRoute>, AnswerError> {
    few("routes", routes.len(), MAX_ROUTES)?;
    let (mut read, mut seen) = (Vec::with_capacity(routes.len()), BTreeSet::new());
    for v1::Route { dst, gateway: gw } in routes {
        let to: IpNet = dst.parse().map_err(|e| field("routes.dst", dst, e))?;
        if to.trunc() != to {
            return Err(field("routes.dst", dst, "host bits are set"));
        }
        if !seen.insert(to) {
            return Err(field("routes.dst", dst, "is there twice"));
        }
        let gw = gw.as_deref().map(|text| gateway(text, to.addr().is_ipv4())).transpose()?;
        read.push(ContainerRoute { dst: to, gw });
    }
    Ok(read)
}

fn resolver(dns: v1::Dns) -> Result<EndpointDns, AnswerError> {
    let v1::Dns { nameservers, domain, search, options } = dns;
    few("dns.nameservers", nameservers.len(), MAX_NAMESERVERS)?;
    let list = |name, list: Vec<String>| {
        few(name, list.len(), MAX_DOMAINS)?;
        list.into_iter().map(|one| sentence(name, one, MAX_TEXT)).collect::<Result<Vec<_>, _>>()
    };
    Ok(EndpointDns {
        nameservers: nameservers
            .iter()
            .map(|text| text.parse().map_err(|e| field("dns.nameservers", text, e)))
            .collect::<Result<_, _>>()?,
        domain: text("dns.domain", domain, MAX_TEXT)?,
        search: list("dns.search", search)?,
        options: list("dns.options", options)?,
    })
}

fn few(name: &'static str, length: usize, most: usize) -> Result<(), AnswerError> {
    if length > most { Err(AnswerError::Many(name, length, most)) } else { Ok(()) }
}

fn text(name: &'static str, text: String, most: usize) -> Result<String, AnswerError> {
    if text.len() > most {
        return Err(field(name, &text, format!("is longer than {most} bytes")));
    }
    if text.chars().any(char::is_control) {
        return Err(field(name, &text, "has control characters"));
    }
    Ok(text)
}

fn sentence(name: &'static str, words: String, most: usize) -> Result<String, AnswerError> {
    if words.is_empty() {
        return Err(AnswerError::Missing(name));
    }
    text(name, words, most)
}

fn field(name: &'static str, value: &str, rule: impl ToString) -> AnswerError {
    AnswerError::Field(name, value.chars().take(80).collect(), rule.to_string())
}

/// The part to display.
pub fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(400).collect()
}

#[cfg(test)]
mod tests;
