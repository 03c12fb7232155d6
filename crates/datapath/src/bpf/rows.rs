//! Shared rows that make an endpoint reachable.

use std::{
    borrow::Borrow,
    net::{IpAddr, Ipv6Addr},
    sync::{MutexGuard, PoisonError},
};

use aya::{
    maps::{Array, HashMap, MapData, MapError},
    programs::SchedClassifier,
};
use wharf_common::{EndpointKey, EndpointRow, map};
use wharf_core::{
    endpoint::EndpointRecord,
    ids::{EndpointId, Epoch, IfIndex, MacAddr},
    kernel::{EndpointTableRow, KernelErrorKind, Result},
};
use wharf_crash as crash;

use super::{Bpf, maps};
use crate::error::{fail, wrap};

const DELIVER: &str = "deliver";

pub(super) fn key_of(address: IpAddr) -> EndpointKey {
    match address {
        IpAddr::V4(a) => EndpointKey::v4(a.octets()),
        IpAddr::V6(a) => EndpointKey::v6(a.octets()),
    }
}

pub(super) fn address_of(key: &EndpointKey) -> IpAddr {
    let address = Ipv6Addr::from(key.addr);
    address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
}

fn row_of(record: &EndpointRecord) -> EndpointRow {
    let id = record.id.get();
    EndpointRow {
        epoch: record.epoch.0,
        direct: if record.link_owner.is_wharf() { u32::from(id) } else { 0 },
        ifindex: record.host_ifindex.0,
        identity: record.identity.0,
        mac: record.container_mac.0,
        endpoint_id: id,
        _pad: [0; 4],
    }
}

pub(crate) fn table_row(key: &EndpointKey, row: &EndpointRow) -> EndpointTableRow {
    EndpointTableRow {
        address: address_of(key),
        endpoint_id: u32::from(row.endpoint_id),
        direct: row.direct,
        epoch: Epoch(row.epoch),
        ifindex: IfIndex(row.ifindex),
        identity: row.identity,
        mac: MacAddr(row.mac),
    }
}

pub(crate) fn expected_row(record: &EndpointRecord, address: IpAddr) -> EndpointTableRow {
    table_row(&key_of(address), &row_of(record))
}

pub(super) fn unless_missing(result: std::result::Result<(), MapError>) -> std::result::Result<(), MapError> {
    match result {
        Err(e) if maps::is_missing(&e) => Ok(()),
        other => other,
    }
}

impl Bpf {
    pub(super) fn lock_tables(&self) -> MutexGuard<'_, ()> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, id: EndpointId) -> Result<SchedClassifier> {
        let path = self.pins.endpoint(id, DELIVER);
        SchedClassifier::from_pin(&path).map_err(|e| wrap("open program", path.display().to_string(), &e))
    }

    pub(crate) fn has_rows(&self, record: &EndpointRecord) -> Result<bool> {
        for address in record.addresses() {
            if self.endpoint_row(address)? != Some(expected_row(record, address)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// `CALLS` first: a sender that finds the address must find the program.
    pub(crate) fn ensure_reachable(&self, record: &EndpointRecord) -> Result<()> {
        let operation = "make reachable";
        let subject = || format!("endpoint {}", record.id);
        // Without the pins the endpoint would work only until the agent ends.
        self.check_shared()?;
        let _tables = self.lock_tables();
        self.set_slot(record.id)?;
        crash::point("datapath/reachable/after-slot");
        let mut endpoints = self.endpoints()?;
        for address in record.addresses() {
            let (key, row) = (key_of(address), row_of(record));
            let changes = endpoints.get(&key, 0).map_or(true, |there| there != row);
            if changes {
                endpoints.insert(key, row, 0).map_err(|e| {
                    let mut told = wrap(operation, format!("{address} ({})", subject()), &e);
                    if told.kind == KernelErrorKind::Exhausted {
                        let full = format!("the endpoint table is full ({} rows)", map::ENDPOINTS_MAX);
                        told.cause = format!("{}: {full}", told.cause);
                    }
                    told
                })?;
            }
            let point = if address.is_ipv4() {
                "datapath/reachable/after-row-ipv4"
            } else {
                "datapath/reachable/after-row-ipv6"
            };
            crash::point(point);
            if changes {
                self.increase_generations([key.generation_slot()])?;
            }
        }
        Ok(())
    }

    fn set_slot(&self, id: EndpointId) -> Result<()> {
        let fail = |e: &(dyn std::error::Error + 'static)| wrap("fill call slot", format!("endpoint {id}"), e);
        let deliver = self.deliver(id)?;
        let mut calls = self.program_slots(map::CALLS)?;
        calls.set(u32::from(id.get()), deliver.fd().map_err(|e| fail(&e))?, 0).map_err(|e| fail(&e))
    }

    pub(super) fn refresh_slot(&self, id: EndpointId) -> Result<()> {
        let _tables = self.lock_tables();
        match self.call_slot(u32::from(id.get()))? {
            Some(_) => self.set_slot(id),
            None => Ok(()),
        }
    }

    /// A successor's rows stay.
    pub(crate) fn remove_reachable(&self, record: &EndpointRecord) -> Result<()> {
        let _tables = self.lock_tables();
        for address in record.addresses() {
            self.remove_row(address, record.epoch)?;
            let point = if address.is_ipv4() {
                "datapath/unreachable/after-row-ipv4"
            } else {
                "datapath/unreachable/after-row-ipv6"
            };
            crash::point(point);
        }
        self.remove_sources_at(record.host_ifindex, record.epoch)?;
        crash::point("datapath/unreachable/after-sources");
        // The configuration's epoch decides: a slot has none. Without a configuration the slot is a predecessor's.
        let successor = match self.config(record.id) {
            Ok(config) => config.epoch > record.epoch.0,
            Err(e) if e.kind == KernelErrorKind::NotFound => false,
            Err(e) => return Err(e),
        };
        if successor { Ok(()) } else { self.clear_slot(u32::from(record.id.get())) }
    }

    fn remove_row(&self, address: IpAddr, epoch: Epoch) -> Result<()> {
        let subject = || format!("{address} of epoch {epoch}");
        let mut endpoints = self.endpoints()?;
        match endpoints.get(&key_of(address), 0) {
            Ok(row) if row.epoch == epoch.0 => {}
            Ok(_) => return Ok(()),
            // Perhaps an agent was killed before the increase.
            Err(MapError::KeyNotFound) => {}
            Err(e) => return Err(wrap("remove endpoint row", subject(), &e)),
        }
        unless_missing(endpoints.remove(&key_of(address))).map_err(|e| wrap("remove endpoint row", subject(), &e))?;
        self.increase_generations([key_of(address).generation_slot()])
    }

    fn clear_slot(&self, slot: u32) -> Result<()> {
        let mut calls = self.program_slots(map::CALLS)?;
        unless_missing(calls.clear_index(&slot)).map_err(|e| wrap("empty call slot", slot.to_string(), &e))
    }

    pub(crate) fn remove_endpoint_row(&self, address: IpAddr, epoch: Epoch) -> Result<()> {
        let _tables = self.lock_tables();
        self.remove_row(address, epoch)
    }

    pub(crate) fn remove_call_slot(&self, slot: u32) -> Result<()> {
        if slot >= map::CALLS_MAX {
            let cause = format!("there are slots 0 to {}", map::CALLS_MAX - 1);
            return Err(fail("empty call slot", slot.to_string(), KernelErrorKind::NotFound, cause));
        }
        let _tables = self.lock_tables();
        self.clear_slot(slot)
    }

    pub(crate) fn call_slot(&self, slot: u32) -> Result<Option<u32>> {
        let program = self.read_held(map::CALLS, |held| {
            read_slot(&Array::try_from(held).map_err(|e| wrap("open map", map::CALLS, &e))?, slot)
        })?;
        Ok(program.flatten())
    }

    /// Filled slots with program ids; empty after `remove_node`.
    pub(super) fn call_slots(&self) -> Result<Vec<(u32, u32)>> {
        let filled = self.read_held(map::CALLS, |held| {
            let calls = Array::try_from(held).map_err(|e| wrap("open map", map::CALLS, &e))?;
            let mut filled = Vec::new();
            for slot in 0..map::CALLS_MAX {
                if let Some(program) = read_slot(&calls, slot)? {
                    filled.push((slot, program));
                }
            }
            Ok(filled)
        })?;
        Ok(filled.unwrap_or_default())
    }

    pub(super) fn endpoint_rows(&self) -> Result<Vec<EndpointTableRow>> {
        let rows = self.read_held(map::ENDPOINTS, |held| {
            let endpoints = HashMap::try_from(held).map_err(|e| wrap("open map", map::ENDPOINTS, &e))?;
            let mut rows = Vec::new();
            for row in endpoints.iter() {
                let (key, row) = row.map_err(|e| wrap("read endpoint table", map::ENDPOINTS, &e))?;
                rows.push(table_row(&key, &row));
            }
            rows.sort();
            Ok(rows)
        })?;
        Ok(rows.unwrap_or_default())
    }

    pub(crate) fn endpoint_row(&self, address: IpAddr) -> Result<Option<EndpointTableRow>> {
        let row = self.read_held(map::ENDPOINTS, |held| {
            let endpoints = HashMap::try_from(held).map_err(|e| wrap("open map", map::ENDPOINTS, &e))?;
            read_row(&endpoints, address)
        })?;
        Ok(row.flatten())
    }
}

fn read_row(
    endpoints: &HashMap<&MapData, EndpointKey, EndpointRow>,
    address: IpAddr,
) -> Result<Option<EndpointTableRow>> {
    let key = key_of(address);
    match endpoints.get(&key, 0) {
        Ok(row) => Ok(Some(table_row(&key, &row))),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(e) => Err(wrap("read endpoint table", address.to_string(), &e)),
    }
}

pub(super) fn read_slot<M: Borrow<MapData>>(calls: &Array<M, u32>, slot: u32) -> Result<Option<u32>> {
    match calls.get(&slot, 0) {
        Ok(program) => Ok(Some(program)),
        Err(e) if maps::is_missing(&e) => Ok(None),
        Err(e) => Err(wrap("read call slot", slot.to_string(), &e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reads_back_as_the_address_it_was_made_of() {
        for text in ["10.0.0.1", "0.0.0.0", "255.255.255.255", "fd00::1", "::", "2001:db8::ffff:10.0.0.1"] {
            let address: IpAddr = text.parse().unwrap_or(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));
            assert_eq!(address_of(&key_of(address)), address, "{text}");
        }
    }
}
