//! What is kept aside: addresses that rest, records out of service, the deletion queue; and the node's own part.

use std::net::IpAddr;

use super::{AuditFinding, Auditor, Lease, LeaseOwner, Repair, describe_owner};
use crate::ids::EndpointId;

/// A deletion record older than this, milliseconds, should have been worked off.
const QUEUE_AGE_MS: u64 = 60_000;

impl Auditor<'_> {
    /// An address rests or is leased, and what rests is a pool's.
    pub(super) fn rests(&self, findings: &mut Vec<AuditFinding>) {
        for rest in &self.view.snapshot.resting {
            let problem = if let Some(lease) = self.leases.get(&rest.ip) {
                format!("rests, and is leased to {}; the lease counts", describe_owner(&lease.owner))
            } else if !self.view.pool_cidrs.iter().any(|c| c.contains(&rest.ip)) {
                format!("rests, but no pool has it today (it was of pool {})", rest.pool)
            } else {
                continue;
            };
            findings.push(AuditFinding {
                object: "rest",
                subject: rest.ip.to_string(),
                problem,
                owner: Some(rest.last_owner.clone()),
                repair: Some(Repair::ForgetRest(rest.ip)),
            });
        }
    }

    /// Records that are out of service, and those that cannot be read.
    pub(super) fn records_aside(&self, findings: &mut Vec<AuditFinding>) {
        for (id, quarantined) in self.quarantined.iter().filter(|(id, _)| !self.in_flight(**id)) {
            findings.push(AuditFinding {
                object: "record",
                subject: id.to_string(),
                problem: format!(
                    "out of service: {}; its id and addresses ({}) stay reserved until its container is deleted",
                    quarantined.why,
                    in_words(&quarantined.addresses)
                ),
                owner: self.owner_aside(*id, &quarantined.addresses),
                repair: Some(Repair::ReleaseQuarantined(*id)),
            });
        }
        for (key, _, why) in &self.view.snapshot.unreadable {
            let id = EndpointId::try_from(*key).ok();
            if id.is_some_and(|id| self.in_flight(id) || self.quarantined.contains_key(&id)) {
                continue;
            }
            findings.push(AuditFinding {
                object: "record",
                subject: key.to_string(),
                problem: format!("cannot be read: {why}; it is taken out of service when it fails at three starts"),
                owner: id.and_then(|id| self.owner_aside(id, &self.addresses_in_kernel(id))),
                repair: id.map(Repair::ReleaseQuarantined),
            });
        }
    }

    /// Is it the lease of a record that is out of service or cannot be read?
    pub(super) fn is_of_record_aside(&self, lease: &Lease) -> bool {
        let row_id = self.rows.get(&lease.ip).and_then(|row| super::endpoint_id(row.endpoint_id));
        self.quarantined_addresses.contains(&lease.ip) || row_id.is_some_and(|id| self.is_unreadable(id))
    }

    fn addresses_in_kernel(&self, id: EndpointId) -> Vec<IpAddr> {
        let rows = self.view.dump.endpoint_rows.iter().filter(|r| r.endpoint_id == u32::from(id.get()));
        rows.map(|r| r.address).collect()
    }

    /// Whose a record is that cannot be asked: the leases of its addresses tell, or the mark on its link.
    fn owner_aside(&self, id: EndpointId, addresses: &[IpAddr]) -> Option<String> {
        let mut leases = addresses.iter().filter_map(|ip| self.leases.get(ip));
        let holder = leases.find(|l| matches!(l.owner, LeaseOwner::Attachment { .. }));
        holder.map(|l| describe_owner(&l.owner)).or_else(|| self.former_owner(id, None))
    }

    /// Deletes that nobody took up, and files that are no deletes.
    pub(super) fn queue_files(&self, findings: &mut Vec<AuditFinding>) {
        for file in self.view.queue {
            let (problem, repair) = match &file.problem {
                Some(why) => (format!("of no use: {why}"), Repair::RemoveQueueFile(file.name.clone())),
                None if file.age_ms > QUEUE_AGE_MS => {
                    let age = file.age_ms / 1_000;
                    (format!("a delete that waits for {age} s and was not taken up"), Repair::DrainQueue)
                }
                None => continue,
            };
            findings.push(AuditFinding {
                object: "queue-file",
                subject: file.name.clone(),
                problem,
                owner: file.owner.clone(),
                repair: Some(repair),
            });
        }
    }

    /// The node's own part.
    pub(super) fn node(&self, findings: &mut Vec<AuditFinding>) {
        for mismatch in self.view.node {
            findings.push(AuditFinding {
                object: "node",
                subject: format!("{} {}", mismatch.object, mismatch.subject),
                problem: mismatch.problem.clone(),
                owner: Some("node".to_owned()),
                repair: Some(Repair::EnsureNode),
            });
        }
    }
}

fn in_words(addresses: &[IpAddr]) -> String {
    if addresses.is_empty() {
        return "none known".to_owned();
    }
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
