//! What the kernel, the bpffs and the store hold that does not match.
//!
//! A comparison of two pictures, nothing more: the one of the kernel ([`KernelDump`]) and the one of the store
//! ([`Snapshot`]). Both are taken while the node lives, so endpoints that are being created or deleted are not judged.
//! What is not provably ours is named and has no repair.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    endpoint::{EndpointRecord, IpOwner, parse_host_ifname},
    ids::{Attachment, EndpointId, Epoch, IfIndex, IfName},
    ipam::describe_owner,
    kernel::{EndpointTableRow, KernelDump, LinkRef, LinkRow, RouteRow},
    store::{Intent, Lease, LeaseOwner, Snapshot},
};

mod leaked;
mod missing;

/// What an audit looks at.
#[derive(Debug, Clone, Copy)]
pub struct AuditView<'a> {
    /// The kernel and the bpffs.
    pub dump: &'a KernelDump,
    /// The store.
    pub snapshot: &'a Snapshot,
    /// Ids whose programs were verified ahead of need: pins without an endpoint.
    pub prepared: &'a BTreeSet<EndpointId>,
    /// Ids that are being created or deleted now: not judged.
    pub in_flight: &'a BTreeSet<EndpointId>,
    /// Every CIDR of every pool; each has an unreachable route.
    pub pool_cidrs: &'a [IpNet],
    /// The node's router addresses.
    pub router: [Option<IpAddr>; 2],
}

/// What mends a finding. Each names its object beyond doubt, so that one that comes late does no harm.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Repair {
    /// Remove a veth pair. Of its epoch only the low 32 bits may be known; the name carries those.
    RemoveLink(LinkRef),
    /// Unpin everything of an id.
    RemovePins(EndpointId),
    /// Remove a row of the endpoint table, if it is still of this epoch.
    RemoveEndpointRow(IpAddr, Epoch),
    /// Empty a slot of the program array.
    RemoveCallSlot(u32),
    /// Give a lease back.
    ReleaseLease(IpAddr),
    /// Remove a route.
    RemoveRoute(RouteRow),
    /// Rebuild the endpoint, rows and routes included.
    Regenerate(EndpointId),
    /// Close an intent, after everything of its id and epoch that has no record was removed.
    CloseIntent(EndpointId, Epoch),
}

/// Something that does not match.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditFinding {
    /// Kind of object: `link`, `pin`, `endpoint-row`, `call-slot`, `route`, `lease`, `endpoint`, `intent`.
    pub object: &'static str,
    /// Which one.
    pub subject: String,
    /// What is wrong, both sides named.
    pub problem: String,
    /// Whom it belongs or belonged to, where that is known.
    pub owner: Option<String>,
    /// What mends it; none where nothing does, or where it is not ours to touch.
    pub repair: Option<Repair>,
}

/// Names pinned for each endpoint, whatever the way its programs are attached.
const REQUIRED_PINS: [&str; 5] = ["from_container", "to_container", "deliver", "CONFIG", "METRICS"];
/// Names pinned besides where programs are attached by tcx links: both or, with clsact, neither.
const LINK_PINS: [&str; 2] = ["link_from_container", "link_to_container"];

/// Compares. Empty is healthy. What should not be there comes first and what is missing after it, so that repairs made
/// in this order do not take away again what a rebuild put in place; intents are closed last.
#[must_use]
pub fn audit(view: &AuditView<'_>) -> Vec<AuditFinding> {
    let auditor = Auditor::new(view);
    let mut findings = Vec::new();
    auditor.links(&mut findings);
    auditor.pins(&mut findings);
    auditor.endpoint_rows(&mut findings);
    auditor.call_slots(&mut findings);
    auditor.routes(&mut findings);
    auditor.leases(&mut findings);
    auditor.missing_pool_routes(&mut findings);
    for record in auditor.judged_records() {
        auditor.missing(record, &mut findings);
    }
    auditor.shared_addresses(&mut findings);
    auditor.intents(&mut findings);
    findings
}

/// A view, indexed: a node may hold thousands of endpoints.
struct Auditor<'a> {
    view: &'a AuditView<'a>,
    records: BTreeMap<EndpointId, &'a EndpointRecord>,
    record_of_ifindex: BTreeMap<IfIndex, &'a EndpointRecord>,
    record_of_attachment: BTreeMap<(&'a Attachment, Epoch), &'a EndpointRecord>,
    /// Endpoint id that a host side's name carries, by index; only names that parse.
    link_ids: BTreeMap<IfIndex, EndpointId>,
    link_names: BTreeSet<&'a str>,
    pins: BTreeMap<EndpointId, &'a [String]>,
    rows: BTreeMap<IpAddr, &'a EndpointTableRow>,
    call_slots: BTreeSet<u32>,
    routes: BTreeSet<&'a RouteRow>,
    leases: BTreeMap<IpAddr, &'a Lease>,
}

impl<'a> Auditor<'a> {
    fn new(view: &'a AuditView<'a>) -> Self {
        let (dump, snapshot) = (view.dump, view.snapshot);
        let link_id = |link: &LinkRow| parse_host_ifname(&link.name).map(|(id, _)| (link.ifindex, id));
        let pins = |(directory, names): &'a (String, Vec<String>)| Some((directory.parse().ok()?, names.as_slice()));
        Self {
            view,
            records: snapshot.endpoints.iter().map(|r| (r.id, r)).collect(),
            record_of_ifindex: snapshot.endpoints.iter().map(|r| (r.host_ifindex, r)).collect(),
            record_of_attachment: snapshot.endpoints.iter().map(|r| ((&r.attachment, r.epoch), r)).collect(),
            link_ids: dump.links.iter().filter_map(link_id).collect(),
            link_names: dump.links.iter().map(|l| l.name.as_str()).collect(),
            pins: dump.pins.iter().filter_map(pins).collect(),
            rows: dump.endpoint_rows.iter().map(|r| (r.address, r)).collect(),
            call_slots: dump.call_slots.iter().copied().collect(),
            routes: dump.routes.iter().collect(),
            leases: snapshot.leases.iter().map(|l| (l.ip, l)).collect(),
        }
    }

    fn in_flight(&self, id: EndpointId) -> bool {
        self.view.in_flight.contains(&id)
    }

    fn judged_records(&self) -> impl Iterator<Item = &'a EndpointRecord> {
        self.records.values().copied().filter(|r| !self.in_flight(r.id))
    }

    /// Who an object of which no record tells belonged to, as far as an open intent says. `low` is what is known of its
    /// epoch.
    fn former_owner(&self, id: EndpointId, low: Option<u32>) -> Option<String> {
        self.view.snapshot.intents.iter().find_map(|(of, epoch, intent)| match intent {
            Intent::Create { attachment, .. } if *of == id && low.is_none_or(|low| low == low_half(*epoch)) => {
                Some(format!("{attachment} (epoch {epoch})"))
            }
            _ => None,
        })
    }
}

fn is_row_of(row: &EndpointTableRow, record: &EndpointRecord) -> bool {
    row.endpoint_id == u32::from(record.id.get())
        && row.epoch == record.epoch
        && record.addresses().any(|a| a == row.address)
}

fn is_lease_of(lease: &Lease, record: &EndpointRecord) -> bool {
    match &lease.owner {
        LeaseOwner::Attachment { attachment, epoch } => {
            *attachment == record.attachment
                && *epoch == record.epoch
                && record.addresses().any(|address| address == lease.ip)
        }
        LeaseOwner::Caller { .. } | LeaseOwner::Node => false,
    }
}

fn describe_record(record: &EndpointRecord) -> String {
    format!("{} (endpoint {}, epoch {})", record.attachment, record.id, record.epoch)
}

/// A number from a map, which anyone with the right to write maps may have written.
fn endpoint_id(n: u32) -> Option<EndpointId> {
    u16::try_from(n).ok().and_then(|n| EndpointId::try_from(n).ok())
}

/// What a host side's name carries of an epoch.
fn low_half(epoch: Epoch) -> u32 {
    u32::try_from(epoch.0 & 0xffff_ffff).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
