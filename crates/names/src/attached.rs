//! Names by which the attached programs of an endpoint are found, the same in every ABI version.

/// Directory of Wharf's pins in a bpffs. Each ABI version has a subdirectory `vN`.
pub const PIN_ROOT: &str = "wharf";
/// Directory of a version's endpoints; each has a subdirectory by its id.
pub const PIN_ENDPOINTS: &str = "endpoints";
/// Pins of an endpoint's tcx links, ingress and egress of the host side.
pub const LINK_PINS: [&str; 2] = ["link_from_container", "link_to_container"];
/// Prefix of the names of clsact filters.
pub const FILTER_PREFIX: &str = "wharf/";
/// Name of the program that drops everything.
pub const SINK: &str = "sink";
