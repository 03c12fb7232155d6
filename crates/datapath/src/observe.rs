//! What the kernel holds for an endpoint, compared with what its record says. Tolerant of what others added later
//! (addresses, routes, programs): it asks only whether ours is there.

use ipnet::IpNet;
use wharf_core::{
    endpoint::EndpointRecord,
    ids::IfIndex,
    kernel::{KernelErrorKind, Mismatch, Result},
};

use crate::{
    ROUTE_PROTOCOL,
    bpf::{Bpf, pins, rows::expected_row},
    netlink::{
        Connection, address,
        link::{self, LinkSeen},
        route::{self, Route},
    },
    netns::NetnsThread,
    source_rule::{self, gateway_of},
};

const OPERATION: &str = "observe endpoint";

/// The mismatches found so far.
struct Findings(Vec<Mismatch>);

impl Findings {
    fn add(&mut self, object: &str, subject: impl Into<String>, problem: impl Into<String>) {
        self.0.push(Mismatch { object: object.to_owned(), subject: subject.into(), problem: problem.into() });
    }

    /// Compares two things that should be the same.
    fn same<T: PartialEq + std::fmt::Debug>(&mut self, object: &str, subject: &str, what: &str, want: &T, is: &T) {
        if want != is {
            self.add(object, subject, format!("{what}: expected {want:?}, found {is:?}"));
        }
    }
}

/// Looks at everything; empty when all is well.
pub(crate) fn observe_endpoint(thread: &NetnsThread, bpf: &Bpf, record: &EndpointRecord) -> Result<Vec<Mismatch>> {
    let mut findings = Findings(Vec::new());
    observe_host(record, bpf, &mut findings)?;
    observe_container(thread, record, &mut findings)?;
    observe_maps(bpf, record, &mut findings)?;
    Ok(findings.0)
}

fn observe_link(seen: &LinkSeen, index: u32, mac: impl std::fmt::Display, mtu: u32, findings: &mut Findings) {
    let name = seen.name.as_str();
    findings.same("link", name, "index", &index, &seen.ifindex.0);
    findings.same("link", name, "up", &true, &seen.up);
    findings.same("mtu", name, "mtu", &mtu, &seen.mtu);
    let is = seen.mac.map_or_else(|| "none".to_owned(), |m| m.to_string());
    findings.same("link", name, "MAC", &mac.to_string(), &is);
}

fn observe_host(record: &EndpointRecord, bpf: &Bpf, findings: &mut Findings) -> Result<()> {
    let mut host = Connection::open()?;
    let name = record.host_ifname.as_str();
    let Some(seen) = link::look_up(&mut host, name)? else {
        let there = link::look_up_index(&mut host, record.host_ifindex)?;
        let renamed = there.filter(|l| link::names(l.alias.as_deref(), record.id, record.epoch));
        findings.add(
            "link",
            name,
            renamed.map_or_else(
                || "expected on the node, is not there".to_owned(),
                |l| {
                    format!(
                        "is called {0} now: rename it back (`ip link set {0} down`, `ip link set {0} name {name}`)",
                        l.name
                    )
                },
            ),
        );
        return Ok(());
    };
    observe_link(&seen, record.host_ifindex.0, record.host_mac, record.mtu, findings);
    // One that names no owner yet is brought up to date when the endpoint is connected again.
    if !link::is_unowned(seen.alias.as_deref(), record.id, record.epoch) {
        let mark = link::mark(record.id, record.epoch, &record.attachment);
        findings.same("link", name, "alias", &Some(mark), &seen.alias);
    }
    findings.0.extend(bpf.attached_mismatches(record)?);
    findings.0.extend(bpf.map_mismatches(record.id)?);
    let routes = route::list(&mut host, Some(ROUTE_PROTOCOL))?;
    for address in record.addresses() {
        let to = IpNet::from(address);
        let found = routes.iter().find(|r| r.destination == to);
        match found {
            Some(r) if r.ifindex == Some(record.host_ifindex) => {}
            Some(r) => {
                let is = r.ifindex.map_or_else(|| "nowhere".to_owned(), |i| format!("interface {i}"));
                let problem = format!("expected by interface {}, goes to {is}", record.host_ifindex);
                findings.add("route", to.to_string(), problem);
            }
            None => findings.add("route", to.to_string(), in_its_place(&mut host, to, record.host_ifindex)?),
        }
    }
    Ok(())
}

/// What there is to an address to which the node has no route of ours.
fn in_its_place(host: &mut Connection, to: IpNet, wanted: IfIndex) -> Result<String> {
    let all = route::list(host, None)?;
    let Some(other) = all.iter().find(|r| r.destination == to) else {
        return Ok("expected on the node, is not there".to_owned());
    };
    let is = other.ifindex.map_or_else(|| "nowhere".to_owned(), |i| format!("interface {i}"));
    Ok(format!(
        "expected by interface {wanted}; a route that is not Wharf's is in its place and goes to {is}: remove it (`ip route \
         del {to}`)"
    ))
}

fn observe_container(thread: &NetnsThread, record: &EndpointRecord, findings: &mut Findings) -> Result<()> {
    let mut inside = match thread.connect(OPERATION, &record.netns) {
        Ok(inside) => inside,
        Err(e) if matches!(e.kind, KernelErrorKind::NotFound | KernelErrorKind::NotANetns) => {
            findings.add("netns", e.subject, e.cause);
            return Ok(());
        }
        Err(e) => return Err(e),
    };
    let name = record.attachment.ifname.as_str();
    let Some(seen) = link::look_up(&mut inside, name)? else {
        findings.add("link", name, "expected in the container, is not there");
        return Ok(());
    };
    observe_link(&seen, record.container_ifindex.0, record.container_mac, record.mtu, findings);
    let addresses = address::list(&mut inside, seen.ifindex)?;
    for wanted in record.addresses() {
        let length = if wanted.is_ipv4() { 32 } else { 128 };
        match addresses.iter().find(|a| a.address == wanted) {
            Some(a) => findings.same("address", &wanted.to_string(), "prefix length", &length, &a.prefix_len),
            None => findings.add("address", wanted.to_string(), "expected in the container, is not there"),
        }
    }
    let routes = route::list(&mut inside, None)?;
    for address in record.addresses() {
        let Some(gateway) = gateway_of(record, address) else { continue };
        for wanted in [Route::direct(gateway.into(), seen.ifindex, None), Route::default_via(gateway, seen.ifindex)] {
            let same = |r: &&Route| r.destination == wanted.destination && r.ifindex == wanted.ifindex;
            if !routes.iter().any(|r| same(&r)) {
                let problem = format!("expected in the container (by {gateway}), is not there");
                findings.add("route", wanted.destination.to_string(), problem);
            }
        }
    }
    let behind = source_rule::behind(&routes, record);
    for (subject, problem) in source_rule::missing(&mut inside, record, &behind)? {
        findings.add("route", subject, problem);
    }
    Ok(())
}

fn observe_maps(bpf: &Bpf, record: &EndpointRecord, findings: &mut Findings) -> Result<()> {
    let there = pins::names(&bpf.pins().endpoint_dir(record.id))?;
    for name in pins::PROGRAMS.into_iter().chain(pins::MAPS) {
        if !there.iter().any(|n| n == name) {
            findings.add("pin", format!("{}/{name}", record.id), "expected, is not there");
        }
    }
    let config = format!("{}/CONFIG", record.id);
    match bpf.config(record.id) {
        Ok(c) => {
            findings.same("map", &config, "epoch", &record.epoch.0, &c.epoch);
            findings.same("map", &config, "ifindex", &record.host_ifindex.0, &c.ifindex);
            findings.same("map", &config, "identity", &record.identity.0, &c.identity);
            findings.same("map", &config, "ipv4", &record.ipv4.map_or([0; 4], |a| a.octets()), &c.ipv4);
            findings.same("map", &config, "ipv6", &record.ipv6.map_or([0; 16], |a| a.octets()), &c.ipv6);
            let live = c.flags & wharf_common::map::FLAG_LIVE != 0;
            findings.same("map", &config, "live", &true, &live);
        }
        // Told above, as a missing pin.
        Err(e) if e.kind == KernelErrorKind::NotFound => {}
        Err(e) => findings.add("map", config, e.cause),
    }
    for address in record.addresses() {
        let want = expected_row(record, address);
        match bpf.endpoint_row(address)? {
            Some(is) if is == want => {}
            Some(is) => findings.add("endpoint-row", address.to_string(), format!("expected {want:?}, found {is:?}")),
            None => findings.add("endpoint-row", address.to_string(), "expected, is not there"),
        }
    }
    let want = bpf.pinned_program_id(record.id, pins::PROGRAMS[2])?;
    let is = bpf.call_slot(u32::from(record.id.get()))?;
    findings.same("map", &format!("CALLS[{}]", record.id), "program id", &want, &is);
    Ok(())
}
