//! Parses the kernel's dumps.

use std::{collections::BTreeMap, io};

use super::{
    super::Refusal,
    TABLE,
    expr::{self, Rule},
    socket::Netfilter,
    table::{Chain, Key, Set, Table, V4, V6},
    wire::{self, Attributes, GEN_ID, attributes, elem, find, message, number, of_message, text},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unreadable;

type Read<T> = Result<T, Unreadable>;

pub(super) enum Failed {
    Changed,
    Io(io::Error),
    Refused(Refusal),
    Unreadable(Unreadable),
}

impl From<Unreadable> for Failed {
    fn from(e: Unreadable) -> Self {
        Self::Unreadable(e)
    }
}

pub(super) fn table(netfilter: &mut Netfilter, head: Head) -> Result<Table, Failed> {
    let mut found = Table { flags: head.flags, objects: head.objects, ..Table::default() };
    let ours = Attributes::default().text(wire::rule::TABLE, TABLE);
    // Dumps have every table's chains.
    for message in dump(netfilter, message::GET_CHAIN, &Attributes::default())? {
        found.chains.extend(chain(&message, TABLE)?);
    }
    for message in dump(netfilter, message::GET_RULE, &ours)? {
        let (chain, rule) = self::rule(&message)?;
        found.chains.entry(chain).or_default().rules.push(rule);
    }
    for message in dump(netfilter, message::GET_SET, &ours)? {
        let (name, mut set) = set(&message)?;
        let list = Attributes::default().text(elem::LIST_TABLE, TABLE).text(elem::LIST_SET, &name);
        for message in dump(netfilter, message::GET_SET_ELEM, &list)? {
            set.elements.extend(elements(&message)?);
        }
        // `nft` adds an end at zero where no interval begins at zero.
        set.elements.retain(|key, _| !key.end || key.bytes.iter().any(|byte| *byte != 0));
        found.sets.insert(name, set);
    }
    Ok(found)
}

fn dump(netfilter: &mut Netfilter, kind: u16, filter: &Attributes) -> Result<Vec<Vec<u8>>, Failed> {
    match netfilter.dump(kind, filter) {
        Ok(Ok(messages)) => Ok(messages),
        Ok(Err(refusal)) if refusal.is(libc::ENOENT) => Err(Failed::Changed),
        Ok(Err(refusal)) => Err(Failed::Refused(refusal)),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Err(Failed::Changed),
        Err(e) => Err(Failed::Io(e)),
    }
}

pub(super) fn generation(message: &[u8]) -> Option<u32> {
    let attributes = message.get(super::super::batch::HEADER_LEN + wire::GENERIC_LEN..)?;
    number(&wire::attributes(attributes)?, GEN_ID)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) flags: u32,
    pub(super) objects: u32,
    /// The comment: in Wharf's table, the mark.
    pub(super) userdata: Vec<u8>,
}

pub(super) fn head(message: &[u8]) -> Read<Head> {
    let all = of_message(message).ok_or(Unreadable)?;
    let flags = number(&all, wire::table::FLAGS).ok_or(Unreadable)?;
    let objects = number(&all, wire::table::USE).ok_or(Unreadable)?;
    Ok(Head { flags, objects, userdata: find(&all, wire::table::USERDATA).unwrap_or_default().to_vec() })
}

/// `None` for another table. A chain without a hook has an empty type.
pub(super) fn chain(message: &[u8], table: &str) -> Read<Option<(String, Chain)>> {
    let all = of_message(message).ok_or(Unreadable)?;
    if text(&all, wire::chain::TABLE).is_none_or(|name| name != table) {
        return Ok(None);
    }
    let name = text(&all, wire::chain::NAME).ok_or(Unreadable)?;
    let Some(hook) = find(&all, wire::chain::HOOK) else { return Ok(Some((name, Chain::default()))) };
    let hook = attributes(hook).ok_or(Unreadable)?;
    let found = Chain {
        kind: text(&all, wire::chain::TYPE).ok_or(Unreadable)?,
        hook: number(&hook, wire::chain::HOOK_NUM).ok_or(Unreadable)?,
        priority: number(&hook, wire::chain::HOOK_PRIORITY).ok_or(Unreadable)?.cast_signed(),
        policy: number(&all, wire::chain::POLICY).ok_or(Unreadable)?,
        rules: Vec::new(),
    };
    Ok(Some((name, found)))
}

pub(super) struct Forwarding {
    pub(super) table: String,
    pub(super) name: String,
    pub(super) drops: bool,
}

/// Of any family; `None` for other hooks.
pub(super) fn forwarding(message: &[u8]) -> Option<Forwarding> {
    let all = of_anybody(message)?;
    let hook = number(&attributes(find(&all, wire::chain::HOOK)?)?, wire::chain::HOOK_NUM)?;
    (hook == wire::HOOK_FORWARD).then_some(())?;
    Some(Forwarding {
        table: text(&all, wire::chain::TABLE)?,
        name: text(&all, wire::chain::NAME)?,
        drops: number(&all, wire::chain::POLICY)? == wire::POLICY_DROP,
    })
}

/// Of any family; `None` unless dormant.
pub(super) fn dormant(message: &[u8]) -> Option<String> {
    let all = of_anybody(message)?;
    (number(&all, wire::table::FLAGS)? & wire::table::F_DORMANT != 0).then_some(())?;
    text(&all, wire::table::NAME)
}

pub(super) fn rule_of_anybody(message: &[u8]) -> Option<Rule> {
    expr::decode(find(&of_anybody(message)?, wire::rule::EXPRESSIONS).unwrap_or_default())
}

pub(super) fn elements_of_anybody(message: &[u8]) -> Option<Vec<(Key, Vec<u8>)>> {
    let all = of_anybody(message)?;
    let list = attributes(find(&all, elem::LIST_ELEMENTS).unwrap_or_default())?;
    let one = |(_, value): &(u16, Vec<u8>)| {
        let all = attributes(value)?;
        let bytes = find(&attributes(find(&all, elem::KEY)?)?, elem::DATA_VALUE)?.to_vec();
        let end = number(&all, elem::FLAGS).unwrap_or_default() & elem::F_INTERVAL_END != 0;
        Some((Key { bytes, end }, find(&all, elem::DATA).unwrap_or_default().to_vec()))
    };
    list.iter().map(one).collect()
}

pub(super) fn of_anybody(message: &[u8]) -> Option<Vec<(u16, Vec<u8>)>> {
    attributes(message.get(super::super::batch::HEADER_LEN + wire::GENERIC_LEN..)?)
}

pub(super) fn rule(message: &[u8]) -> Read<(String, Rule)> {
    let all = of_message(message).ok_or(Unreadable)?;
    let chain = text(&all, wire::rule::CHAIN).ok_or(Unreadable)?;
    let expressions = expr::decode(find(&all, wire::rule::EXPRESSIONS).unwrap_or_default()).ok_or(Unreadable)?;
    Ok((chain, expressions))
}

pub(super) fn set(message: &[u8]) -> Read<(String, Set)> {
    let all = of_message(message).ok_or(Unreadable)?;
    let name = text(&all, wire::set::NAME).ok_or(Unreadable)?;
    let optional = |kind| number(&all, kind).unwrap_or_default();
    let found = Set {
        flags: optional(wire::set::FLAGS),
        key_type: optional(wire::set::KEY_TYPE),
        key_len: number(&all, wire::set::KEY_LEN).ok_or(Unreadable)?,
        data_type: optional(wire::set::DATA_TYPE),
        data_len: optional(wire::set::DATA_LEN),
        elements: BTreeMap::new(),
    };
    Ok((name, found))
}

/// A set may span several messages.
pub(super) fn elements(message: &[u8]) -> Read<Vec<(Key, Vec<u8>)>> {
    let all = of_message(message).ok_or(Unreadable)?;
    let list = attributes(find(&all, elem::LIST_ELEMENTS).unwrap_or_default()).ok_or(Unreadable)?;
    list.iter().map(|(_, value)| element(value).ok_or(Unreadable)).collect()
}

fn element(bytes: &[u8]) -> Option<(Key, Vec<u8>)> {
    let all = attributes(bytes)?;
    let value = |kind| find(&all, kind).map(|data| Some(find(&attributes(data)?, elem::DATA_VALUE)?.to_vec()));
    let end = number(&all, elem::FLAGS).unwrap_or_default() & elem::F_INTERVAL_END != 0;
    let data = match value(elem::DATA) {
        Some(data) => data?,
        None => Vec::new(),
    };
    Some((Key { bytes: value(elem::KEY)??, end }, data))
}

pub(crate) fn is_readable(message: &[u8]) -> bool {
    let entries = |elements: Vec<_>| {
        let set = Set { elements: elements.into_iter().collect(), ..Set::default() };
        let names = [V4.ports, V4.ports_of, V4.own, V6.ports, V6.ports_of, V6.own];
        let sets = names.map(|name| (name.to_owned(), set.clone())).into();
        Table { sets, ..Table::default() }.entries().len()
    };
    let _others = (forwarding(message), dormant(message), rule_of_anybody(message), elements_of_anybody(message));
    let whole = head(message).is_ok() | chain(message, TABLE).is_ok() | rule(message).is_ok() | set(message).is_ok();
    whole | elements(message).map(entries).is_ok() | generation(message).is_some()
}
