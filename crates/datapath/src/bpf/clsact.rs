//! Attaching where there is no tcx (before Linux 6.6): one filter on each side of the `clsact` qdisc, replaced in place.
//!
//! A filter lives and dies with its interface, so it needs no pin.

use std::io;

use aya::programs::{
    ProgramError, SchedClassifier, TcAttachType,
    tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle},
};
use nix::net::if_::if_nametoindex;
use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcFilterBpfOption, TcHandle as Parent, TcMessage, TcOption},
};
use wharf_core::kernel::Result;

use crate::{error::wrap, netlink::Connection};

const ATTACH: &str = "attach programs";
/// Our filter's place on the hook: the first.
const PRIORITY: u16 = 1;
const HANDLE: TcHandle = TcHandle::new(0, 1);

fn errno(error: &ProgramError) -> Option<i32> {
    match error {
        ProgramError::TcError(TcError::NetlinkError(e)) | ProgramError::NetlinkError(e) => e.raw_os_error(),
        _ => None,
    }
}

/// Attaches a program, or puts it in the place of the one that is there. True when one was there.
pub(super) fn ensure(program: &mut SchedClassifier, ifname: &str, hook: TcAttachType) -> Result<bool> {
    match tc::qdisc_add_clsact(ifname) {
        Ok(()) => {}
        Err(TcError::NetlinkError(e)) if e.raw_os_error() == Some(libc::EEXIST) => {}
        Err(e) => return Err(wrap(ATTACH, ifname, &e)),
    }
    let there = SchedClassifierLink::attached(ifname, hook, PRIORITY, HANDLE, None)
        .map_err(|e: io::Error| wrap(ATTACH, ifname, &e))?;
    let (id, replaced) = match program.attach_to_link(there) {
        Ok(id) => (id, true),
        Err(e) if errno(&e) == Some(libc::ENOENT) => {
            let options = NlOptions { priority: PRIORITY, handle: HANDLE, classid: None };
            let new = program.attach_with_options(ifname, hook, TcAttachOptions::Netlink(options));
            (new.map_err(|e| wrap(ATTACH, ifname, &e))?, false)
        }
        Err(e) => return Err(wrap(ATTACH, ifname, &e)),
    };
    let link = program.take_link(id).map_err(|e| wrap(ATTACH, ifname, &e))?;
    // Dropping it would take the filter away; it holds no memory and no descriptor.
    std::mem::forget(link);
    Ok(replaced)
}

/// Ids of the programs on a hook; none when the interface or its qdisc is gone.
pub(super) fn programs(ifname: &str, hook: TcAttachType) -> Result<Vec<u32>> {
    let Ok(index) = if_nametoindex(ifname) else { return Ok(Vec::new()) };
    let minor = match hook {
        TcAttachType::Ingress => Parent::MIN_INGRESS,
        _ => Parent::MIN_EGRESS,
    };
    let mut request = TcMessage::default();
    request.header.index = i32::try_from(index).unwrap_or_default();
    request.header.parent = Parent { major: u16::MAX, minor };
    let answer = Connection::open()?.dump(&RouteNetlinkMessage::GetTrafficFilter(request))?;
    let Ok(filters) = answer else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for filter in filters {
        let RouteNetlinkMessage::NewTrafficFilter(filter) = filter else { continue };
        for attribute in filter.attributes {
            let TcAttribute::Options(options) = attribute else { continue };
            found.extend(options.iter().filter_map(|o| match o {
                TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
                _ => None,
            }));
        }
    }
    Ok(found)
}
