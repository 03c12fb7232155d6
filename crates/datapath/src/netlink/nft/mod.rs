//! The node's nftables table, `table inet wharf`, over netlink. [`wharf_core::nat`] decides the content, which is
//! written in one transaction. A port mapping is two set elements, a container that is not masqueraded is one. The
//! table's comment is Wharf's mark: a table without it is foreign and never changed.
//!
//! Errors: `Unsupported` where the kernel lacks a part of nf_tables, `Permission` without `CAP_NET_ADMIN`, `Conflict`
//! for a foreign table, `Exists` for a port with another target, `NotFound` for elements of an absent table,
//! `Exhausted` if other programs change the ruleset faster than it can be read.

mod expr;
mod judge;
mod packets;
mod read;
mod redirects;
mod rules;
mod socket;
mod table;
#[cfg(test)]
mod tests;
mod wire;
mod write;

use std::{
    collections::HashSet,
    io,
    sync::{Mutex, PoisonError},
};

use ipnet::IpNet;
use rtnetlink::packet_core::NLM_F_CREATE;
use wharf_core::{
    kernel::{ForeignChain, KernelError, KernelErrorKind, Result},
    nat::{Nat, NatEntry},
};
use wharf_crash as crash;

pub(crate) use self::read::is_readable;
pub use self::table::Table;
use self::{
    judge::{Judgement, Ruleset},
    packets::{Packets, Way},
    read::{Head, Unreadable},
    socket::{Netfilter, Outcome},
    table::{Element, elements},
    wire::{Attributes, message},
    write::{comment, create, delete_table, of_element},
};
use super::Refusal;
use crate::error::{fail, kind_of};

const TABLE: &str = "wharf";
const SUBJECT: &str = "inet wharf";
/// Other versions recognise the table by this prefix.
const MARK: &str = "made by wharf-agent";
const TRIES: usize = 16;

/// The result of [`Nft::ensure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ensured {
    /// It was as desired.
    Unchanged,
    /// There was no table.
    Created,
    /// Another Wharf table was there.
    Replaced,
}

/// The table in the network namespace of the first calling thread. The socket stays open: after a removal, closing any
/// netfilter socket waits until the kernel has freed the objects (12 ms on Linux 6.18). Errors: see the module.
#[derive(Default)]
pub struct Nft {
    socket: Mutex<Option<Netfilter>>,
}

impl Nft {
    /// Writes the desired table, unless it is in force.
    pub fn ensure(&self, nat: &Nat) -> Result<Ensured> {
        let desired = Table::of(nat)?;
        self.write(|_| Ok(desired.clone()))
    }

    /// [`Self::ensure`], but keeps the endpoints' entries.
    pub fn ensure_around(&self, nat: &Nat) -> Result<Ensured> {
        self.write(|seen| {
            let Some(seen) = seen else { return Table::of(nat) };
            let entries = Nat::with_entries(nat.masquerade.clone(), seen.entries());
            let mut kept = Nat { redirects: nat.redirects, ..entries };
            let desired = Table::of(&kept)?;
            if *seen == desired {
                return Ok(desired);
            }
            kept.mappings.retain(|mapping| !nat.mappings.iter().any(|ours| ours.overlaps(mapping)));
            kept.mappings.extend(&nat.mappings);
            kept.own.extend(&nat.own);
            Table::of(&kept)
        })
    }

    fn write(&self, desired: impl Fn(Option<&Table>) -> Result<Table>) -> Result<Ensured> {
        const OPERATION: &str = "write table";
        self.with(OPERATION, |netfilter| {
            for _ in 0..TRIES {
                let Some((generation, seen)) = try_read(netfilter, OPERATION)? else { continue };
                let desired = desired(seen.as_ref())?;
                if seen.as_ref() == Some(&desired) {
                    return Ok(Ensured::Unchanged);
                }
                let delete = seen.is_some().then(delete_table);
                let messages: Vec<_> = delete.into_iter().chain(create(&desired)).collect();
                crash::point("datapath/nft/before-write");
                match netfilter.commit(Some(generation), &messages).map_err(|e| wrap(OPERATION, &e))? {
                    Outcome::Done if seen.is_some() => return Ok(Ensured::Replaced),
                    Outcome::Done => return Ok(Ensured::Created),
                    Outcome::Stale => {}
                    Outcome::Refused(refused) => return Err(unwritten(OPERATION, refused)),
                    Outcome::Failed(refusal) => return Err(missing_or(refusal, OPERATION)),
                }
            }
            Err(restless(OPERATION))
        })
    }

    /// Adds all entries or none; existing ones stay.
    ///
    /// # Errors
    /// See the module; `Exists` names the port.
    pub fn add(&self, entries: &[NatEntry]) -> Result<()> {
        const OPERATION: &str = "publish";
        let all = listed(entries)?;
        if all.is_empty() {
            return Ok(());
        }
        self.with(OPERATION, |netfilter| {
            if head(netfilter, OPERATION)?.is_none() {
                let cause = "the table is missing; it has to be written first";
                return Err(fail(OPERATION, in_words(entries), KernelErrorKind::NotFound, cause));
            }
            let messages: Vec<_> =
                all.iter().map(|(_, one)| of_element(message::NEW_SET_ELEM, NLM_F_CREATE, one)).collect();
            crash::point("datapath/nft/before-publish");
            let refused = match netfilter.commit(None, &messages).map_err(|e| wrap(OPERATION, &e))? {
                Outcome::Done => return Ok(()),
                Outcome::Stale => return Err(restless(OPERATION)),
                Outcome::Failed(refusal) => return Err(missing_or(refusal, OPERATION)),
                Outcome::Refused(refused) => refused,
            };
            let is_taken = |refusal: &Refusal| refusal.is(libc::EBUSY) || refusal.is(libc::EEXIST);
            let taken = refused.iter().find(|(_, refusal)| is_taken(refusal)).and_then(|(index, _)| all.get(*index));
            match taken {
                Some((NatEntry::Port(mapping), _)) => {
                    let cause =
                        format!("{} leads to another container already; choose another port", mapping.host_side());
                    Err(fail(OPERATION, mapping.to_string(), KernelErrorKind::Exists, cause))
                }
                _ => Err(refused_elements(OPERATION, refused)),
            }
        })
    }

    /// Removes entries; a port with another target stays. Remove both mappings of a container port in one call, or the
    /// container does not reach itself by the remaining one.
    pub fn take_back(&self, entries: &[NatEntry]) -> Result<()> {
        const OPERATION: &str = "take back";
        let all = listed(entries)?;
        self.with(OPERATION, |netfilter| {
            for _ in 0..TRIES {
                let generation = generation(netfilter, OPERATION)?;
                if all.is_empty() || head(netfilter, OPERATION)?.is_none() {
                    return Ok(());
                }
                let mut messages = Vec::new();
                for (_, element) in &all {
                    if is_there(netfilter, OPERATION, element)? {
                        messages.push(of_element(message::DEL_SET_ELEM, 0, element));
                    }
                }
                if messages.is_empty() {
                    return Ok(());
                }
                crash::point("datapath/nft/before-take-back");
                match netfilter.commit(Some(generation), &messages).map_err(|e| wrap(OPERATION, &e))? {
                    Outcome::Done => return Ok(()),
                    Outcome::Stale => {}
                    Outcome::Refused(refused) => return Err(refused_elements(OPERATION, refused)),
                    Outcome::Failed(refusal) => return Err(missing_or(refusal, OPERATION)),
                }
            }
            Err(restless(OPERATION))
        })
    }

    /// Reads the table, if any.
    pub fn look(&self) -> Result<Option<Table>> {
        const OPERATION: &str = "read table";
        self.with(OPERATION, |netfilter| {
            for _ in 0..TRIES {
                if let Some((_, table)) = try_read(netfilter, OPERATION)? {
                    return Ok(table);
                }
            }
            Err(restless(OPERATION))
        })
    }

    /// Foreign chains that refuse forwarded packets of the pools, or whose effect is unclear. `published`: also
    /// connections to the pools. `uplink`: the only interface to other networks.
    pub fn refusing_forward_chains(
        &self,
        pools: &[IpNet],
        published: bool,
        uplink: Option<&str>,
    ) -> Result<Vec<ForeignChain>> {
        const OPERATION: &str = "list chains";
        self.with(OPERATION, |netfilter| {
            let mut found = Vec::new();
            for (family, name) in wire::FAMILIES {
                let mut dump = |kind, attributes: &Attributes| {
                    let mut answer = netfilter.dump_of(family, kind, attributes);
                    for _ in 1..TRIES {
                        if answer.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::Interrupted) {
                            answer = netfilter.dump_of(family, kind, attributes);
                        }
                    }
                    answer.map_err(|e| wrap(OPERATION, &e))?.map_err(|refusal| missing_or(refusal, OPERATION))
                };
                let chains = dump(message::GET_CHAIN, &Attributes::default())?;
                let chains: Vec<_> = chains.iter().filter_map(|message| read::forwarding(message)).collect();
                if chains.is_empty() {
                    continue;
                }
                let tables = dump(message::GET_TABLE, &Attributes::default())?;
                let dormant: Vec<_> = tables.iter().filter_map(|message| read::dormant(message)).collect();
                let mut ask = |kind, attributes: &Attributes| dump(kind, attributes).ok();
                let is_own = |table: &str| name == "inet" && table == TABLE;
                for chain in chains.into_iter().filter(|c| !dormant.contains(&c.table) && !is_own(&c.table)) {
                    let mut seen = ForeignChain {
                        name: format!("{name} {} {}", chain.table, chain.name),
                        refused: Vec::new(),
                        unclear: false,
                    };
                    let mut ruleset = Ruleset::new(chain.table, &mut ask);
                    let sees = |pool: &&IpNet| name == "inet" || pool.addr().is_ipv4() == (name == "ip");
                    for pool in pools.iter().filter(sees) {
                        for way in [Way::Out, Way::Answer, Way::Published].into_iter().take(2 + usize::from(published))
                        {
                            let packets = Packets { pool: *pool, way, uplink };
                            match ruleset.judge(&packets, &chain.name, chain.drops) {
                                Judgement::Accepts => {}
                                Judgement::Refuses if seen.refused.contains(pool) => {}
                                Judgement::Refuses => seen.refused.push(*pool),
                                Judgement::Unclear => seen.unclear = true,
                            }
                        }
                    }
                    if seen.unclear || !seen.refused.is_empty() {
                        found.push(seen);
                    }
                }
            }
            Ok(found)
        })
    }

    /// Deletes the table; false without one.
    pub fn remove(&self) -> Result<bool> {
        const OPERATION: &str = "delete table";
        self.with(OPERATION, |netfilter| {
            for _ in 0..TRIES {
                let generation = generation(netfilter, OPERATION)?;
                if head(netfilter, OPERATION)?.is_none() {
                    return Ok(false);
                }
                crash::point("datapath/nft/before-delete");
                match netfilter.commit(Some(generation), &[delete_table()]).map_err(|e| wrap(OPERATION, &e))? {
                    Outcome::Done => return Ok(true),
                    Outcome::Stale => {}
                    Outcome::Refused(refused) => return Err(refused_elements(OPERATION, refused)),
                    Outcome::Failed(refusal) => return Err(missing_or(refusal, OPERATION)),
                }
            }
            Err(restless(OPERATION))
        })
    }

    /// A failed job may leave unread answers.
    fn with<T>(&self, operation: &'static str, job: impl FnOnce(&mut Netfilter) -> Result<T>) -> Result<T> {
        let mut slot = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let mut netfilter = match slot.take() {
            Some(netfilter) => netfilter,
            None => Netfilter::open().map_err(|e| wrap(operation, &e))?,
        };
        let done = job(&mut netfilter)?;
        *slot = Some(netfilter);
        Ok(done)
    }
}

fn listed(entries: &[NatEntry]) -> Result<Vec<(&NatEntry, Element)>> {
    let mut seen = HashSet::new();
    let mut all = Vec::with_capacity(2 * entries.len());
    for entry in entries {
        let new = elements(entry)?.into_iter().filter(|element| seen.insert(element.clone()));
        all.extend(new.map(|element| (entry, element)));
    }
    Ok(all)
}

fn in_words(entries: &[NatEntry]) -> String {
    match entries {
        [first, _, ..] => format!("{first} and {} more", entries.len() - 1),
        one => one.iter().map(ToString::to_string).collect(),
    }
}

/// With the generation; `None` if the ruleset changed meanwhile.
fn try_read(netfilter: &mut Netfilter, operation: &'static str) -> Result<Option<(u32, Option<Table>)>> {
    let before = generation(netfilter, operation)?;
    let seen = match head(netfilter, operation)? {
        None => None,
        Some(head) => match read::table(netfilter, head) {
            Ok(table) => Some(table),
            Err(read::Failed::Changed) => return Ok(None),
            Err(read::Failed::Io(e)) => return Err(wrap(operation, &e)),
            Err(read::Failed::Refused(refusal)) => return Err(missing_or(refusal, operation)),
            Err(read::Failed::Unreadable(Unreadable)) => return Err(unreadable(operation)),
        },
    };
    Ok((generation(netfilter, operation)? == before).then_some((before, seen)))
}

fn generation(netfilter: &mut Netfilter, operation: &'static str) -> Result<u32> {
    let answer = netfilter.get(message::GET_GEN, &Attributes::default()).map_err(|e| wrap(operation, &e))?;
    let messages = answer.map_err(|refusal| missing_or(refusal, operation))?;
    messages.first().and_then(|message| read::generation(message)).ok_or_else(|| unreadable(operation))
}

/// Fails for a foreign table.
fn head(netfilter: &mut Netfilter, operation: &'static str) -> Result<Option<Head>> {
    let name = Attributes::default().text(wire::table::NAME, TABLE);
    let messages = match netfilter.get(message::GET_TABLE, &name).map_err(|e| wrap(operation, &e))? {
        Err(refusal) if refusal.is(libc::ENOENT) => return Ok(None),
        answer => answer.map_err(|refusal| missing_or(refusal, operation))?,
    };
    let head = messages.first().and_then(|message| read::head(message).ok()).ok_or_else(|| unreadable(operation))?;
    let mark = comment(MARK);
    let marked = head.userdata.first() == mark.first()
        && head.userdata.get(2..).is_some_and(|text| text.starts_with(MARK.as_bytes()));
    if marked {
        return Ok(Some(head));
    }
    let cause = "somebody else made a table of that name, and Wharf leaves it alone; look with `nft list table inet \
                 wharf`, then rename it or delete it";
    Err(fail(operation, SUBJECT, KernelErrorKind::Conflict, cause))
}

fn is_there(netfilter: &mut Netfilter, operation: &'static str, element: &Element) -> Result<bool> {
    let question = of_element(message::GET_SET_ELEM, 0, element);
    let messages = match netfilter.get(question.kind, &question.attributes).map_err(|e| wrap(operation, &e))? {
        Err(refusal) if refusal.is(libc::ENOENT) => return Ok(false),
        answer => answer.map_err(|refusal| missing_or(refusal, operation))?,
    };
    for message in &messages {
        let found = read::elements(message).map_err(|Unreadable| unreadable(operation))?;
        if found.iter().any(|(key, data)| key.bytes == element.key && *data == element.data) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn unreadable(operation: &'static str) -> KernelError {
    fail(operation, SUBJECT, KernelErrorKind::Other, "the kernel's answer cannot be read; report this as a bug")
}

fn restless(operation: &'static str) -> KernelError {
    let cause = "others changed the ruleset each time it was read; try again";
    fail(operation, SUBJECT, KernelErrorKind::Exhausted, cause)
}

fn wrap(operation: &'static str, error: &io::Error) -> KernelError {
    let refusal = Refusal { errno: io::Error::from(error.kind()), reason: None };
    match error.raw_os_error() {
        Some(errno) => missing_or(Refusal { errno: io::Error::from_raw_os_error(errno), ..refusal }, operation),
        None => fail(operation, SUBJECT, kind_of(error), error.to_string()),
    }
}

fn missing_or(refusal: Refusal, operation: &'static str) -> KernelError {
    const ABSENT: [i32; 5] =
        [libc::EINVAL, libc::EOPNOTSUPP, libc::EPROTONOSUPPORT, libc::EAFNOSUPPORT, libc::ENOPROTOOPT];
    if ABSENT.iter().any(|errno| refusal.is(*errno)) {
        let cause = format!(
            "{}: the kernel has no nf_tables; load nf_tables, or use a kernel with CONFIG_NF_TABLES_INET",
            refusal.errno
        );
        return fail(operation, SUBJECT, KernelErrorKind::Unsupported, cause);
    }
    if refusal.is(libc::EPERM) || refusal.is(libc::EACCES) {
        let cause = format!("{}: nftables needs CAP_NET_ADMIN", refusal.errno);
        return fail(operation, SUBJECT, KernelErrorKind::Permission, cause);
    }
    refusal.into_error(operation, SUBJECT)
}

/// ENOENT or similar: the kernel lacks a kind of expression, chain or table.
fn unwritten(operation: &'static str, refused: Vec<(usize, Refusal)>) -> KernelError {
    const ABSENT: [i32; 3] = [libc::ENOENT, libc::EOPNOTSUPP, libc::EAFNOSUPPORT];
    match refused.into_iter().next() {
        Some((_, refusal)) if ABSENT.iter().any(|errno| refusal.is(*errno)) => {
            let cause = format!(
                "{}: the kernel lacks a part of nf_tables; it needs CONFIG_NF_TABLES_INET, NFT_NAT, NFT_MASQ, NFT_CT \
                 and NFT_FIB_INET, and NFT_TPROXY, NFT_SOCKET and NF_CONNTRACK_ZONES for rules about what connections carry",
                refusal.errno
            );
            fail(operation, SUBJECT, KernelErrorKind::Unsupported, cause)
        }
        first => refused_elements(operation, first.into_iter().collect()),
    }
}

fn refused_elements(operation: &'static str, refused: Vec<(usize, Refusal)>) -> KernelError {
    match refused.into_iter().next() {
        Some((_, refusal)) => refusal.into_error(operation, SUBJECT),
        None => fail(operation, SUBJECT, KernelErrorKind::Other, "refused without a reason"),
    }
}
