//! Attachment by pinned tcx links (Linux 6.6), which run before every filter.

use std::{error::Error, io, path::Path};

use aya::programs::{
    LinkOrder, ProgramError, SchedClassifier, TcAttachType,
    links::{FdLink, LinkError, PinnedLink},
    tc::{SchedClassifierLink, TcAttachOptions, TcError},
};
use wharf_core::kernel::{KernelErrorKind, Result};
use wharf_crash as crash;

use super::{
    attach::{ATTACH, gone},
    pins,
};
use crate::error::{fail, io_cause, wrap};

/// Empty when the interface is gone.
pub(super) fn programs(ifname: &str, hook: TcAttachType) -> Result<Vec<u32>> {
    match SchedClassifier::query_tcx(ifname, hook) {
        Ok((_, programs)) => Ok(programs.iter().map(|p| p.id()).collect()),
        Err(e) => match io_cause(&e).and_then(io::Error::raw_os_error) {
            Some(libc::ENODEV | libc::ENXIO | libc::ENOENT) => Ok(Vec::new()),
            _ => Err(wrap("query attached programs", ifname, &e)),
        },
    }
}

pub(super) fn open(pin: &Path) -> Result<Option<FdLink>> {
    match PinnedLink::from_pin(pin) {
        Ok(link) => Ok(Some(FdLink::from(link))),
        Err(LinkError::SyscallError(e)) if e.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(e) => Err(wrap("open link pin", pin.display().to_string(), &e)),
    }
}

pub(super) fn program_of(link: &FdLink, subject: &str) -> Result<u32> {
    Ok(link.info().map_err(|e| wrap("read link", subject, &e))?.program_id())
}

/// If its program is on the hook: the kernel reports a link's interface only as text.
pub(super) fn open_on(pin: &Path, ifname: &str, hook: TcAttachType) -> Result<Option<FdLink>> {
    let Some(link) = open(pin)? else { return Ok(None) };
    let program = program_of(&link, ifname)?;
    Ok(programs(ifname, hook)?.contains(&program).then_some(link))
}

/// False when the link's interface is gone.
pub(super) fn put_behind(program: &mut SchedClassifier, link: FdLink, subject: &str) -> Result<bool> {
    let error = |e: &(dyn Error + 'static)| wrap(ATTACH, subject, e);
    let link = SchedClassifierLink::try_from(link).map_err(|e| error(&e))?;
    match program.attach_to_link(link) {
        Ok(id) => {
            // The pin keeps the attachment.
            drop(program.take_link(id).map_err(|e| error(&e))?);
            Ok(true)
        }
        Err(ProgramError::SyscallError(e)) if e.io_error.raw_os_error() == Some(libc::ENOLINK) => Ok(false),
        Err(e) => Err(error(&e)),
    }
}

pub(super) fn attach(
    program: &mut SchedClassifier,
    ifname: &str,
    hook: TcAttachType,
    order: LinkOrder,
    pin: &Path,
) -> Result<()> {
    let error = |e: &(dyn Error + 'static)| wrap(ATTACH, ifname, e);
    let id = program.attach_with_options(ifname, hook, TcAttachOptions::TcxOrder(order)).map_err(|e| match e {
        // aya resolves the name just before.
        ProgramError::TcError(TcError::IoError(_)) => gone(ATTACH, ifname.to_owned()),
        ProgramError::SyscallError(e) if e.io_error.raw_os_error() == Some(libc::EEXIST) => {
            let cause = "the program is attached by a link that has no pin of ours; the kernel lets go of it in a moment, \
                         unless a process holds it open: try again";
            fail(ATTACH, ifname, KernelErrorKind::Exhausted, cause)
        }
        e => error(&e),
    })?;
    let link = program.take_link(id).map_err(|e| error(&e))?;
    let link = FdLink::try_from(link).map_err(|e| error(&e))?;
    crash::point("datapath/tcx/before-pin");
    link.pin(pin).map_err(|e| wrap("pin attachment", pin.display().to_string(), &e))?;
    Ok(())
}

/// Detaches a link; older kernels with a delay.
pub(super) fn release(pin: &Path) -> Result<()> {
    let last = open(pin)?;
    pins::unpin(pin)?;
    // Last: this close detaches the link, not the kernel's deferred inode clean-up.
    drop(last);
    Ok(())
}
