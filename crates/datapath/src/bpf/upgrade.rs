//! Upgrade and downgrade: taking endpoints over from the pin trees of other ABI versions, without losing a packet.
//!
//! # What versions agree on
//!
//! Every other layout may differ; these names may not, in any version (`pins`):
//!
//! - The tree of version N is `<bpffs>/wharf/v<N>`, with `shared/`, `endpoints/<id>/` and `closing/<host interface>/`. Every
//!   file in those directories is a pin of that version. There are no directories below them.
//! - An endpoint's programs are `from_container`, `to_container` and `deliver`, its tcx links `link_from_container` and
//!   `link_to_container`, there and in `closing/`. A clsact filter has the same place in every version (`clsact`).
//! - Counters are a map `METRICS`. They are carried over where its shape is this version's.
//!
//! # Steps
//!
//! The endpoints' records are given; a tree holds nothing else that is needed but the counters and the pins of tcx links.
//!
//! 1. *Prepare*, for each endpoint: programs and maps are loaded into this version's tree, the row of `CONFIG` is written, then
//!    the slot of `CALLS` and the rows of `ENDPOINTS`, all in maps that no program on a hook uses yet.
//! 2. *Counters* are copied into the new `METRICS`, in which nothing is counted before the first hook is swapped.
//! 3. *Swap*, for each endpoint: the pins of its tcx links move into this version's tree (the attachment stays as it is), then
//!    its programs replace the other version's, each hook in one step (link update, or the filter in place).
//! 4. The pins of closing links move over; their sink, a program without maps, goes on dropping.
//! 5. *Remove*: the other version's pins go; its shared maps when no endpoint of it is left.
//!
//! Between the first swap and the last, endpoints of both versions exchange packets. The sender's `from_container` looks into
//! the tables of its own version, and finds the receiver in both: a new sender runs the receiver's new `deliver` (prepared in
//! step 1), an old one its old `deliver` (which stays in the old `CALLS` until step 5). Either runs over the maps of its own
//! version, polices for the same record and redirects to the same interface. Before step 5 a grace period of RCU passes, so
//! that no program of the other version still runs when its `CALLS` is emptied.
//!
//! # Failures
//!
//! A failure in steps 1 to 3 puts the other version's programs back on the hooks that were swapped, and removes this version's
//! tree; the caller refuses to start. A failure in steps 4 and 5 leaves pins behind that nothing uses; the next start
//! removes them.
//!
//! A SIGKILL between any two steps leaves every hook with programs of one version, pinned in its tree, over maps that are
//! pinned. A start of either version, or of a third, begins at step 1: what is there is kept or written once more, and
//! what another version holds is taken over again. Only the counters of an endpoint that has this version's programs on a hook
//! already are not copied again. What the other version counted between the copy and the end of the swap is not carried:
//! milliseconds of traffic; for an endpoint that is swapped only after a SIGKILL, what this version's `deliver` counted until
//! then. Counters never go backward: nobody reads them in between.
//!
//! # Endpoints that stay
//!
//! An endpoint that cannot be taken over (no record, see `wharf_core::upgrade`) keeps its pins, programs and the other
//! version's shared maps until its link is removed. The tables of both versions then know each other's endpoints: in step 1 its
//! `deliver` is put into this version's `CALLS`, and its rows are copied into `ENDPOINTS`; in step 5 the slots of the other
//! version's `CALLS` get the new `deliver` of endpoints that were taken over, so that these police what they receive from it.
//! Tables of another shape are left as they are: traffic in that direction then takes the node's stack, if the node
//! forwards, or the old `deliver`. The other version's table does not learn of endpoints that come later.
//!
//! # Adding a stateful map
//!
//! A map whose content must outlive an upgrade (connections, say) is carried in step 2, see [`Bpf::carry`]: that is the one
//! place that may read another version's content. What an old version's rows mean is decided there by its number.

mod version_1;

use std::{collections::BTreeSet, fs, io, path::Path, sync::atomic::Ordering};

use aya::{maps::PerCpuValues, programs::ProgramInfo};
use nix::net::if_::if_nameindex;
use wharf_common::{
    ABI_VERSION, Counter,
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

impl Bpf {
    /// The trees of other ABI versions.
    pub(crate) fn other_versions(&self) -> Result<Vec<VersionTree>> {
        let others = self.pins.others()?;
        others.iter().map(|tree| Ok(VersionTree { version: tree.version(), endpoints: tree.endpoint_ids()? })).collect()
    }

    /// Takes endpoints over from other versions' trees, and removes those trees but for the endpoints to `keep`.
    ///
    /// # Errors
    /// What failed, and which versions' programs are in force now.
    pub(crate) fn upgrade(&self, endpoints: &[Takeover], keep: &BTreeSet<EndpointId>) -> Result<Upgraded> {
        let others = self.pins.others()?;
        let mut done = Upgraded::default();
        if let Err(error) = self.replace_versions(&others, endpoints, keep, &mut done) {
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
            let subject = format!("from {from} to v{ABI_VERSION}");
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
        done: &mut Upgraded,
    ) -> Result<()> {
        for Takeover { record, programs, config } in endpoints {
            self.ensure_programs(programs)?;
            self.ensure_config(record.id, config)?;
            self.ensure_reachable(record)?;
            crash::point("datapath/upgrade/after-prepare");
        }
        for tree in others {
            self.know_those_that_stay(tree, keep)?;
        }
        for link in endpoints.iter().map(|endpoint| LinkRef::of(&endpoint.record)) {
            if self.is_in_force(&self.pins, others, &link)? {
                // Taken over by a start that was killed: what was counted since is in this version's map alone.
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
                // With its container: its delete removes the rest.
                Err(e) if e.kind == KernelErrorKind::NotFound && !present(&link)? => {
                    done.gone.insert(link.id);
                }
                Err(e) => return Err(e),
            }
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

    /// Step 2: carries the content of stateful maps into this version's, which nothing uses yet. Each row is written as it was,
    /// not added to, so that a second attempt does no harm.
    fn carry(&self, others: &[PinTree], link: &LinkRef) -> Result<()> {
        let id = link.id;
        let mut metrics = maps::metrics(&self.pins.endpoint(id, map::METRICS))?;
        let mut source = None;
        for tree in others.iter().filter(|tree| tree.endpoint(id, map::METRICS).exists()) {
            // Where several have some, those in force are the latest.
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
            // Zeros too: an attempt that failed may have left something.
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

    /// After a failure: puts the other version's programs back where this one's are, then removes this version's tree. When an
    /// endpoint cannot go back, everything stays as it is: its programs need the tables of this version.
    fn fall_back(&self, others: &[PinTree], endpoints: &[Takeover]) -> std::result::Result<(), String> {
        let mut failed = Vec::new();
        for endpoint in endpoints.iter().rev() {
            let link = LinkRef::of(&endpoint.record);
            if let Err(e) = self.put_back(others, &link) {
                failed.push(e.to_string());
            }
        }
        if let Some(first) = failed.first() {
            return Err(format!("{} of them; the first: {first}", failed.len()));
        }
        wait_for_programs();
        for endpoint in endpoints {
            if let Err(error) = self.unpin_all(endpoint.record.id) {
                tracing::warn!(endpoint = %endpoint.record.id, %error, "left-over pins of a failed upgrade");
            }
        }
        let removed = match self.pins.in_use() {
            Ok(left) if left.is_empty() => self.remove_shared(),
            // Of endpoints that this version had before; or not ours, and told above.
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
        // Where its programs were never replaced, the pins of its links go back to any tree: they hold the attachment.
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

    /// Puts those that stay in another version into this version's tables.
    fn know_those_that_stay(&self, tree: &PinTree, keep: &BTreeSet<EndpointId>) -> Result<()> {
        let mut known = BTreeSet::new();
        for id in tree.endpoint_ids()?.intersection(keep) {
            // An endpoint of this version may have the id again.
            if self.pins.endpoint_dir(*id).is_dir() {
                continue;
            }
            if put_deliver(&self.pins, tree, *id)? {
                known.insert(u32::from(id.get()));
            }
        }
        let Some(rows) = known_shape(maps::endpoints(&tree.shared(map::ENDPOINTS)))? else { return Ok(()) };
        let mut own = maps::endpoints(&self.pins.shared(map::ENDPOINTS))?;
        let failed = |e: &(dyn std::error::Error + 'static)| wrap("copy endpoint rows", map::ENDPOINTS, e);
        for row in rows.iter() {
            let (key, row) = row.map_err(|e| failed(&e))?;
            if known.contains(&row.endpoint_id) {
                own.insert(key, row, 0).map_err(|e| failed(&e))?;
            }
        }
        crash::point("datapath/upgrade/after-kept");
        Ok(())
    }

    /// Puts the new `deliver` of those that were taken over into the other version's `CALLS`, for those that stay.
    fn tell_those_that_stay(&self, tree: &PinTree, endpoints: &[Takeover]) -> Result<()> {
        if known_shape(maps::calls(&tree.shared(map::CALLS)))?.is_none() {
            return Ok(());
        }
        endpoints.iter().try_for_each(|endpoint| put_deliver(tree, &self.pins, endpoint.record.id).map(drop))
    }

    /// Removes what endpoints of another version shared; none of them is left.
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

    /// Remembers whether other versions have pins, so that a delete need not look.
    pub(super) fn note_others(&self) -> Result<()> {
        self.beside_others.store(!self.pins.others()?.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// After a link was removed: removes what other versions have pinned for its endpoint, if no other link has its id.
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

/// Puts the `deliver` that a tree holds for an endpoint into the `CALLS` of another. False when it holds none.
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

/// True when an interface of this namespace has a name with this id.
fn has_link(id: EndpointId) -> Result<bool> {
    let all = if_nameindex().map_err(|e| wrap("list links", "names", &io::Error::from(e)))?;
    Ok(all.iter().any(|link| link.name().to_str().ok().and_then(parse_host_ifname).is_some_and(|(of, _)| of == id)))
}

/// Waits until programs that ran when this was called have ended: one that another version's hook started may be about to look
/// into its `CALLS`.
fn wait_for_programs() {
    /// `MEMBARRIER_CMD_GLOBAL` of `linux/membarrier.h`: a grace period of RCU, which programs run under.
    const GLOBAL: libc::c_int = 1;
    // SAFETY: the call takes three integers and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if result != 0 {
        // Not compiled in, or `nohz_full` processors. The removals that follow take longer than a program runs.
        tracing::debug!(error = %io::Error::last_os_error(), "membarrier");
    }
}
