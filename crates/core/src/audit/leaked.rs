//! Orphans, and objects that differ from their records.

use super::{
    AuditFinding, Auditor, IfName, Intent, LINK_PINS, Lease, LeaseOwner, LinkRef, LinkRow, REQUIRED_PINS, Repair,
    RouteRow, describe_owner, describe_record, endpoint_id, is_lease_of, is_row_of, low_half, parse_host_ifname,
};
use wharf_names::mark::Mark;

use crate::{
    endpoint::LinkOwner,
    finding::{EndpointProblem, Kept, Problem, Side, Stray},
    ids::{EndpointId, Epoch},
    ipam::is_leasable,
};

impl Auditor<'_> {
    pub(super) fn links(&self, findings: &mut Vec<AuditFinding>) {
        for link in &self.view.dump.links {
            // The router's pair and foreign links have no id.
            let Some((id, epoch)) = parse_host_ifname(&link.name) else {
                self.renamed(link, findings);
                continue;
            };
            if self.is_unjudged(id) {
                continue;
            }
            let record = self.records.get(&id).filter(|r| r.host_ifname.as_str() == link.name);
            if let Some(record) = record {
                if record.host_ifindex != link.ifindex {
                    let problem = EndpointProblem::LinkReplaced {
                        side: Side::Node,
                        name: link.name.clone(),
                        expected: record.host_ifindex,
                        found: link.ifindex,
                    };
                    findings.push(AuditFinding::of_endpoint(record, problem));
                }
                continue;
            }
            let intended = self.view.snapshot.intents.iter().any(|(of, e, _)| *of == id && low_half(*e) == epoch);
            let marked = link.alias.as_deref().is_some_and(|alias| alias.starts_with(&format!("wharf:{id}:")));
            let ours = IfName::parse(&link.name).ok().filter(|_| intended || marked);
            let problem =
                Stray::Link { name: link.name.clone(), ifindex: link.ifindex, id, epoch, ours: ours.is_some() };
            let repair = ours.map(|host_ifname| {
                Repair::RemoveLink(LinkRef {
                    id,
                    epoch: self.full_epoch(id, epoch),
                    host_ifname,
                    host_ifindex: Some(link.ifindex),
                    container: None,
                    owner: LinkOwner::Wharf,
                })
            });
            findings.push(AuditFinding {
                problem: Problem::Stray(problem),
                owner: self.former_owner(id, Some(epoch)),
                repair,
            });
        }
    }

    /// The endpoint works, but look-ups by name fail.
    fn renamed(&self, link: &LinkRow, findings: &mut Vec<AuditFinding>) {
        let Some(mark) = link.alias.as_deref().and_then(Mark::parse) else { return };
        let Some(id) = endpoint_id(u32::from(mark.id)).filter(|id| !self.is_unjudged(*id)) else { return };
        let record = self.records.get(&id).filter(|r| r.epoch.0 == mark.epoch && r.host_ifindex == link.ifindex);
        findings.push(match record {
            Some(record) => AuditFinding::of_endpoint(
                record,
                EndpointProblem::LinkRenamed {
                    side: Side::Node,
                    name: record.host_ifname.to_string(),
                    found: link.name.clone(),
                },
            ),
            None => AuditFinding {
                problem: Problem::Stray(Stray::MarkedLink { name: link.name.clone(), ifindex: link.ifindex }),
                owner: Some(mark.owner.clone()),
                repair: None,
            },
        });
    }

    fn full_epoch(&self, id: EndpointId, low: u32) -> Epoch {
        let known = self.view.snapshot.intents.iter().find(|(of, epoch, _)| *of == id && low_half(*epoch) == low);
        let intended = known.map(|(_, epoch, _)| *epoch);
        intended.or_else(|| self.mark(id, Some(low)).map(|m| Epoch(m.epoch))).unwrap_or(Epoch(u64::from(low)))
    }

    pub(super) fn pins(&self, findings: &mut Vec<AuditFinding>) {
        for path in &self.view.dump.foreign_pins {
            findings.push(AuditFinding {
                problem: Problem::Stray(Stray::ForeignPin { path: path.display().to_string() }),
                owner: None,
                repair: None,
            });
        }
        for (directory, names) in &self.view.dump.pins {
            let Ok(id) = directory.parse::<EndpointId>() else {
                findings.push(AuditFinding {
                    problem: Problem::Stray(Stray::ForeignPin { path: format!("endpoints/{directory}") }),
                    owner: None,
                    repair: None,
                });
                continue;
            };
            if self.is_unjudged(id) {
                continue;
            }
            if !self.records.contains_key(&id) && !self.view.prepared.contains(&id) {
                findings.push(AuditFinding {
                    problem: Problem::Stray(Stray::Pins { id, count: names.len() }),
                    owner: self.former_owner(id, None),
                    repair: Some(Repair::RemovePins(id)),
                });
                continue;
            }
            for name in
                names.iter().map(String::as_str).filter(|n| !REQUIRED_PINS.contains(n) && !LINK_PINS.contains(n))
            {
                findings.push(AuditFinding {
                    problem: Problem::Stray(Stray::ForeignPin { path: format!("endpoints/{id}/{name}") }),
                    owner: None,
                    repair: None,
                });
            }
        }
    }

    /// With a lost record, entries belong to its row.
    pub(super) fn nat(&self, findings: &mut Vec<AuditFinding>) {
        for entry in &self.view.dump.nat {
            let container = entry.container();
            let record = self.records.values().find(|r| r.addresses().any(|ip| ip == container));
            let explained = match record {
                Some(record) => self.is_unjudged(record.id) || record.nat_entries().contains(entry),
                None => self.rows.contains_key(&container) || self.addresses_out_of_service.contains(&container),
            };
            if !explained {
                findings.push(AuditFinding {
                    problem: Problem::Stray(Stray::Nat { entry: *entry }),
                    owner: record.map(|record| describe_record(record)),
                    repair: Some(Repair::RemoveNat(*entry)),
                });
            }
        }
    }

    pub(super) fn endpoint_rows(&self, findings: &mut Vec<AuditFinding>) {
        for row in &self.view.dump.endpoint_rows {
            let id = endpoint_id(row.endpoint_id);
            if id.is_some_and(|id| self.is_unjudged(id)) {
                continue;
            }
            let record = id.and_then(|id| self.records.get(&id)).filter(|r| is_row_of(row, r));
            let Some(record) = record else {
                findings.push(AuditFinding {
                    problem: Problem::Stray(Stray::Row {
                        address: row.address,
                        endpoint_id: row.endpoint_id,
                        epoch: row.epoch,
                    }),
                    owner: id.and_then(|id| self.former_owner(id, Some(low_half(row.epoch)))),
                    repair: Some(Repair::RemoveEndpointRow(row.address, row.epoch)),
                });
                continue;
            };
            let mut differences = Vec::new();
            if row.ifindex != record.host_ifindex {
                differences.push(format!("ifindex {}, not {}", row.ifindex, record.host_ifindex));
            }
            if row.identity != record.identity.0 {
                differences.push(format!("identity {}, not {}", row.identity, record.identity));
            }
            let direct = if record.link_owner.is_wharf() { row.endpoint_id } else { 0 };
            if row.direct != direct {
                differences.push(format!("direct way to slot {}, not {direct}", row.direct));
            }
            if row.mac != record.container_mac {
                differences.push(format!("MAC {}, not {}", row.mac, record.container_mac));
            }
            if !differences.is_empty() {
                let problem = EndpointProblem::Row { address: row.address, found: Some(differences.join(", ")) };
                findings.push(AuditFinding::of_endpoint(record, problem));
            }
        }
    }

    pub(super) fn call_slots(&self, findings: &mut Vec<AuditFinding>) {
        for slot in self.view.call_slots {
            let id = endpoint_id(*slot);
            if id.is_some_and(|id| self.is_unjudged(id) || self.records.contains_key(&id)) {
                continue;
            }
            findings.push(AuditFinding {
                problem: Problem::Stray(Stray::CallSlot { slot: *slot }),
                owner: id.and_then(|id| self.former_owner(id, None)),
                repair: Some(Repair::RemoveCallSlot(*slot)),
            });
        }
    }

    pub(super) fn routes(&self, findings: &mut Vec<AuditFinding>) {
        for route in &self.view.dump.routes {
            if self.is_route_expected(route) || self.is_route_unjudged(route) {
                continue;
            }
            let owner = route.ifindex.and_then(|i| self.link_ids.get(&i)).and_then(|id| self.former_owner(*id, None));
            // The protocol number proves nothing.
            let ours = route.ifindex.is_none_or(|i| {
                self.link_ids.contains_key(&i)
                    || self.view.pool_cidrs.iter().any(|cidr| cidr.contains(&route.destination))
            });
            findings.push(AuditFinding {
                problem: Problem::Stray(Stray::Route { to: route.destination, ifindex: route.ifindex, ours }),
                owner,
                repair: ours.then(|| Repair::RemoveRoute(route.clone())),
            });
        }
    }

    fn is_route_expected(&self, route: &RouteRow) -> bool {
        let destination = route.destination;
        match route.ifindex {
            None => self.view.pool_cidrs.contains(&destination),
            Some(ifindex) => {
                let is_host = destination.prefix_len() == destination.max_prefix_len();
                let to_router = self.view.router.iter().flatten().any(|r| *r == destination.addr());
                let to_endpoint = self
                    .record_of_ifindex
                    .get(&ifindex)
                    .is_some_and(|r| r.addresses().any(|a| a == destination.addr()));
                is_host && (to_router || to_endpoint)
            }
        }
    }

    /// A skipped endpoint's route, or over an unknown link during an operation: the dump is not atomic.
    fn is_route_unjudged(&self, route: &RouteRow) -> bool {
        let Some(ifindex) = route.ifindex else { return false };
        match self.link_ids.get(&ifindex) {
            Some(id) => self.is_unjudged(*id),
            None => !self.view.in_flight.is_empty(),
        }
    }

    pub(super) fn leases(&self, findings: &mut Vec<AuditFinding>) {
        for lease in &self.view.snapshot.leases {
            let problem = match &lease.owner {
                LeaseOwner::Node if self.view.router.contains(&Some(lease.ip)) => continue,
                LeaseOwner::Node => Stray::NodeLease { ip: lease.ip },
                LeaseOwner::Attachment { .. } if !self.is_lease_explained(lease) => Stray::Lease { ip: lease.ip },
                LeaseOwner::Attachment { .. } | LeaseOwner::Caller { .. } => {
                    findings.extend(self.lease_outside(lease));
                    continue;
                }
            };
            findings.push(AuditFinding {
                problem: Problem::Stray(problem),
                owner: Some(describe_owner(&lease.owner)),
                repair: Some(Repair::ReleaseLease(lease.ip)),
            });
        }
    }

    fn lease_outside(&self, lease: &Lease) -> Option<AuditFinding> {
        if self.view.pool_cidrs.iter().any(|cidr| is_leasable(cidr, lease.ip)) {
            return None;
        }
        let id = match &lease.owner {
            // Another finding reports the record, or an operation is in flight.
            LeaseOwner::Attachment { attachment, epoch } => {
                Some(self.record_of_attachment.get(&(attachment, *epoch)).filter(|r| !self.is_unjudged(r.id))?.id)
            }
            // Another finding reports the endpoint; the address may belong to another IPAM.
            LeaseOwner::Caller { .. } if lease.owner.link_without_record().is_some() => return None,
            LeaseOwner::Caller { .. } => None,
            LeaseOwner::Node => return None,
        };
        Some(AuditFinding {
            problem: Problem::Kept(Kept::LeaseOutside { ip: lease.ip, pool: lease.pool.to_string(), id }),
            owner: Some(describe_owner(&lease.owner)),
            repair: None,
        })
    }

    fn is_lease_explained(&self, lease: &Lease) -> bool {
        let LeaseOwner::Attachment { attachment, epoch } = &lease.owner else { return false };
        let held = self.record_of_attachment.get(&(attachment, *epoch)).is_some_and(|r| is_lease_of(lease, r));
        let may_be_held = self.view.snapshot.intents.iter().any(|(id, e, _)| e == epoch && self.in_flight(*id));
        held || may_be_held || self.is_of_record_aside(lease)
    }

    pub(super) fn intents(&self, findings: &mut Vec<AuditFinding>) {
        for (id, epoch, intent) in &self.view.snapshot.intents {
            if self.is_unjudged(*id) {
                continue;
            }
            let record = self.records.get(id).filter(|r| r.epoch == *epoch);
            let (what, owner) = match intent {
                Intent::Create { attachment, .. } => ("create", Some(format!("{attachment} (epoch {epoch})"))),
                Intent::Delete { .. } => ("delete", record.map(|r| describe_record(r))),
            };
            // The delete must resume: its intent stays open.
            let resumed = matches!(intent, Intent::Delete { .. }) && record.is_some();
            let (problem, repair) = if resumed {
                (Stray::Delete { id: *id, epoch: *epoch }, None)
            } else {
                let link = match intent {
                    Intent::Create { link, .. } => link.clone(),
                    Intent::Delete { .. } => None,
                };
                (Stray::Intent { id: *id, epoch: *epoch, what }, Some(Repair::CloseIntent(*id, *epoch, link)))
            };
            findings.push(AuditFinding { problem: Problem::Stray(problem), owner, repair });
        }
    }
}
