//! Maps that programs and agents of any version may have written: rows of `ENDPOINTS`, and records of the event ring
//! buffer as `wharf monitor` shows them.

use std::net::IpAddr;

use wharf_agent::monitor::Monitor;
use wharf_api::MonitorEvent;
use wharf_common::{EndpointKey, EndpointRow, Event, EventKind};
use wharf_datapath::outside::endpoint_row;
use zerocopy::FromBytes as _;

const KEY: usize = size_of::<EndpointKey>();
const ROW: usize = size_of::<EndpointRow>();

/// Reads the input as both.
pub fn run(data: &[u8]) {
    row(data);
    event(data);
}

fn row(data: &[u8]) {
    let (key, value) = data.split_at(data.len().min(KEY));
    let Some(row) = endpoint_row(key, value) else {
        assert_ne!(data.len(), KEY + ROW, "a row is not read");
        return;
    };
    assert_eq!(data.len(), KEY + ROW, "a row of another length is read");
    // The shown address belongs to this row alone.
    let again = match row.address {
        IpAddr::V4(address) => EndpointKey::v4(address.octets()),
        IpAddr::V6(address) => EndpointKey::v6(address.octets()),
    };
    assert_eq!(again.addr, key, "{} is the address of two rows", row.address);
    let number = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| value[at + byte]));
    assert_eq!((row.direct, row.ifindex.0, row.identity), (number(8), number(12), number(16)));
    assert_eq!(row.mac.0, value[20..26]);
    assert_eq!(row.endpoint_id, u32::from(u16::from_ne_bytes([value[26], value[27]])));
}

fn event(data: &[u8]) {
    let Ok(record) = Event::read_from_bytes(data) else { return };
    let monitor = Monitor::default();
    let mut reader = monitor.subscribe();
    monitor.packets([(record, None)].into_iter());
    let told = reader.try_recv().ok();
    assert_eq!(told.is_some(), EventKind::from_u32(record.kind).is_some(), "what is known is told, and nothing else");
    let Some(told) = told else { return };
    let line = serde_json::to_string(&*told).expect("an event can be written");
    assert_eq!(serde_json::from_str::<MonitorEvent>(&line).ok().as_ref(), Some(&*told), "an event changes on its way");
    let words = match &*told {
        MonitorEvent::Drop(packet) | MonitorEvent::Trace(packet) => packet,
        other => panic!("a packet is told as {other:?}"),
    };
    assert_eq!((words.endpoint, words.epoch, words.identity), (record.endpoint_id, record.epoch, record.identity));
    let has_ports = matches!(words.protocol.as_str(), "TCP" | "UDP");
    assert_eq!(words.source_port, if has_ports { u16::from_be_bytes(record.source_port) } else { 0 });
    assert!(!words.direction.is_empty() && !words.reason.is_empty() && !words.ethertype.is_empty());
}
