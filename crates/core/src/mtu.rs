//! Default MTU of links.

use std::fmt;

use crate::kernel::MIN_MTU;

/// Without an uplink.
const ETHERNET: u32 = 1_500;
/// Of a veth link, bytes.
pub const MAX_MTU: u32 = 65_535;

/// An interface with a default route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uplink {
    pub ifname: String,
    /// Bytes.
    pub mtu: u32,
}

/// MTU of new links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeMtu {
    pub bytes: u32,
    /// Origin of the value.
    pub origin: Origin,
}

/// Origin of the MTU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The agent's configuration.
    Setting,
    /// The uplink with the smallest MTU.
    Uplink(Uplink),
    /// No interface has a default route.
    NoUplink,
}

impl NodeMtu {
    /// The configured MTU, else the smallest of the uplinks, because packets may leave by any, clamped to a link with
    /// IPv6.
    #[must_use]
    pub fn of(setting: Option<u32>, uplinks: &[Uplink]) -> Self {
        if let Some(bytes) = setting {
            return Self { bytes, origin: Origin::Setting };
        }
        // A stable origin: the name breaks ties.
        match uplinks.iter().min_by_key(|uplink| (uplink.mtu, &uplink.ifname)) {
            Some(uplink) => Self { bytes: uplink.mtu.clamp(MIN_MTU, MAX_MTU), origin: Origin::Uplink(uplink.clone()) },
            None => Self { bytes: ETHERNET, origin: Origin::NoUplink },
        }
    }
}

impl fmt::Display for NodeMtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bytes)?;
        match &self.origin {
            Origin::Setting => f.write_str(" (the setting mtu)"),
            Origin::Uplink(Uplink { ifname, mtu }) if *mtu == self.bytes => write!(f, " (uplink {ifname})"),
            Origin::Uplink(Uplink { ifname, mtu }) if *mtu < MIN_MTU => {
                write!(f, " (uplink {ifname} has {mtu}, less than IPv6 needs)")
            }
            Origin::Uplink(Uplink { ifname, mtu }) => write!(f, " (uplink {ifname} has {mtu})"),
            Origin::NoUplink => f.write_str(" (no interface has a default route)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uplink(ifname: &str, mtu: u32) -> Uplink {
        Uplink { ifname: ifname.to_owned(), mtu }
    }

    #[test]
    fn the_setting_comes_first_then_the_smallest_uplink() {
        let two = [uplink("wan1", 9_000), uplink("wan0", 1_400)];
        for (setting, uplinks, told) in [
            (Some(1_300), two.as_slice(), "1300 (the setting mtu)"),
            (None, &two, "1400 (uplink wan0)"),
            (None, &[], "1500 (no interface has a default route)"),
            (None, &[uplink("ppp0", 576)], "1280 (uplink ppp0 has 576, less than IPv6 needs)"),
            (None, &[uplink("lo", 65_536)], "65535 (uplink lo has 65536)"),
            (None, &[uplink("b", 1_400), uplink("a", 1_400)], "1400 (uplink a)"),
        ] {
            assert_eq!(NodeMtu::of(setting, uplinks).to_string(), told);
        }
    }
}
