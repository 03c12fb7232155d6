//! Validation of pool CIDRs.

use std::collections::BTreeSet;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{CidrProblem, IpamError, PoolConfig};

/// Without container addresses.
const RESERVED4: [([u8; 4], u8, &str); 5] = [
    ([0, 0, 0, 0], 8, "\"this network\""),
    ([127, 0, 0, 0], 8, "loopback"),
    ([169, 254, 0, 0], 16, "link-local"),
    ([224, 0, 0, 0], 4, "multicast"),
    ([240, 0, 0, 0], 4, "reserved (class E) and broadcast"),
];

const RESERVED6: [([u16; 8], u8, &str); 6] = [
    ([0; 8], 128, "unspecified"),
    ([0, 0, 0, 0, 0, 0, 0, 1], 128, "loopback"),
    // Programs drop packets to both forms (RFC 4291, 2.5.5); the endpoint table stores IPv4 addresses as mapped.
    ([0; 8], 96, "IPv4-compatible"),
    ([0, 0, 0, 0, 0, 0xffff, 0, 0], 96, "IPv4-mapped"),
    ([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10, "link-local"),
    ([0xff00, 0, 0, 0, 0, 0, 0, 0], 8, "multicast"),
];

pub(super) fn check(pools: &[PoolConfig]) -> Result<(), IpamError> {
    let mut names = BTreeSet::new();
    let mut seen: Vec<(IpNet, &PoolConfig)> = Vec::new();
    for pool in pools {
        if !names.insert(&pool.name) {
            return Err(IpamError::DuplicatePool { pool: pool.name.clone() });
        }
        if pool.cidrs.is_empty() {
            return Err(IpamError::EmptyPool { pool: pool.name.clone() });
        }
        for cidr in &pool.cidrs {
            if let Err(why) = check_one(*cidr) {
                return Err(IpamError::BadCidr { pool: pool.name.clone(), cidr: *cidr, why });
            }
            if let Some((first, first_pool)) = seen.iter().find(|(other, _)| overlap(other, cidr)) {
                return Err(IpamError::Overlap {
                    first: *first,
                    first_pool: first_pool.name.clone(),
                    second: *cidr,
                    second_pool: pool.name.clone(),
                });
            }
            seen.push((*cidr, pool));
        }
    }
    Ok(())
}

fn check_one(cidr: IpNet) -> Result<(), CidrProblem> {
    if cidr.trunc() != cidr {
        return Err(CidrProblem::HostBits(cidr.trunc()));
    }
    if cidr.prefix_len() == cidr.max_prefix_len() {
        return Err(CidrProblem::TooSmall(cidr.max_prefix_len() - 1));
    }
    reserved(cidr).map_or(Ok(()), |what| Err(CidrProblem::Reserved(what)))
}

fn reserved(cidr: IpNet) -> Option<&'static str> {
    match cidr {
        IpNet::V4(_) => RESERVED4.iter().find_map(|(addr, len, what)| {
            let net = Ipv4Net::new((*addr).into(), *len).ok()?;
            overlap(&cidr, &IpNet::V4(net)).then_some(*what)
        }),
        IpNet::V6(_) => RESERVED6.iter().find_map(|(addr, len, what)| {
            let net = Ipv6Net::new((*addr).into(), *len).ok()?;
            overlap(&cidr, &IpNet::V6(net)).then_some(*what)
        }),
    }
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}
