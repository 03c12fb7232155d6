//! Routing rules by source address.

use std::net::IpAddr;

use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        route::RouteProtocol,
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};
use wharf_core::kernel::Result;

use super::{Connection, Request, batch::Dump};
use crate::ROUTE_PROTOCOL;

/// Tables default and local (`linux/rtnetlink.h`); main is between.
const DEFAULT: u32 = 253;
const LOCAL: u32 = 255;

/// Before the main table's, 32766.
const PRIORITY: u32 = 30_000;

/// Identified by protocol number and priority.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) source: IpAddr,
    pub(crate) table: u32,
}

impl Rule {
    fn message(&self) -> RuleMessage {
        let mut m = RuleMessage::default();
        (m.header.family, m.header.src_len) = match self.source {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        m.header.action = RuleAction::ToTable;
        m.attributes = vec![
            RuleAttribute::Source(self.source),
            RuleAttribute::Table(self.table),
            RuleAttribute::Priority(PRIORITY),
            RuleAttribute::Protocol(RouteProtocol::from(ROUTE_PROTOCOL)),
        ];
        m
    }

    pub(crate) fn add(&self) -> Request {
        Request::new(RouteNetlinkMessage::NewRule(self.message()), NLM_F_CREATE | NLM_F_EXCL)
    }

    pub(crate) fn remove(&self) -> Request {
        Request::new(RouteNetlinkMessage::DelRule(self.message()), 0)
    }
}

pub(crate) fn list(connection: &mut Connection) -> Result<Vec<Rule>> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RuleMessage::default();
        request.header.family = family;
        let Ok(messages) = connection.dump(&RouteNetlinkMessage::GetRule(request))? else { continue };
        found.extend(messages.iter().filter_map(read));
    }
    Ok(found)
}

/// Whether a foreign rule leads to a table other than local, main and default. True if unknown.
pub(crate) fn lead_to_other_tables(connection: &mut Connection) -> Result<bool> {
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RuleMessage::default();
        request.header.family = family;
        match connection.dump_whole(&RouteNetlinkMessage::GetRule(request))? {
            Ok(Dump { known, left_out }) if left_out > 0 || known.iter().any(leads_to_another_table) => {
                return Ok(true);
            }
            // The kernel lacks the family or rules.
            Err(refusal) if !refusal.is(libc::EAFNOSUPPORT) && !refusal.is(libc::EOPNOTSUPP) => return Ok(true),
            Ok(_) | Err(_) => {}
        }
    }
    Ok(false)
}

fn leads_to_another_table(message: &RouteNetlinkMessage) -> bool {
    let RouteNetlinkMessage::NewRule(m) = message else { return false };
    let mut table = u32::from(m.header.table);
    for attribute in &m.attributes {
        match attribute {
            RuleAttribute::Table(t) => table = *t,
            RuleAttribute::Protocol(p) if u8::from(*p) == ROUTE_PROTOCOL => return false,
            _ => {}
        }
    }
    // `l3mdev` leads to the tables of VRFs.
    m.header.action != RuleAction::ToTable || !(DEFAULT..=LOCAL).contains(&table)
}

fn read(message: &RouteNetlinkMessage) -> Option<Rule> {
    let RouteNetlinkMessage::NewRule(m) = message else { return None };
    let (mut source, mut table, mut priority, mut protocol) = (None, u32::from(m.header.table), 0, 0);
    for attribute in &m.attributes {
        match attribute {
            RuleAttribute::Source(a) => source = Some(*a),
            RuleAttribute::Table(t) => table = *t,
            RuleAttribute::Priority(p) => priority = *p,
            RuleAttribute::Protocol(p) => protocol = u8::from(*p),
            _ => {}
        }
    }
    (priority == PRIORITY && protocol == ROUTE_PROTOCOL).then_some(Rule { source: source?, table })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_other_programs_to_tables_of_their_own_are_found() {
        let message = |action, table: u8, attributes: Vec<RuleAttribute>| {
            let mut m = RuleMessage::default();
            (m.header.action, m.header.table, m.attributes) = (action, table, attributes);
            RouteNetlinkMessage::NewRule(m)
        };
        let to = |table, attributes| message(RuleAction::ToTable, table, attributes);
        let ours = RuleAttribute::Protocol(RouteProtocol::from(ROUTE_PROTOCOL));
        for rule in [
            to(255, vec![]),
            to(254, vec![RuleAttribute::SuppressPrefixLen(0), RuleAttribute::FwMark(1)]),
            to(253, vec![]),
            to(0, vec![RuleAttribute::Table(254)]),
            to(0, vec![RuleAttribute::Table(1_000), ours]),
        ] {
            assert!(!leads_to_another_table(&rule), "{rule:?}");
        }
        for rule in [
            to(100, vec![]),
            to(0, vec![RuleAttribute::Table(1_000)]),
            to(0, vec![RuleAttribute::L3MDev(true)]),
            message(RuleAction::Goto, 0, vec![RuleAttribute::Goto(32_000)]),
            message(RuleAction::Blackhole, 0, vec![]),
        ] {
            assert!(leads_to_another_table(&rule), "{rule:?}");
        }
    }
}
