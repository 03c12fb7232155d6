//! The node's part of redirects to the proxy: packets with [`MARK_TO_PROXY`] are delivered to the node, whatever their
//! destination.
//!
//! | part | purpose |
//! |---|---|
//! | rules | route marked packets by table [`TABLE`], before any foreign rule, and drop the rest |
//! | routes | the table's only routes: everything is local |
//! | settings of the router's link | accept packets from any source |
//! | row 0 of `PROFILES` | names that link to the programs |
//! | chains of `table inet wharf` | deliver to the proxy's listener, mark its replies, drop forwarded marked packets |
//!
//! **Any source.** `rp_filter` checks that a packet's source is routed over the link of arrival. With `src_valid_mark`
//! that lookup uses the mark and finds the table's route; `accept_local` permits a local source
//! (Documentation/networking/ip-sysctl.rst). `rp_filter` 2 permits the node's addresses, which are routed over another
//! link.

use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};
use wharf_common::{
    EndpointConfig, EndpointProfile,
    policy::{MARK_PORT_SHIFT, MARK_TO_PROXY},
};
use wharf_core::{
    finding::NodeProblem,
    ids::IfIndex,
    kernel::{KernelErrorKind, NodeSpec, Result},
};

use crate::{
    ROUTE_PROTOCOL, ROUTER_IFNAME,
    bpf::Bpf,
    error::fail,
    forwarding::set,
    netlink::{Connection, Request, link, route},
    settings::{dotted, read},
};

const OPERATION: &str = "set up redirects";
const TABLE: u32 = 0x7768_0000;
/// After the kernel's rule for the table local, before foreign ones.
const PRIORITY: u32 = 87;
const PORT: u32 = u32::MAX << MARK_PORT_SHIFT;
pub(crate) const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];
const SETTINGS: [(&str, &str); 2] = [("src_valid_mark", "1"), ("accept_local", "1")];
/// Also for [`crate::translated`]; stays until the link is removed.
const SOURCE_CHECK: (&str, &str) = ("rp_filter", "2");
/// Must be zero, or marked packets fail the source check on other links, or the node's replies carry the mark and stay
/// on the node.
const STOP_REDIRECTS: [&str; 4] =
    ["ipv4/conf/all/src_valid_mark", "ipv4/tcp_fwmark_accept", "ipv4/fwmark_reflect", "ipv6/fwmark_reflect"];

fn setting(ifname: &str, name: &str) -> String {
    format!("ipv4/conf/{ifname}/{name}")
}

/// The first for marks without a port, the second drops the rest.
fn rules(family: AddressFamily) -> [(&'static str, RuleMessage); 2] {
    let rule = |mask, priority| {
        let mut m = RuleMessage::default();
        m.header.family = family;
        m.attributes = vec![
            RuleAttribute::FwMark(MARK_TO_PROXY),
            RuleAttribute::FwMask(mask),
            RuleAttribute::Priority(priority),
            RuleAttribute::Protocol(RouteProtocol::from(ROUTE_PROTOCOL)),
        ];
        m
    };
    let (mut to_table, mut drops) = (rule(MARK_TO_PROXY | PORT, PRIORITY), rule(MARK_TO_PROXY, PRIORITY + 1));
    to_table.header.action = RuleAction::ToTable;
    to_table.attributes.push(RuleAttribute::Table(TABLE));
    drops.header.action = RuleAction::Blackhole;
    [("rule to table", to_table), ("rule behind table", drops)]
}

fn everything(family: AddressFamily, over: Option<IfIndex>) -> RouteMessage {
    let mut m = RouteMessage::default();
    m.header.address_family = family;
    m.header.table = RouteHeader::RT_TABLE_UNSPEC;
    m.header.protocol = RouteProtocol::from(ROUTE_PROTOCOL);
    (m.header.kind, m.header.scope) = (RouteType::Local, RouteScope::Host);
    m.attributes = vec![RouteAttribute::Table(TABLE)];
    m.attributes.extend(over.map(|ifindex| RouteAttribute::Oif(ifindex.0)));
    m
}

/// All parts except the chains. Needs the router's link.
pub(crate) fn ensure(bpf: &Bpf, wanted: bool) -> Result<()> {
    if !wanted {
        // First, so that programs send no more packets there.
        bpf.ensure_way_to_proxy(EndpointProfile::default())?;
        take_back_settings()?;
        return remove();
    }
    let mut connection = Connection::open()?;
    let Some(router) = link::look_up(&mut connection, ROUTER_IFNAME)? else {
        return Err(fail(OPERATION, ROUTER_IFNAME, KernelErrorKind::NotFound, "the router's link is not there"));
    };
    accept_any_source()?;
    for (name, value) in SETTINGS {
        let path = setting(ROUTER_IFNAME, name);
        if read(&path)? != value {
            set(&path, value)?;
        }
    }
    for family in FAMILIES {
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        let route = RouteNetlinkMessage::NewRoute(everything(family, Some(router.ifindex)));
        let rules = rules(family).map(|(name, rule)| (name, Request::new(RouteNetlinkMessage::NewRule(rule), flags)));
        let steps = [("route of table", Request::new(route, flags))].into_iter().chain(rules);
        run(&mut connection, family, steps, &[libc::EEXIST])?;
    }
    let row = EndpointProfile {
        config: EndpointConfig { ifindex: router.ifindex.0, ..EndpointConfig::default() },
        host_mac: router.mac.map(|mac| mac.0).unwrap_or_default(),
        ..EndpointProfile::default()
    };
    bpf.ensure_way_to_proxy(row)
}

pub(crate) fn accept_any_source() -> Result<()> {
    let (name, value) = SOURCE_CHECK;
    let path = setting(ROUTER_IFNAME, name);
    if read(&path)? == value { Ok(()) } else { set(&path, value) }
}

pub(crate) fn other_source_check() -> Result<Option<NodeProblem>> {
    let (name, expected) = SOURCE_CHECK;
    other_setting(&setting(ROUTER_IFNAME, name), expected, true)
}

fn other_setting(path: &str, expected: &str, repairable: bool) -> Result<Option<NodeProblem>> {
    let found = read(path)?;
    let problem = |found| NodeProblem::Setting { name: dotted(path), expected: expected.to_owned(), found, repairable };
    Ok((found != expected).then(|| problem(found)))
}

/// The settings vanish with the router's link.
pub(crate) fn remove() -> Result<()> {
    let mut connection = Connection::open()?;
    for family in FAMILIES {
        let route = RouteNetlinkMessage::DelRoute(everything(family, None));
        let rules = rules(family).map(|(name, rule)| (name, Request::new(RouteNetlinkMessage::DelRule(rule), 0)));
        let steps = rules.into_iter().chain([("route of table", Request::new(route, 0))]);
        run(&mut connection, family, steps, &[libc::ENOENT, libc::ESRCH, libc::EAFNOSUPPORT, libc::EOPNOTSUPP])?;
    }
    Ok(())
}

/// To the kernel's defaults.
fn take_back_settings() -> Result<()> {
    for (name, value) in SETTINGS {
        let (path, before) = (setting(ROUTER_IFNAME, name), read(&setting("default", name))?);
        if before != value && read(&path).is_ok_and(|found| found == value) {
            set(&path, &before)?;
        }
    }
    Ok(())
}

/// Errnos in `fine` are success; IPv6 may be missing.
fn run(
    connection: &mut Connection,
    family: AddressFamily,
    steps: impl Iterator<Item = (&'static str, Request)>,
    fine: &[i32],
) -> Result<()> {
    let (names, requests): (Vec<_>, Vec<_>) = steps.unzip();
    for (answer, name) in connection.batch(requests)?.into_iter().zip(names) {
        let Err(refusal) = answer else { continue };
        let without = [libc::EAFNOSUPPORT, libc::EOPNOTSUPP, libc::EACCES];
        let is_absent = family == AddressFamily::Inet6 && without.iter().any(|errno| refusal.is(*errno));
        if !is_absent && !fine.iter().any(|errno| refusal.is(*errno)) {
            return Err(refusal.into_error(OPERATION, format!("{name} {TABLE:#x} ({family:?})")));
        }
    }
    Ok(())
}

pub(crate) fn ours(connection: &mut Connection) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for family in FAMILIES {
        for (what, rule) in rules(family) {
            if has_rule(connection, family, &rule)? {
                found.push(format!("{} {what} {TABLE:#x}", family_name(family)));
            }
        }
    }
    for there in route::list_table(connection, Some(TABLE), Some(ROUTE_PROTOCOL))? {
        let name = if there.destination.addr().is_ipv4() { "IPv4" } else { "IPv6" };
        found.push(format!("{name} route of table {TABLE:#x}"));
    }
    Ok(found)
}

pub(crate) fn family_name(family: AddressFamily) -> &'static str {
    if family == AddressFamily::Inet { "IPv4" } else { "IPv6" }
}

pub(crate) fn has_rule(connection: &mut Connection, family: AddressFamily, rule: &RuleMessage) -> Result<bool> {
    let mut request = RuleMessage::default();
    request.header.family = family;
    let there = connection.dump(&RouteNetlinkMessage::GetRule(request))?.unwrap_or_default();
    Ok(there.iter().any(|message| is_rule(message, rule)))
}

fn is_rule(message: &RouteNetlinkMessage, rule: &RuleMessage) -> bool {
    let RouteNetlinkMessage::NewRule(m) = message else { return false };
    m.header.action == rule.header.action && rule.attributes.iter().all(|wanted| m.attributes.contains(wanted))
}

pub(crate) fn observe(bpf: &Bpf, spec: &NodeSpec) -> Result<Vec<NodeProblem>> {
    let problem =
        |what: String, cause: &str, repairable| NodeProblem::Outbound { what, cause: cause.to_owned(), repairable };
    let mut connection = Connection::open()?;
    let there = ours(&mut connection)?;
    if !spec.redirects {
        let left = |what| problem(what, "is there, and no rule redirects to the proxy", true);
        return Ok(there.into_iter().map(left).collect());
    }
    let ipv6 = spec.cidrs.iter().any(|cidr| cidr.addr().is_ipv6());
    let mut wrong = Vec::new();
    for (name, family) in ["IPv4", "IPv6"].into_iter().zip(FAMILIES).take(1 + usize::from(ipv6)) {
        let rules = rules(family).map(|(what, _)| format!("{name} {what} {TABLE:#x}"));
        for what in rules.into_iter().chain([format!("{name} route of table {TABLE:#x}")]) {
            if !there.contains(&what) {
                let cause = "expected, is not there: redirected connections do not reach the proxy";
                wrong.push(problem(what, cause, true));
            }
        }
    }
    let Some(router) = link::look_up(&mut connection, ROUTER_IFNAME)?.map(|seen| seen.ifindex.0) else {
        return Ok(wrong);
    };
    let ours = SETTINGS.map(|(name, expected)| (setting(ROUTER_IFNAME, name), expected, true));
    let others = STOP_REDIRECTS.iter().filter(|path| ipv6 || !path.starts_with("ipv6"));
    for (path, expected, repairable) in ours.into_iter().chain(others.map(|path| ((*path).to_owned(), "0", false))) {
        wrong.extend(other_setting(&path, expected, repairable)?);
    }
    wrong.extend(other_source_check()?);
    if bpf.way_to_proxy()? != Some(router) {
        wrong.push(problem("row 0 of PROFILES".to_owned(), "it does not tell the router's link", true));
    }
    Ok(wrong)
}
