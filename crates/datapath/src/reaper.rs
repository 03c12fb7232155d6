//! The deletion of links.
//!
//! Under RTNL the kernel removes both sides of a pair from its lookup tables and reports `RTM_DELLINK`, in well
//! below a millisecond. Then the caller's `sendmsg` waits until every CPU has released the devices: 12 to 20 ms, once
//! for a group of links. So requests that arrive during a batch form the next batch. One thread selects links and
//! listens for the report; a thread per batch sends the request and waits.
//!
//! The container side's addresses, sysctls and sysfs entries go after the report, before RTNL is released
//! (`unregister_netdevice_many_notify` of `net/core/dev.c`): see [`await_rtnl`].

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    io,
    sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rtnetlink::{
    LinkUnspec,
    packet_route::{AddressFamily, RouteNetlinkMessage},
};
use tokio::sync::oneshot;
use wharf_core::{
    ids::IfIndex,
    kernel::{KernelErrorKind, LinkRef, Result},
};
use wharf_crash as crash;

use crate::{
    error::{fail, wrap},
    netlink::{Connection, Request, link},
};

/// Queued deletes; the agent runs fewer at a time.
const QUEUE: usize = 1024;
const BATCH: usize = 256;
/// A thread each.
const BATCHES: usize = 8;
/// Poll interval for a batch without a report.
const CHECK: Duration = Duration::from_millis(5);
/// Positive as a signed number.
const GROUP_BASE: u32 = 1 << 30;

const OPERATION: &str = "remove link";

pub(crate) struct Removal {
    pub(crate) existed: bool,
    pub(crate) unlisted: bool,
    pub(crate) release: oneshot::Receiver<Result<()>>,
}

struct Order {
    link: LinkRef,
    reply: oneshot::Sender<Result<Removal>>,
}

/// Drop ends the thread after the queued deletes.
pub(crate) struct Reaper {
    queue: Option<SyncSender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Reaper {
    fn drop(&mut self) {
        drop(self.queue.take());
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

impl Reaper {
    pub(crate) fn start() -> Result<Self> {
        let connection = Connection::open()?;
        let (queue, orders) = sync_channel(QUEUE);
        let thread = thread::Builder::new()
            .name("wharf-reaper".to_owned())
            .spawn(move || serve(&orders, connection))
            .map_err(|e: io::Error| wrap("start reaper", "wharf-reaper", &e))?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    pub(crate) async fn remove(&self, link: &LinkRef) -> Result<Removal> {
        let subject = link.host_ifname.to_string();
        let (reply, answer) = oneshot::channel();
        let Some(queue) = &self.queue else { return Err(ended(subject)) };
        match queue.try_send(Order { link: link.clone(), reply }) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                let cause = format!("{QUEUE} deletes wait already; try again");
                return Err(fail(OPERATION, subject, KernelErrorKind::Exhausted, cause));
            }
            Err(TrySendError::Disconnected(_)) => return Err(ended(subject)),
        }
        answer.await.unwrap_or_else(|_| Err(ended(subject)))
    }
}

pub(crate) fn ended(subject: String) -> wharf_core::kernel::KernelError {
    fail(OPERATION, subject, KernelErrorKind::Other, "the reaper thread has ended; restart the agent")
}

fn serve(orders: &Receiver<Order>, mut connection: Connection) {
    let mut batches: Vec<JoinHandle<()>> = Vec::new();
    while let Ok(first) = orders.recv() {
        let mut batch = vec![first];
        batch.extend(orders.try_iter().take(BATCH - 1));
        match find(&mut connection, batch) {
            Ok(doomed) if doomed.is_empty() => {}
            Ok(doomed) => batches.extend(delete(doomed)),
            Err(error) => {
                tracing::warn!(%error, "look up links to delete");
                // The old socket may still receive answers.
                match Connection::open() {
                    Ok(fresh) => connection = fresh,
                    Err(error) => tracing::warn!(%error, "the reaper keeps its old socket"),
                }
            }
        }
        batches.retain(|batch| !batch.is_finished());
        if batches.len() >= BATCHES {
            let _ended = batches.remove(0).join();
        }
    }
    for batch in batches {
        let _ended = batch.join();
    }
}

struct Doomed {
    ifindex: IfIndex,
    name: String,
    orders: Vec<Order>,
}

fn find(connection: &mut Connection, batch: Vec<Order>) -> Result<Vec<Doomed>> {
    let questions = batch.iter().map(|o| link::get_by_name(o.link.host_ifname.as_str())).collect();
    let answers = match connection.batch(questions) {
        Ok(answers) => answers,
        Err(e) => {
            for order in batch {
                let again = fail(OPERATION, order.link.host_ifname.to_string(), e.kind, e.cause.clone());
                let _unwanted = order.reply.send(Err(again));
            }
            return Err(e);
        }
    };
    let mut doomed: BTreeMap<IfIndex, Doomed> = BTreeMap::new();
    for (order, answer) in batch.into_iter().zip(answers) {
        let name = order.link.host_ifname.to_string();
        let found = match link::found(answer, &name) {
            // By name: unlike an index, it is never reused.
            Ok(Some(seen)) if seen.pair => Ok(Some(seen.ifindex)),
            Ok(Some(_)) => {
                let cause = "it is neither a veth nor a netkit link, so it is not ours; it was left alone";
                Err(fail(OPERATION, &*name, KernelErrorKind::Conflict, cause))
            }
            Ok(None) => renamed(connection, &order.link),
            Err(e) => Err(e),
        };
        match found {
            Ok(Some(ifindex)) => {
                let there = doomed.entry(ifindex).or_insert_with(|| Doomed { ifindex, name, orders: Vec::new() });
                there.orders.push(order);
            }
            Ok(None) => {
                let (released, release) = oneshot::channel();
                let _unwanted = released.send(Ok(()));
                let _unwanted = order.reply.send(Ok(Removal { existed: false, unlisted: true, release }));
            }
            Err(e) => drop(order.reply.send(Err(e))),
        }
    }
    Ok(doomed.into_values().collect())
}

fn renamed(connection: &mut Connection, link: &LinkRef) -> Result<Option<IfIndex>> {
    let Some(ifindex) = link.host_ifindex else { return Ok(None) };
    let seen = link::look_up_index(connection, ifindex)?;
    let ours = |l: &link::LinkSeen| l.pair && link::has_mark(l.alias.as_deref(), link.id, link.epoch);
    Ok(seen.filter(ours).map(|l| l.ifindex))
}

/// Replies when the kernel reports the removal. Returns the thread if it still waits for the kernel's answer.
fn delete(doomed: Vec<Doomed>) -> Option<JoinHandle<()>> {
    let mut reports = Connection::open().and_then(|mut c| c.hear_links().map(|()| c));
    let (mut waiting, mut targets) = (BTreeMap::new(), Vec::with_capacity(doomed.len()));
    for Doomed { ifindex, name, orders } in doomed {
        let (replies, releases): (Vec<_>, Vec<_>) = orders
            .into_iter()
            .map(|order| {
                let (released, release) = oneshot::channel();
                ((order.reply, release), released)
            })
            .unzip();
        waiting.insert(ifindex, replies);
        targets.push(Target { ifindex, name, releases });
    }
    let thread = match thread::Builder::new().name("wharf-unlink".to_owned()).spawn(move || send(targets)) {
        Ok(thread) => thread,
        Err(error) => {
            tracing::error!(%error, "start a thread that deletes links");
            waiting.into_values().for_each(|replies| answer(Some(replies), false));
            return None;
        }
    };
    while !waiting.is_empty() && !thread.is_finished() {
        let Ok(socket) = &mut reports else { break };
        match socket.heard(Instant::now() + CHECK) {
            Ok(messages) => {
                let removed: Vec<_> = messages.iter().filter_map(removed).filter(|i| waiting.contains_key(i)).collect();
                let done = removed.first().map_or(Ok(()), |ifindex| await_rtnl(socket, *ifindex));
                match done {
                    Ok(()) => removed.iter().for_each(|ifindex| answer(waiting.remove(ifindex), true)),
                    Err(error) => reports = Err(error),
                }
            }
            Err(error) => reports = Err(error),
        }
    }
    if waiting.is_empty() {
        return Some(thread);
    }
    if let Err(error) = reports {
        tracing::warn!(%error, "listen to removed links; the kernel's answer is awaited instead");
    }
    let _ended = thread.join();
    waiting.into_values().for_each(|replies| answer(Some(replies), false));
    None
}

/// An empty change of a removed link takes RTNL.
fn await_rtnl(connection: &mut Connection, removed: IfIndex) -> Result<()> {
    let nothing = link::set(LinkUnspec::new_with_index(removed.0).build());
    connection.batch(vec![nothing]).map(drop)
}

fn removed(message: &RouteNetlinkMessage) -> Option<IfIndex> {
    match message {
        // Other families: a bridge reports that a link is no longer a port.
        RouteNetlinkMessage::DelLink(link) if link.header.interface_family == AddressFamily::Unspec => {
            Some(IfIndex(link.header.index))
        }
        _ => None,
    }
}

type Reply = (oneshot::Sender<Result<Removal>>, oneshot::Receiver<Result<()>>);

fn answer(replies: Option<Vec<Reply>>, unlisted: bool) {
    for (reply, release) in replies.into_iter().flatten() {
        drop(reply.send(Ok(Removal { existed: true, unlisted, release })));
    }
}

struct Target {
    ifindex: IfIndex,
    name: String,
    releases: Vec<oneshot::Sender<Result<()>>>,
}

fn send(targets: Vec<Target>) {
    let results = delete_all(&targets);
    crash::hold("datapath/reaper/before-release");
    for (at, target) in targets.into_iter().enumerate() {
        for release in target.releases {
            let result = match &results {
                Ok(refused) => match refused.get(&at) {
                    None => Ok(()),
                    Some(cause) => Err(fail(OPERATION, &*target.name, cause.kind, cause.cause.clone())),
                },
                Err(e) => Err(fail(OPERATION, &*target.name, e.kind, e.cause.clone())),
            };
            let _unwanted = release.send(result);
        }
    }
}

fn delete_all(targets: &[Target]) -> Result<BTreeMap<usize, wharf_core::kernel::KernelError>> {
    let mut connection = Connection::open()?;
    let mut refused = BTreeMap::new();
    crash::point("datapath/reaper/before-delete");
    if targets.len() > 1 && delete_group(&mut connection, random_group(), targets)? {
        return Ok(refused);
    }
    for (at, target) in targets.iter().enumerate() {
        if let Some(Err(refusal)) = connection.batch(vec![link::delete(target.ifindex)])?.pop()
            && !refusal.is(libc::ENODEV)
        {
            refused.insert(at, refusal.into_error(OPERATION, target.name.clone()));
        }
    }
    Ok(refused)
}

/// A collision is one in a billion: foreign members are not checked.
fn random_group() -> u32 {
    let [a, b, c, d, ..] = RandomState::new().hash_one(0_u8).to_le_bytes();
    u32::from_le_bytes([a, b, c, d]) % GROUP_BASE + GROUP_BASE
}

/// False when refused: then any link may remain.
fn delete_group(connection: &mut Connection, group: u32, targets: &[Target]) -> Result<bool> {
    let requests = targets
        .iter()
        .map(|target| link::set(LinkUnspec::new_with_index(target.ifindex.0).link_group(group).build()))
        .collect();
    connection.batch(requests)?;
    crash::point("datapath/reaper/after-group");
    let message = LinkUnspec::new_with_index(0).link_group(group).build();
    let answer = connection.batch(vec![Request::new(RouteNetlinkMessage::DelLink(message), 0)])?.pop();
    match answer {
        Some(Err(refusal)) if refusal.is(libc::ENODEV) => Ok(true),
        Some(Err(refusal)) => {
            tracing::warn!(error = %refusal.errno, "deleting a link group was refused; deleting one by one");
            Ok(false)
        }
        _ => Ok(true),
    }
}
