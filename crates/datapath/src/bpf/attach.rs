//! Attachment of an endpoint's programs, or of the sink, to an interface's hooks. After a change of attach mode,
//! programs are attached before the other mode's are detached. On a hook with both, only tcx runs: Wharf's programs
//! always return a final verdict.

use std::{borrow::Cow, fs, io, path::Path};

use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use nix::{
    errno::Errno,
    net::if_::{if_indextoname, if_nametoindex},
};
use wharf_core::{
    endpoint::{HooksFound, LinkOwner},
    ids::IfName,
    kernel::{AttachMode, Attached, KernelError, KernelErrorKind, LinkRef, Result},
};
use wharf_crash as crash;

use super::{
    Bpf,
    clsact::{self, Wanted},
    pins::{self, LINKS, PROGRAMS, PinTree, SINK},
    tcx,
};
use crate::error::{fail, wrap};

pub(super) const ATTACH: &str = "attach programs";
const DETACH: &str = "detach programs";

#[derive(Clone, Copy)]
pub(super) struct Hook {
    pub(super) attach: TcAttachType,
    pub(super) program: &'static str,
    /// Pin name of the tcx link.
    pub(super) link: &'static str,
    /// Crash points after attaching the programs, and the sink.
    attached: &'static str,
    closed: &'static str,
}

/// The host side's ingress carries the container's egress.
pub(super) const HOOKS: [Hook; 2] = [
    Hook {
        attach: TcAttachType::Ingress,
        program: PROGRAMS[0],
        link: LINKS[0],
        attached: "datapath/attach/after-ingress",
        closed: "datapath/detach/after-ingress",
    },
    Hook {
        attach: TcAttachType::Egress,
        program: PROGRAMS[1],
        link: LINKS[1],
        attached: "datapath/attach/after-egress",
        closed: "datapath/detach/after-egress",
    },
];

fn about(link: &LinkRef) -> String {
    format!("{} (endpoint {}, epoch {})", link.host_ifname, link.id, link.epoch)
}

pub(super) fn index_of(ifname: &str) -> Result<Option<u32>> {
    match if_nametoindex(ifname) {
        Ok(index) => Ok(Some(index)),
        Err(Errno::ENODEV | Errno::ENXIO) => Ok(None),
        Err(e) => Err(wrap("look up link", ifname, &io::Error::from(e))),
    }
}

pub(crate) fn present(link: &LinkRef) -> Result<bool> {
    Ok(here(link)?.is_some())
}

/// Under its current name. Other plugins' links are identified by index.
fn here(link: &LinkRef) -> Result<Option<Cow<'_, LinkRef>>> {
    if link.owner.is_wharf() {
        let index = index_of(link.host_ifname.as_str())?;
        let same = index.is_some_and(|is| link.host_ifindex.is_none_or(|want| want.0 == is));
        return Ok(same.then_some(Cow::Borrowed(link)));
    }
    let Some(index) = link.host_ifindex else { return Ok(None) };
    let name = match if_indextoname(index.0) {
        // nix returns an empty name for a null pointer.
        Ok(name) if !name.is_empty() => name.to_string_lossy().into_owned(),
        Ok(_) | Err(Errno::ENODEV | Errno::ENXIO) => return Ok(None),
        Err(e) => return Err(wrap("look up link", format!("index {index}"), &io::Error::from(e))),
    };
    if name == link.host_ifname.as_str() {
        return Ok(Some(Cow::Borrowed(link)));
    }
    let host_ifname =
        IfName::parse(&name).map_err(|e| fail("look up link", name, KernelErrorKind::Unsupported, e.to_string()))?;
    Ok(Some(Cow::Owned(LinkRef { host_ifname, ..link.clone() })))
}

pub(super) fn open_program(path: &Path) -> Result<SchedClassifier> {
    SchedClassifier::from_pin(path).map_err(|e| wrap("open program", path.display().to_string(), &e))
}

pub(super) fn gone(operation: &'static str, subject: String) -> KernelError {
    fail(operation, subject, KernelErrorKind::NotFound, "the interface is gone, or its index is another's")
}

/// Whether every hook had programs.
fn ensure_tcx(tree: &PinTree, link: &LinkRef, programs: &mut [(Hook, SchedClassifier)]) -> Result<bool> {
    let ifname = link.host_ifname.as_str();
    let mut replaced = true;
    for (hook, program) in programs {
        let pin = tree.endpoint(link.id, hook.link);
        if let Some(old) = tcx::open_on(&pin, ifname, hook.attach)?
            && tcx::put_behind(program, old, &about(link))?
        {
            crash::point(hook.attached);
            continue;
        }
        pins::unpin(&pin)?;
        tcx::attach(program, ifname, hook.attach, LinkOrder::default(), &pin)?;
        crash::point(hook.attached);
        replaced = false;
    }
    let filtered = clsact::release(ifname)?;
    Ok(replaced || filtered)
}

/// Whether every hook had programs.
fn ensure_clsact(tree: &PinTree, link: &LinkRef, programs: &mut [(Hook, SchedClassifier)]) -> Result<bool> {
    let mut linked = 0;
    for (hook, program) in &mut *programs {
        // tcx links of the other mode get the program too: some kernels detach a released link with a delay.
        let pin = tree.endpoint(link.id, hook.link);
        if let Some(old) = tcx::open_on(&pin, link.host_ifname.as_str(), hook.attach)?
            && tcx::put_behind(program, old, &about(link))?
        {
            linked += 1;
        }
    }
    let wanted: Vec<_> = programs
        .iter()
        .map(|(hook, program)| Wanted { hook: hook.attach, program, name: clsact::name(hook.program, link) })
        .collect();
    let filtered = clsact::ensure(link.host_ifname.as_str(), &wanted)?;
    crash::point("datapath/attach/after-filters");
    for hook in HOOKS {
        tcx::release(&tree.endpoint(link.id, hook.link))?;
    }
    Ok(filtered || linked == HOOKS.len())
}

fn reopen_closed(tree: &PinTree, link: &LinkRef) -> Result<()> {
    let closing = tree.closing(&link.host_ifname);
    let names = pins::names(&closing)?;
    if names.is_empty() {
        return pins::remove_dir(&closing);
    }
    for hook in HOOKS.into_iter().filter(|hook| names.iter().any(|n| n == hook.link)) {
        pins::replace(&closing.join(hook.link), &tree.endpoint(link.id, hook.link))?;
    }
    crash::point("datapath/attach/after-reopen");
    pins::remove_dir(&closing)
}

impl Bpf {
    pub(crate) fn ensure_attached(&self, link: &LinkRef) -> Result<Attached> {
        let replaced = self.attach(&self.pins, link)?;
        crash::point("datapath/attach/before-slot");
        self.refresh_slot(link.id)?;
        Ok(if replaced { Attached::Replaced } else { Attached::New })
    }

    pub(super) fn attach(&self, tree: &PinTree, link: &LinkRef) -> Result<bool> {
        let Some(link) = &here(link)? else { return Err(gone(ATTACH, about(link))) };
        reopen_closed(tree, link)?;
        let mut programs = Vec::with_capacity(HOOKS.len());
        for hook in HOOKS {
            programs.push((hook, open_program(&tree.endpoint(link.id, hook.program))?));
        }
        match self.mode_of(link.owner) {
            AttachMode::Tcx => ensure_tcx(tree, link, &mut programs),
            AttachMode::Clsact => ensure_clsact(tree, link, &mut programs),
        }
    }

    pub(crate) fn remove_attached(&self, link: &LinkRef) -> Result<()> {
        let Some(link) = &here(link)? else { return Ok(()) };
        let mut sink = self.sink()?;
        let done = match self.mode_of(link.owner) {
            AttachMode::Tcx => self.sink_tcx(&mut sink, link),
            AttachMode::Clsact => self.sink_clsact(&mut sink, link),
        };
        match done {
            // The interface is gone, or goes with its namespace.
            Err(e) if e.kind == KernelErrorKind::NotFound => Ok(()),
            Err(e) => Err(KernelError { operation: DETACH, ..e }),
            Ok(()) => Ok(()),
        }
    }

    /// Another plugin's link gets filters, which the kernel removes with the link.
    pub(super) fn mode_of(&self, owner: LinkOwner) -> AttachMode {
        match owner {
            LinkOwner::Wharf => self.mode,
            LinkOwner::Plugin { .. } => AttachMode::Clsact,
        }
    }

    /// A plugin's link that was found closed is closed again.
    pub(crate) fn restore(&self, link: &LinkRef) -> Result<()> {
        let LinkOwner::Plugin { hooks } = link.owner else { return Ok(()) };
        let Some(link) = &here(link)? else { return Ok(()) };
        match hooks {
            HooksFound::None | HooksFound::Clsact => clsact::restore(link, hooks == HooksFound::None),
            HooksFound::Closed => self.remove_attached(link),
        }
    }

    fn sink_tcx(&self, sink: &mut SchedClassifier, link: &LinkRef) -> Result<()> {
        let closing = self.pins.closing(&link.host_ifname);
        if let Err(e) = fs::create_dir(&closing)
            && e.kind() != io::ErrorKind::AlreadyExists
        {
            // Never `NotFound`, by which the caller would take the interface for gone.
            return Err(KernelError {
                kind: KernelErrorKind::Other,
                ..wrap("make pin directory", closing.display().to_string(), &e)
            });
        }
        crash::point("datapath/detach/after-directory");
        for hook in HOOKS {
            self.sink_tcx_hook(sink, link, hook, &closing.join(hook.link))?;
            crash::point(hook.closed);
        }
        clsact::release(link.host_ifname.as_str()).map(drop)
    }

    fn sink_tcx_hook(&self, sink: &mut SchedClassifier, link: &LinkRef, hook: Hook, closed: &Path) -> Result<()> {
        let ifname = link.host_ifname.as_str();
        if let Some(old) = tcx::open_on(closed, ifname, hook.attach)? {
            return tcx::put_behind(sink, old, &about(link)).map(drop);
        }
        pins::unpin(closed)?;
        let open = self.pins.endpoint(link.id, hook.link);
        if let Some(old) = tcx::open_on(&open, ifname, hook.attach)? {
            if tcx::put_behind(sink, old, &about(link))? {
                crash::point("datapath/detach/before-pin-moves");
                // Stays until the link is gone.
                return pins::replace(&open, closed);
            }
            return Ok(());
        }
        // Never attached, or replaced by a successor's. The sink goes first on the hook.
        tcx::attach(sink, ifname, hook.attach, LinkOrder::first(), closed)
    }

    fn sink_clsact(&self, sink: &mut SchedClassifier, link: &LinkRef) -> Result<()> {
        let ifname = link.host_ifname.as_str();
        let closing = self.pins.closing(&link.host_ifname);
        // These run before filters: they get the sink first and are released last.
        let mut linked = Vec::new();
        for hook in HOOKS {
            for pin in [self.pins.endpoint(link.id, hook.link), closing.join(hook.link)] {
                if let Some(old) = tcx::open_on(&pin, ifname, hook.attach)? {
                    tcx::put_behind(sink, old, &about(link))?;
                    linked.push(pin);
                }
            }
        }
        let hooks = match link.owner {
            LinkOwner::Wharf => HOOKS.to_vec(),
            LinkOwner::Plugin { .. } => clsact::held(link)?,
        };
        let name = clsact::name(SINK, link);
        let wanted: Vec<_> =
            hooks.iter().map(|hook| Wanted { hook: hook.attach, program: sink, name: name.clone() }).collect();
        if !wanted.is_empty() {
            clsact::ensure(ifname, &wanted)?;
        }
        crash::point("datapath/detach/after-filters");
        if linked.is_empty() {
            return Ok(());
        }
        for pin in linked {
            tcx::release(&pin)?;
        }
        self.forget_closed_dir(&closing)
    }

    pub(crate) fn forget_closed(&self, link: &LinkRef) -> Result<()> {
        self.forget_closed_dir(&self.pins.closing(&link.host_ifname))?;
        self.forget_elsewhere(link.id)
    }

    fn forget_closed_dir(&self, closing: &Path) -> Result<()> {
        for pin in LINKS {
            pins::unpin(&closing.join(pin))?;
        }
        crash::point("datapath/closing/before-directory");
        pins::remove_dir(closing)
    }

    /// Closed links may have vanished while no agent ran.
    pub(super) fn sweep_closed(&self) -> Result<()> {
        for name in pins::names(&self.pins.closing_dir())? {
            if index_of(&name)?.is_none() {
                self.forget_closed_dir(&self.pins.closing_dir().join(name))?;
            }
        }
        Ok(())
    }
}
