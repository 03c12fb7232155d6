//! Upgrade and downgrade: taking endpoints over from the pin trees of other ABI versions, without losing a packet.
//!
//! # What versions agree on
//!
//! These names are the same in every version; every other layout may differ (`pins`):
//!
//! - The tree of version N is `<bpffs>/wharf/v<N>`, with `shared/`, `endpoints/<id>/` and
//!   `closing/<host interface>/`. Every file in these directories is a pin of that version. They have no
//!   subdirectories.
//! - An endpoint's programs are `from_container`, `to_container` and `deliver`. Its tcx links are
//!   `link_from_container` and `link_to_container`, in `endpoints/<id>/` and in `closing/`. A clsact filter has the
//!   same place in every version (`clsact`).
//! - Counters are in the map `METRICS`. They are carried over where the map's shape is this version's.
//!
//! # Steps
//!
//! The endpoints' records are given. From another version's tree only the counters and the pins of tcx links are
//! needed.
//!
//! 1. *Prepare*, for each endpoint: programs and maps are loaded into this version's tree; then the row of `CONFIG`,
//!    the slot of `CALLS` and the rows of `ENDPOINTS` are written, all in maps that no attached program uses yet.
//! 2. *Counters* are copied into the new `METRICS`, in which nothing is counted before the first hook is swapped.
//! 3. *Swap*, for each endpoint: the pins of its tcx links move into this version's tree (the attachments stay as
//!    they are), then its programs replace the other version's, each hook atomically (by link update, or by replacing
//!    the filter).
//! 4. The pins of closing links move into this version's tree. Their sink, a program without maps, keeps dropping.
//! 5. *Remove*: the other version's pins are removed; its shared maps are removed when none of its endpoints is left.
//!
//! Between the first swap and the last, endpoints of both versions exchange packets. The sender's `from_container`
//! uses the tables of its own version, and both versions' tables hold the receiver. A new sender runs the receiver's
//! new `deliver` (prepared in step 1); an old sender runs the old `deliver` (which stays in the old `CALLS` until
//! step 5). Each `deliver` uses the maps of its own version, polices for the same record and redirects to the same
//! interface. Before step 5 an RCU grace period passes, so that no program of the other version still runs when its
//! `CALLS` is emptied.
//!
//! # Failures
//!
//! A failure in steps 1 to 3 puts the other version's programs back on the hooks that were swapped, and removes this
//! version's tree; the caller refuses to start. A failure in steps 4 and 5 leaves unused pins; the next start removes
//! them.
//!
//! After a SIGKILL between any two steps, every hook has programs of one version, pinned in that version's tree, over
//! pinned maps. A start of either version, or of a third one, begins at step 1: existing programs and rows are kept
//! or written again, and other versions' endpoints are taken over again. Counters are not copied again for an
//! endpoint that already has this version's programs on a hook. Packets that the other version counts between the
//! copy and the end of the swap are lost to the counters: milliseconds of traffic. For an endpoint that is swapped
//! only after a SIGKILL, the counts of this version's `deliver` until then are lost too. No reader sees a counter go
//! backward: nobody reads counters during an upgrade.
//!
//! # Endpoints that stay
//!
//! An endpoint that cannot be taken over (no record, see `wharf_core::upgrade`) keeps its pins, its programs and the
//! other version's shared maps until its link is removed. The tables of both versions then hold each other's
//! endpoints. In step 1 the endpoint's `deliver` is put into this version's `CALLS`, and its rows are copied into
//! `ENDPOINTS`. In step 5 the slots of the other version's `CALLS` get the new `deliver` of endpoints that were taken
//! over, so that the new programs police packets from the remaining endpoint. Tables of another shape are not
//! changed: traffic in that direction then goes through the node's stack, if the node forwards, or through the old
//! `deliver`. The other version's table does not learn of endpoints that are created later.
//!
//! # Adding a stateful map
//!
//! A map of the node whose rows mean the same to both versions is pinned in both trees (those of the node's programs, see
//! `shared::share_with_other_versions`): what is noted during the upgrade is in both. Any other map whose content must
//! survive is carried over in step 2, see [`Bpf::carry`]. Only that function may read another version's content; it
//! interprets old rows by their version number.

mod version_1;

use std::{collections::BTreeSet, fs, io, path::Path, sync::atomic::Ordering};

use aya::{maps::PerCpuValues, programs::ProgramInfo};
use nix::net::if_::if_nameindex;
use wharf_common::{
    Counter, abi,
    map::{self, METRICS_MAX},
};
use wharf_core::{
    endpoint::parse_host_ifname,
    ids::{EndpointId, IfIndex},
    kernel::{KernelError, KernelErrorKind, LinkRef, Result},
    upgrade::{Takeover, Upgraded, VersionTree},
};
use wharf_crash as crash;

use super::{
    Bpf,
    attach::{HOOKS, index_of, open_program, present},
    clsact, maps,
    pins::{self, PROGRAMS, PinTree},
    tcx,
};
use crate::{
    error::{fail, wrap},
    netlink::Connection,
};

fn version_names(trees: &[PinTree]) -> String {
    trees.iter().map(PinTree::version_name).collect::<Vec<_>>().join(", ")
}

/// So many endpoints did not go back to the version before; the first failure.
#[derive(Debug, thiserror::Error)]
#[error("{0} of them; the first: {1}")]
struct NotBack(usize, #[source] KernelError);

impl Bpf {
    /// The trees of other ABI versions.
    pub(crate) fn other_versions(&self) -> Result<Vec<VersionTree>> {
        let others = self.pins.others()?;
        others.iter().map(|tree| Ok(VersionTree { version: tree.version(), endpoints: tree.endpoint_ids()? })).collect()
    }

    /// Takes endpoints over from other versions' trees, and removes those trees except the endpoints in `keep`. Calls
    /// `moves` after each endpoint that was prepared or switched.
    ///
    /// # Errors
    /// What failed, and which versions' programs are in force now.
    pub(crate) fn upgrade(
        &self,
        endpoints: &[Takeover],
        keep: &BTreeSet<EndpointId>,
        moves: &dyn Fn(),
    ) -> Result<Upgraded> {
        let others = self.pins.others()?;
        let mut done = Upgraded::default();
        if let Err(error) = self.replace_versions(&others, endpoints, keep, moves, &mut done) {
            let from = version_names(&others);
            let state = match self.fall_back(&others, endpoints) {
                Ok(()) => format!("the programs of {from} are in force as before"),
                Err(why) => format!(
                    "not every endpoint went back to {from} ({why}): programs of both versions are in force, and traffic goes on"
                ),
            };
            let cause = format!(
                "{error}; {state}; start the version that uses {from}, or remove the cause and start this one again"
            );
            let subject = format!("from {from} to v{}", abi::version());
            return Err(KernelError { operation: "upgrade endpoints", subject, cause, kind: error.kind });
        }
        wait_for_programs();
        let stay: BTreeSet<EndpointId> = keep.union(&done.gone).copied().collect();
        for tree in &others {
            if let Err(e) = self.take_closing(tree).and_then(|()| self.remove_version(tree, endpoints, &stay)) {
                done.left.push(e.to_string());
            }
        }
        if let Err(e) = self.note_others() {
            done.left.push(e.to_string());
        }
        crash::point("datapath/upgrade/after-removal");
        Ok(done)
    }

    /// Steps 1 to 3.
    fn replace_versions(
        &self,
        others: &[PinTree],
        endpoints: &[Takeover],
        keep: &BTreeSet<EndpointId>,
        moves: &dyn Fn(),
        done: &mut Upgraded,
    ) -> Result<()> {
        for Takeover { record, programs, config } in endpoints {
            self.ensure_programs(programs)?;
            self.ensure_config(record.id, config)?;
            self.ensure_reachable(record)?;
            moves();
            crash::point("datapath/upgrade/after-prepare");
        }
        for tree in others {
            self.know_those_that_stay(tree, keep)?;
        }
        for link in endpoints.iter().map(|endpoint| LinkRef::of(&endpoint.record)) {
            if self.is_in_force(&self.pins, others, &link)? {
                // An earlier start that was killed took this endpoint over: only this version's map has the newer
                // counts.
                continue;
            }
            if let Err(why) = self.carry(others, &link) {
                done.counters_lost.get_or_insert((0, why.to_string())).0 += 1;
            }
            crash::point("datapath/upgrade/after-counters");
        }
        for endpoint in endpoints {
            let link = LinkRef::of(&endpoint.record);
            self.move_links(others, &self.pins, link.id)?;
            match self.ensure_attached(&link) {
                Ok(_) => done.taken_over += 1,
                // The link was removed with its container; the endpoint's delete removes the rest.
                Err(e) if e.kind == KernelErrorKind::NotFound && !present(&link)? => {
                    done.gone.insert(link.id);
                }
                Err(e) => return Err(e),
            }
            moves();
            crash::point("datapath/upgrade/after-swap");
        }
        Ok(())
    }

    /// True when a program that this tree has pinned for the endpoint is on a hook of its link.
    fn is_in_force(&self, tree: &PinTree, others: &[PinTree], link: &LinkRef) -> Result<bool> {
        let ifname = link.host_ifname.as_str();
        let Some(index) = index_of(ifname)?.filter(|_| tree.endpoint_dir(link.id).is_dir()) else { return Ok(false) };
        let mut connection = Connection::open()?;
        for hook in HOOKS {
            let Some(pinned) = program_id(&tree.endpoint(link.id, hook.program))? else { continue };
            if clsact::program(&mut connection, IfIndex(index), hook.attach)? == Some(pinned) {
                return Ok(true);
            }
            // A tcx link is pinned in the tree of either version: its pin moves before its program is replaced.
            for holder in others.iter().chain([&self.pins]) {
                let attached = tcx::open_on(&holder.endpoint(link.id, hook.link), ifname, hook.attach)?;
                if attached.map(|l| tcx::program_of(&l, ifname)).transpose()? == Some(pinned) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Step 2: copies the content of stateful maps into this version's maps, which are not in use yet. Each row is
    /// overwritten, not added to, so that the step is idempotent.
    fn carry(&self, others: &[PinTree], link: &LinkRef) -> Result<()> {
        let id = link.id;
        let mut metrics = maps::metrics(&self.pins.endpoint(id, map::METRICS))?;
        let mut source = None;
        for tree in others.iter().filter(|tree| tree.endpoint(id, map::METRICS).exists()) {
            // When several versions have counters, those of the version in force are the latest.
            if source.is_none() || self.is_in_force(tree, others, link)? {
                source = Some(tree);
            }
        }
        let (old, lost) = match source.map(|tree| maps::metrics(&tree.endpoint(id, map::METRICS))).transpose() {
            Ok(old) => (old, Ok(())),
            Err(e) => (None, Err(e)),
        };
        let of_version_1 = source.is_some_and(|tree| tree.version() == 1);
        let failed = |e: &(dyn std::error::Error + 'static)| wrap("carry counters", format!("endpoint {id}"), e);
        for row in 0..METRICS_MAX {
            let now = metrics.get(&row, 0).map_err(|e| failed(&e))?;
            let mut wanted = vec![Counter::default(); now.len()];
            if let Some(old) = &old {
                let read = |row: u32| Ok(old.get(&row, 0).map_err(|e| failed(&e))?.to_vec());
                wanted = if of_version_1 { version_1::row(row, read) } else { read(row) }?;
            }
            // Zeros are written too: a failed attempt may have left counts.
            if now[..] != wanted[..] {
                let wanted = PerCpuValues::try_from(wanted).map_err(|e| failed(&e))?;
                metrics.set(row, wanted, 0).map_err(|e| failed(&e))?;
            }
        }
        lost
    }

    /// Moves the pins of an endpoint's tcx links into a tree. The attachments stay as they are.
    fn move_links(&self, from: &[PinTree], to: &PinTree, id: EndpointId) -> Result<()> {
        for (tree, hook) in from.iter().flat_map(|tree| HOOKS.map(|hook| (tree, hook))) {
            let pin = tree.endpoint(id, hook.link);
            if pin.exists() {
                pins::replace(&pin, &to.endpoint(id, hook.link))?;
                crash::point("datapath/upgrade/after-link-moved");
            }
        }
        Ok(())
    }

    /// After a failure: restores the other version's programs on swapped hooks, then removes this version's tree. If
    /// one endpoint cannot be restored, the tree stays: that endpoint's programs need the tables of this version.
    fn fall_back(&self, others: &[PinTree], endpoints: &[Takeover]) -> std::result::Result<(), NotBack> {
        let put_back = |endpoint: &Takeover| self.put_back(others, &LinkRef::of(&endpoint.record)).err();
        let failed: Vec<KernelError> = endpoints.iter().rev().filter_map(put_back).collect();
        let count = failed.len();
        if let Some(first) = failed.into_iter().next() {
            return Err(NotBack(count, first));
        }
        wait_for_programs();
        for endpoint in endpoints {
            if let Err(error) = self.unpin_all(endpoint.record.id) {
                tracing::warn!(endpoint = %endpoint.record.id, %error, "left-over pins of a failed upgrade");
            }
        }
        let removed = match self.pins.in_use() {
            Ok(left) if left.is_empty() => self.remove_shared(),
            // The remaining pins belong to endpoints that this version had before, or failed to unpin and were logged
            // above.
            Ok(_) => Ok(()),
            Err(e) => Err(e),
        };
        if let Err(error) = removed {
            tracing::warn!(%error, "left-over pins of a failed upgrade");
        }
        Ok(())
    }

    fn put_back(&self, others: &[PinTree], link: &LinkRef) -> Result<()> {
        let complete = |tree: &&PinTree| HOOKS.iter().all(|hook| tree.endpoint(link.id, hook.program).exists());
        let in_force = self.is_in_force(&self.pins, others, link)?;
        let mut trees = others.iter().filter(|tree| tree.endpoint_dir(link.id).is_dir());
        // If the endpoint's programs were never replaced, its link pins go back to any tree: they hold the
        // attachment.
        let tree = trees.clone().find(complete).or_else(|| trees.next().filter(|_| !in_force)).ok_or_else(|| {
            let cause = "no other version has its programs any more";
            fail("attach programs", format!("endpoint {}", link.id), KernelErrorKind::NotFound, cause)
        })?;
        self.move_links(std::slice::from_ref(&self.pins), tree, link.id)?;
        if in_force {
            self.attach(tree, link)?;
        }
        crash::point("datapath/upgrade/after-put-back");
        Ok(())
    }

    /// Step 4.
    fn take_closing(&self, tree: &PinTree) -> Result<()> {
        for name in pins::names(&tree.closing_dir())? {
            let (old, own) = (tree.closing_dir().join(&name), self.pins.closing_dir().join(&name));
            if index_of(&name)?.is_some() {
                fs::create_dir_all(&own).map_err(|e| wrap("make pin directory", own.display().to_string(), &e))?;
                for pin in pins::names(&old)? {
                    pins::replace(&old.join(&pin), &own.join(&pin))?;
                    crash::point("datapath/upgrade/after-closing-moved");
                }
            }
            pins::remove_files(&old)?;
        }
        Ok(())
    }

    /// Step 5.
    fn remove_version(&self, tree: &PinTree, endpoints: &[Takeover], stay: &BTreeSet<EndpointId>) -> Result<()> {
        let there = tree.endpoint_ids()?;
        if !there.is_disjoint(stay) {
            self.tell_those_that_stay(tree, endpoints)?;
        }
        for id in there.difference(stay) {
            pins::remove_files(&tree.endpoint_dir(*id))?;
            crash::point("datapath/upgrade/after-endpoint-removed");
        }
        self.remove_unused_version(tree)
    }

    /// Adds the endpoints that stay with another version to this version's tables.
    fn know_those_that_stay(&self, tree: &PinTree, keep: &BTreeSet<EndpointId>) -> Result<()> {
        let mut known = BTreeSet::new();
        for id in tree.endpoint_ids()?.intersection(keep) {
            // An endpoint of this version may have taken the same id.
            if self.pins.endpoint_dir(*id).is_dir() {
                continue;
            }
            if put_deliver(&self.pins, tree, *id)? {
                known.insert(u32::from(id.get()));
            }
        }
        let Some(rows) = known_shape(maps::endpoints(&tree.shared(map::ENDPOINTS)))? else { return Ok(()) };
        let mut own = self.endpoints()?;
        let failed = |e: &(dyn std::error::Error + 'static)| wrap("copy endpoint rows", map::ENDPOINTS, e);
        for row in rows.iter() {
            let (key, row) = row.map_err(|e| failed(&e))?;
            if known.contains(&u32::from(row.endpoint_id)) {
                own.insert(key, row, 0).map_err(|e| failed(&e))?;
            }
        }
        crash::point("datapath/upgrade/after-kept");
        Ok(())
    }

    /// Puts the new `deliver` of taken-over endpoints into the other version's `CALLS`, for the endpoints that stay
    /// there.
    fn tell_those_that_stay(&self, tree: &PinTree, endpoints: &[Takeover]) -> Result<()> {
        if known_shape(maps::calls(&tree.shared(map::CALLS)))?.is_none() {
            return Ok(());
        }
        endpoints.iter().try_for_each(|endpoint| put_deliver(tree, &self.pins, endpoint.record.id).map(drop))
    }

    /// Removes another version's shared maps and tree if it has no endpoint left.
    fn remove_unused_version(&self, tree: &PinTree) -> Result<()> {
        if !tree.in_use()?.is_empty() {
            return Ok(());
        }
        pins::remove_files(&tree.shared_dir())?;
        crash::point("datapath/upgrade/after-shared-removed");
        for dir in [tree.endpoints_dir(), tree.closing_dir()] {
            pins::remove_dir(&dir)?;
        }
        pins::remove_dir(tree.root())
    }

    /// Records whether other versions have pins, so that a delete need not list them.
    pub(super) fn note_others(&self) -> Result<()> {
        self.beside_others.store(!self.pins.others()?.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// After a link was removed: removes other versions' pins for its endpoint, unless another link has the same id.
    pub(super) fn forget_elsewhere(&self, id: EndpointId) -> Result<()> {
        if !self.beside_others.load(Ordering::Relaxed) || has_link(id)? {
            return Ok(());
        }
        for tree in self.pins.others()? {
            pins::remove_files(&tree.endpoint_dir(id))?;
            self.remove_unused_version(&tree)?;
        }
        self.note_others()
    }
}

/// Puts an endpoint's `deliver` from one tree into the `CALLS` of another. False when the first tree has no
/// `deliver`.
fn put_deliver(calls_of: &PinTree, deliver_of: &PinTree, id: EndpointId) -> Result<bool> {
    let failed = |e: &(dyn std::error::Error + 'static)| wrap("fill call slot", format!("endpoint {id}"), e);
    let deliver = match open_program(&deliver_of.endpoint(id, PROGRAMS[2])) {
        Ok(deliver) => deliver,
        Err(e) if e.kind == KernelErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    let mut calls = maps::calls(&calls_of.shared(map::CALLS))?;
    calls.set(u32::from(id.get()), deliver.fd().map_err(|e| failed(&e))?, 0).map_err(|e| failed(&e))?;
    Ok(true)
}

/// Id of a pinned program; `None` when it is not pinned.
fn program_id(path: &Path) -> Result<Option<u32>> {
    match ProgramInfo::from_pin(path).map_err(|e| wrap("read program", path.display().to_string(), &e)) {
        Ok(info) => Ok(Some(info.id())),
        Err(e) if e.kind == KernelErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// A map of another version; `None` when it is not pinned, or its shape is not this version's.
fn known_shape<T>(opened: Result<T>) -> Result<Option<T>> {
    match opened {
        Ok(map) => Ok(Some(map)),
        Err(e) if matches!(e.kind, KernelErrorKind::Conflict | KernelErrorKind::NotFound) => Ok(None),
        Err(e) => Err(e),
    }
}

/// True when an interface of this namespace has this endpoint id in its name.
fn has_link(id: EndpointId) -> Result<bool> {
    let all = if_nameindex().map_err(|e| wrap("list links", "names", &io::Error::from(e)))?;
    Ok(all.iter().any(|link| link.name().to_str().ok().and_then(parse_host_ifname).is_some_and(|(of, _)| of == id)))
}

/// Waits until every program that was running at the call has ended: a program of another version may still be about
/// to read its `CALLS`.
fn wait_for_programs() {
    /// `MEMBARRIER_CMD_GLOBAL` of `linux/membarrier.h`: a grace period of RCU, which programs run under.
    const GLOBAL: libc::c_int = 1;
    // SAFETY: the call takes three integers and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if result != 0 {
        // The kernel lacks membarrier or has `nohz_full` processors. The removals that follow take longer than a
        // program runs.
        tracing::debug!(error = %io::Error::last_os_error(), "membarrier");
    }
}
