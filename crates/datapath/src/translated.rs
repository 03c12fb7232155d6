//! The node's part of egress rules about services whose backend is a container of another node
//! (docs/design/datapath.md, "Services with a backend on another node"): rules and routes send packets with
//! [`MARK_UNDECIDED`] over the router's link, whose egress filter `translated` judges them.
//!
//! All parts are present only with ranges of services and with networks that are not masqueraded. **Each part may be
//! missing**: without rules, routes or link, the chain `undecided` drops the packet, which keeps its mark until the
//! judgement; without the filter, the stack drops it, because the frame is not to the link's other end.

use std::collections::BTreeMap;

use ipnet::IpNet;
use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        route::RouteProtocol,
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};
use wharf_common::policy::MARK_UNDECIDED;
use wharf_core::{
    finding::NodeProblem,
    ids::IfIndex,
    kernel::{NextHop, NodeSpec, PeerRoute, Result},
};
use wharf_crash as crash;

use crate::{
    ROUTE_PROTOCOL, ROUTER_IFNAME,
    bpf::Bpf,
    netlink::{
        Connection, Request, link,
        route::{self, Route},
    },
    redirects::{self, FAMILIES},
};

const OPERATION: &str = "set up egress rules for services of other nodes";
const TABLE: u32 = 0x7768_0001;
/// `RT_TABLE_MAIN` of `linux/rtnetlink.h`.
const MAIN: u32 = 254;
/// After the rules of redirects, before foreign ones.
const PRIORITIES: [u32; 2] = [89, 90];

/// The first leads to single addresses of the main table: the hook of this node's container judges the packet.
fn rules(family: AddressFamily) -> [RuleMessage; 2] {
    let single = if family == AddressFamily::Inet { 32 } else { 128 };
    let to = [
        vec![RuleAttribute::Table(MAIN), RuleAttribute::SuppressPrefixLen(single - 1)],
        vec![RuleAttribute::Table(TABLE)],
    ];
    let rule = |(priority, to): (u32, Vec<RuleAttribute>)| {
        let mut m = RuleMessage::default();
        m.header.family = family;
        m.header.action = RuleAction::ToTable;
        m.attributes = vec![
            RuleAttribute::FwMark(MARK_UNDECIDED),
            RuleAttribute::FwMask(MARK_UNDECIDED),
            RuleAttribute::Priority(priority),
            RuleAttribute::Protocol(RouteProtocol::from(ROUTE_PROTOCOL)),
        ];
        m.attributes.extend(to);
        m
    };
    let [first, second] = to;
    [(PRIORITIES[0], first), (PRIORITIES[1], second)].map(rule)
}

fn all_rules() -> impl Iterator<Item = RuleMessage> {
    FAMILIES.into_iter().flat_map(rules)
}

/// Of the families of this node's containers; also without a Wharf route to the network. With the MTU of the route to
/// the other node: a too-big error names the service only in the first pass.
fn routes(spec: &NodeSpec, router: IfIndex) -> BTreeMap<IpNet, Route> {
    let Some(masquerade) = spec.masquerade.as_ref().filter(|masquerade| masquerade.services) else {
        return BTreeMap::new();
    };
    let mtu = |peer: &PeerRoute| {
        let tunnel = matches!(peer.via, NextHop::Overlay { .. });
        spec.overlay.as_ref().filter(|_| tunnel).map(|overlay| overlay.mtu)
    };
    let peers = spec.peers.iter().map(|peer| (peer.to.trunc(), mtu(peer)));
    let wanted = masquerade.excluded.iter().map(|net| (net.trunc(), None)).chain(peers);
    let has_family = |net: &IpNet| spec.cidrs.iter().any(|own| own.addr().is_ipv4() == net.addr().is_ipv4());
    let wanted = wanted.filter(|(to, _)| has_family(to));
    wanted.map(|(to, mtu)| (to, Route::translated(to, router, TABLE, mtu))).collect()
}

fn there(connection: &mut Connection) -> Result<BTreeMap<IpNet, Route>> {
    let found = route::list_table(connection, Some(TABLE), Some(ROUTE_PROTOCOL))?;
    Ok(found.into_iter().map(|route| (route.destination, route)).collect())
}

/// All parts except the chain. A refused part is no error: its packets are dropped, and [`observe`] reports it. Needs
/// the router's link.
pub(crate) fn ensure(connection: &mut Connection, bpf: &Bpf, spec: &NodeSpec, router: IfIndex) -> Result<()> {
    let wanted = routes(spec, router);
    if wanted.is_empty() || !bpf.ensure_translated() {
        return remove(connection);
    }
    if let Err(e) = make(connection, bpf, &wanted, router) {
        tracing::warn!("containers with egress rules do not reach services with a backend on another node: {e}");
    }
    Ok(())
}

fn make(connection: &mut Connection, bpf: &Bpf, wanted: &BTreeMap<IpNet, Route>, router: IfIndex) -> Result<()> {
    redirects::accept_any_source()?;
    bpf.attach_translated(connection, router)?;
    crash::point("datapath/translated/after-filter");
    let mut left = there(connection)?;
    let mut requests = Vec::new();
    for (to, route) in wanted {
        match left.remove(to) {
            Some(found) if found == *route => {}
            Some(_) => requests.push(("route of table", route.replace())),
            None => requests.push(("route of table", route.add())),
        }
    }
    requests.extend(left.values().map(|route| ("route of table", route.remove())));
    let routes = run(connection, requests);
    crash::point("datapath/translated/after-routes");
    let rules = all_rules()
        .map(|rule| ("rule to table", Request::new(RouteNetlinkMessage::NewRule(rule), NLM_F_CREATE | NLM_F_EXCL)));
    // Also after a refused route, to use the others.
    run(connection, rules.collect()).and(routes)
}

/// The rest vanishes with the router's link.
pub(crate) fn remove(connection: &mut Connection) -> Result<()> {
    let rules = all_rules().map(|rule| ("rule to table", Request::new(RouteNetlinkMessage::DelRule(rule), 0)));
    run(connection, rules.collect())?;
    let routes = there(connection)?.values().map(|route| ("route of table", route.remove())).collect();
    run(connection, routes)
}

/// Present, gone already, or without IPv6: no error.
fn run(connection: &mut Connection, steps: Vec<(&'static str, Request)>) -> Result<()> {
    let (names, requests): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
    let done = [libc::EEXIST, libc::ENOENT, libc::ESRCH, libc::EAFNOSUPPORT, libc::EOPNOTSUPP, libc::EACCES];
    for (answer, name) in connection.batch(requests)?.into_iter().zip(names) {
        match answer {
            Err(refusal) if !done.iter().any(|errno| refusal.is(*errno)) => {
                return Err(refusal.into_error(OPERATION, format!("{name} {TABLE:#x}")));
            }
            _ => {}
        }
    }
    Ok(())
}

pub(crate) fn ours(connection: &mut Connection) -> Result<Vec<String>> {
    let mut found = rules_there(connection)?;
    found.extend(there(connection)?.keys().map(|to| format!("route {to} of table {TABLE:#x}")));
    Ok(found)
}

fn rules_there(connection: &mut Connection) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for family in FAMILIES {
        for (rule, name) in rules(family).iter().zip(rule_names(family)) {
            if redirects::has_rule(connection, family, rule)? {
                found.push(name);
            }
        }
    }
    Ok(found)
}

fn rule_names(family: AddressFamily) -> [String; 2] {
    ["rule before", "rule to"].map(|rule| format!("{} {rule} table {TABLE:#x}", redirects::family_name(family)))
}

pub(crate) fn observe(connection: &mut Connection, bpf: &Bpf, spec: &NodeSpec) -> Result<Vec<NodeProblem>> {
    const MISSING: &str =
        "expected, is not there: containers with egress rules do not reach services with a backend on another node";
    const LEFT: &str = "is there, and nothing needs it";
    let problem = |what, cause: &str| NodeProblem::Outbound { what, cause: cause.to_owned(), repairable: true };
    let router = link::look_up(connection, ROUTER_IFNAME)?.map(|router| router.ifindex);
    let wanted = router.map(|router| routes(spec, router)).unwrap_or_default();
    if !wanted.is_empty() && bpf.translated_is_refused() {
        let cause = "the kernel refused it (see the agent's log): containers with egress rules do not reach services with \
                     a backend on another node";
        let what = "program `translated`".to_owned();
        return Ok(vec![NodeProblem::Outbound { what, cause: cause.to_owned(), repairable: false }]);
    }
    let (mut left, rules) = (there(connection)?, rules_there(connection)?);
    let mut wrong = Vec::new();
    for (to, route) in &wanted {
        if left.remove(to).as_ref() != Some(route) {
            wrong.push(problem(format!("route {to} of table {TABLE:#x}"), MISSING));
        }
    }
    wrong.extend(left.keys().map(|to| problem(format!("route {to} of table {TABLE:#x}"), LEFT)));
    if wanted.is_empty() {
        wrong.extend(rules.into_iter().map(|rule| problem(rule, LEFT)));
        return Ok(wrong);
    }
    let families = FAMILIES.into_iter().filter(|family| {
        let is_v4 = *family == AddressFamily::Inet;
        wanted.keys().any(|to| to.addr().is_ipv4() == is_v4)
    });
    let names = families.flat_map(rule_names);
    wrong.extend(names.filter(|name| !rules.contains(name)).map(|name| problem(name, MISSING)));
    if let Some(router) = router
        && !bpf.is_translated_attached(connection, router)?
    {
        wrong.push(problem(format!("filter of {ROUTER_IFNAME}"), MISSING));
    }
    wrong.extend(redirects::other_source_check()?);
    Ok(wrong)
}
