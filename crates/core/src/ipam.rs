//! IPAM: address pools and leases, in memory; the agent stores the leases. An address is free, leased or resting. A
//! released address rests ([`crate::store::Rest`]) and is reused as late as possible.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    ids::{ContainerId, PoolName},
    store::{Lease, LeaseOwner},
};

mod cidr;
mod error;
mod family;
mod quarantine;
mod rest;
mod routers;

pub use error::{CidrProblem, IpamError};
use family::FamilyPool;
pub use family::is_leasable;
pub use quarantine::RestView;

/// Address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    /// Family.
    #[must_use]
    pub const fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::Ipv4,
            IpAddr::V6(_) => Self::Ipv6,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        })
    }
}

/// A configured pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolConfig {
    pub name: PoolName,
    /// Used in this order.
    pub cidrs: Vec<IpNet>,
}

/// Request for one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Wanted<A> {
    /// Any free address, if the pool has the family.
    #[default]
    Any,
    /// This address.
    Exact(A),
    /// No address.
    None,
}

/// A lease request; default: an address of each family.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct LeaseRequest {
    /// None for the default pool.
    pub pool: Option<PoolName>,
    pub ipv4: Wanted<Ipv4Addr>,
    pub ipv6: Wanted<Ipv6Addr>,
}

/// Leased addresses: at least one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Leased {
    pub ipv4: Option<Ipv4Addr>,
    pub ipv6: Option<Ipv6Addr>,
    pub pool: PoolName,
}

/// Addresses that the node has or reaches: IPAM does not lease them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withheld {
    pub net: IpNet,
    /// The node's address or route.
    pub why: String,
}

/// Usage of one family of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolUsage {
    pub pool: PoolName,
    /// Whether the family is IPv6.
    pub v6: bool,
    /// Of that family.
    pub cidrs: Vec<IpNet>,
    /// Includes the router's.
    pub used: u64,
    /// Resting addresses.
    pub resting: u64,
    /// At most `u64::MAX`.
    pub total: u64,
}

#[derive(Debug, Clone)]
struct Pool {
    config: PoolConfig,
    v4: Option<FamilyPool>,
    v6: Option<FamilyPool>,
}

impl Pool {
    fn family(&self, family: Family) -> Option<&FamilyPool> {
        match family {
            Family::Ipv4 => self.v4.as_ref(),
            Family::Ipv6 => self.v6.as_ref(),
        }
    }

    fn family_mut(&mut self, family: Family) -> Option<&mut FamilyPool> {
        match family {
            Family::Ipv4 => self.v4.as_mut(),
            Family::Ipv6 => self.v6.as_mut(),
        }
    }
}

/// Pools and leases.
#[derive(Debug, Clone)]
pub struct Ipam {
    pools: Vec<Pool>,
    default_pool: PoolName,
    router4: Option<Ipv4Addr>,
    router6: Option<Ipv6Addr>,
    former_routers: Vec<IpAddr>,
    leases: BTreeMap<IpAddr, Lease>,
    /// A delete must not scan all leases.
    by_container: HashMap<ContainerId, BTreeSet<IpAddr>>,
    withheld: Vec<Withheld>,
    rest_ms: u64,
    /// Latest time that a caller has passed, Unix epoch.
    latest_ms: u64,
    turns: u64,
}

impl Ipam {
    /// Leases the router addresses to [`LeaseOwner::Node`]: the first usable address of each family in the default
    /// pool.
    ///
    /// # Errors
    /// Invalid or overlapping CIDRs, repeated names, no CIDR, or an unknown default pool.
    pub fn new(pools: Vec<PoolConfig>, default_pool: PoolName) -> Result<Self, IpamError> {
        cidr::check(&pools)?;
        let pools: Vec<Pool> = pools
            .into_iter()
            .map(|config| Pool {
                v4: FamilyPool::new(Family::Ipv4, &config.cidrs),
                v6: FamilyPool::new(Family::Ipv6, &config.cidrs),
                config,
            })
            .collect();
        let default_index = index_of(&pools, &default_pool)?;
        let mut ipam = Self::of(pools, default_pool.clone());
        for family in [Family::Ipv4, Family::Ipv6] {
            let router = ipam.pools.get(default_index).and_then(|p| p.family(family)).and_then(FamilyPool::first);
            match router {
                Some(IpAddr::V4(ip)) => ipam.router4 = Some(ip),
                Some(IpAddr::V6(ip)) => ipam.router6 = Some(ip),
                None => continue,
            }
            if let Some(ip) = router {
                ipam.insert(
                    default_index,
                    Lease { ip, pool: default_pool.clone(), owner: LeaseOwner::Node, since_unix_ms: 0 },
                );
            }
        }
        Ok(ipam)
    }

    fn of(pools: Vec<Pool>, default_pool: PoolName) -> Self {
        Self {
            pools,
            default_pool,
            router4: None,
            router6: None,
            former_routers: Vec::new(),
            leases: BTreeMap::new(),
            by_container: HashMap::new(),
            withheld: Vec::new(),
            rest_ms: quarantine::DEFAULT_REST_MS,
            latest_ms: 0,
            turns: 0,
        }
    }

    /// Router address, IPv4.
    #[must_use]
    pub fn router4(&self) -> Option<Ipv4Addr> {
        self.router4
    }

    /// Router address, IPv6.
    #[must_use]
    pub fn router6(&self) -> Option<Ipv6Addr> {
        self.router6
    }

    #[must_use]
    pub fn default_pool(&self) -> &PoolName {
        &self.default_pool
    }

    /// In configuration order.
    #[must_use]
    pub fn cidrs(&self) -> Vec<IpNet> {
        self.pools.iter().flat_map(|p| p.config.cidrs.iter().copied()).collect()
    }

    /// Replaces the withheld addresses. Leases stay.
    pub fn withhold(&mut self, withheld: Vec<Withheld>) {
        let nets: Vec<IpNet> = withheld.iter().map(|w| w.net).collect();
        for pool in &mut self.pools {
            pool.v4.iter_mut().chain(pool.v6.iter_mut()).for_each(|f| f.withhold(&nets));
        }
        self.withheld = withheld;
    }

    /// The withholding entry, if any.
    #[must_use]
    pub fn withheld(&self, ip: IpAddr) -> Option<&Withheld> {
        self.withheld.iter().find(|w| w.net.contains(&ip))
    }

    /// Leases an address of each requested family. `now_ms`: Unix epoch.
    ///
    /// # Errors
    /// Neither family is leased. [`Self::early`] returns addresses whose rest may end early.
    pub fn lease(&mut self, req: &LeaseRequest, owner: LeaseOwner, now_ms: u64) -> Result<Leased, IpamError> {
        let pool = req.pool.as_ref().unwrap_or(&self.default_pool).clone();
        let index = index_of(&self.pools, &pool)?;
        // No rollback: choose both addresses before leasing either.
        let v4 = self.choose(index, &pool, Family::Ipv4, req.ipv4, now_ms)?;
        let v6 = self.choose(index, &pool, Family::Ipv6, req.ipv6, now_ms)?;
        if v4.is_none() && v6.is_none() {
            return Err(match (req.ipv4, req.ipv6) {
                (Wanted::None, Wanted::None) => IpamError::NothingWanted { pool },
                (Wanted::None, _) => IpamError::FamilyNotInPool { pool, family: Family::Ipv6 },
                _ => IpamError::FamilyNotInPool { pool, family: Family::Ipv4 },
            });
        }
        for ip in [v4, v6].into_iter().flatten() {
            self.insert(index, Lease { ip, pool: pool.clone(), owner: owner.clone(), since_unix_ms: now_ms });
        }
        let ipv4 = v4.and_then(|ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None });
        let ipv6 = v6.and_then(|ip| if let IpAddr::V6(ip) = ip { Some(ip) } else { None });
        Ok(Leased { ipv4, ipv6, pool })
    }

    /// Restores a lease, in the pool that contains the address now. Idempotent for one owner.
    ///
    /// # Errors
    /// [`IpamError::AlreadyLeased`] for another owner, [`IpamError::NotInPool`] after a configuration change.
    pub fn claim(&mut self, lease: Lease) -> Result<(), IpamError> {
        let family = Family::of(lease.ip);
        let Some((index, pool)) = self.pool_of(lease.ip).map(|(index, name)| (index, name.clone())) else {
            return Err(self.not_in_pool(lease.ip, lease.pool));
        };
        if let Some(held) = self.leases.get(&lease.ip) {
            if held.owner != lease.owner {
                return Err(IpamError::AlreadyLeased { ip: lease.ip, owner: held.owner.clone() });
            }
        } else if lease.owner == LeaseOwner::Node {
            let router = match family {
                Family::Ipv4 => self.router4.map(IpAddr::V4),
                Family::Ipv6 => self.router6.map(IpAddr::V6),
            };
            let today = router.map_or_else(|| "none".to_owned(), |ip| ip.to_string());
            let why = format!("it was the node's router address and is not any more (today: {today}); drop the lease");
            return Err(IpamError::NotInPool { ip: lease.ip, pool: lease.pool, why });
        }
        self.insert(index, Lease { pool, ..lease });
        Ok(())
    }

    /// Restores a lease outside the shrunk pools. False when a pool contains the address, it is leased, or the node
    /// owns it.
    pub fn keep_outside(&mut self, lease: Lease) -> bool {
        let outside = self.pool_of(lease.ip).is_none() && lease.owner != LeaseOwner::Node;
        let keep = outside && !self.leases.contains_key(&lease.ip);
        if keep {
            self.file(lease);
        }
        keep
    }

    /// Leases outside all pools.
    #[must_use]
    pub fn outside(&self) -> Vec<&Lease> {
        self.leases.values().filter(|l| self.pool_of(l.ip).is_none()).collect()
    }

    /// Changes the owner, for NoIPRelease: the lease must not be an orphan for the audit.
    pub fn transfer(&mut self, ip: IpAddr, from: &LeaseOwner, to: LeaseOwner) -> Option<Lease> {
        let held = self.leases.get(&ip).filter(|l| l.owner == *from && l.owner != LeaseOwner::Node)?;
        let lease = Lease { owner: to, ..held.clone() };
        self.file(lease.clone());
        Some(lease)
    }

    /// By address.
    #[must_use]
    pub fn of_container(&self, id: &ContainerId) -> Vec<Lease> {
        let held = self.by_container.get(id).into_iter().flatten();
        held.filter_map(|ip| self.leases.get(ip)).cloned().collect()
    }

    /// By address.
    pub fn owned_by(&self, pred: impl Fn(&LeaseOwner) -> bool) -> Vec<Lease> {
        self.leases.values().filter(|l| pred(&l.owner)).cloned().collect()
    }

    /// Lease of an address.
    #[must_use]
    pub fn get(&self, ip: IpAddr) -> Option<&Lease> {
        self.leases.get(&ip)
    }

    /// By address, IPv4 first; includes the router's.
    #[must_use]
    pub fn leases(&self) -> Vec<Lease> {
        self.leases.values().cloned().collect()
    }

    /// Of each pool and family.
    #[must_use]
    pub fn usage(&self) -> Vec<PoolUsage> {
        let row = |pool: &Pool, family| {
            pool.family(family).map(|f| PoolUsage {
                pool: pool.config.name.clone(),
                v6: family == Family::Ipv6,
                cidrs: pool.config.cidrs.iter().copied().filter(|c| Family::of(c.addr()) == family).collect(),
                used: f.used(),
                resting: u64::try_from(f.resting().len()).unwrap_or(u64::MAX),
                total: f.total(),
            })
        };
        self.pools.iter().flat_map(|p| [row(p, Family::Ipv4), row(p, Family::Ipv6)]).flatten().collect()
    }

    fn choose<A: Into<IpAddr>>(
        &self,
        index: usize,
        name: &PoolName,
        family: Family,
        wanted: Wanted<A>,
        now_ms: u64,
    ) -> Result<Option<IpAddr>, IpamError> {
        let pool = self.pools.get(index).and_then(|p| p.family(family));
        let name = name.clone();
        match (wanted, pool) {
            (Wanted::None, _) | (Wanted::Any, None) => Ok(None),
            (Wanted::Exact(_), None) => Err(IpamError::FamilyNotInPool { pool: name, family }),
            (Wanted::Any, Some(pool)) => match pool.next_free() {
                Some(ip) => Ok(Some(ip)),
                None if pool.has_withheld_free() => Err(IpamError::Withheld {
                    pool: name,
                    why: self
                        .withheld
                        .iter()
                        .find(|w| Family::of(w.net.addr()) == family && pool.overlaps(&w.net))
                        .map_or_else(String::new, |w| w.why.clone()),
                }),
                None => {
                    let resting = pool.resting();
                    Err(IpamError::Exhausted {
                        pool: name,
                        family,
                        used: pool.used(),
                        resting: u64::try_from(resting.len()).unwrap_or(u64::MAX),
                        total: pool.total(),
                        why: resting.blocked().find_map(|(_, s)| Some(format!("{}: {}", s.rest.ip, s.why()?))),
                    })
                }
            },
            (Wanted::Exact(ip), Some(pool)) => {
                let ip = ip.into();
                if !pool.gives_out(ip) {
                    return Err(self.not_in_pool(ip, name));
                }
                if let Some(held) = self.leases.get(&ip) {
                    return Err(IpamError::AlreadyLeased { ip, owner: held.owner.clone() });
                }
                if let Some(withheld) = self.withheld(ip) {
                    return Err(IpamError::TakenByNode { ip, pool: name, why: withheld.why.clone() });
                }
                match pool.sleeper(ip) {
                    Some(sleeper) => {
                        let left_ms = self.rest_left_ms(&sleeper.rest, now_ms);
                        Err(IpamError::Resting {
                            ip,
                            pool: name,
                            last_owner: sleeper.rest.last_owner.clone(),
                            left_ms,
                            ends_unix_ms: now_ms.saturating_add(left_ms),
                            why: sleeper.why().map(str::to_owned),
                        })
                    }
                    None => Ok(Some(ip)),
                }
            }
        }
    }

    fn insert(&mut self, index: usize, lease: Lease) {
        if let Some(pool) = self.pools.get_mut(index).and_then(|p| p.family_mut(Family::of(lease.ip))) {
            pool.take(lease.ip);
        }
        self.file(lease);
    }

    fn file(&mut self, lease: Lease) {
        self.unfile(lease.ip);
        if let LeaseOwner::Attachment { attachment, .. } = &lease.owner {
            self.by_container.entry(attachment.container_id.clone()).or_default().insert(lease.ip);
        }
        self.leases.insert(lease.ip, lease);
    }

    fn unfile(&mut self, ip: IpAddr) -> Option<Lease> {
        let lease = self.leases.remove(&ip)?;
        if let LeaseOwner::Attachment { attachment, .. } = &lease.owner
            && let Some(held) = self.by_container.get_mut(&attachment.container_id)
        {
            held.remove(&ip);
            if held.is_empty() {
                self.by_container.remove(&attachment.container_id);
            }
        }
        Some(lease)
    }

    fn pool_of(&self, ip: IpAddr) -> Option<(usize, &PoolName)> {
        let index = self.pools.iter().position(|p| p.family(Family::of(ip)).is_some_and(|f| f.gives_out(ip)))?;
        self.pools.get(index).map(|p| (index, &p.config.name))
    }

    fn not_in_pool(&self, ip: IpAddr, pool: PoolName) -> IpamError {
        let holds = self.pools.iter().find(|p| p.config.cidrs.iter().any(|c| c.contains(&ip)));
        let why = match holds {
            Some(p) if p.config.name != pool && self.pool_of(ip).is_some() => {
                format!("it belongs to pool {}; ask that pool", p.config.name)
            }
            Some(_) => {
                "it is the first or last address of its CIDR, which no host may have; ask for another".to_owned()
            }
            None => {
                let cidrs: Vec<String> = self.cidrs().iter().map(ToString::to_string).collect();
                format!("no pool has it (configured: {}); ask for one of those", cidrs.join(", "))
            }
        };
        IpamError::NotInPool { ip, pool, why }
    }
}

fn index_of(pools: &[Pool], name: &PoolName) -> Result<usize, IpamError> {
    pools.iter().position(|p| p.config.name == *name).ok_or_else(|| {
        let known: Vec<&str> = pools.iter().map(|p| p.config.name.as_str()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        IpamError::UnknownPool { pool: name.clone(), known }
    })
}

/// For the CLI and errors.
#[must_use]
pub fn describe_owner(owner: &LeaseOwner) -> String {
    match owner {
        LeaseOwner::Attachment { attachment, epoch } => format!("{attachment} (epoch {epoch})"),
        LeaseOwner::Caller { name } => name.clone(),
        LeaseOwner::Node => "node".to_owned(),
    }
}

#[cfg(test)]
mod tests;
