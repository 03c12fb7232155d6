//! Nexthop objects (`ip nexthop`) in routes.

use rtnetlink::packet_core::NlasIterator;
use wharf_core::kernel::Result;

use super::{Connection, batch::HEADER_LEN};

/// `linux/rtnetlink.h`.
const RTM_GETNEXTHOP: u16 = 106;
/// `struct nhmsg` of `linux/nexthop.h`.
const NEXTHOP_LEN: usize = 8;
/// `enum nha_attrs`.
const ID: u16 = 1;
const GROUP: u16 = 2;
const OIF: u16 = 5;
/// `struct nexthop_grp`; the member's id comes first.
const MEMBER_LEN: usize = 8;

#[derive(Debug, Default, PartialEq, Eq)]
struct Nexthop {
    interface: Option<u32>,
    members: Vec<u32>,
}

pub(crate) fn interfaces(connection: &mut Connection, id: u32) -> Result<Vec<u32>> {
    let first = look_up(connection, id)?;
    let mut found = Vec::from_iter(first.interface);
    for member in first.members {
        found.extend(look_up(connection, member)?.interface);
    }
    Ok(found)
}

fn look_up(connection: &mut Connection, id: u32) -> Result<Nexthop> {
    let mut question = vec![0; NEXTHOP_LEN];
    for half in [8u16, ID] {
        question.extend(half.to_ne_bytes());
    }
    question.extend(id.to_ne_bytes());
    let answer = connection.one_of_kind(RTM_GETNEXTHOP, &question)?;
    Ok(answer.ok().and_then(|message| read(&message)).unwrap_or_default())
}

fn read(message: &[u8]) -> Option<Nexthop> {
    let number = |bytes: &[u8]| Some(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?));
    let mut found = Nexthop::default();
    for attribute in NlasIterator::new(message.get(HEADER_LEN + NEXTHOP_LEN..)?) {
        let attribute = attribute.ok()?;
        match attribute.kind() {
            OIF => found.interface = number(attribute.value()),
            GROUP => found.members = attribute.value().chunks(MEMBER_LEN).filter_map(number).collect(),
            _ => {}
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_answer_says_nothing() {
        let mut whole = vec![0; HEADER_LEN + NEXTHOP_LEN];
        whole.extend([8u16, OIF].map(u16::to_ne_bytes).concat());
        whole.extend(7u32.to_ne_bytes());
        assert_eq!(read(&whole), Some(Nexthop { interface: Some(7), members: Vec::new() }));
        for length in 0..whole.len() {
            assert!(read(&whole[..length]).is_none_or(|found| found.interface.is_none()), "{length} bytes");
        }
    }
}
