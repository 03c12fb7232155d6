//! Findings of rests, records out of service, the deletion queue and the node's objects.

use std::net::IpAddr;

use super::{AuditFinding, Auditor, Lease, LeaseOwner, Repair, describe_owner};
use crate::{
    finding::{Kept, Mender, Problem},
    ids::EndpointId,
};

/// Overdue, milliseconds.
const QUEUE_AGE_MS: u64 = 60_000;

impl Auditor<'_> {
    pub(super) fn rests(&self, findings: &mut Vec<AuditFinding>) {
        for rest in &self.view.snapshot.resting {
            let problem = if let Some(lease) = self.leases.get(&rest.ip) {
                Kept::RestLeased { ip: rest.ip, holder: describe_owner(&lease.owner) }
            } else if !self.view.pool_cidrs.iter().any(|c| c.contains(&rest.ip)) {
                Kept::RestOutside { ip: rest.ip, pool: rest.pool.to_string() }
            } else {
                continue;
            };
            findings.push(AuditFinding {
                problem: Problem::Kept(problem),
                owner: Some(rest.last_owner.clone()),
                repair: Some(Repair::ForgetRest(rest.ip)),
            });
        }
    }

    pub(super) fn records_aside(&self, findings: &mut Vec<AuditFinding>) {
        for (id, out_of_service) in self.out_of_service.iter().filter(|(id, _)| !self.in_flight(**id)) {
            findings.push(AuditFinding {
                problem: Problem::Kept(Kept::RecordAside {
                    id: *id,
                    why: out_of_service.why.clone(),
                    addresses: out_of_service.addresses.clone(),
                }),
                owner: self.owner_aside(*id, &out_of_service.addresses),
                repair: Some(Repair::ReleaseOutOfService(*id)),
            });
        }
        for (key, _, why) in &self.view.snapshot.unreadable {
            let id = EndpointId::try_from(*key).ok();
            if id.is_some_and(|id| self.in_flight(id) || self.out_of_service.contains_key(&id)) {
                continue;
            }
            findings.push(AuditFinding {
                problem: Problem::Kept(Kept::RecordUnreadable { key: *key, why: why.clone() }),
                owner: id.and_then(|id| self.owner_aside(id, &self.addresses_in_kernel(id))),
                repair: id.map(Repair::ReleaseOutOfService),
            });
        }
    }

    /// The record is out of service or unreadable.
    pub(super) fn is_of_record_aside(&self, lease: &Lease) -> bool {
        let row_id = self.rows.get(&lease.ip).and_then(|row| super::endpoint_id(row.endpoint_id));
        self.addresses_out_of_service.contains(&lease.ip) || row_id.is_some_and(|id| self.is_unreadable(id))
    }

    fn addresses_in_kernel(&self, id: EndpointId) -> Vec<IpAddr> {
        let rows = self.view.dump.endpoint_rows.iter().filter(|r| r.endpoint_id == u32::from(id.get()));
        rows.map(|r| r.address).collect()
    }

    fn owner_aside(&self, id: EndpointId, addresses: &[IpAddr]) -> Option<String> {
        let mut leases = addresses.iter().filter_map(|ip| self.leases.get(ip));
        let holder = leases.find(|l| matches!(l.owner, LeaseOwner::Attachment { .. }));
        holder.map(|l| describe_owner(&l.owner)).or_else(|| self.former_owner(id, None))
    }

    pub(super) fn queue_files(&self, findings: &mut Vec<AuditFinding>) {
        for file in self.view.queue {
            let name = || file.name.clone();
            let (problem, repair) = match &file.problem {
                Some(why) => (Kept::QueueFile { name: name(), why: why.clone() }, Repair::RemoveQueueFile(name())),
                None if file.age_ms > QUEUE_AGE_MS => {
                    (Kept::QueuedDelete { name: name(), age_ms: file.age_ms }, Repair::DrainQueue)
                }
                None => continue,
            };
            findings.push(AuditFinding {
                problem: Problem::Kept(problem),
                owner: file.owner.clone(),
                repair: Some(repair),
            });
        }
    }

    pub(super) fn node(&self, findings: &mut Vec<AuditFinding>) {
        for problem in self.view.node.iter().cloned().map(Problem::Node) {
            let repair = (problem.mender() == Mender::Repair).then_some(Repair::EnsureNode);
            findings.push(AuditFinding { problem, owner: Some("node".to_owned()), repair });
        }
    }
}
