//! IPAM errors.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{Family, describe_owner};
use crate::{ids::PoolName, store::LeaseOwner};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IpamError {
    /// Every address is leased or resting.
    #[error("pool {pool} has no free {family} address: {}", exhausted(*.used, *.resting, *.total, .why.as_deref()))]
    Exhausted {
        pool: PoolName,
        family: Family,
        /// Leased addresses.
        used: u64,
        /// Resting addresses.
        resting: u64,
        /// Usable addresses.
        total: u64,
        /// Failed check of a resting address, if any.
        why: Option<String>,
    },
    /// The address is resting.
    #[error(
        "{ip} is in quarantine {} ({last_owner} released it; pool {pool}); ask again then, or for another address",
        quarantine(*.left_ms, *.ends_unix_ms, .why.as_deref())
    )]
    Resting {
        ip: IpAddr,
        pool: PoolName,
        /// In words.
        last_owner: String,
        /// Milliseconds; 0 when only the checks remain.
        left_ms: u64,
        /// Milliseconds since the Unix epoch.
        ends_unix_ms: u64,
        /// Failed check, if any.
        why: Option<String>,
    },
    #[error("there is no pool {pool}; configured are: {known}")]
    UnknownPool {
        /// Requested name.
        pool: PoolName,
        /// Configured pools.
        known: String,
    },
    /// Outside the pool, or reserved.
    #[error("{ip} cannot be leased from pool {pool}: {why}")]
    NotInPool {
        ip: IpAddr,
        pool: PoolName,
        /// Cause and hint.
        why: String,
    },
    /// The node has or reaches the address.
    #[error("{ip} cannot be leased from pool {pool}: {why} overlaps the pool; ask for another address")]
    TakenByNode {
        ip: IpAddr,
        pool: PoolName,
        /// The node's address or route.
        why: String,
    },
    /// The node has or reaches all free addresses.
    #[error(
        "pool {pool} has no free address: {why} overlaps the pool, and no other address is free; remove that from the node, or give the pool another CIDR"
    )]
    Withheld {
        pool: PoolName,
        /// The node's address or route.
        why: String,
    },
    /// Another owner holds the address.
    #[error("{ip} is {}", held(*ip, owner))]
    AlreadyLeased { ip: IpAddr, owner: LeaseOwner },
    /// The pool lacks the family.
    #[error("pool {pool} has no {family} CIDR; configure one, or ask another pool")]
    FamilyNotInPool { pool: PoolName, family: Family },
    /// The request excludes both families.
    #[error("no address family was asked for; ask for IPv4, IPv6 or both (pool {pool})")]
    NothingWanted { pool: PoolName },
    /// Two CIDRs overlap.
    #[error(
        "configure pools: {first} (pool {first_pool}) and {second} (pool {second_pool}) overlap; change one of them"
    )]
    Overlap {
        /// First CIDR.
        first: IpNet,
        first_pool: PoolName,
        /// Second CIDR.
        second: IpNet,
        second_pool: PoolName,
    },
    /// Invalid CIDR.
    #[error("configure pool {pool}: CIDR {cidr} {why}")]
    BadCidr {
        pool: PoolName,
        cidr: IpNet,
        /// Violated rule.
        why: CidrProblem,
    },
    /// A pool without CIDRs.
    #[error("configure pool {pool}: it has no CIDR; give it at least one, or remove the pool")]
    EmptyPool { pool: PoolName },
    /// Repeated pool name.
    #[error("configure pool {pool}: the name is used twice; rename one, or join their CIDRs in one pool")]
    DuplicatePool { pool: PoolName },
}

/// Violated rule of a pool CIDR.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CidrProblem {
    /// Host bits are set; corrected.
    #[error("has bits set beyond its prefix; write {0}")]
    HostBits(IpNet),
    /// Too few addresses; the longest valid prefix.
    #[error("is too small: the node itself takes one address; use /{0} or shorter")]
    TooSmall(u8),
    /// Contains reserved addresses of this kind.
    #[error("holds {0} addresses, which endpoints cannot have; use a private range such as 10.0.0.0/8 or fd00::/8")]
    Reserved(&'static str),
}

fn held(ip: IpAddr, owner: &LeaseOwner) -> String {
    let mend = match owner {
        LeaseOwner::Node => {
            return "held by the node, whose own address it is; ask for another address".to_owned();
        }
        LeaseOwner::Attachment { .. } => "delete that endpoint first".to_owned(),
        LeaseOwner::Caller { .. } => format!("give it back first (`wharf ipam release {ip}`)"),
    };
    let kept = owner.kept().map_or_else(String::new, |of| format!(" (a delete kept it for {of})"));
    format!("held by {}{kept}; {mend}, or ask for another address", describe_owner(owner))
}

/// The time of day is for logs.
fn quarantine(left_ms: u64, ends_unix_ms: u64, why: Option<&str>) -> String {
    match (left_ms, why) {
        (0, Some(why)) => format!("until nothing on the node uses it: {why}"),
        (0, None) => "until the next check that nothing on the node uses it".to_owned(),
        (left, _) => {
            let s = ends_unix_ms.div_ceil(1_000) % 86_400;
            let ends = format!("{:02}:{:02}:{:02} UTC", s / 3_600, s / 60 % 60, s % 60);
            format!("for {} s more, until {ends}", left.div_ceil(1_000))
        }
    }
}

fn exhausted(used: u64, resting: u64, total: u64, why: Option<&str>) -> String {
    const MEND: &str = "delete endpoints, release leases (`wharf ipam list`), or give the pool another CIDR";
    if resting == 0 {
        return format!("all of its {total} addresses are in use ({used}); {MEND}");
    }
    let why = why.map_or_else(String::new, |why| format!(": {why}"));
    format!("of its {total} addresses {used} are in use, and {resting} rest and could not be woken{why}; {MEND}")
}
