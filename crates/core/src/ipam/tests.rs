#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use super::*;
use crate::ids::{Attachment, ContainerId, Epoch, IfName, NetworkName};

mod model;
mod rest;

fn pool_name(name: &str) -> PoolName {
    PoolName::parse(name).unwrap()
}

fn pool(name: &str, cidrs: &[&str]) -> PoolConfig {
    PoolConfig { name: pool_name(name), cidrs: cidrs.iter().map(|c| c.parse().unwrap()).collect() }
}

fn ipam(cidrs: &[&str]) -> Ipam {
    Ipam::new(vec![pool("default", cidrs)], pool_name("default")).unwrap()
}

fn refused(pools: Vec<PoolConfig>) -> String {
    Ipam::new(pools, pool_name("default")).unwrap_err().to_string()
}

fn owner(n: u64) -> LeaseOwner {
    let attachment = Attachment {
        network: NetworkName::parse("net").unwrap(),
        container_id: ContainerId::parse(&format!("c{n}")).unwrap(),
        ifname: IfName::parse("eth0").unwrap(),
    };
    LeaseOwner::Attachment { attachment, epoch: Epoch(n) }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn exact4(text: &str) -> LeaseRequest {
    LeaseRequest { ipv4: Wanted::Exact(text.parse().unwrap()), ipv6: Wanted::None, ..LeaseRequest::default() }
}

fn lease4(ipam: &mut Ipam, n: u64) -> Ipv4Addr {
    let request = LeaseRequest { ipv6: Wanted::None, ..LeaseRequest::default() };
    ipam.lease(&request, owner(n), n).unwrap().ipv4.unwrap()
}

#[test]
fn the_router_is_the_first_usable_address_and_stays() {
    let mut ipam = ipam(&["10.1.0.0/24", "fd00::/64", "10.2.0.0/24"]);
    assert_eq!(ipam.router4(), Some([10, 1, 0, 1].into()));
    assert_eq!(ipam.router6(), Some("fd00::1".parse().unwrap()));
    assert_eq!(ipam.get(ip("10.1.0.1")).unwrap().owner, LeaseOwner::Node);
    assert_eq!(ipam.release(ip("10.1.0.1"), 0), None);
    assert_eq!(ipam.release_owned(ip("fd00::1"), &LeaseOwner::Node, 0), None);
    assert_eq!(ipam.release_unused(ip("fd00::1"), &LeaseOwner::Node), None);
    assert_eq!(ipam.peek_rest(ip("fd00::1"), &LeaseOwner::Node, 0), None);
    assert_eq!(ipam.transfer(ip("fd00::1"), &LeaseOwner::Node, owner(1)), None);
    assert_eq!(ipam.leases().len(), 2);
}

#[test]
fn a_router_of_other_pools_is_kept_for_its_endpoints_and_leased_to_none() {
    let mut ipam = ipam(&["10.1.0.0/29"]);
    for gateway in ["10.1.0.1", "10.1.0.2", "10.9.0.1", "10.9.0.1"] {
        ipam.keep_router(ip(gateway));
    }
    assert_eq!((ipam.routers(), ipam.former_routers()), (vec![ip("10.1.0.1")], &[ip("10.1.0.2"), ip("10.9.0.1")][..]));
    assert!(ipam.is_router(ip("10.9.0.1")) && !ipam.is_router(ip("10.1.0.3")));
    assert_eq!(lease4(&mut ipam, 1), Ipv4Addr::new(10, 1, 0, 3));
    assert!(ipam.outside().is_empty());

    let mut none = Ipam::without_pools(pool_name("default"));
    assert!(none.routers().is_empty() && none.cidrs().is_empty() && none.usage().is_empty());
    assert!(none.lease(&LeaseRequest::default(), owner(1), 0).is_err());
}

#[test]
fn a_lease_holds_both_families_that_the_pool_has() {
    let mut both = ipam(&["10.1.0.0/24", "fd00::/64"]);
    let leased = both.lease(&LeaseRequest::default(), owner(1), 7).unwrap();
    assert_eq!((leased.ipv4, leased.ipv6), (Some([10, 1, 0, 2].into()), Some("fd00::2".parse().unwrap())));
    assert_eq!(both.get(ip("fd00::2")).unwrap().since_unix_ms, 7);

    let mut one = ipam(&["10.1.0.0/24"]);
    let leased = one.lease(&LeaseRequest::default(), owner(1), 7).unwrap();
    assert_eq!((leased.ipv4, leased.ipv6), (Some([10, 1, 0, 2].into()), None));
}

#[test]
fn a_family_that_fails_leaves_the_other_unleased() {
    let mut ipam = ipam(&["10.1.0.0/30", "fd00::/64"]);
    lease4(&mut ipam, 1);
    let before = ipam.leases();
    let error = ipam.lease(&LeaseRequest::default(), owner(2), 0).unwrap_err();
    let (pool, family) = (pool_name("default"), Family::Ipv4);
    assert_eq!(error, IpamError::Exhausted { pool, family, used: 2, resting: 0, total: 2, why: None });
    assert_eq!(
        error.to_string(),
        "pool default has no free IPv4 address: all of its 2 addresses are in use (2); delete endpoints, release leases \
         (`wharf ipam list`), or give the pool another CIDR"
    );
    assert_eq!(ipam.leases(), before);

    // IPv4 has room, the exact IPv6 address is taken.
    let mut ipam = self::ipam(&["10.1.0.0/24", "fd00::/64"]);
    let request = LeaseRequest { ipv6: Wanted::Exact("fd00::1".parse().unwrap()), ..LeaseRequest::default() };
    let error = ipam.lease(&request, owner(1), 0).unwrap_err();
    assert_eq!(error.to_string(), "fd00::1 is held by the node, whose own address it is; ask for another address");
    assert_eq!(ipam.leases().len(), 2);
    assert_eq!(ipam.usage().iter().map(|u| u.used).collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn requests_that_no_pool_can_answer_say_why() {
    let mut ipam =
        Ipam::new(vec![pool("default", &["10.1.0.0/24"]), pool("b", &["fd00::/64"])], pool_name("default")).unwrap();
    let mut error = |request: LeaseRequest| ipam.lease(&request, owner(1), 0).unwrap_err().to_string();
    let named = |name: &str| LeaseRequest { pool: Some(pool_name(name)), ..LeaseRequest::default() };
    assert_eq!(error(named("c")), "there is no pool c; configured are: default, b");
    assert_eq!(
        error(LeaseRequest { ipv4: Wanted::None, ..named("default") }),
        "pool default has no IPv6 CIDR; configure one, or ask another pool"
    );
    assert_eq!(
        error(LeaseRequest { ipv4: Wanted::Exact([10, 1, 0, 9].into()), ..named("b") }),
        "pool b has no IPv4 CIDR; configure one, or ask another pool"
    );
    assert_eq!(
        error(LeaseRequest { ipv4: Wanted::None, ipv6: Wanted::None, ..named("b") }),
        "no address family was asked for; ask for IPv4, IPv6 or both (pool b)"
    );
    assert_eq!(
        error(exact4("192.168.7.7")),
        "192.168.7.7 cannot be leased from pool default: no pool has it (configured: 10.1.0.0/24, fd00::/64); ask for one of those"
    );
    for edge in ["10.1.0.0", "10.1.0.255"] {
        let message = error(exact4(edge));
        assert!(message.contains("first or last address of its CIDR"), "{message}");
    }
}

#[test]
fn an_address_of_another_pool_is_named_as_such() {
    let pools = vec![pool("default", &["10.1.0.0/24"]), pool("b", &["10.2.0.0/24"])];
    let mut ipam = Ipam::new(pools, pool_name("default")).unwrap();
    let error = ipam.lease(&exact4("10.2.0.5"), owner(1), 0).unwrap_err();
    assert_eq!(error.to_string(), "10.2.0.5 cannot be leased from pool default: it belongs to pool b; ask that pool");
}

#[test]
fn pools_that_cannot_work_are_refused() {
    let cases: &[(&[&str], &str)] = &[
        (&[], "configure pool default: it has no CIDR; give it at least one, or remove the pool"),
        (
            &["10.0.0.1/24"],
            "configure pool default: CIDR 10.0.0.1/24 has bits set beyond its prefix; write 10.0.0.0/24",
        ),
        (
            &["10.0.0.1/32"],
            "configure pool default: CIDR 10.0.0.1/32 is too small: the node itself takes one address; use /31 or shorter",
        ),
        (
            &["fd00::1/128"],
            "configure pool default: CIDR fd00::1/128 is too small: the node itself takes one address; use /127 or shorter",
        ),
        (
            &["10.0.0.0/8", "10.3.0.0/16"],
            "configure pools: 10.0.0.0/8 (pool default) and 10.3.0.0/16 (pool default) overlap; change one of them",
        ),
    ];
    for (cidrs, message) in cases {
        assert_eq!(refused(vec![pool("default", cidrs)]), *message);
    }
    for (cidr, what) in [
        ("127.0.0.0/16", "loopback"),
        ("169.254.8.0/24", "link-local"),
        ("224.1.0.0/16", "multicast"),
        ("255.255.255.0/24", "class E"),
        ("0.0.0.0/0", "this network"),
        ("::/0", "unspecified"),
        ("::/127", "unspecified"),
        ("::a00:0/104", "IPv4-compatible"),
        ("::ffff:10.0.0.0/104", "IPv4-mapped"),
        ("fe80::/64", "link-local"),
        ("ff02::/16", "multicast"),
    ] {
        let message = refused(vec![pool("default", &[cidr])]);
        assert!(message.starts_with(&format!("configure pool default: CIDR {cidr} holds")), "{message}");
        assert!(message.contains(what), "{message}");
    }
    assert_eq!(
        refused(vec![pool("default", &["10.1.0.0/16"]), pool("b", &["fd00::/64", "10.1.2.0/24"])]),
        "configure pools: 10.1.0.0/16 (pool default) and 10.1.2.0/24 (pool b) overlap; change one of them"
    );
    assert_eq!(
        refused(vec![pool("default", &["10.1.0.0/16"]), pool("default", &["10.2.0.0/16"])]),
        "configure pool default: the name is used twice; rename one, or join their CIDRs in one pool"
    );
    assert_eq!(refused(vec![pool("b", &["10.1.0.0/16"])]), "there is no pool default; configured are: b");
    assert_eq!(refused(vec![]), "there is no pool default; configured are: none");
}

#[test]
fn point_to_point_prefixes_give_out_both_addresses() {
    let mut ipam = ipam(&["10.1.0.0/31", "fd00::/127"]);
    assert_eq!((ipam.router4(), ipam.router6()), (Some([10, 1, 0, 0].into()), Some("fd00::".parse().unwrap())));
    let leased = ipam.lease(&LeaseRequest::default(), owner(1), 0).unwrap();
    assert_eq!((leased.ipv4, leased.ipv6), (Some([10, 1, 0, 1].into()), Some("fd00::1".parse().unwrap())));
    assert_eq!(ipam.usage().iter().map(|u| (u.used, u.total)).collect::<Vec<_>>(), [(2, 2), (2, 2)]);
}

#[test]
fn a_pool_goes_on_with_its_next_cidr_and_is_used_up_to_the_last_address() {
    let mut ipam = ipam(&["10.1.0.0/30", "10.9.0.0/30"]);
    let given: Vec<String> = (0..3).map(|n| lease4(&mut ipam, n).to_string()).collect();
    assert_eq!(given, ["10.1.0.2", "10.9.0.1", "10.9.0.2"]);
    let usage = ipam.usage();
    assert_eq!(usage.len(), 1);
    assert_eq!((usage[0].used, usage[0].total, usage[0].v6), (4, 4, false));
    assert!(matches!(
        ipam.lease(&LeaseRequest::default(), owner(9), 0),
        Err(IpamError::Exhausted { used: 4, total: 4, .. })
    ));
}

#[test]
fn an_address_that_has_rested_may_be_asked_for() {
    let mut ipam = ipam(&["10.1.0.0/29"]);
    let address = lease4(&mut ipam, 1);
    ipam.release(address.into(), 0).unwrap();
    ipam.wake(address.into()).unwrap();
    ipam.lease(&exact4(&address.to_string()), owner(2), 0).unwrap();
    assert_eq!(ipam.usage()[0].used, 2);
    let others: Vec<Ipv4Addr> = (0..4).map(|n| lease4(&mut ipam, n)).collect();
    assert!(!others.contains(&address), "{address} was given out twice");
}

#[test]
fn a_large_ipv6_pool_keeps_few_addresses_back() {
    let mut ipam = ipam(&["fd00::/64"]);
    assert_eq!(ipam.usage()[0].total, u64::MAX);
    for n in 0..10_000 {
        let leased = ipam.lease(&LeaseRequest::default(), owner(n), 0).unwrap();
        ipam.release(leased.ipv6.unwrap().into(), 0).unwrap();
        ipam.wake(leased.ipv6.unwrap().into()).unwrap();
    }
    let kept = ipam.pools[0].v6.as_ref().unwrap().kept_back();
    assert_eq!(kept, (4096, 4096 + 1), "rested, and rested plus the router");
}

#[test]
fn the_wrong_owner_cannot_release() {
    let mut ipam = ipam(&["10.1.0.0/24"]);
    let address = IpAddr::from(lease4(&mut ipam, 1));
    assert_eq!(ipam.peek_rest(address, &owner(2), 0), None);
    assert_eq!(ipam.release_owned(address, &owner(2), 0), None);
    assert_eq!(ipam.release_unused(address, &owner(2)), None);
    assert_eq!(ipam.release_owned(address, &owner(1), 0).unwrap().0.owner, owner(1));
    assert_eq!(ipam.release(address, 0), None);
    assert_eq!(ipam.release(ip("192.0.2.1"), 0), None);
}

#[test]
fn claims_are_exact_and_hold_against_others() {
    let mut ipam = ipam(&["10.1.0.0/24"]);
    let lease = |address: &str, n| Lease {
        ip: ip(address),
        pool: pool_name("renamed-since"),
        owner: owner(n),
        since_unix_ms: 5,
    };
    ipam.claim(lease("10.1.0.7", 1)).unwrap();
    ipam.claim(lease("10.1.0.7", 1)).unwrap();
    assert_eq!(ipam.get(ip("10.1.0.7")).unwrap().pool, pool_name("default"));
    assert_eq!(ipam.usage()[0].used, 2);
    assert!(matches!(ipam.claim(lease("10.1.0.7", 2)), Err(IpamError::AlreadyLeased { .. })));
    assert!(matches!(ipam.claim(lease("10.1.0.1", 2)), Err(IpamError::AlreadyLeased { .. })));
    assert!(matches!(ipam.claim(lease("10.2.0.7", 2)), Err(IpamError::NotInPool { .. })));

    let node = |address: &str| Lease { owner: LeaseOwner::Node, ..lease(address, 0) };
    ipam.claim(node("10.1.0.1")).unwrap();
    let error = ipam.claim(node("10.1.0.9")).unwrap_err().to_string();
    assert!(error.contains("not any more (today: 10.1.0.1)"), "{error}");
}

#[test]
fn a_lease_can_change_hands_when_its_endpoint_goes() {
    let mut ipam = ipam(&["10.1.0.0/24"]);
    let address = IpAddr::from(lease4(&mut ipam, 1));
    let keeper = LeaseOwner::Caller { name: "kept".to_owned() };
    assert_eq!(ipam.transfer(address, &owner(2), keeper.clone()), None);
    assert_eq!(ipam.transfer(address, &owner(1), keeper.clone()).unwrap().owner, keeper);
    assert_eq!(ipam.release_owned(address, &owner(1), 0), None);
    assert_eq!(ipam.owned_by(|o| *o == keeper).len(), 1);
}

#[test]
fn a_lease_that_smaller_pools_leave_outside_is_listed_and_given_back() {
    let mut ipam = ipam(&["10.1.0.0/30"]);
    let lease = |text: &str| Lease { ip: ip(text), pool: pool_name("default"), owner: owner(1), since_unix_ms: 0 };
    assert!(ipam.keep_outside(lease("10.1.0.9")));
    assert!(!ipam.keep_outside(lease("10.1.0.9")), "held already");
    assert!(!ipam.keep_outside(lease("10.1.0.2")), "a pool has it");
    assert!(!ipam.keep_outside(Lease { owner: LeaseOwner::Node, ..lease("10.1.0.8") }), "a router of before");
    assert_eq!(ipam.outside(), [&lease("10.1.0.9")]);
    assert!(ipam.leases().contains(&lease("10.1.0.9")));
    assert_eq!(ipam.usage().first().unwrap().used, 1, "the router's alone");
    assert_eq!(ipam.peek_rest(ip("10.1.0.9"), &owner(1), 5), None, "nobody waits for it");
    assert!(ipam.release_owned(ip("10.1.0.9"), &owner(1), 5).is_some());
    assert!(ipam.outside().is_empty() && ipam.resting().is_empty());
}

fn withheld(nets: &[&str]) -> Vec<Withheld> {
    nets.iter().map(|n| Withheld { net: n.parse().unwrap(), why: format!("the node's {n}") }).collect()
}

#[test]
fn what_the_node_has_is_given_to_nobody() {
    let mut ipam = ipam(&["10.1.0.0/29", "fd00::/64"]);
    ipam.withhold(withheld(&["10.1.0.2/31", "10.1.0.5/32", "fd00::/65"]));
    // Usable: the router's 10.1.0.1 to 10.1.0.6.
    assert_eq!(lease4(&mut ipam, 1), Ipv4Addr::new(10, 1, 0, 4));
    assert_eq!(lease4(&mut ipam, 2), Ipv4Addr::new(10, 1, 0, 6));
    let any4 = LeaseRequest { ipv6: Wanted::None, ..LeaseRequest::default() };
    let none = ipam.lease(&any4, owner(3), 0).unwrap_err();
    assert!(matches!(&none, IpamError::Withheld { .. }), "{none}");
    assert!(none.to_string().contains("the node's 10.1.0.2/31"), "{none}");
    let refused = ipam.lease(&exact4("10.1.0.3"), owner(3), 0).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "10.1.0.3 cannot be leased from pool default: the node's 10.1.0.2/31 overlaps the pool; ask for another address"
    );
    let any6 = LeaseRequest { ipv4: Wanted::None, ..LeaseRequest::default() };
    let leased = ipam.lease(&any6, owner(4), 0).unwrap();
    assert_eq!(leased.ipv6, Some("fd00::8000:0:0:0".parse().unwrap()), "the first one beyond");
    ipam.release_unused(ip("10.1.0.4"), &owner(1)).unwrap();
    ipam.withhold(withheld(&["10.1.0.0/29"]));
    assert!(matches!(ipam.lease(&any4, owner(5), 0), Err(IpamError::Withheld { .. })));
    ipam.withhold(Vec::new());
    assert_eq!(lease4(&mut ipam, 5), Ipv4Addr::new(10, 1, 0, 2));
    assert_eq!(ipam.usage().first().unwrap().used, 3);
}

#[test]
fn a_full_pool_is_exhausted_whatever_is_withheld() {
    let mut ipam = ipam(&["10.1.0.0/30"]);
    lease4(&mut ipam, 1);
    ipam.withhold(withheld(&["10.1.0.0/30"]));
    let any4 = LeaseRequest { ipv6: Wanted::None, ..LeaseRequest::default() };
    assert!(matches!(ipam.lease(&any4, owner(2), 0), Err(IpamError::Exhausted { .. })));
}
