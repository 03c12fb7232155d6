//! What should be there and is not.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

use super::{
    AuditFinding, Auditor, IpOwner, LINK_PINS, LinkRow, Mark, REQUIRED_PINS, Repair, RouteRow, describe_owner,
    describe_record, is_lease_of, is_row_of,
};
use crate::endpoint::EndpointRecord;

impl Auditor<'_> {
    /// The pools' own routes, where the look at the node's part has not named them.
    pub(super) fn missing_pool_routes(&self, findings: &mut Vec<AuditFinding>) {
        for cidr in self.view.pool_cidrs {
            let wanted = RouteRow { destination: *cidr, ifindex: None };
            let is_it = |word: &str| word.parse() == Ok(*cidr);
            let mut routes = self.view.node.iter().filter(|m| m.object == "route");
            let named = routes.any(|m| m.subject.split_whitespace().any(is_it));
            if !named && !self.routes.contains(&wanted) {
                findings.push(AuditFinding {
                    object: "route",
                    subject: format!("{cidr} (unreachable)"),
                    problem: "missing: traffic to addresses of the pool that no endpoint has leaves the node"
                        .to_owned(),
                    owner: Some("node".to_owned()),
                    repair: Some(Repair::EnsureNode),
                });
            }
        }
    }

    /// What an endpoint should have and has not.
    pub(super) fn missing(&self, record: &EndpointRecord, findings: &mut Vec<AuditFinding>) {
        let id = record.id;
        let mut add = |object, subject: String, problem: String, repair| {
            findings.push(AuditFinding { object, subject, problem, owner: Some(describe_record(record)), repair });
        };
        let rebuild = || Some(Repair::Regenerate(id));
        // One that was renamed is told as such.
        let renamed = |mark: &Mark| mark.id == id.get() && mark.epoch == record.epoch.0;
        let is_renamed = |link: &LinkRow| {
            link.ifindex == record.host_ifindex
                && link.alias.as_deref().and_then(Mark::parse).is_some_and(|m| renamed(&m))
        };
        if !self.link_names.contains(record.host_ifname.as_str()) && !self.view.dump.links.iter().any(is_renamed) {
            let problem = format!(
                "missing: endpoint {id} has no network (its namespace is gone, or the link was removed behind the agent's \
                 back); delete the endpoint"
            );
            add("link", record.host_ifname.to_string(), problem, None);
        }
        match self.pins.get(&id) {
            None => add("pin", format!("endpoints/{id}"), "missing: no programs are pinned".to_owned(), rebuild()),
            Some(names) => {
                let has = |name: &str| names.iter().any(|n| n == name);
                let links = LINK_PINS.into_iter().filter(|name| LINK_PINS.into_iter().any(has) && !has(name));
                for name in REQUIRED_PINS.into_iter().filter(|name| !has(name)).chain(links) {
                    add("pin", format!("endpoints/{id}/{name}"), "missing".to_owned(), rebuild());
                }
            }
        }
        if !self.call_slots.contains(&u32::from(id.get())) {
            let problem = format!("missing: other endpoints cannot reach endpoint {id}");
            add("call-slot", id.to_string(), problem, rebuild());
        }
        for address in record.addresses() {
            if !self.rows.get(&address).is_some_and(|row| is_row_of(row, record)) {
                let problem = format!("missing: other endpoints cannot reach endpoint {id} at this address");
                add("endpoint-row", address.to_string(), problem, rebuild());
            }
            let route = RouteRow { destination: IpNet::from(address), ifindex: Some(record.host_ifindex) };
            if !self.routes.contains(&route) {
                let problem = format!(
                    "missing: the node cannot reach endpoint {id} at this address; if another's route is in its place \
                     (`ip route get {address}`), remove that one first"
                );
                add("route", route.destination.to_string(), problem, rebuild());
            }
            if let Some(problem) = self.lease_problem(record, address) {
                add("lease", address.to_string(), problem, None);
            }
        }
    }

    /// An address that an endpoint has and the pools could give to another.
    fn lease_problem(&self, record: &EndpointRecord, address: IpAddr) -> Option<String> {
        // A pool that the user took out of the configuration gives nothing out: nobody else can get the address.
        if !self.view.pool_cidrs.iter().any(|c| c.contains(&address)) {
            return None;
        }
        let lease = self.leases.get(&address);
        match (lease, record.ip_owner) {
            (Some(lease), IpOwner::Endpoint) if !is_lease_of(lease, record) => {
                Some(format!("held by {}, not by endpoint {}", describe_owner(&lease.owner), record.id))
            }
            (Some(_), _) => None,
            (None, _) => Some(format!(
                "missing: the pool may give the address of endpoint {} to another; delete the endpoint, or restart the agent",
                record.id
            )),
        }
    }

    /// Addresses that more than one endpoint claims.
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
                object: "endpoint",
                subject: address.to_string(),
                problem: format!("{} endpoints have this address; delete all but one", records.len()),
                owner: Some(owners.join(", ")),
                repair: None,
            });
        }
    }
}
