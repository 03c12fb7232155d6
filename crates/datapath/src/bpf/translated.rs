//! The filter of the router's link (`crate::translated`), of the object `node`.

use std::sync::PoisonError;

use aya::programs::{SchedClassifier, TcAttachType};
use wharf_common::map::TRANSLATED;
use wharf_core::{
    ids::IfIndex,
    kernel::{KernelErrorKind, Result},
};

use super::{
    Bpf,
    clsact::{self, Wanted},
    loader,
};
use crate::{
    ROUTER_IFNAME,
    error::{fail, wrap},
    netlink::Connection,
};

const HOOK: TcAttachType = TcAttachType::Egress;

impl Bpf {
    /// Loads the program once; false if the kernel refuses it, because everything else works without it.
    pub(crate) fn ensure_translated(&self) -> bool {
        if !self.has_translated()
            && let Err(e) = self.load_translated()
        {
            tracing::error!("egress rules do not hold for services with a backend on another node: {e}");
        }
        self.has_translated()
    }

    fn load_translated(&self) -> Result<()> {
        let mut ebpf = self.load_node()?;
        let program = loader::classifier(&mut ebpf, TRANSLATED)?;
        program.load().map_err(|e| loader::load_error(format!("{TRANSLATED} of the node"), &e))?;
        let failed = |e| wrap("read program", TRANSLATED, &e);
        let info = program.info().map_err(failed)?;
        let program = SchedClassifier::from_program_info(info, TRANSLATED.into()).map_err(failed)?;
        *self.translated.lock().unwrap_or_else(PoisonError::into_inner) = Some(program);
        Ok(())
    }

    pub(crate) fn has_translated(&self) -> bool {
        self.translated.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Replaces another Wharf filter without a gap. `device`: the router's link.
    pub(crate) fn attach_translated(&self, connection: &mut Connection, device: IfIndex) -> Result<()> {
        if self.is_translated_attached(connection, device)? {
            return Ok(());
        }
        let program = self.translated.lock().unwrap_or_else(PoisonError::into_inner);
        let absent = || fail("attach filter", TRANSLATED, KernelErrorKind::NotFound, "the program is not loaded");
        let program = program.as_ref().ok_or_else(absent)?;
        clsact::ensure(ROUTER_IFNAME, &[Wanted { hook: HOOK, program, name: TRANSLATED.to_owned() }]).map(drop)
    }

    pub(crate) fn is_translated_attached(&self, connection: &mut Connection, device: IfIndex) -> Result<bool> {
        let program = self.translated.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(program) = &*program else { return Ok(false) };
        let ours = program.info().map_err(|e| wrap("read program", TRANSLATED, &e))?.id();
        Ok(clsact::program(connection, device, HOOK)? == Some(ours))
    }
}
