//! The embedded BPF objects: a binary and its programs always have the same version.

use std::{fs, io, path::Path, sync::OnceLock};

include!(concat!(env!("OUT_DIR"), "/objects.rs"));

/// The objects of one ABI version.
pub(crate) struct Objects {
    pub(crate) endpoint: &'static [u8],
    /// Programs with log records, in builds that asked for them.
    pub(crate) endpoint_debug: Option<&'static [u8]>,
    pub(crate) node: &'static [u8],
    pub(crate) sink: &'static [u8],
}

static EMBEDDED: Objects = Objects { endpoint: ENDPOINT, endpoint_debug: ENDPOINT_DEBUG, node: NODE, sink: SINK };

static NEXT: OnceLock<Objects> = OnceLock::new();

/// The objects that this process loads.
pub(crate) fn objects() -> &'static Objects {
    NEXT.get().unwrap_or(&EMBEDDED)
}

/// Makes this process one of the next ABI version ([`wharf_common::abi`]), whose objects are in the directory. Only for
/// tests, before the kernel is opened.
///
/// # Errors
/// When an object cannot be read.
pub fn use_next_abi(directory: &Path) -> io::Result<()> {
    let read = |name| fs::read(directory.join(name)).map(|bytes| -> &'static [u8] { bytes.leak() });
    let (endpoint, node, sink) = (read("endpoint.o")?, read("node.o")?, read("sink.o")?);
    NEXT.get_or_init(|| Objects { endpoint, endpoint_debug: None, node, sink });
    wharf_common::abi::use_next();
    Ok(())
}
