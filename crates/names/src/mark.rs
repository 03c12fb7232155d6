//! The owner's mark: the alias (`IFLA_IFALIAS`) on the host side of an endpoint's link.
//!
//! `wharf:ID:EPOCH:NETWORK/CONTAINER/IFNAME`, numbers in decimal, set when the link is created. The path of a network
//! namespace may later name another namespace; the mark still names the owner.

use std::fmt;

/// The kernel's longest alias, bytes (`IFALIASZ` less the terminating zero).
pub const MAX_MARK: usize = 255;
const PREFIX: &str = "wharf:";
/// The character that did not fit may have up to four bytes.
const MAY_BE_CUT_OFF: usize = MAX_MARK + 1 - char::MAX_LEN_UTF8;

/// An owner's mark. Two marks cut at the same place may be equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Mark {
    pub id: u16,
    pub epoch: u64,
    /// `NETWORK/CONTAINER/IFNAME`, cut at the last character that fits [`MAX_MARK`].
    pub owner: String,
}

impl Mark {
    /// Cuts the owner to fit.
    #[must_use]
    pub fn new(id: u16, epoch: u64, network: &str, container_id: &str, ifname: &str) -> Self {
        let head = format!("{PREFIX}{id}:{epoch}:");
        let mut owner = format!("{network}/{container_id}/{ifname}");
        let mut room = MAX_MARK.saturating_sub(head.len()).min(owner.len());
        while !owner.is_char_boundary(room) {
            room -= 1;
        }
        owner.truncate(room);
        Self { id, epoch, owner }
    }

    /// `None` if the alias is not a mark.
    #[must_use]
    pub fn parse(alias: &str) -> Option<Self> {
        let (id, rest) = alias.strip_prefix(PREFIX)?.split_once(':')?;
        let (epoch, owner) = rest.split_once(':')?;
        let mark = Self { id: id.parse().ok()?, epoch: epoch.parse().ok()?, owner: owner.to_owned() };
        // `+1` and `01` parse as well.
        (mark.to_string() == alias && alias.len() <= MAX_MARK).then_some(mark)
    }

    /// Whether the attachment owns the mark, at any epoch.
    #[must_use]
    pub fn is_of(&self, network: &str, container_id: &str, ifname: &str) -> bool {
        *self == Self::new(self.id, self.epoch, network, container_id, ifname)
    }

    /// Network, container id and interface name; `None` if the mark may be cut.
    #[must_use]
    pub fn attachment(&self) -> Option<(&str, &str, &str)> {
        if self.to_string().len() >= MAY_BE_CUT_OFF {
            return None;
        }
        let (network, rest) = self.owner.split_once('/')?;
        let (container_id, ifname) = rest.split_once('/')?;
        Some((network, container_id, ifname))
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}:{}:{}", self.id, self.epoch, self.owner)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_reads_as_what_it_stands_for() {
        let mark = Mark::new(7, 42, "net", "c1", "eth0");
        assert_eq!(mark.to_string(), "wharf:7:42:net/c1/eth0");
        assert_eq!(Mark::parse("wharf:7:42:net/c1/eth0").as_ref(), Some(&mark));
        assert_eq!(mark.attachment(), Some(("net", "c1", "eth0")));
        assert!(mark.is_of("net", "c1", "eth0"));
        assert!(!mark.is_of("net", "c1", "eth1") && !mark.is_of("other", "c1", "eth0"));
    }

    #[test]
    fn what_is_not_ours_is_not_read() {
        for alias in
            ["", "wharf:", "wharf:1", "wharf:1:2", "wharf:01:2:n/c/i", "wharf:+1:2:n/c/i", "wharf:70000:2:n/c/i"]
        {
            assert_eq!(Mark::parse(alias), None, "{alias}");
        }
    }

    #[test]
    fn a_long_one_is_cut_the_same_way_on_both_sides() {
        let long = "c".repeat(400);
        let mark = Mark::new(1, 2, "net", &long, "eth0");
        assert_eq!(mark.to_string().len(), MAX_MARK);
        assert!(Mark::parse(&mark.to_string()).is_some_and(|m| m.is_of("net", &long, "eth0")));
        assert_eq!(mark.attachment(), None);
    }

    #[test]
    fn a_mark_that_is_cut_before_a_wide_character_names_no_attachment() {
        for width in ['e', 'é', '€', '🚢'] {
            for room in 0..8 {
                // `wharf:1:2:n/` has 12 bytes; a `/` follows the container id.
                let container_id = "c".repeat(MAX_MARK - 13 - room);
                let ifname = width.to_string().repeat(8);
                let mark = Mark::new(1, 2, "n", &container_id, &ifname);
                assert_eq!(mark.attachment(), None, "{width}, {room} bytes of room: {mark}");
                assert!(mark.is_of("n", &container_id, &ifname));
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(alias in ".{0,300}") {
            if let Some(mark) = Mark::parse(&alias) {
                prop_assert_eq!(mark.to_string(), alias);
            }
        }

        #[test]
        fn what_is_written_is_read_back(id: u16, epoch: u64, network in "[a-z0-9._-]{1,90}", c in "[a-z0-9._-]{1,200}", i in "[^/:\\s]{1,15}") {
            let mark = Mark::new(id, epoch, &network, &c, &i);
            let back = Mark::parse(&mark.to_string());
            prop_assert_eq!(back.as_ref(), Some(&mark));
            prop_assert!(mark.is_of(&network, &c, &i));
        }
    }
}
