//! The embedded BPF objects.

use std::{fs, io, path::Path, sync::OnceLock};

include!(concat!(env!("OUT_DIR"), "/objects.rs"));

pub(crate) struct Objects {
    pub(crate) endpoint: &'static [u8],
    /// With log records, if the build has them.
    pub(crate) endpoint_debug: Option<&'static [u8]>,
    pub(crate) node: &'static [u8],
    /// The same in all ABI versions.
    pub(crate) overlay: &'static [u8],
    pub(crate) sink: &'static [u8],
}

static EMBEDDED: Objects =
    Objects { endpoint: ENDPOINT, endpoint_debug: ENDPOINT_DEBUG, node: NODE, overlay: OVERLAY, sink: SINK };

static NEXT: OnceLock<Objects> = OnceLock::new();

pub(crate) fn objects() -> &'static Objects {
    NEXT.get().unwrap_or(&EMBEDDED)
}

/// Loads the next ABI version ([`wharf_common::abi`]) from a directory. For tests, before the kernel is opened.
///
/// # Errors
/// An unreadable object.
pub fn use_next_abi(directory: &Path) -> io::Result<()> {
    let read = |name| fs::read(directory.join(name)).map(|bytes| -> &'static [u8] { bytes.leak() });
    let (endpoint, node, sink) = (read("endpoint.o")?, read("node.o")?, read("sink.o")?);
    NEXT.get_or_init(|| Objects { endpoint, endpoint_debug: None, node, overlay: OVERLAY, sink });
    wharf_common::abi::use_next();
    Ok(())
}
