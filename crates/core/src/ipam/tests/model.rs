//! Random leases, releases and rests against a naive model.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::store::Rest;

const REST_MS: u64 = 50;

#[derive(Debug, Clone)]
enum Op {
    Lease { v4: bool, v6: bool },
    Exact(u8),
    Exact6(u8),
    Release(usize),
    ReleaseAs(usize, u64),
    ReleaseUnused(usize),
    Claim(u8, u64),
    ClaimRest(u8),
    Wake(usize),
    Block(usize),
    Rested(usize),
    Pass(u8),
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (any::<bool>(), any::<bool>()).prop_map(|(v4, v6)| Op::Lease { v4, v6 }),
        2 => any::<u8>().prop_map(Op::Exact),
        1 => (0u8..40).prop_map(Op::Exact6),
        5 => any::<usize>().prop_map(Op::Release),
        2 => (any::<usize>(), 0u64..4).prop_map(|(at, n)| Op::ReleaseAs(at, n)),
        1 => any::<usize>().prop_map(Op::ReleaseUnused),
        2 => (any::<u8>(), 0u64..4).prop_map(|(last, n)| Op::Claim(last, n)),
        1 => (0u8..40).prop_map(Op::ClaimRest),
        4 => any::<usize>().prop_map(Op::Wake),
        2 => any::<usize>().prop_map(Op::Block),
        1 => (0usize..20).prop_map(Op::Rested),
        2 => any::<u8>().prop_map(Op::Pass),
    ]
}

#[derive(Debug, Clone)]
struct Released {
    ip: IpAddr,
    at_ms: u64,
    blocked: Option<usize>,
}

/// Each address is in `leased`, in `resting`, or free; `rested` lists some of the free ones. Lists are in release
/// order.
struct Model {
    all: Vec<IpAddr>,
    leased: BTreeMap<IpAddr, LeaseOwner>,
    resting: Vec<Released>,
    rested: Vec<Released>,
    now_ms: u64,
    checks: usize,
}

impl Model {
    fn new() -> Self {
        let v4 = (1u8..15).chain(32..34).map(|n| IpAddr::from([10, 0, 0, n]));
        let v6 = (1u16..16).map(|n| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, n]));
        let routers = [(ip("10.0.0.1"), LeaseOwner::Node), (ip("fd00::1"), LeaseOwner::Node)];
        Self {
            all: v4.chain(v6).collect(),
            leased: BTreeMap::from(routers),
            resting: Vec::new(),
            rested: Vec::new(),
            now_ms: 1_000,
            checks: 0,
        }
    }

    fn rests(&self, ip: IpAddr) -> bool {
        self.resting.iter().any(|r| r.ip == ip)
    }

    fn is_free(&self, ip: IpAddr) -> bool {
        self.all.contains(&ip) && !self.leased.contains_key(&ip) && !self.rests(ip)
    }

    fn free(&self, family: Family) -> impl Iterator<Item = IpAddr> {
        self.all.iter().copied().filter(move |ip| Family::of(*ip) == family && self.is_free(*ip))
    }

    fn is_next(&self, ip: IpAddr) -> bool {
        let family = Family::of(ip);
        let has_rested = |ip: IpAddr| self.rested.iter().any(|r| r.ip == ip);
        let any_fresh = self.free(family).any(|ip| !has_rested(ip));
        let oldest = self.rested.iter().find(|r| Family::of(r.ip) == family);
        self.is_free(ip) && if any_fresh { !has_rested(ip) } else { oldest.is_some_and(|r| r.ip == ip) }
    }

    fn lease(&mut self, ip: IpAddr, who: LeaseOwner) {
        self.resting.retain(|r| r.ip != ip);
        self.rested.retain(|r| r.ip != ip);
        self.leased.insert(ip, who);
    }

    fn release(&mut self, ip: IpAddr) -> Released {
        self.leased.remove(&ip);
        Released { ip, at_ms: self.now_ms, blocked: None }
    }

    fn wake(&mut self, ip: IpAddr, order: &BTreeMap<IpAddr, usize>) {
        if let Some(at) = self.resting.iter().position(|r| r.ip == ip) {
            self.rested.push(self.resting.remove(at));
            self.rested.sort_by_key(|r| order.get(&r.ip));
        }
    }

    fn to_check(&self, pred: impl Fn(&Released) -> bool) -> Vec<IpAddr> {
        let mut found: Vec<&Released> = self.resting.iter().filter(|r| pred(r)).collect();
        found.sort_by_key(|r| r.blocked.map_or(0, |check| check + 1));
        found.into_iter().map(|r| r.ip).collect()
    }

    fn early(&self, request: &LeaseRequest, limit: usize) -> Vec<IpAddr> {
        let of = |family, exact: Option<IpAddr>, any: bool| match exact {
            Some(ip) => self.to_check(|r| r.ip == ip),
            None if !any || self.free(family).next().is_some() => Vec::new(),
            None => {
                let mut found = self.to_check(|r| Family::of(r.ip) == family);
                found.truncate(limit);
                found
            }
        };
        let exact4 = if let Wanted::Exact(ip) = request.ipv4 { Some(ip.into()) } else { None };
        let exact6 = if let Wanted::Exact(ip) = request.ipv6 { Some(ip.into()) } else { None };
        let mut found = of(Family::Ipv4, exact4, request.ipv4 == Wanted::Any);
        found.extend(of(Family::Ipv6, exact6, request.ipv6 == Wanted::Any));
        found
    }
}

fn pick(ips: &[Released], at: usize) -> Option<IpAddr> {
    ips.get(at.checked_rem(ips.len())?).map(|r| r.ip)
}

fn wanted<A>(wanted: bool) -> Wanted<A> {
    if wanted { Wanted::Any } else { Wanted::None }
}

proptest! {
    #[test]
    fn every_address_is_free_or_leased_or_rests(ops in prop::collection::vec(any_op(), 1..250)) {
        let mut ipam = ipam(&["10.0.0.0/28", "10.0.0.32/31", "fd00::/124"]);
        ipam.set_rest(REST_MS);
        let mut model = Model::new();
        // Operation number of each address's last release.
        let mut order: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for (n, op) in ops.into_iter().enumerate() {
            let who = owner(n as u64 % 4);
            let held = |model: &Model, at: usize| *model.leased.keys().nth(at % model.leased.len()).unwrap();
            match op {
                Op::Lease { v4, v6 } => {
                    let request = LeaseRequest { pool: None, ipv4: wanted(v4), ipv6: wanted(v6) };
                    let has = |family| model.free(family).next().is_some();
                    let possible = (v4 || v6) && (!v4 || has(Family::Ipv4)) && (!v6 || has(Family::Ipv6));
                    prop_assert_eq!(ipam.early(&request, 3), model.early(&request, 3));
                    match ipam.lease(&request, who.clone(), model.now_ms) {
                        Err(_) => prop_assert!(!possible),
                        Ok(leased) => {
                            prop_assert!(possible);
                            prop_assert_eq!((leased.ipv4.is_some(), leased.ipv6.is_some()), (v4, v6));
                            for ip in leased.ipv4.map(IpAddr::V4).into_iter().chain(leased.ipv6.map(IpAddr::V6)) {
                                prop_assert!(model.is_next(ip), "{} was not the next", ip);
                                model.lease(ip, who.clone());
                            }
                        }
                    }
                }
                Op::Exact(_) | Op::Exact6(_) => {
                    let (address, request) = match op {
                        Op::Exact6(last) => {
                            let address = Ipv6Addr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last)]);
                            let ipv6 = Wanted::Exact(address);
                            (IpAddr::V6(address), LeaseRequest { pool: None, ipv4: Wanted::None, ipv6 })
                        }
                        Op::Exact(last) => (IpAddr::from([10, 0, 0, last]), exact4(&format!("10.0.0.{last}"))),
                        _ => unreachable!(),
                    };
                    prop_assert_eq!(ipam.early(&request, 3), model.early(&request, 3));
                    let outcome = ipam.lease(&request, who.clone(), model.now_ms);
                    prop_assert_eq!(outcome.is_ok(), model.is_free(address));
                    let says_rests = matches!(outcome, Err(IpamError::Resting { .. }));
                    prop_assert_eq!(says_rests, model.rests(address));
                    if outcome.is_ok() {
                        model.lease(address, who);
                    }
                }
                Op::Release(at) => {
                    let address = held(&model, at);
                    let expected = model.leased.get(&address).filter(|o| **o != LeaseOwner::Node).cloned();
                    let outcome = ipam.release(address, model.now_ms);
                    prop_assert_eq!(outcome.map(|(l, _)| l.owner), expected.clone());
                    if expected.is_some() {
                        let released = model.release(address);
                        model.resting.push(released);
                        order.insert(address, n);
                    }
                }
                Op::ReleaseAs(at, by) => {
                    let address = held(&model, at);
                    let holds = model.leased.get(&address) == Some(&owner(by));
                    let peeked = ipam.peek_rest(address, &owner(by), model.now_ms);
                    let outcome = ipam.release_owned(address, &owner(by), model.now_ms);
                    prop_assert_eq!(outcome.is_some(), holds);
                    prop_assert_eq!(peeked, outcome.map(|(_, rest)| rest));
                    if holds {
                        let released = model.release(address);
                        model.resting.push(released);
                        order.insert(address, n);
                    }
                }
                Op::ReleaseUnused(at) => {
                    let address = held(&model, at);
                    let by = model.leased.get(&address).cloned().unwrap();
                    let outcome = ipam.release_unused(address, &by);
                    prop_assert_eq!(outcome.is_some(), by != LeaseOwner::Node);
                    if outcome.is_some() {
                        let released = model.release(address);
                        model.rested.push(released);
                        order.insert(address, n);
                    }
                }
                Op::Claim(last, by) => {
                    let address = IpAddr::from([10, 0, 0, last]);
                    let unheld = model.leased.get(&address).is_none_or(|o| *o == owner(by));
                    let lease = Lease { ip: address, pool: pool_name("default"), owner: owner(by), since_unix_ms: 0 };
                    prop_assert_eq!(ipam.claim(lease).is_ok(), model.all.contains(&address) && unheld);
                    if model.all.contains(&address) && unheld {
                        model.lease(address, owner(by));
                    }
                }
                Op::ClaimRest(last) => {
                    let address = IpAddr::from([10, 0, 0, last]);
                    let possible = model.all.contains(&address) && !model.leased.contains_key(&address);
                    let rest = Rest {
                        ip: address,
                        pool: pool_name("default"),
                        last_owner: String::new(),
                        since_unix_ms: model.now_ms,
                    };
                    prop_assert_eq!(ipam.claim_rest(rest).is_ok(), possible);
                    if possible {
                        model.resting.retain(|r| r.ip != address);
                        model.rested.retain(|r| r.ip != address);
                        let released = model.release(address);
                        model.resting.push(released);
                        order.insert(address, n);
                    }
                }
                Op::Wake(at) => {
                    if let Some(address) = pick(&model.resting, at) {
                        prop_assert_eq!(ipam.wake(address).map(|r| r.ip), Some(address));
                        model.wake(address, &order);
                    }
                    let leased = held(&model, at);
                    prop_assert_eq!(ipam.wake(leased), None);
                }
                Op::Block(at) => {
                    if let Some(address) = pick(&model.resting, at) {
                        prop_assert!(ipam.block(address, "somebody"));
                        model.checks += 1;
                        let check = model.checks;
                        let mut resting = model.resting.iter_mut();
                        resting.find(|r| r.ip == address).unwrap().blocked = Some(check);
                    }
                    let leased = held(&model, at);
                    prop_assert!(!ipam.block(leased, "somebody"));
                }
                Op::Rested(limit) => {
                    let mut expected = model.to_check(|r| r.at_ms + REST_MS <= model.now_ms);
                    expected.truncate(limit);
                    prop_assert_eq!(ipam.rested(model.now_ms, limit), expected);
                }
                Op::Pass(ms) => model.now_ms += u64::from(ms),
            }
            let held: BTreeMap<IpAddr, LeaseOwner> = ipam.leases().into_iter().map(|l| (l.ip, l.owner)).collect();
            prop_assert_eq!(&held, &model.leased);
            for owner in model.leased.values() {
                let LeaseOwner::Attachment { attachment, .. } = owner else { continue };
                let is_of = |o: &LeaseOwner| {
                    matches!(o, LeaseOwner::Attachment { attachment: a, .. } if a.container_id == attachment.container_id)
                };
                prop_assert_eq!(ipam.of_container(&attachment.container_id), ipam.owned_by(is_of));
            }
            prop_assert!(ipam.by_container.len() <= model.leased.len(), "containers without a lease are forgotten");
            let resting: Vec<IpAddr> = ipam.resting().into_iter().map(|v| v.rest.ip).collect();
            let expected: Vec<IpAddr> = model.resting.iter().map(|r| r.ip).collect();
            prop_assert_eq!(&resting, &expected);
            let used = |v6| model.leased.keys().filter(|ip| ip.is_ipv6() == v6).count() as u64;
            let rest = |v6| resting.iter().filter(|ip| ip.is_ipv6() == v6).count() as u64;
            let usage: Vec<(u64, u64, u64)> = ipam.usage().iter().map(|u| (u.used, u.resting, u.total)).collect();
            prop_assert_eq!(usage, [(used(false), rest(false), 16), (used(true), rest(true), 15)]);
        }
    }
}
