//! What stands on an interface's hooks: an endpoint's programs, or the sink.

use std::{fs, io, path::Path};

use aya::programs::{
    LinkOrder, ProgramError, SchedClassifier, TcAttachType,
    links::{FdLink, LinkError, PinnedLink},
    tc::{SchedClassifierLink, TcAttachOptions, TcError},
};
use nix::{errno::Errno, net::if_::if_nametoindex};
use wharf_core::{
    ids::EndpointId,
    kernel::{AttachMode, Attached, KernelError, KernelErrorKind, LinkRef, Result},
};

use super::{
    Bpf, clsact,
    pins::{self, LINKS, PROGRAMS, SINK},
};
use crate::error::{fail, io_cause, wrap};

const ATTACH: &str = "attach programs";
const DETACH: &str = "detach programs";

/// The hooks, with the index of their program's and link's pin names. The host side's ingress is what the container
/// sends.
pub(crate) const HOOKS: [(TcAttachType, &str, &str); 2] =
    [(TcAttachType::Ingress, PROGRAMS[0], LINKS[0]), (TcAttachType::Egress, PROGRAMS[1], LINKS[1])];

fn about(link: &LinkRef) -> String {
    format!("{} (endpoint {}, epoch {})", link.host_ifname, link.id, link.epoch)
}

/// True when the interface is there and, where its index is known, is that very one.
fn present(link: &LinkRef) -> Result<bool> {
    match if_nametoindex(link.host_ifname.as_str()) {
        Ok(index) => Ok(link.host_ifindex.is_none_or(|want| want.0 == index)),
        Err(Errno::ENODEV | Errno::ENXIO) => Ok(false),
        Err(e) => Err(wrap("look up link", about(link), &io::Error::from(e))),
    }
}

/// Ids of the programs on a tcx hook; none when the interface is gone.
pub(crate) fn tcx_programs(ifname: &str, hook: TcAttachType) -> Result<Vec<u32>> {
    match SchedClassifier::query_tcx(ifname, hook) {
        Ok((_, programs)) => Ok(programs.iter().map(|p| p.id()).collect()),
        Err(e) => match io_cause(&e).and_then(io::Error::raw_os_error) {
            Some(libc::ENODEV | libc::ENXIO | libc::ENOENT) => Ok(Vec::new()),
            _ => Err(wrap("query attached programs", ifname, &e)),
        },
    }
}

fn open_program(path: &Path) -> Result<SchedClassifier> {
    SchedClassifier::from_pin(path).map_err(|e| wrap("open program", path.display().to_string(), &e))
}

/// Opens a pinned link; `None` when it is not pinned.
fn open_link(path: &Path) -> Result<Option<FdLink>> {
    match PinnedLink::from_pin(path) {
        Ok(link) => Ok(Some(FdLink::from(link))),
        Err(LinkError::SyscallError(e)) if e.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(e) => Err(wrap("open link pin", path.display().to_string(), &e)),
    }
}

/// Puts a program behind a link that is pinned, in one step. False when the link's interface is gone.
fn put_behind(program: &mut SchedClassifier, link: FdLink, subject: &str) -> Result<bool> {
    let error = |e: &(dyn std::error::Error + 'static)| wrap(ATTACH, subject, e);
    let link = SchedClassifierLink::try_from(link).map_err(|e| error(&e))?;
    match program.attach_to_link(link) {
        Ok(id) => {
            // The pin keeps the attachment; this descriptor of it may go.
            drop(program.take_link(id).map_err(|e| error(&e))?);
            Ok(true)
        }
        Err(ProgramError::SyscallError(e)) if e.io_error.raw_os_error() == Some(libc::ENOLINK) => Ok(false),
        Err(e) => Err(error(&e)),
    }
}

/// Attaches a program anew and pins the attachment.
fn attach_new(program: &mut SchedClassifier, ifname: &str, hook: TcAttachType, pin: &Path) -> Result<()> {
    let error = |e: &(dyn std::error::Error + 'static)| wrap(ATTACH, ifname, e);
    let options = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program.attach_with_options(ifname, hook, options).map_err(|e| match e {
        // aya looks the index up by name just before.
        ProgramError::TcError(TcError::IoError(_)) => gone(ATTACH, ifname.to_owned()),
        e => error(&e),
    })?;
    let link = program.take_link(id).map_err(|e| error(&e))?;
    let link = FdLink::try_from(link).map_err(|e| error(&e))?;
    link.pin(pin).map_err(|e| wrap("pin attachment", pin.display().to_string(), &e))?;
    Ok(())
}

fn gone(operation: &'static str, subject: String) -> KernelError {
    fail(operation, subject, KernelErrorKind::NotFound, "the interface is gone, or its index is another's")
}

impl Bpf {
    /// Attaches the pinned programs, or replaces what is attached.
    pub(crate) fn ensure_attached(&self, link: &LinkRef) -> Result<Attached> {
        if !present(link)? {
            return Err(gone(ATTACH, about(link)));
        }
        self.reopen_closed(link)?;
        let mut outcome = Attached::Replaced;
        for (hook, program, pin) in HOOKS {
            let mut program = open_program(&self.pins.endpoint(link.id, program))?;
            let replaced = match self.mode {
                AttachMode::Tcx => self.ensure_tcx(&mut program, link, hook, &self.pins.endpoint(link.id, pin))?,
                AttachMode::Clsact => clsact::ensure(&mut program, link.host_ifname.as_str(), hook)?,
            };
            if !replaced {
                outcome = Attached::New;
            }
        }
        self.refresh_slot(link.id)?;
        Ok(outcome)
    }

    /// True when an attachment was there and now has the new program.
    fn ensure_tcx(
        &self,
        program: &mut SchedClassifier,
        link: &LinkRef,
        hook: TcAttachType,
        pin: &Path,
    ) -> Result<bool> {
        let ifname = link.host_ifname.as_str();
        if let Some(old) = open_link(pin)? {
            // A pin outlives its interface, and may be of another one: then it is worth nothing here.
            if is_on(&old, ifname, hook)? && put_behind(program, old, &about(link))? {
                return Ok(true);
            }
            pins::unpin(pin)?;
        }
        attach_new(program, ifname, hook, pin)?;
        Ok(false)
    }

    /// Puts the sink in the place of the endpoint's programs.
    pub(crate) fn remove_attached(&self, link: &LinkRef) -> Result<()> {
        if !present(link)? {
            return Ok(());
        }
        let mut sink = open_program(&self.pins.shared(SINK))?;
        for (hook, _, pin) in HOOKS {
            let ifname = link.host_ifname.as_str();
            let done = match self.mode {
                AttachMode::Tcx => self.sink_tcx(&mut sink, link, hook, pin),
                AttachMode::Clsact => clsact::ensure(&mut sink, ifname, hook).map(drop),
            };
            match done {
                // It went away meanwhile, or is on its way out with its namespace: it still has its name then, but the
                // kernel refuses to attach to it, and nothing passes through it any more.
                Err(e) if e.kind == KernelErrorKind::NotFound => return Ok(()),
                Err(e) => return Err(KernelError { operation: DETACH, ..e }),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn sink_tcx(&self, sink: &mut SchedClassifier, link: &LinkRef, hook: TcAttachType, pin: &str) -> Result<()> {
        let ifname = link.host_ifname.as_str();
        let closing = self.pins.closing(&link.host_ifname);
        let closed = closing.join(pin);
        if let Err(e) = fs::create_dir(&closing)
            && e.kind() != io::ErrorKind::AlreadyExists
        {
            // Never `NotFound`: that is said of the interface alone here.
            return Err(KernelError {
                kind: KernelErrorKind::Other,
                ..wrap("make pin directory", closing.display().to_string(), &e)
            });
        }
        if let Some(old) = open_link(&closed)?
            && is_on(&old, ifname, hook)?
        {
            // Closed before; once more costs nothing and makes sure.
            return put_behind(sink, old, &about(link)).map(drop);
        }
        pins::unpin(&closed)?;
        let open = self.pins.endpoint(link.id, pin);
        if let Some(old) = open_link(&open)?
            && is_on(&old, ifname, hook)?
        {
            if put_behind(sink, old, &about(link))? {
                // Out of the endpoint's directory, which is about to go; the attachment has to stay until its link goes.
                return pins::replace(&open, &closed);
            }
            return Ok(());
        }
        // Nothing of the endpoint's stands there (never attached, or a successor's pins have its place).
        attach_new(sink, ifname, hook, &closed)
    }

    /// Takes the pins of a closed link back into the endpoint's directory, so that its programs take the sink's place.
    fn reopen_closed(&self, link: &LinkRef) -> Result<()> {
        let closing = self.pins.closing(&link.host_ifname);
        let names = pins::names(&closing)?;
        if names.is_empty() {
            return Ok(());
        }
        for (_, _, pin) in HOOKS.into_iter().filter(|(_, _, pin)| names.iter().any(|n| n == pin)) {
            pins::replace(&closing.join(pin), &self.pins.endpoint(link.id, pin))?;
        }
        pins::remove_dir(&closing)
    }

    /// Forgets the sink's attachments to a link that is gone.
    pub(crate) fn forget_closed(&self, link: &LinkRef) -> Result<()> {
        self.forget_closed_dir(&self.pins.closing(&link.host_ifname))
    }

    fn forget_closed_dir(&self, closing: &Path) -> Result<()> {
        for pin in LINKS {
            pins::unpin(&closing.join(pin))?;
        }
        pins::remove_dir(closing)
    }

    /// At start: forgets closed links whose interface went while no agent ran.
    pub(super) fn sweep_closed(&self) -> Result<()> {
        for name in pins::names(&self.pins.closing_dir())? {
            if let Err(Errno::ENODEV | Errno::ENXIO) = if_nametoindex(name.as_str()) {
                self.forget_closed_dir(&self.pins.closing_dir().join(name))?;
            }
        }
        Ok(())
    }

    /// Id of a pinned program of the endpoint; `None` when it is not pinned.
    pub(crate) fn pinned_program_id(&self, id: EndpointId, name: &str) -> Result<Option<u32>> {
        match open_program(&self.pins.endpoint(id, name)) {
            Ok(program) => Ok(Some(program.info().map_err(|e| wrap("read program", name, &e))?.id())),
            Err(e) if e.kind == KernelErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// What should stand on the hooks but does not: the hook's program name and what is wrong.
    pub(crate) fn attached_mismatches(&self, id: EndpointId, ifname: &str) -> Result<Vec<(&'static str, String)>> {
        let mut wrong = Vec::new();
        for (hook, program, _) in HOOKS {
            let Some(wanted) = self.pinned_program_id(id, program)? else { continue };
            let there = match self.mode {
                AttachMode::Tcx => tcx_programs(ifname, hook)?,
                AttachMode::Clsact => clsact::programs(ifname, hook)?,
            };
            if !there.contains(&wanted) {
                wrong.push((program, format!("expected program id {wanted} on {ifname}, found {there:?}")));
            }
        }
        Ok(wrong)
    }
}

/// True when a link's program stands on that hook of that interface: the kernel does not say which interface a link is
/// of other than in text, but it says which programs an interface has.
fn is_on(link: &FdLink, ifname: &str, hook: TcAttachType) -> Result<bool> {
    let program = link.info().map_err(|e| wrap("read link", ifname, &e))?.program_id();
    Ok(tcx_programs(ifname, hook)?.contains(&program))
}
