//! Wharf's objects in route netlink.

use rtnetlink::packet_route::RouteNetlinkMessage;
use wharf_core::{
    endpoint::parse_host_ifname,
    kernel::{KernelDump, LinkRow, Result, RouteRow},
};

use wharf_names::mark::Mark;

use super::{Connection, link, route};
use crate::ROUTE_PROTOCOL;

pub(crate) fn dump_into(dump: &mut KernelDump) -> Result<()> {
    let mut connection = Connection::open()?;
    for message in link::pairs(&mut connection)? {
        let RouteNetlinkMessage::NewLink(m) = message else { continue };
        let seen = link::read(&m);
        // By mark if renamed.
        let marked = seen.alias.as_deref().and_then(Mark::parse).is_some();
        if seen.pair && (marked || parse_host_ifname(&seen.name).is_some()) {
            dump.links.push(LinkRow { name: seen.name, ifindex: seen.ifindex, alias: seen.alias.clone() });
        }
    }
    for route in route::list(&mut connection, Some(ROUTE_PROTOCOL))? {
        dump.routes.push(RouteRow { destination: route.destination, ifindex: route.ifindex });
    }
    dump.links.sort();
    dump.routes.sort();
    Ok(())
}
