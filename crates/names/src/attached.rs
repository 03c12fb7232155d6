//! Names of attached programs and pins, the same in every ABI version.

/// Directory in a bpffs; one subdirectory `vN` for each ABI version.
pub const PIN_ROOT: &str = "wharf";
/// Below `vN`; one subdirectory for each endpoint id.
pub const PIN_ENDPOINTS: &str = "endpoints";
/// An endpoint's tcx links on the host side: ingress, egress.
pub const LINK_PINS: [&str; 2] = ["link_from_container", "link_to_container"];
/// Prefix of clsact filters' names.
pub const FILTER_PREFIX: &str = "wharf/";
/// Program that drops all packets.
pub const SINK: &str = "sink";
