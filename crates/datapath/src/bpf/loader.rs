//! Loading and pinning.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use aya::{
    Ebpf, EbpfError, EbpfLoader, VerifierLogLevel,
    programs::{ProgramError, SchedClassifier},
};
use wharf_common::EndpointConsts;
use wharf_core::kernel::{KernelError, KernelErrorKind, Result};

use crate::error::{fail, wrap};

const CONSTS: &str = "CONSTS";

/// Last lines of the verifier's log.
const VERIFIER_LINES: usize = 12;

/// The aya loader, created once, because that parses the kernel's BTF (tens of milliseconds, 25 MiB). Under a memory
/// limit, return that memory to the kernel before programs are loaded: the verifier needs up to 15 MiB in the same
/// control group (Linux 6.16).
pub struct Loader(Mutex<Kept>);

impl Default for Loader {
    fn default() -> Self {
        Self(Mutex::new(Kept::new()))
    }
}

struct Kept {
    loader: EbpfLoader<'static>,
    /// Maps with a pin path, which aya cannot remove.
    pinned: BTreeSet<&'static str>,
}

impl Kept {
    fn new() -> Self {
        let mut loader = EbpfLoader::new();
        loader.btf(None).verifier_log_level(VerifierLogLevel::DEBUG);
        Self { loader, pinned: BTreeSet::new() }
    }

    /// An earlier load's path would give this load another endpoint's map.
    fn set_pins(&mut self, pins: Vec<(&'static str, PathBuf)>) {
        let names: BTreeSet<_> = pins.iter().map(|(name, _)| *name).collect();
        if !self.pinned.is_subset(&names) {
            *self = Self::new();
        }
        for (name, path) in pins {
            self.loader.map_pin_path(name, Cow::<'static, Path>::Owned(path));
        }
        self.pinned = names;
    }
}

/// Resets the constants, also on a panic.
struct Reset<'a>(&'a mut EbpfLoader<'static>);

impl Drop for Reset<'_> {
    fn drop(&mut self) {
        static NO_CONSTS: EndpointConsts =
            EndpointConsts { abi_version: 0, endpoint_id: 0, container_mac: [0; 6], host_mac: [0; 6], debug: 0 };
        self.0.override_global(CONSTS, &NO_CONSTS, false);
    }
}

impl Loader {
    /// Creates or opens the object's maps, which the caller must have checked.
    pub(crate) fn load(
        &self,
        object: &[u8],
        consts: Option<&EndpointConsts>,
        map_pins: Vec<(&'static str, PathBuf)>,
    ) -> std::result::Result<Ebpf, EbpfError> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.set_pins(map_pins);
        let reset = Reset(&mut kept.loader);
        if let Some(consts) = consts {
            // SAFETY: the loader reads the constants only inside `load` below; `reset` replaces them on every way out
            // of this function, before `consts` can end.
            let consts: &'static EndpointConsts = unsafe { &*std::ptr::from_ref(consts) };
            reset.0.override_global(CONSTS, consts, true);
        }
        reset.0.load(object)
    }
}

pub(crate) fn classifier<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier> {
    let operation = "find program";
    let Some(program) = ebpf.program_mut(name) else {
        return Err(fail(operation, name, KernelErrorKind::NotFound, "the embedded object has no such program"));
    };
    program.try_into().map_err(|e: ProgramError| wrap(operation, name, &e))
}

pub(crate) fn load_error(subject: String, error: &ProgramError) -> KernelError {
    let mut told = wrap("load program", subject, error);
    if let ProgramError::LoadError { io_error, verifier_log } = error {
        let log = verifier_log.to_string();
        let lines: Vec<&str> = log.lines().filter(|l| !l.trim().is_empty()).collect();
        let end = lines.get(lines.len().saturating_sub(VERIFIER_LINES)..).unwrap_or_default().join(" | ");
        told.cause = format!("{io_error}; the verifier said: {end}");
        told.kind = crate::error::kind_of(io_error);
    }
    told
}
