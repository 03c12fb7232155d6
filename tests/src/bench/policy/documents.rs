//! The policies that are measured, as an operator would write them.

use std::net::Ipv4Addr;

/// Rules of each direction in [`each_way`].
pub(super) const EACH_WAY: usize = 100;
/// Rules of one identity in [`of_identity`].
pub(super) const OF_IDENTITY: usize = 5;
/// Where the packets of outside come from that are made by hand (TEST-NET-1, RFC 5737).
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Ports that no server of the benchmark is below.
const HIGH: &str = "{protocol: TCP, port: 1024, endPort: 65535}, {protocol: UDP, port: 1024, endPort: 65535}";

fn document(version: &str, kind: &str, name: &str, spec: &str) -> String {
    format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\n---\n")
}

/// A `NetworkPolicy` about the containers with the label `app`.
fn network_policy(name: &str, app: &str, rules: &str) -> String {
    let spec = format!("podSelector: {{matchLabels: {{app: {app}}}}},\n  {rules}");
    document("networking.k8s.io/v1", "NetworkPolicy", name, &spec)
}

fn pods(app: &str) -> String {
    format!("{{podSelector: {{matchLabels: {{app: {app}}}}}}}")
}

/// A rule; `side` is `from` or `to`.
fn rule(side: &str, peer: &str, ports: &str) -> String {
    format!("{{{side}: [{peer}], ports: [{ports}]}}")
}

/// The client of a pair may send by [`EACH_WAY`] rules and its server receive by as many. Of each, one is about the
/// other end and one about outside; the others are about other containers, networks and ports.
pub(super) fn each_way() -> String {
    let rules = |side: &str, other: &str| {
        let others = (0..EACH_WAY - 2).map(|n| {
            let peer =
                if n % 2 == 0 { pods(&format!("other{n}")) } else { format!("{{ipBlock: {{cidr: 198.18.{n}.0/24}}}}") };
            rule(side, &peer, &format!("{{port: {}}}", 20_000 + n))
        });
        let outside = rule(side, "{ipBlock: {cidr: 192.0.2.0/24}}", HIGH);
        others.chain([rule(side, &pods(other), HIGH), outside]).collect::<Vec<_>>().join(",\n  ")
    };
    let client = format!("policyTypes: [Egress],\n  egress: [{}]", rules("to", "server"));
    let server = format!("policyTypes: [Ingress],\n  ingress: [{}]", rules("from", "client"));
    network_policy("client", "client", &client) + &network_policy("server", "server", &server)
}

/// The label `app` of an identity.
pub(super) fn app(identity: usize) -> String {
    format!("m{identity}")
}

/// The policy of one of `identities`: [`OF_IDENTITY`] rules about others of them, three of ingress and two of egress;
/// with `added` one more of ingress.
pub(super) fn of_identity(identity: usize, identities: usize, added: bool) -> String {
    let other = |steps: usize| pods(&app((identity + steps) % identities));
    let of = |side, numbers: std::ops::Range<usize>| {
        numbers.map(|n| rule(side, &other(17 * n + 1), &format!("{{port: {}}}", 5_000 + n))).collect::<Vec<_>>()
    };
    let (mut ingress, egress) = (of("from", 0..3), of("to", 3..OF_IDENTITY));
    if added {
        ingress.push(rule("from", &other(11), "{port: 6000}"));
    }
    let rules = format!("ingress: [{}],\n  egress: [{}]", ingress.join(",\n  "), egress.join(",\n  "));
    network_policy(&app(identity), &app(identity), &rules)
}

/// The policies of all identities.
pub(super) fn of_identities(identities: usize) -> String {
    (0..identities).map(|identity| of_identity(identity, identities, false)).collect()
}

/// Single addresses, each with a gap behind it.
fn hosts(count: u32) -> impl Iterator<Item = Ipv4Addr> {
    (0..count).map(|n| Ipv4Addr::from_bits(Ipv4Addr::new(11, 0, 0, 0).to_bits() + 2 * n))
}

/// A policy that lets the containers with the label `app` send to `count` addresses, each a peer of its own.
pub(super) fn peers(app: &str, count: u32) -> String {
    let blocks: Vec<_> = hosts(count).map(|host| format!("{{ipBlock: {{cidr: {host}/32}}}}")).collect();
    let rules = format!("policyTypes: [Egress],\n  egress: [{{to: [{}]}}]", blocks.join(",\n  "));
    network_policy("networks", app, &rules)
}

/// As [`peers`], to all of `11.0.0.0/8` but `count` addresses.
pub(super) fn exceptions(app: &str, count: u32) -> String {
    let but: Vec<_> = hosts(count).map(|host| format!("{host}/32")).collect();
    let block = format!("{{ipBlock: {{cidr: 11.0.0.0/8, except: [{}]}}}}", but.join(",\n  "));
    network_policy("networks", app, &format!("policyTypes: [Egress],\n  egress: [{{to: [{block}]}}]"))
}

/// A policy that lets the containers with the label `app` send to `count` networks, and denies a part of each.
pub(super) fn denied_and_allowed(app: &str, count: u32) -> String {
    let networks = |length: u8| {
        let network = |n: u32| Ipv4Addr::from_bits(Ipv4Addr::new(12, 0, 0, 0).to_bits() + (n << 8));
        (0..count).map(|n| format!("{}/{length}", network(n))).collect::<Vec<_>>().join(",\n  ")
    };
    let spec = format!(
        "endpointSelector: {{matchLabels: {{app: {app}}}}},\n  egress: [{{toCIDR: [{}]}}],\n  egressDeny: [{{toCIDR: [{}]}}]",
        networks(24),
        networks(28)
    );
    document("cilium.io/v2", "CiliumNetworkPolicy", "networks", &spec)
}

#[cfg(test)]
mod tests {
    use wharf_policy::{
        model::{Action, Direction, Peer, Policy},
        read::read,
    };

    use super::*;

    fn rules(policies: &[Policy], direction: Direction) -> usize {
        policies.iter().flat_map(|policy| &policy.rules).filter(|rule| rule.direction == direction).count()
    }

    #[test]
    fn the_pairs_policies_have_as_many_rules_as_their_name_says() {
        let read = read("t", &each_way()).expect("valid");
        assert_eq!((rules(&read, Direction::Egress), rules(&read, Direction::Ingress)), (EACH_WAY, EACH_WAY));
    }

    #[test]
    fn an_added_rule_is_one_rule_more() {
        let read = |text: &str| read("t", text).expect("valid");
        let all = read(&of_identities(100));
        assert_eq!((all.len(), rules(&all, Direction::Ingress), rules(&all, Direction::Egress)), (100, 300, 200));
        let more = read(&of_identity(7, 100, true));
        assert_eq!((rules(&more, Direction::Ingress), &more[0].name), (4, &all[7].name));
    }

    #[test]
    fn networks_are_as_many_as_was_asked_for() {
        let read = |text: &str| read("t", text).expect("valid").remove(0).rules;
        assert_eq!(read(&peers("a", 300))[0].peers.as_ref().map(Vec::len), Some(300));
        let [Peer::Network { except, .. }] = &read(&exceptions("a", 300))[0].peers.clone().expect("peers")[..] else {
            panic!("one network");
        };
        assert_eq!(except.len(), 300);
        let both = read(&denied_and_allowed("a", 300));
        let of = |action| both.iter().filter(|r| r.action == action).filter_map(|r| r.peers.as_ref()).flatten().count();
        assert_eq!((of(Action::Accept), of(Action::Deny)), (300, 300));
    }
}
