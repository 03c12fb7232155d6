//! The host side's interface name.

use crate::ids::{EndpointId, Epoch, IfName};

/// Prefix of the host side's interface name.
pub const PREFIX: &str = "wh";

/// [`PREFIX`], four hex digits of the id, eight of the epoch's low 32 bits: fourteen bytes.
#[must_use]
pub fn host_ifname(id: EndpointId, epoch: Epoch) -> IfName {
    IfName(format!("{PREFIX}{:04x}{:08x}", id.get(), epoch.0 & 0xffff_ffff))
}

/// Inverse of [`host_ifname`]; `None` for other names.
#[must_use]
pub fn parse_host_ifname(name: &str) -> Option<(EndpointId, u32)> {
    let hex = name
        .strip_prefix(PREFIX)
        .filter(|h| h.len() == 12 && h.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)))?;
    let id = u16::from_str_radix(hex.get(..4)?, 16).ok()?;
    let epoch = u32::from_str_radix(hex.get(4..)?, 16).ok()?;
    Some((EndpointId::try_from(id).ok()?, epoch))
}
