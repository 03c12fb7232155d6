//! Upgrade and downgrade: takeover of endpoints from other ABI versions without packet loss.
//!
//! All versions agree on (names in `pins`): a version's directories; the pins of an endpoint's programs and tcx links;
//! the place of a clsact filter (`clsact`). `METRICS` is copied if its shape is this version's.
//!
//! # Steps
//!
//! 1. *Prepare* each endpoint from its record: load programs and maps into this version's tree, then write the row of
//!    `CONFIG`, the slot of `CALLS` and the rows of `ENDPOINTS`. No attached program uses these maps yet.
//! 2. Copy the *counters* into the new `METRICS`.
//! 3. *Swap* each endpoint: move its tcx link pins into this version's tree, then replace the programs on each hook
//!    atomically.
//! 4. Move the pins of closing links. Their sink keeps dropping.
//! 5. After an RCU grace period, *remove* the other version's pins, and its shared maps when no endpoint needs them.
//!
//! # Failures
//!
//! A failure in steps 1 to 3 restores the other version's programs and removes this version's tree; the caller refuses
//! to start. A failure in steps 4 and 5 leaves unused pins, which the next start removes.
//!
//! After a SIGKILL, every hook has programs of one version, pinned in that version's tree, over pinned maps. A start of
//! any version begins at step 1, but copies no counters for an endpoint with this version's programs on a hook. Counts
//! between copy and swap are lost; after a SIGKILL, also this version's counts before the swap.
//!
//! # Endpoints that stay
//!
//! An endpoint without a usable record (`wharf_core::upgrade`) keeps its pins, programs and the other version's shared
//! maps until its link is removed. Step 1 adds its `deliver` and rows to this version's tables; step 5 adds the new
//! `deliver` of other endpoints to the other version's `CALLS`. If a table has another shape, that direction uses the
//! node's stack, if the node forwards, or the old `deliver`.
//!
//! # Adding a stateful map
//!
//! List a node map whose rows mean the same to both versions in `shared::OF_ALL_VERSIONS`. Copy any other map whose
//! content must survive in [`Bpf::carry`].

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

#[derive(Debug, thiserror::Error)]
#[error("{0} of them; the first: {1}")]
struct NotBack(usize, #[source] KernelError);

impl Bpf {
    pub(crate) fn other_versions(&self) -> Result<Vec<VersionTree>> {
        let others = self.pins.others()?;
        others.iter().map(|tree| Ok(VersionTree { version: tree.version(), endpoints: tree.endpoint_ids()? })).collect()
    }

    /// Removes other versions' trees except for `keep`. Calls `moves` after each prepared or swapped endpoint.
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
                // After a killed start, this version has the newer counts.
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
                // The endpoint's delete removes the rest.
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

    /// Whether a hook of the link has a program of `tree`.
    fn is_in_force(&self, tree: &PinTree, others: &[PinTree], link: &LinkRef) -> Result<bool> {
        let ifname = link.host_ifname.as_str();
        let Some(index) = index_of(ifname)?.filter(|_| tree.endpoint_dir(link.id).is_dir()) else { return Ok(false) };
        let mut connection = Connection::open()?;
        for hook in HOOKS {
            let Some(pinned) = program_id(&tree.endpoint(link.id, hook.program))? else { continue };
            if clsact::program(&mut connection, IfIndex(index), hook.attach)? == Some(pinned) {
                return Ok(true);
            }
            // The pin moves before its program is replaced.
            for holder in others.iter().chain([&self.pins]) {
                let attached = tcx::open_on(&holder.endpoint(link.id, hook.link), ifname, hook.attach)?;
                if attached.map(|l| tcx::program_of(&l, ifname)).transpose()? == Some(pinned) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Step 2. Idempotent.
    fn carry(&self, others: &[PinTree], link: &LinkRef) -> Result<()> {
        let id = link.id;
        let mut metrics = maps::metrics(&self.pins.endpoint(id, map::METRICS))?;
        let mut source = None;
        for tree in others.iter().filter(|tree| tree.endpoint(id, map::METRICS).exists()) {
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
            // Zeros too: a failed attempt may have left counts.
            if now[..] != wanted[..] {
                let wanted = PerCpuValues::try_from(wanted).map_err(|e| failed(&e))?;
                metrics.set(row, wanted, 0).map_err(|e| failed(&e))?;
            }
        }
        lost
    }

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

    /// This version's tree stays if an endpoint's programs still need it.
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
        // Without a swap, any tree may have the link pins.
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

    fn know_those_that_stay(&self, tree: &PinTree, keep: &BTreeSet<EndpointId>) -> Result<()> {
        let mut known = BTreeSet::new();
        for id in tree.endpoint_ids()?.intersection(keep) {
            // This version may have an endpoint with the id.
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
                self.increase_generations([key.generation_slot()])?;
            }
        }
        crash::point("datapath/upgrade/after-kept");
        Ok(())
    }

    fn tell_those_that_stay(&self, tree: &PinTree, endpoints: &[Takeover]) -> Result<()> {
        if known_shape(maps::calls(&tree.shared(map::CALLS)))?.is_none() {
            return Ok(());
        }
        endpoints.iter().try_for_each(|endpoint| put_deliver(tree, &self.pins, endpoint.record.id).map(drop))
    }

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

    pub(super) fn note_others(&self) -> Result<()> {
        self.beside_others.store(!self.pins.others()?.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// The pins stay if another link has the id.
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

/// False without `deliver`.
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

fn program_id(path: &Path) -> Result<Option<u32>> {
    match ProgramInfo::from_pin(path).map_err(|e| wrap("read program", path.display().to_string(), &e)) {
        Ok(info) => Ok(Some(info.id())),
        Err(e) if e.kind == KernelErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// `None` when the map is not pinned, or has another shape.
fn known_shape<T>(opened: Result<T>) -> Result<Option<T>> {
    match opened {
        Ok(map) => Ok(Some(map)),
        Err(e) if matches!(e.kind, KernelErrorKind::Conflict | KernelErrorKind::NotFound) => Ok(None),
        Err(e) => Err(e),
    }
}

fn has_link(id: EndpointId) -> Result<bool> {
    let all = if_nameindex().map_err(|e| wrap("list links", "names", &io::Error::from(e)))?;
    Ok(all.iter().any(|link| link.name().to_str().ok().and_then(parse_host_ifname).is_some_and(|(of, _)| of == id)))
}

fn wait_for_programs() {
    /// `linux/membarrier.h`: an RCU grace period, which covers programs.
    const GLOBAL: libc::c_int = 1;
    // SAFETY: the call takes three integers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if result != 0 {
        // No membarrier, or `nohz_full` processors. The removals take longer than a program runs.
        tracing::debug!(error = %io::Error::last_os_error(), "membarrier");
    }
}
