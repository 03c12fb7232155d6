//! Netlink requests. The container's link is a veth or netkit in the node's namespace whose alias is the attachment's
//! mark and whose name matches it. A DEL enters no namespace, so a stale `CNI_NETNS` does no harm.

pub(crate) mod sides;

use std::{fmt, io, time::Duration};

use futures::StreamExt as _;
use rtnetlink::{
    Error, Handle, new_connection_with_strict_check,
    packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoKind, LinkAttribute, LinkExtentMask, LinkInfo, LinkMessage},
    },
};
use wharf_names::{
    ids::{EndpointId, Epoch},
    link::host_ifname,
    mark::Mark,
};

use crate::{netconf::NetConf, request::Target};

/// Usually milliseconds; a second on a busy node.
const KERNEL_LIMIT: Duration = Duration::from_secs(10);
const LIST_TRIES: usize = 5;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Marked {
    index: u32,
    name: String,
    pub(crate) mark: Mark,
}

impl fmt::Display for Marked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    Removed,
    /// Or its index was reused.
    Gone,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("list links: {0}")]
    List(#[source] Cause),
    #[error("remove link {0}: {1}")]
    Remove(String, #[source] Cause),
    #[error("open network namespace {0}: {1}")]
    Netns(String, #[source] io::Error),
    #[error("look at {0}: {1}")]
    Look(String, #[source] Cause),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Cause {
    #[error("open netlink socket: {0}")]
    Socket(#[source] io::Error),
    #[error("no answer within {} s", KERNEL_LIMIT.as_secs())]
    TimedOut,
    #[error("{0}")]
    Answer(&'static str),
    #[error("look at it: {0}")]
    Look(#[source] Error),
    #[error(transparent)]
    Request(#[from] Error),
    #[error(transparent)]
    Kernel(#[from] io::Error),
}

/// Several after an earlier failure.
pub(crate) async fn find(conf: &NetConf, target: &Target) -> Result<Vec<Marked>, LinkError> {
    // Of every kind: a kernel without netkit does not filter by it.
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    let links = in_kernel(async |mut handle| dump(&mut handle, RouteNetlinkMessage::GetLink(message)).await);
    let links = links.await.map_err(LinkError::List)?;
    let ours = |message: &RouteNetlinkMessage| match message {
        RouteNetlinkMessage::NewLink(link) => marked(link, conf, target),
        _ => None,
    };
    Ok(links.iter().filter_map(ours).collect())
}

pub(crate) async fn remove(link: &Marked, conf: &NetConf, target: &Target) -> Result<Removal, LinkError> {
    let removed = in_kernel(async |handle| {
        // Indexes are reused.
        let mut found = std::pin::pin!(handle.link().get().match_index(link.index).execute());
        let there = match found.next().await {
            Some(Ok(message)) => marked(&message, conf, target),
            Some(Err(error)) if is_gone(&error) => None,
            Some(Err(error)) => return Err(Cause::Look(error)),
            None => return Err(Cause::Answer("look at it: no answer")),
        };
        if there.as_ref() != Some(link) {
            return Ok(Removal::Gone);
        }
        match handle.link().del(link.index).execute().await {
            Ok(()) => Ok(Removal::Removed),
            Err(error) if is_gone(&error) => Ok(Removal::Gone),
            Err(error) => Err(error.into()),
        }
    });
    removed.await.map_err(|cause| LinkError::Remove(link.name.clone(), cause))
}

/// Also polls the connection.
async fn in_kernel<T>(work: impl AsyncFnOnce(Handle) -> Result<T, Cause>) -> Result<T, Cause> {
    let (mut connection, handle, _unasked) = new_connection_with_strict_check().map_err(Cause::Socket)?;
    // Shows whether a dump is complete.
    connection.set_forward_done(true);
    tokio::select! {
        biased;
        result = work(handle) => result,
        () = connection => Err(Cause::Answer("the netlink socket was closed")),
        () = tokio::time::sleep(KERNEL_LIMIT) => Err(Cause::TimedOut),
    }
}

async fn dump(handle: &mut Handle, question: RouteNetlinkMessage) -> Result<Vec<RouteNetlinkMessage>, Cause> {
    for _ in 0..LIST_TRIES {
        if let Some(objects) = try_dump(handle, question.clone()).await? {
            return Ok(objects);
        }
    }
    Err(Cause::Answer("it changed each time it was read"))
}

/// `None` if the dump changed meanwhile.
async fn try_dump(
    handle: &mut Handle,
    question: RouteNetlinkMessage,
) -> Result<Option<Vec<RouteNetlinkMessage>>, Cause> {
    let mut request = NetlinkMessage::from(question);
    request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut answers = std::pin::pin!(handle.request(request)?);
    let (mut objects, mut whole) = (Vec::new(), true);
    while let Some(answer) = answers.next().await {
        whole &= answer.header.flags & NLM_F_DUMP_INTR == 0;
        match answer.payload {
            NetlinkPayload::InnerMessage(object) => objects.push(object),
            NetlinkPayload::Done(done) if done.code == 0 => return Ok(whole.then_some(objects)),
            NetlinkPayload::Done(done) => return Err(io::Error::from_raw_os_error(done.code.saturating_neg()).into()),
            NetlinkPayload::Error(error) => return Err(error.to_io().into()),
            NetlinkPayload::Overrun(_) => return Ok(None),
            _ => {}
        }
    }
    Err(Cause::Answer("the answer was cut short"))
}

fn marked(link: &LinkMessage, conf: &NetConf, target: &Target) -> Option<Marked> {
    let (mut name, mut alias, mut pair) = (None, None, false);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(text) => name = Some(text),
            LinkAttribute::IfAlias(text) => alias = Some(text),
            LinkAttribute::LinkInfo(infos) => {
                pair = infos.iter().any(|info| matches!(info, LinkInfo::Kind(InfoKind::Veth | InfoKind::Netkit)));
            }
            _ => {}
        }
    }
    let (name, mark) = (name?, Mark::parse(alias?)?);
    let ours = pair
        && EndpointId::try_from(mark.id).is_ok_and(|id| *name == host_ifname(id, Epoch(mark.epoch)).as_str())
        && mark.is_of(&conf.name, &target.container_id, &target.ifname);
    ours.then(|| Marked { index: link.header.index, name: name.clone(), mark })
}

fn is_gone(error: &Error) -> bool {
    matches!(error, Error::NetlinkError(e) if e.to_io().raw_os_error() == Some(libc::ENODEV))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn conf() -> NetConf {
        let document = json!({"cniVersion": "1.1.0", "name": "net", "type": "wharf-cni"});
        NetConf::parse(document.as_object().unwrap().clone(), None).unwrap()
    }

    fn target() -> Target {
        Target { container_id: "c1".into(), ifname: "eth0".into() }
    }

    fn link(name: &str, alias: Option<&str>, kind: InfoKind) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = 9;
        message.attributes.push(LinkAttribute::IfName(name.into()));
        message.attributes.extend(alias.map(|alias| LinkAttribute::IfAlias(alias.into())));
        message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]));
        message
    }

    #[test]
    fn the_containers_own_link_is_known_by_kind_mark_and_name() {
        let found = marked(&link("wh000700000009", Some("wharf:7:9:net/c1/eth0"), InfoKind::Veth), &conf(), &target());
        let mark = Mark::new(7, 9, "net", "c1", "eth0");
        assert_eq!(found, Some(Marked { index: 9, name: "wh000700000009".into(), mark }));
    }

    #[test]
    fn anything_less_is_not_ours() {
        let ours = "wharf:7:9:net/c1/eth0";
        for (name, alias, kind) in [
            ("wh000700000009", None, InfoKind::Veth),
            ("wh000000000009", Some("wharf:0:9:net/c1/eth0"), InfoKind::Veth),
            ("wh400000000009", Some("wharf:16384:9:net/c1/eth0"), InfoKind::Veth),
            ("wh000700000009", Some(""), InfoKind::Veth),
            ("wh000700000009", Some("wharf:7:9"), InfoKind::Veth),
            ("wh000700000009", Some(ours), InfoKind::Bridge),
            ("wh00070000000a", Some(ours), InfoKind::Veth),
            ("wh000800000009", Some(ours), InfoKind::Veth),
            ("eth0", Some(ours), InfoKind::Veth),
            ("wh000700000009", Some("wharf:7:9:net/c1/eth1"), InfoKind::Veth),
            ("wh000700000009", Some("wharf:7:9:net/c2/eth0"), InfoKind::Veth),
            ("wh000700000009", Some("wharf:7:9:other/c1/eth0"), InfoKind::Veth),
            ("wh000700000009", Some("wharf:7:9:net/c1/eth0/"), InfoKind::Veth),
            ("wh000700000009", Some("a wharf:7:9:net/c1/eth0"), InfoKind::Veth),
        ] {
            assert_eq!(marked(&link(name, alias, kind.clone()), &conf(), &target()), None, "{name} {alias:?} {kind:?}");
        }
        assert_eq!(marked(&LinkMessage::default(), &conf(), &target()), None);
    }
}
