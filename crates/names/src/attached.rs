//! Names of an endpoint's attached programs, the same in every ABI version.

/// Directory of Wharf's pins in a bpffs; one subdirectory `vN` for each ABI version.
pub const PIN_ROOT: &str = "wharf";
/// Directory of a version's endpoints, with a subdirectory for each id.
pub const PIN_ENDPOINTS: &str = "endpoints";
/// Pins of an endpoint's tcx links on the host side: ingress, egress.
pub const LINK_PINS: [&str; 2] = ["link_from_container", "link_to_container"];
/// Prefix of the names of clsact filters.
pub const FILTER_PREFIX: &str = "wharf/";
/// Program that drops all packets.
pub const SINK: &str = "sink";
