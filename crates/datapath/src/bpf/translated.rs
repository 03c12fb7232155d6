//! The filter of the router's link (`crate::translated`), of the object `node`.

use std::sync::{MutexGuard, PoisonError};

use aya::{
    Ebpf,
    programs::{SchedClassifier, TcAttachType},
};
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

/// This process's program.
#[derive(Default)]
pub(super) enum Translated {
    #[default]
    Untried,
    Loaded(Box<SchedClassifier>),
    Refused,
}

fn load(node: &mut Ebpf) -> Result<SchedClassifier> {
    let program = loader::classifier(node, TRANSLATED)?;
    program.load().map_err(|e| loader::load_error(format!("{TRANSLATED} of the node"), &e))?;
    let failed = |e| wrap("read program", TRANSLATED, &e);
    let info = program.info().map_err(failed)?;
    SchedClassifier::from_program_info(info, TRANSLATED.into()).map_err(failed)
}

impl Bpf {
    /// Tries the load once; false if the kernel refuses the program, because everything else works without it.
    pub(crate) fn ensure_translated(&self) -> bool {
        let mut translated = self.translated();
        if matches!(*translated, Translated::Untried) {
            *translated = match self.collector.with_object(load) {
                Ok(program) => Translated::Loaded(Box::new(program)),
                Err(e) => {
                    tracing::error!("egress rules do not hold for services with a backend on another node: {e}");
                    Translated::Refused
                }
            };
        }
        matches!(*translated, Translated::Loaded(_))
    }

    pub(crate) fn translated_is_refused(&self) -> bool {
        matches!(*self.translated(), Translated::Refused)
    }

    pub(super) fn translated(&self) -> MutexGuard<'_, Translated> {
        self.translated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces another Wharf filter without a gap. `device`: the router's link.
    pub(crate) fn attach_translated(&self, connection: &mut Connection, device: IfIndex) -> Result<()> {
        if self.is_translated_attached(connection, device)? {
            return Ok(());
        }
        let translated = self.translated();
        let Translated::Loaded(program) = &*translated else {
            return Err(fail("attach filter", TRANSLATED, KernelErrorKind::NotFound, "the program is not loaded"));
        };
        clsact::ensure(ROUTER_IFNAME, &[Wanted { hook: HOOK, program, name: TRANSLATED.to_owned() }]).map(drop)
    }

    pub(crate) fn is_translated_attached(&self, connection: &mut Connection, device: IfIndex) -> Result<bool> {
        let translated = self.translated();
        let Translated::Loaded(program) = &*translated else { return Ok(false) };
        let ours = program.info().map_err(|e| wrap("read program", TRANSLATED, &e))?.id();
        Ok(clsact::program(connection, device, HOOK)? == Some(ours))
    }
}
