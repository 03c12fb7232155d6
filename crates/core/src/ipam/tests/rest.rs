use super::*;
use crate::store::Rest;

fn wake_all(ipam: &mut Ipam, ips: &[Ipv4Addr]) {
    for ip in ips {
        assert!(ipam.wake((*ip).into()).is_some(), "{ip} did not rest");
    }
}

fn released4<const N: usize>(ipam: &mut Ipam) -> [Ipv4Addr; N] {
    let given = std::array::from_fn(|n| lease4(ipam, n as u64));
    for (ip, n) in given.iter().zip(0..) {
        assert!(ipam.release((*ip).into(), n).is_some());
    }
    given
}

#[test]
fn what_rests_is_neither_leased_nor_free() {
    let mut ipam = ipam(&["10.1.0.0/29"]);
    let [address] = released4(&mut ipam);
    let usage = &ipam.usage()[0];
    assert_eq!((usage.used, usage.resting, usage.total), (1, 1, 6));
    assert_eq!(ipam.get(address.into()), None);
    let others: Vec<Ipv4Addr> = (0..4).map(|n| lease4(&mut ipam, n)).collect();
    assert!(!others.contains(&address), "{address} was given out while it rests");
    assert!(matches!(
        ipam.lease(&LeaseRequest::default(), owner(9), 0),
        Err(IpamError::Exhausted { used: 5, resting: 1, total: 6, .. })
    ));
}

#[test]
fn a_peek_tells_what_the_release_makes() {
    let mut ipam = ipam(&["10.1.0.0/29"]);
    let address = IpAddr::from(lease4(&mut ipam, 1));
    let peeked = ipam.peek_rest(address, &owner(1), 77).unwrap();
    assert_eq!((peeked.ip, peeked.since_unix_ms), (address, 77));
    assert_eq!(peeked.last_owner, "net/c1:eth0 (epoch 1)");
    let (lease, rest) = ipam.release_owned(address, &owner(1), 77).unwrap();
    assert_eq!((lease.ip, &rest), (address, &peeked));
    assert_eq!(ipam.resting(), [RestView { rest, blocked: None }]);
}

#[test]
fn what_was_released_last_comes_back_last_whenever_it_was_woken() {
    let mut ipam = ipam(&["10.1.0.0/29"]);
    let given: [Ipv4Addr; 3] = released4(&mut ipam);
    assert!(ipam.block(given[0].into(), "conntrack"));
    wake_all(&mut ipam, &[given[2], given[1], given[0]]);
    // Fresh addresses (.5 and .6) first, then in release order.
    let again: Vec<Ipv4Addr> = (0..5).map(|n| lease4(&mut ipam, n)).collect();
    assert_eq!(again, [[10, 1, 0, 5].into(), [10, 1, 0, 6].into(), given[0], given[1], given[2]]);
}

#[test]
fn a_lease_that_was_never_used_is_free_at_once_and_still_comes_back_last() {
    let mut ipam = ipam(&["10.1.0.0/30"]);
    let address = lease4(&mut ipam, 1);
    assert_eq!(ipam.release_unused(address.into(), &owner(1)).unwrap().owner, owner(1));
    assert_eq!(ipam.resting(), []);
    assert_eq!(lease4(&mut ipam, 2), address);

    let mut ipam = self::ipam(&["10.1.0.0/29"]);
    let [older] = released4(&mut ipam);
    let unused = lease4(&mut ipam, 7);
    ipam.release_unused(unused.into(), &owner(7)).unwrap();
    wake_all(&mut ipam, &[older]);
    let again: Vec<Ipv4Addr> = (0..5).map(|n| lease4(&mut ipam, n)).collect();
    assert_eq!(again[3..], [older, unused]);
}

#[test]
fn a_rest_is_over_in_its_time_and_the_oldest_comes_first() {
    let mut ipam = Ipam::new(
        vec![pool("default", &["10.1.0.0/29", "fd00::/64"]), pool("b", &["10.2.0.0/29"])],
        pool_name("default"),
    )
    .unwrap();
    let b = LeaseRequest { pool: Some(pool_name("b")), ..LeaseRequest::default() };
    let first = ipam.lease(&LeaseRequest::default(), owner(1), 0).unwrap();
    let second = ipam.lease(&b, owner(2), 0).unwrap();
    let [v4, v6, other] = [IpAddr::from(first.ipv4.unwrap()), first.ipv6.unwrap().into(), second.ipv4.unwrap().into()];
    ipam.set_rest(1_000);
    for (ip, at) in [(v6, 5_000), (other, 5_400), (v4, 5_800)] {
        ipam.release(ip, at).unwrap();
    }
    assert_eq!(ipam.rested(5_999, 9), Vec::<IpAddr>::new());
    assert_eq!(ipam.rested(6_000, 9), [v6]);
    assert_eq!(ipam.rested(6_800, 9), [v6, other, v4]);
    assert_eq!(ipam.rested(6_800, 2), [v6, other]);
    assert!(ipam.block(v6, "a route") && ipam.block(other, "a row"));
    assert_eq!(ipam.rested(6_800, 9), [v4, v6, other]);
    assert_eq!(ipam.rested(6_800, 2), [v4, v6]);
    assert!(ipam.block(v6, "still a route"));
    assert_eq!(ipam.rested(6_800, 9), [v4, other, v6]);
    let blocked: Vec<_> = ipam.resting().into_iter().map(|v| (v.rest.ip, v.blocked)).collect();
    let why = |text: &str| Some(text.to_owned());
    assert_eq!(blocked, [(v6, why("still a route")), (other, why("a row")), (v4, None)]);
    assert_eq!(ipam.wake(v6).unwrap().ip, v6);
    assert_eq!(ipam.wake(v6), None);
    assert!(!ipam.block(v6, "a route"));
    assert_eq!(ipam.rested(6_800, 9), [v4, other]);
}

#[test]
fn without_a_rest_the_checks_are_awaited_all_the_same() {
    let mut ipam = ipam(&["10.1.0.0/30"]);
    ipam.set_rest(0);
    let [address] = released4(&mut ipam);
    assert!(matches!(ipam.lease(&LeaseRequest::default(), owner(2), 0), Err(IpamError::Exhausted { .. })));
    assert_eq!(ipam.rested(0, 9), [IpAddr::from(address)]);
}

#[test]
fn a_rest_is_cut_short_only_where_that_helps() {
    let mut ipam = ipam(&["10.1.0.0/29", "fd00::/64"]);
    let only4 = LeaseRequest { ipv6: Wanted::None, ..LeaseRequest::default() };
    let given: [Ipv4Addr; 3] = released4(&mut ipam);
    let given = given.map(IpAddr::from);
    assert_eq!(ipam.early(&only4, 9), Vec::<IpAddr>::new(), "two are free");
    lease4(&mut ipam, 1);
    lease4(&mut ipam, 2);
    assert_eq!(ipam.early(&only4, 9), given);
    assert_eq!(ipam.early(&LeaseRequest::default(), 2), given[..2]);
    assert!(ipam.block(given[0], "a route"));
    assert_eq!(ipam.early(&only4, 9), [given[1], given[2], given[0]]);
    let [IpAddr::V4(asked), ..] = given else { panic!("IPv4") };
    assert_eq!(ipam.early(&exact4(&asked.to_string()), 9), [given[0]]);
    assert_eq!(ipam.early(&exact4("10.1.0.5"), 9), Vec::<IpAddr>::new(), "that one is leased");
    assert_eq!(ipam.early(&LeaseRequest { pool: Some(pool_name("c")), ..only4 }, 9), Vec::<IpAddr>::new());
}

#[test]
fn errors_say_who_rests_and_why() {
    let mut ipam = ipam(&["10.1.0.0/30"]);
    let [address] = released4(&mut ipam);
    let any = |ipam: &mut Ipam| ipam.lease(&LeaseRequest::default(), owner(1), 0).unwrap_err().to_string();
    let exact = |ipam: &mut Ipam| ipam.lease(&exact4(&address.to_string()), owner(1), 0).unwrap_err().to_string();
    assert_eq!(
        any(&mut ipam),
        "pool default has no free IPv4 address: of its 2 addresses 1 are in use, and 1 rest and could not be woken; delete \
         endpoints, release leases (`wharf ipam list`), or give the pool another CIDR"
    );
    assert_eq!(
        exact(&mut ipam),
        "10.1.0.2 is in quarantine for 30 s more, until 00:00:30 UTC (net/c0:eth0 (epoch 0) released it; pool default); ask again \
         then, or for another address"
    );
    assert!(ipam.block(address.into(), "row of ENDPOINTS"));
    assert!(any(&mut ipam).contains("1 rest and could not be woken: 10.1.0.2: row of ENDPOINTS; delete"));
    let told =
        |ipam: &mut Ipam, now_ms| ipam.lease(&exact4(&address.to_string()), owner(1), now_ms).unwrap_err().to_string();
    assert!(told(&mut ipam, 3_001).starts_with("10.1.0.2 is in quarantine for 27 s more, until 00:00:30 UTC ("));
    let over = "10.1.0.2 is in quarantine until nothing on the node uses it: row of ENDPOINTS (";
    assert!(told(&mut ipam, 30_000).starts_with(over), "{}", told(&mut ipam, 30_000));
}

#[test]
fn rests_are_taken_up_again_where_there_is_something_to_rest() {
    let mut ipam = ipam(&["10.1.0.0/29"]);
    let leased = lease4(&mut ipam, 1);
    let rest = |ip: IpAddr, since_unix_ms| Rest {
        ip,
        pool: pool_name("renamed-since"),
        last_owner: "somebody".to_owned(),
        since_unix_ms,
    };
    assert!(matches!(ipam.claim_rest(rest(leased.into(), 5)), Err(IpamError::AlreadyLeased { .. })));
    assert!(matches!(ipam.claim_rest(rest(ip("10.9.0.1"), 5)), Err(IpamError::NotInPool { .. })));
    // In address order, as from a store.
    for (last, since) in [(3, 30), (4, 10), (5, 20)] {
        ipam.claim_rest(rest([10, 1, 0, last].into(), since)).unwrap();
    }
    ipam.claim_rest(rest(ip("10.1.0.5"), 20)).unwrap();
    assert_eq!(ipam.usage()[0].resting, 3);
    let all = ipam.resting();
    assert_eq!(all.iter().map(|v| v.rest.ip).collect::<Vec<_>>(), [ip("10.1.0.4"), ip("10.1.0.5"), ip("10.1.0.3")]);
    assert!(all.iter().all(|v| v.rest.pool == pool_name("default")));
    let lease = Lease { ip: ip("10.1.0.5"), pool: pool_name("default"), owner: owner(5), since_unix_ms: 0 };
    ipam.claim(lease).unwrap();
    assert_eq!(ipam.wake(ip("10.1.0.5")), None);
    let usage = &ipam.usage()[0];
    assert_eq!((usage.used, usage.resting), (3, 2));
}

#[test]
fn a_clock_that_was_set_back_does_not_prolong_a_rest_beyond_one_more() {
    const YEARS: u64 = 1 << 40;
    let mut ipam = ipam(&["10.1.0.0/29"]);
    ipam.set_rest(1_000);
    let given: Vec<IpAddr> = (0..4).map(|n| lease4(&mut ipam, n).into()).collect();
    for (ip, at) in given.iter().zip([YEARS, YEARS + 1, 7_000, 6_500]) {
        ipam.release(*ip, at).unwrap();
    }
    // The last release came 500 ms before the third by another thread's clock: counted from the third.
    assert_eq!(ipam.rested(7_999, 9), Vec::<IpAddr>::new());
    assert_eq!(ipam.rested(8_000, 9), given);
    for ip in given.iter().rev() {
        ipam.wake(*ip).unwrap();
    }
    lease4(&mut ipam, 5);
    let again: Vec<IpAddr> = (0..4).map(|n| lease4(&mut ipam, n).into()).collect();
    assert_eq!(again, given);
}

#[test]
fn a_rest_begins_anew_when_the_clock_is_set_back_for_whoever_asks_for_the_address() {
    const YEARS: u64 = 1 << 40;
    let mut ipam = ipam(&["10.1.0.0/29"]);
    ipam.set_rest(1_000);
    let ip: IpAddr = lease4(&mut ipam, 1).into();
    assert!(!ipam.has_rested(ip, YEARS), "it is leased");
    ipam.release(ip, YEARS).unwrap();
    assert!(!ipam.has_rested(ip, YEARS + 999));
    assert!(!ipam.has_rested(ip, 5_000), "the clock was set back");
    assert!(ipam.has_rested(ip, 6_000));
}

#[test]
fn many_that_rest_in_a_large_pool_are_not_in_the_way() {
    const MANY: u64 = 100_000;
    let mut ipam = ipam(&["10.0.0.0/8"]);
    let request = LeaseRequest::default();
    for n in 0..MANY {
        let leased = ipam.lease(&request, owner(n % 7), n).unwrap();
        ipam.release(leased.ipv4.unwrap().into(), n).unwrap();
    }
    let usage = &ipam.usage()[0];
    assert_eq!((usage.used, usage.resting), (1, MANY));
    let over = MANY + 30_000;
    for ip in ipam.rested(over, 50_000) {
        ipam.block(ip, "a row");
    }
    for ip in ipam.rested(over, 50_000) {
        assert!(ipam.wake(ip).is_some());
    }
    assert_eq!(ipam.usage()[0].resting, 50_000);
    assert!(ipam.rested(over, 10).iter().all(|ip| ipam.wake(*ip).is_some()));
}
