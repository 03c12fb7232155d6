//! Datagrams of route netlink, and messages of ctnetlink, nf_tables and sock_diag.

use std::{collections::HashSet, net::IpAddr};

use wharf_datapath::outside::{conntrack_message, netlink_datagram, nft_message, socket_message};

const HEADER: usize = 16;
/// Headers of netlink and netfilter (four bytes).
const CONNTRACK_HEADER: usize = HEADER + 4;

/// Reads the input as each of them.
pub fn run(data: &[u8]) {
    datagram(data);
    connection(data);
    let _either = nft_message(data);
    let client = socket_message(data);
    assert_eq!(client, client.map(|address| address.to_canonical()), "a client has one address");
}

fn datagram(data: &[u8]) {
    let Ok(messages) = netlink_datagram(data) else { return };
    assert!(messages.len() <= data.len() / HEADER, "{} messages in {} bytes", messages.len(), data.len());
    // Concatenated datagrams are read separately.
    let mut twice = data.to_vec();
    if let Some(end) = end_of(data, messages.len()) {
        twice.truncate(end);
        twice.extend_from_slice(&data[..end]);
        let both = netlink_datagram(&twice).expect("two good datagrams");
        assert_eq!(both.len(), 2 * messages.len());
        assert!(both.chunks_exact(messages.len()).all(|half| half == messages), "messages tell each other's tales");
    }
}

/// End of the last message, if another can follow.
fn end_of(data: &[u8], messages: usize) -> Option<usize> {
    let mut end = 0_usize;
    for _ in 0..messages {
        let length = u32::from_ne_bytes(data.get(end..end + 4)?.try_into().ok()?);
        end += usize::try_from(length).ok()?.next_multiple_of(4);
    }
    (messages > 0 && end <= data.len()).then_some(end)
}

fn connection(data: &[u8]) {
    let nobody = HashSet::new();
    let Some(found) = conntrack_message(data, &nobody) else { return };
    assert!(!found, "a connection of nobody");
    let wanted = HashSet::from([IpAddr::from([10, 87, 0, 7])]);
    let found = conntrack_message(data, &wanted);
    assert!(found.is_some(), "whether a row can be read depends on who is looked for");
    // An unknown attribute, as of a newer kernel, changes nothing.
    let mut more = data.to_vec();
    more.resize(more.len().max(CONNTRACK_HEADER).next_multiple_of(4), 0);
    let padded = conntrack_message(&more, &wanted);
    more.extend_from_slice(&8_u16.to_ne_bytes());
    more.extend_from_slice(&99_u16.to_ne_bytes());
    more.extend_from_slice(&[1, 2, 3, 4]);
    if padded == found {
        assert_eq!(conntrack_message(&more, &wanted), found, "an unknown attribute changes what a row says");
    }
}
