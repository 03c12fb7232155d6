//! Upgrade or downgrade across ABI versions: which endpoints a starting agent takes over, and which pins it keeps. Each
//! ABI version has a pin tree; a killed upgrade leaves several. Everything but counters and pins of tcx links can be
//! recreated from the records.

use std::collections::{BTreeMap, BTreeSet};

use wharf_names::mark::Mark;

use crate::{
    endpoint::{EndpointRecord, LinkOwner, parse_host_ifname},
    ids::{EndpointId, Epoch, IfIndex},
    kernel::{ConfigSpec, LinkRow, ProgramSpec},
    store::{Intent, Snapshot},
};

/// Pins of another ABI version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionTree {
    /// ABI version.
    pub version: u32,
    /// With a pin directory.
    pub endpoints: BTreeSet<EndpointId>,
}

/// Actions at start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UpgradePlan {
    /// With a record, a live link and no open delete.
    pub take_over: Vec<EndpointRecord>,
    /// Pins stay until the link's removal: no record, out of service, a renamed link, or an open delete.
    pub keep: BTreeSet<EndpointId>,
}

/// `gone`: recorded endpoints without their plugin's link, which the dump lacks. Pins of other ids carry no traffic and
/// may be removed.
#[must_use]
pub fn plan_upgrade(
    trees: &[VersionTree],
    snapshot: &Snapshot,
    links: &[LinkRow],
    gone: &BTreeSet<EndpointId>,
) -> UpgradePlan {
    let pinned: BTreeSet<EndpointId> = trees.iter().flat_map(|tree| tree.endpoints.iter().copied()).collect();
    let by_name: BTreeMap<&str, IfIndex> = links.iter().map(|link| (link.name.as_str(), link.ifindex)).collect();
    let deleting: BTreeSet<(EndpointId, Epoch)> = snapshot
        .intents
        .iter()
        .filter(|(_, _, intent)| matches!(intent, Intent::Delete { .. }))
        .map(|(id, epoch, _)| (*id, *epoch))
        .collect();
    let has_link = |record: &EndpointRecord| match record.link_owner {
        LinkOwner::Wharf => by_name.get(record.host_ifname.as_str()) == Some(&record.host_ifindex),
        LinkOwner::Plugin { .. } => !gone.contains(&record.id),
    };
    let lives = |record: &&EndpointRecord| {
        pinned.contains(&record.id) && has_link(record) && !deleting.contains(&(record.id, record.epoch))
    };
    let mut plan = UpgradePlan::default();
    let mut taken = BTreeSet::new();
    for record in snapshot.endpoints.iter().filter(lives) {
        if taken.insert(record.id) {
            plan.take_over.push(record.clone());
        }
    }
    plan.keep = links.iter().flat_map(ids_of).filter(|id| pinned.contains(id) && !taken.contains(id)).collect();
    plan
}

/// In name and mark, which differ after a rename.
fn ids_of(link: &LinkRow) -> impl Iterator<Item = EndpointId> + use<> {
    let named = parse_host_ifname(&link.name).map(|(id, _)| id);
    let mark = link.alias.as_deref().and_then(Mark::parse);
    let marked = mark.and_then(|mark| EndpointId::try_from(mark.id).ok());
    named.into_iter().chain(marked)
}

/// An endpoint to take over, as this version specifies it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Takeover {
    pub record: EndpointRecord,
    pub programs: ProgramSpec,
    /// Configuration row.
    pub config: ConfigSpec,
}

/// Result of an upgrade.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Upgraded {
    /// This version's programs are on their hooks.
    pub taken_over: usize,
    /// Their link disappeared meanwhile.
    pub gone: BTreeSet<EndpointId>,
    /// Counters that this version cannot read restart at zero; and the first cause.
    pub counters_lost: Option<(usize, String)>,
    /// Objects of other versions; the next start retries their removal.
    pub left: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{id, record};

    fn tree(version: u32, ids: &[u16]) -> VersionTree {
        VersionTree { version, endpoints: ids.iter().map(|n| id(*n)).collect() }
    }

    fn link(record: &EndpointRecord) -> LinkRow {
        let alias = Some(format!("wharf:{}:{}:net/c/eth0", record.id, record.epoch));
        LinkRow { name: record.host_ifname.to_string(), ifindex: record.host_ifindex, alias }
    }

    fn taken(plan: &UpgradePlan) -> Vec<u16> {
        plan.take_over.iter().map(|r| r.id.get()).collect()
    }

    fn kept(plan: &UpgradePlan) -> Vec<u16> {
        plan.keep.iter().map(|id| id.get()).collect()
    }

    #[test]
    fn living_endpoints_of_every_other_version_are_taken_over() {
        let records = vec![record(1, 10), record(2, 11), record(3, 12), record(4, 13)];
        let links: Vec<_> = records.iter().map(link).collect();
        let snapshot = Snapshot { endpoints: records, ..Snapshot::default() };
        // 3 starts after a killed upgrade from 1 to 2.
        let plan = plan_upgrade(&[tree(1, &[1, 2, 9]), tree(2, &[2, 3])], &snapshot, &links, &BTreeSet::new());
        assert_eq!((taken(&plan), kept(&plan)), (vec![1, 2, 3], vec![]), "{plan:?}");
        assert_eq!(plan_upgrade(&[], &snapshot, &links, &BTreeSet::new()), UpgradePlan::default());
    }

    #[test]
    fn an_endpoint_whose_link_is_gone_or_anothers_is_neither_taken_over_nor_kept() {
        let (gone, replaced) = (record(1, 10), record(2, 11));
        let mut other = link(&replaced);
        other.ifindex = IfIndex(999);
        other.alias = None;
        let snapshot = Snapshot { endpoints: vec![gone, replaced], ..Snapshot::default() };
        let plan = plan_upgrade(&[tree(1, &[1, 2])], &snapshot, &[other], &BTreeSet::new());
        // An interface has the second endpoint's name.
        assert_eq!((taken(&plan), kept(&plan)), (vec![], vec![2]), "{plan:?}");
    }

    #[test]
    fn what_has_a_link_but_no_record_in_service_stays_in_force() {
        let (lost, deleting, renamed) = (record(1, 10), record(2, 11), record(3, 12));
        let mut new_name = link(&renamed);
        new_name.name = "uplink0".to_owned();
        let links = [link(&lost), link(&deleting), new_name];
        let snapshot = Snapshot {
            intents: vec![
                (deleting.id, deleting.epoch, Intent::Delete { no_ip_release: false }),
                (renamed.id, Epoch(3), Intent::Delete { no_ip_release: false }),
            ],
            endpoints: vec![deleting, renamed],
            ..Snapshot::default()
        };
        let plan = plan_upgrade(&[tree(1, &[1, 2, 3, 4])], &snapshot, &links, &BTreeSet::new());
        assert_eq!((taken(&plan), kept(&plan)), (vec![], vec![1, 2, 3]), "{plan:?}");
    }
}
