//! Why IPAM refused.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{Family, describe_owner};
use crate::{ids::PoolName, store::LeaseOwner};

/// Why IPAM refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IpamError {
    /// No address is free: each is given out, or rests.
    #[error("pool {pool} has no free {family} address: {}", exhausted(*.used, *.resting, *.total, .why.as_deref()))]
    Exhausted {
        /// Pool.
        pool: PoolName,
        /// Family.
        family: Family,
        /// Given out.
        used: u64,
        /// Given back, and not free yet.
        resting: u64,
        /// Of so many.
        total: u64,
        /// What still speaks for one of those that rest, where the checks found something.
        why: Option<String>,
    },
    /// The address was given back and is not free yet.
    #[error(
        "{ip} is in quarantine {} ({last_owner} released it; pool {pool}); ask again then, or for another address",
        quarantine(*.left_ms, *.ends_unix_ms, .why.as_deref())
    )]
    Resting {
        /// Address.
        ip: IpAddr,
        /// Pool.
        pool: PoolName,
        /// Who held it, in words.
        last_owner: String,
        /// How long its rest still lasts, milliseconds; 0 when only the checks are left.
        left_ms: u64,
        /// When its rest ends, milliseconds since the Unix epoch.
        ends_unix_ms: u64,
        /// What still speaks for it, where the checks found something.
        why: Option<String>,
    },
    /// No pool of that name.
    #[error("there is no pool {pool}; configured are: {known}")]
    UnknownPool {
        /// The name asked for.
        pool: PoolName,
        /// Names of the pools there are.
        known: String,
    },
    /// The address is not one that the pool gives out.
    #[error("{ip} cannot be leased from pool {pool}: {why}")]
    NotInPool {
        /// Address.
        ip: IpAddr,
        /// Pool.
        pool: PoolName,
        /// What it is instead, and what to do.
        why: String,
    },
    /// The node itself has the address, or reaches it over a link of its own.
    #[error("{ip} cannot be leased from pool {pool}: {why} overlaps the pool; ask for another address")]
    TakenByNode {
        /// Address.
        ip: IpAddr,
        /// Pool.
        pool: PoolName,
        /// What has it.
        why: String,
    },
    /// Every address that nobody holds is the node's, or one that the node reaches over a link of its own.
    #[error(
        "pool {pool} has no free address: {why} overlaps the pool, and no other address is free; remove that from the node, or give the pool another CIDR"
    )]
    Withheld {
        /// Pool.
        pool: PoolName,
        /// What has them.
        why: String,
    },
    /// Somebody else holds it.
    #[error("{ip} is {}", held(*ip, owner))]
    AlreadyLeased {
        /// Address.
        ip: IpAddr,
        /// Holder.
        owner: LeaseOwner,
    },
    /// The pool has no addresses of that family.
    #[error("pool {pool} has no {family} CIDR; configure one, or ask another pool")]
    FamilyNotInPool {
        /// Pool.
        pool: PoolName,
        /// Family.
        family: Family,
    },
    /// Neither family was wanted.
    #[error("no address family was asked for; ask for IPv4, IPv6 or both (pool {pool})")]
    NothingWanted {
        /// Pool.
        pool: PoolName,
    },
    /// Two CIDRs share addresses.
    #[error(
        "configure pools: {first} (pool {first_pool}) and {second} (pool {second_pool}) overlap; change one of them"
    )]
    Overlap {
        /// One.
        first: IpNet,
        /// Its pool.
        first_pool: PoolName,
        /// The other.
        second: IpNet,
        /// Its pool.
        second_pool: PoolName,
    },
    /// A CIDR that cannot be a pool's.
    #[error("configure pool {pool}: CIDR {cidr} {why}")]
    BadCidr {
        /// Pool.
        pool: PoolName,
        /// CIDR.
        cidr: IpNet,
        /// The rule it breaks, and what to do.
        why: CidrProblem,
    },
    /// A pool without CIDRs.
    #[error("configure pool {pool}: it has no CIDR; give it at least one, or remove the pool")]
    EmptyPool {
        /// Pool.
        pool: PoolName,
    },
    /// Two pools of one name.
    #[error("configure pool {pool}: the name is used twice; rename one, or join their CIDRs in one pool")]
    DuplicatePool {
        /// Pool.
        pool: PoolName,
    },
}

/// The rule that a pool's CIDR breaks, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CidrProblem {
    /// It is not the first address of its prefix; that one.
    #[error("has bits set beyond its prefix; write {0}")]
    HostBits(IpNet),
    /// It has one address; the longest prefix that has more.
    #[error("is too small: the node itself takes one address; use /{0} or shorter")]
    TooSmall(u8),
    /// It has addresses of this reserved kind.
    #[error("holds {0} addresses, which endpoints cannot have; use a private range such as 10.0.0.0/8 or fd00::/8")]
    Reserved(&'static str),
}

/// By whom an address is held, and what to do.
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

/// How long a quarantine still lasts. The time of day stays true in a log.
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
