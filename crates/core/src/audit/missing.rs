//! Missing objects.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

use super::{
    AuditFinding, Auditor, IpOwner, LINK_PINS, LinkRow, Mark, REQUIRED_PINS, Repair, RouteRow, describe_owner,
    describe_record, is_lease_of, is_row_of,
};
use crate::{
    endpoint::EndpointRecord,
    finding::{EndpointProblem, Kept, NodeProblem, Problem, Side},
};

impl Auditor<'_> {
    pub(super) fn missing_pool_routes(&self, findings: &mut Vec<AuditFinding>) {
        for cidr in self.view.pool_cidrs {
            let wanted = RouteRow { destination: *cidr, ifindex: None };
            let is_it = |p: &NodeProblem| matches!(p, NodeProblem::PoolRoute { cidr: named, .. } if named == cidr);
            if !self.view.node.iter().any(is_it) && !self.routes.contains(&wanted) {
                findings.push(AuditFinding {
                    problem: Problem::Node(NodeProblem::PoolRoute { cidr: *cidr, found: None }),
                    owner: Some("node".to_owned()),
                    repair: Some(Repair::EnsureNode),
                });
            }
        }
    }

    pub(super) fn missing(&self, record: &EndpointRecord, findings: &mut Vec<AuditFinding>) {
        let id = record.id;
        let mut add = |problem: EndpointProblem| findings.push(AuditFinding::of_endpoint(record, problem));
        let renamed = |mark: &Mark| mark.id == id.get() && mark.epoch == record.epoch.0;
        let is_renamed = |link: &LinkRow| {
            link.ifindex == record.host_ifindex
                && link.alias.as_deref().and_then(Mark::parse).is_some_and(|m| renamed(&m))
        };
        // Only the detailed inspection has links of other plugins.
        let own = record.link_owner.is_wharf();
        if own && !self.link_names.contains(record.host_ifname.as_str()) && !self.view.dump.links.iter().any(is_renamed)
        {
            add(EndpointProblem::LinkMissing { side: Side::Node, name: record.host_ifname.to_string() });
        }
        match self.pins.get(&id) {
            None => add(EndpointProblem::PinsMissing),
            Some(names) => {
                let has = |name: &str| names.iter().any(|n| n == name);
                let links = LINK_PINS.into_iter().filter(|name| LINK_PINS.into_iter().any(has) && !has(name));
                for name in REQUIRED_PINS.into_iter().filter(|name| !has(name)).chain(links) {
                    add(EndpointProblem::PinMissing { name: name.to_owned() });
                }
            }
        }
        if !self.call_slots.contains(&u32::from(id.get())) {
            add(EndpointProblem::CallSlot { expected: None, found: None });
        }
        for address in record.addresses() {
            if !self.rows.get(&address).is_some_and(|row| is_row_of(row, record)) {
                add(EndpointProblem::Row { address, found: None });
            }
            let route = RouteRow { destination: IpNet::from(address), ifindex: Some(record.host_ifindex) };
            if own && !self.routes.contains(&route) {
                let (to, expected) = (route.destination, record.host_ifname.to_string());
                add(EndpointProblem::NodeRoute { to, expected, found: None });
            }
        }
        for problem in record.addresses().filter_map(|address| self.lease_problem(record, address)) {
            let owner = Some(describe_record(record));
            findings.push(AuditFinding { problem: Problem::Kept(problem), owner, repair: None });
        }
    }

    /// IPAM could lease the address to another endpoint.
    fn lease_problem(&self, record: &EndpointRecord, ip: IpAddr) -> Option<Kept> {
        if !self.view.pool_cidrs.iter().any(|c| c.contains(&ip)) {
            return None;
        }
        let (lease, id) = (self.leases.get(&ip), record.id);
        match (lease, record.ip_owner) {
            (Some(lease), IpOwner::Endpoint) if !is_lease_of(lease, record) => {
                Some(Kept::LeaseHeld { ip, id, holder: describe_owner(&lease.owner) })
            }
            (Some(_), _) => None,
            (None, _) => Some(Kept::LeaseMissing { ip, id }),
        }
    }

    pub(super) fn shared_addresses(&self, findings: &mut Vec<AuditFinding>) {
        let mut claims: BTreeMap<IpAddr, Vec<&EndpointRecord>> = BTreeMap::new();
        for record in self.judged_records() {
            for address in record.addresses() {
                claims.entry(address).or_default().push(record);
            }
        }
        for (address, records) in claims.into_iter().filter(|(_, records)| records.len() > 1) {
            let owners: Vec<String> = records.iter().map(|r| describe_record(r)).collect();
            findings.push(AuditFinding {
                problem: Problem::Kept(Kept::SharedAddress { ip: address, count: records.len() }),
                owner: Some(owners.join(", ")),
                repair: None,
            });
        }
    }
}
