//! Attachment by filters on the `clsact` qdisc, the default (docs/attach-modes.md). The kernel removes a filter with
//! its interface. A filter is Wharf's if kind, priority, protocol, handle and name match; others are never changed.

use std::os::fd::{AsFd, AsRawFd};

use aya::programs::{SchedClassifier, TcAttachType};
use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL},
    packet_route::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcBpfFlags, TcFilterBpfOption, TcHandle, TcHeader, TcMessage, TcOption},
    },
};
use wharf_core::{
    endpoint::{HooksFound, LinkOwner},
    ids::{Epoch, IfIndex},
    kernel::{KernelError, KernelErrorKind, LinkRef, Result},
};
use wharf_crash as crash;

use super::attach::{ATTACH, HOOKS, Hook, gone, index_of};
use crate::{
    error::{fail, wrap},
    netlink::{Connection, Refusal, Request},
};

const RELEASE: &str = "remove filters";

const PRIORITY: u32 = 1;
/// `ETH_P_ALL` of `linux/if_ether.h`.
const ALL_PROTOCOLS: u16 = 3;
/// Usual handles are small.
const HANDLE: u32 = 0x7768_0001;
const NAME_PREFIX: &str = wharf_names::attached::FILTER_PREFIX;
const BPF: &str = "bpf";
const CLSACT: &str = "clsact";

pub(super) struct Wanted<'a> {
    pub(super) hook: TcAttachType,
    pub(super) program: &'a SchedClassifier,
    /// After [`NAME_PREFIX`].
    pub(super) name: String,
}

/// The program, and on another plugin's link also id and epoch.
pub(super) fn name(program: &str, link: &LinkRef) -> String {
    match link.owner {
        LinkOwner::Wharf => program.to_owned(),
        LinkOwner::Plugin { .. } => format!("{program}{}", owner(link)),
    }
}

fn owner(link: &LinkRef) -> String {
    format!(":{}:{}", link.id, link.epoch)
}

/// Attaches or replaces the filters. Returns whether all existed. `NotFound` only when the interface is gone;
/// `Conflict` for a foreign filter or qdisc.
pub(super) fn ensure(ifname: &str, wanted: &[Wanted<'_>]) -> Result<bool> {
    let mut device = Device::open(ifname)?.ok_or_else(|| gone(ATTACH, ifname.to_owned()))?;
    let mut outcome = device.attach(wanted)?;
    if outcome.as_ref().is_err_and(|r| [libc::ENOENT, libc::EEXIST, libc::EINVAL].iter().any(|e| r.is(*e))) {
        // Another program changed filters or qdisc meanwhile.
        outcome = device.attach(wanted)?;
    }
    outcome.map_err(|refusal| {
        let device_gone = refusal.is(libc::ENODEV);
        let told = refusal.into_error(ATTACH, ifname);
        match told.kind {
            _ if device_gone => gone(ATTACH, ifname.to_owned()),
            KernelErrorKind::NotFound | KernelErrorKind::Exists => {
                let cause = format!(
                    "{}; the kernel must have the clsact qdisc and the bpf classifier (CONFIG_NET_SCH_INGRESS, \
                     CONFIG_NET_CLS_BPF), or, for links of Wharf's own, use --attach-mode tcx",
                    told.cause
                );
                KernelError { kind: KernelErrorKind::Unsupported, cause, ..told }
            }
            _ => told,
        }
    })
}

pub(super) fn program(connection: &mut Connection, index: IfIndex, hook: TcAttachType) -> Result<Option<u32>> {
    let filters = filters(connection, index.0.cast_signed(), hook, &index.to_string())?;
    Ok(filters.ours().and_then(|f| f.program))
}

/// Also removes an empty qdisc. Returns whether every hook had a filter.
pub(super) fn release(ifname: &str) -> Result<bool> {
    let Some(mut device) = Device::open(ifname)? else { return Ok(false) };
    let mut ours = Vec::with_capacity(HOOKS.len());
    for hook in HOOKS {
        if device.look(hook.attach)?.ours().is_some() {
            ours.push(device.remove_filter(hook.attach));
        }
    }
    if ours.is_empty() {
        return Ok(false);
    }
    let everywhere = ours.len() == HOOKS.len();
    let refused = device.connection.batch(ours)?.into_iter().find_map(std::result::Result::err);
    let mut empty = true;
    for hook in HOOKS {
        let left = device.look(hook.attach)?;
        match refused {
            Some(refusal) if left.ours().is_some() => return Err(refusal.into_error(RELEASE, ifname)),
            _ => empty &= left.is_empty(),
        }
    }
    if empty && let Some(Err(refusal)) = device.connection.batch(vec![device.remove_qdisc()])?.pop() {
        tracing::debug!(ifname, error = %refusal.errno, "the clsact qdisc was not removed");
    }
    Ok(everywhere)
}

/// On another plugin's link. `bare`: removes an empty qdisc.
pub(super) fn restore(link: &LinkRef, bare: bool) -> Result<()> {
    let owner = owner(link);
    remove_all(link.host_ifname.as_str(), |filter| filter.name.ends_with(&owner), bare)
}

/// On another plugin's link.
pub(super) fn held(link: &LinkRef) -> Result<Vec<Hook>> {
    let mut held = Vec::with_capacity(HOOKS.len());
    let Some(mut device) = Device::open(link.host_ifname.as_str())? else { return Ok(held) };
    let owner = owner(link);
    for hook in HOOKS {
        if device.look(hook.attach)?.ours().is_some_and(|filter| filter.name.ends_with(&owner)) {
            held.push(hook);
        }
    }
    Ok(held)
}

fn remove_all(ifname: &str, wanted: impl Fn(&Filter) -> bool, bare: bool) -> Result<()> {
    let Some(mut device) = Device::open(ifname)? else { return Ok(()) };
    let mut empty = true;
    for hook in HOOKS {
        let refused = match device.look(hook.attach)?.ours().is_some_and(&wanted) {
            true => device
                .connection
                .batch(vec![device.remove_filter(hook.attach)])?
                .pop()
                .and_then(std::result::Result::err),
            false => None,
        };
        crash::point("datapath/restore/after-filter");
        let left = device.look(hook.attach)?;
        match refused {
            Some(refusal) if left.ours().is_some_and(&wanted) => return Err(refusal.into_error(RELEASE, ifname)),
            _ => empty &= left.is_empty(),
        }
    }
    if bare
        && empty
        && let Some(Err(refusal)) = device.connection.batch(vec![device.remove_qdisc()])?.pop()
        && is_there(&mut device.connection, IfIndex(device.index.cast_unsigned()))?
    {
        return Err(refusal.into_error(RELEASE, ifname));
    }
    Ok(())
}

/// A qdisc `ingress` counts as clsact.
pub(crate) fn found(connection: &mut Connection, index: IfIndex) -> Result<HooksFound> {
    Ok(match owner_on(connection, index)? {
        Some(_) => HooksFound::Closed,
        None if is_there(connection, index)? => HooksFound::Clsact,
        None => HooksFound::None,
    })
}

/// The kernel answers to the sender only with NLM_F_ECHO.
fn is_there(connection: &mut Connection, index: IfIndex) -> Result<bool> {
    match connection.one(RouteNetlinkMessage::GetQueueDiscipline(qdisc(index.0.cast_signed())), NLM_F_ECHO)? {
        Ok(messages) => Ok(messages.iter().any(|m| matches!(m, RouteNetlinkMessage::NewQueueDiscipline(_)))),
        // No qdisc, another handle, or just removed.
        Err(refusal) if [libc::ENOENT, libc::EINVAL, libc::ENODEV].iter().any(|none| refusal.is(*none)) => Ok(false),
        Err(refusal) => Err(refusal.into_error("look at qdiscs", format!("index {index}"))),
    }
}

/// From the filters' names; zeros where they name none.
pub(crate) fn owner_on(connection: &mut Connection, index: IfIndex) -> Result<Option<(u16, Epoch)>> {
    for hook in HOOKS {
        if let Some(filter) = filters(connection, index.0.cast_signed(), hook.attach, &index.to_string())?.ours() {
            let mut parts = filter.name.rsplit(':');
            let epoch = parts.next().and_then(|text| text.parse().ok()).map(Epoch);
            let id = parts.next().and_then(|text| text.parse().ok());
            return Ok(Some(id.zip(epoch).unwrap_or((0, Epoch(0)))));
        }
    }
    Ok(None)
}

/// Also removes an empty qdisc.
pub(crate) fn remove_from(ifname: &str) -> Result<()> {
    remove_all(ifname, |_| true, true)
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Filter {
    /// Priority in the upper half, protocol in the lower.
    info: u32,
    /// 0 in a priority's row.
    handle: u32,
    kind: String,
    name: String,
    program: Option<u32>,
}

impl Filter {
    fn read(message: TcMessage) -> Self {
        let TcMessage { header, attributes, .. } = message;
        let mut filter = Self {
            info: header.info,
            handle: header.handle.into(),
            kind: String::new(),
            name: String::new(),
            program: None,
        };
        for attribute in attributes {
            match attribute {
                TcAttribute::Kind(kind) => filter.kind = kind,
                TcAttribute::Options(options) => {
                    for option in options {
                        match option {
                            TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => filter.name = name,
                            TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => filter.program = Some(id),
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        filter
    }

    fn is_ours(&self) -> bool {
        self.info == info()
            && self.handle == HANDLE
            && self.kind == BPF
            && self.name.strip_prefix(NAME_PREFIX).is_some_and(|program| !program.is_empty())
    }

    /// A priority has one kind and one protocol.
    fn excludes_ours(&self) -> bool {
        self.info >> 16 == PRIORITY
            && !self.is_ours()
            && (self.kind != BPF || self.info != info() || self.handle == HANDLE)
    }
}

struct Filters {
    known: Vec<Filter>,
    unknown: usize,
}

impl Filters {
    fn ours(&self) -> Option<&Filter> {
        self.known.iter().find(|f| f.is_ours())
    }

    fn is_empty(&self) -> bool {
        self.known.is_empty() && self.unknown == 0
    }
}

fn info() -> u32 {
    PRIORITY << 16 | u32::from(ALL_PROTOCOLS.to_be())
}

struct Device<'a> {
    connection: Connection,
    ifname: &'a str,
    index: i32,
}

impl<'a> Device<'a> {
    fn open(ifname: &'a str) -> Result<Option<Self>> {
        let Some(index) = index_of(ifname)? else { return Ok(None) };
        let index = i32::try_from(index).map_err(|e| wrap(ATTACH, ifname, &e))?;
        Ok(Some(Self { connection: Connection::open()?, ifname, index }))
    }

    fn attach(&mut self, wanted: &[Wanted<'_>]) -> Result<std::result::Result<bool, Refusal>> {
        // Without NLM_F_EXCL: an existing clsact is accepted. An `ingress` qdisc (same handle, one hook) is refused.
        let qdisc = Request::new(RouteNetlinkMessage::NewQueueDiscipline(self.qdisc()), NLM_F_CREATE);
        match self.connection.batch(vec![qdisc])?.pop() {
            Some(Err(refusal)) if refusal.is(libc::EINVAL) => {
                let told = refusal.into_error(ATTACH, self.ifname);
                let cause = format!(
                    "{}; a qdisc of another kind is in clsact's place: remove it (`tc qdisc del dev {} ingress`) or, for \
                     links of Wharf's own, use --attach-mode tcx",
                    told.cause, self.ifname
                );
                return Err(KernelError { kind: KernelErrorKind::Conflict, cause, ..told });
            }
            Some(Err(refusal)) => return Ok(Err(refusal)),
            _ => {}
        }
        crash::point("datapath/filters/after-qdisc");
        // First, because new interfaces have no filters, and listing takes RTNL for each hook.
        let new = NLM_F_CREATE | NLM_F_EXCL;
        let requests = wanted.iter().map(|w| self.put_filter(w, new)).collect::<Result<_>>()?;
        let answers = self.connection.batch(requests)?;
        crash::point("datapath/filters/after-new");
        let mut replacements = Vec::with_capacity(wanted.len());
        for (filter, answer) in wanted.iter().zip(answers) {
            let Err(refusal) = answer else { continue };
            let there = self.look(filter.hook)?;
            if there.ours().is_some() {
                // Flags 0: replaces, never creates.
                replacements.push(self.put_filter(filter, 0)?);
            } else if let Some(other) = there.known.iter().find(|f| f.excludes_ours()) {
                let cause = format!(
                    "a filter that is not ours has our place (kind {}, name {:?}, priority {PRIORITY}, handle {:#x}); \
                     give it another priority or, for links of Wharf's own, use --attach-mode tcx",
                    other.kind, other.name, other.handle
                );
                return Err(fail(ATTACH, self.ifname, KernelErrorKind::Conflict, cause));
            } else {
                return Ok(Err(refusal));
            }
        }
        let replaced = replacements.len() == wanted.len();
        let refused = self.connection.batch(replacements)?.into_iter().find_map(std::result::Result::err);
        Ok(refused.map_or(Ok(replaced), Err))
    }

    fn look(&mut self, hook: TcAttachType) -> Result<Filters> {
        filters(&mut self.connection, self.index, hook, self.ifname)
    }

    fn put_filter(&self, wanted: &Wanted<'_>, flags: u16) -> Result<Request> {
        let error = |e: &(dyn std::error::Error + 'static)| wrap(ATTACH, self.ifname, e);
        let program = wanted.program.fd().map_err(|e| error(&e))?.as_fd().as_raw_fd();
        let program = u32::try_from(program).map_err(|e| error(&e))?;
        let options = vec![
            TcFilterBpfOption::ProgFd(program),
            TcFilterBpfOption::ProgName(format!("{NAME_PREFIX}{}", wanted.name)),
            TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
        ];
        let options = options.into_iter().map(TcOption::Bpf).collect();
        let header = TcHeader { handle: HANDLE.into(), ..on_hook(self.index, wanted.hook) };
        let attributes = vec![TcAttribute::Kind(BPF.to_owned()), TcAttribute::Options(options)];
        let message = TcMessage::from_parts(header, attributes);
        Ok(Request::new(RouteNetlinkMessage::NewTrafficFilter(message), flags))
    }

    fn remove_filter(&self, hook: TcAttachType) -> Request {
        let header = TcHeader { handle: HANDLE.into(), ..on_hook(self.index, hook) };
        let message = TcMessage::from_parts(header, vec![TcAttribute::Kind(BPF.to_owned())]);
        Request::new(RouteNetlinkMessage::DelTrafficFilter(message), 0)
    }

    fn qdisc(&self) -> TcMessage {
        qdisc(self.index)
    }

    fn remove_qdisc(&self) -> Request {
        Request::new(RouteNetlinkMessage::DelQueueDiscipline(self.qdisc()), 0)
    }
}

fn qdisc(index: i32) -> TcMessage {
    let handle = TcHandle { minor: 0, ..TcHandle::CLSACT };
    let header = TcHeader { index, handle, parent: TcHandle::CLSACT, ..TcHeader::default() };
    TcMessage::from_parts(header, vec![TcAttribute::Kind(CLSACT.to_owned())])
}

/// A qdisc without programs keeps hooks in use on the machine. The kernel patches code on all processors for the first
/// and the last hook: 0.1 ms of an ADD or more.
pub(crate) fn keep_hooks(index: IfIndex) -> Request {
    Request::new(RouteNetlinkMessage::NewQueueDiscipline(qdisc(index.0.cast_signed())), NLM_F_CREATE)
}

fn filters(connection: &mut Connection, index: i32, hook: TcAttachType, subject: &str) -> Result<Filters> {
    let request = TcMessage::from_parts(TcHeader { info: 0, ..on_hook(index, hook) }, Vec::new());
    let dump = match connection.dump_whole(&RouteNetlinkMessage::GetTrafficFilter(request))? {
        Ok(dump) => dump,
        Err(refusal) if refusal.is(libc::ENODEV) => return Ok(Filters { known: Vec::new(), unknown: 0 }),
        Err(refusal) => return Err(refusal.into_error("list filters", subject)),
    };
    let known = dump.known.into_iter().filter_map(|m| match m {
        RouteNetlinkMessage::NewTrafficFilter(m) => Some(Filter::read(m)),
        _ => None,
    });
    Ok(Filters { known: known.collect(), unknown: dump.left_out })
}

fn on_hook(index: i32, hook: TcAttachType) -> TcHeader {
    let minor = match hook {
        TcAttachType::Ingress => TcHandle::MIN_INGRESS,
        _ => TcHandle::MIN_EGRESS,
    };
    let parent = TcHandle { major: TcHandle::CLSACT.major, minor };
    TcHeader { index, parent, info: info(), ..TcHeader::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours() -> Filter {
        Filter {
            info: info(),
            handle: HANDLE,
            kind: BPF.to_owned(),
            name: "wharf/from_container".to_owned(),
            program: Some(7),
        }
    }

    #[test]
    fn a_filter_is_ours_only_when_everything_about_it_is() {
        assert!(ours().is_ours() && !ours().excludes_ours());
        let others = [
            Filter { info: 2 << 16 | (info() & 0xffff), ..ours() },
            Filter { info: PRIORITY << 16 | u32::from(0x0800u16.to_be()), ..ours() },
            Filter { handle: 1, ..ours() },
            Filter { kind: "u32".to_owned(), ..ours() },
            Filter { name: "theirs".to_owned(), ..ours() },
            Filter { name: "wharf/".to_owned(), ..ours() },
        ];
        for other in others {
            assert!(!other.is_ours(), "{other:?}");
        }
    }

    #[test]
    fn only_what_the_kernel_or_we_would_mistake_for_ours_is_in_the_way() {
        let beside = [Filter { info: 2 << 16 | (info() & 0xffff), ..ours() }, Filter { handle: 1, ..ours() }];
        for other in beside {
            assert!(!other.excludes_ours(), "{other:?}");
        }
        let in_the_way = [
            Filter { info: PRIORITY << 16 | u32::from(0x0800u16.to_be()), handle: 1, ..ours() },
            Filter { handle: 0x8000_0800, kind: "u32".to_owned(), ..ours() },
            Filter { name: "theirs".to_owned(), ..ours() },
        ];
        for other in in_the_way {
            assert!(other.excludes_ours(), "{other:?}");
        }
    }
}
