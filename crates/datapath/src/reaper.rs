//! The deletion of links.
//!
//! Deleting a veth pair makes the kernel wait until every CPU has released it: 12 to 16 ms, under the RTNL lock.
//! Deleting a hundred pairs as one group waits once. So one thread deletes links, and requests that arrive during a
//! delete form its next batch.

use std::{
    hash::{BuildHasher, RandomState},
    io,
    sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    thread::{self, JoinHandle},
};

use rtnetlink::{LinkUnspec, packet_route::RouteNetlinkMessage};
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

/// Deletes that may wait for the thread; a node has 16,383 endpoints at most, and the agent runs fewer deletes at a
/// time than this.
const QUEUE: usize = 1024;
/// Links in one batch.
const BATCH: usize = 256;
/// Our link group numbers begin here: far from those that people choose, and positive where a tool reads them as
/// signed.
const GROUP_BASE: u32 = 1 << 30;

const OPERATION: &str = "remove link";

struct Order {
    link: LinkRef,
    reply: oneshot::Sender<Result<bool>>,
}

/// The thread `wharf-reaper`. Dropping this ends the thread after the queued deletes.
pub(crate) struct Reaper {
    /// `None` only during drop: closing the queue ends the thread.
    queue: Option<SyncSender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Reaper {
    fn drop(&mut self) {
        drop(self.queue.take());
        // A thread that panicked has ended too.
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

impl Reaper {
    /// Starts the thread; it deletes in the caller's network namespace.
    pub(crate) fn start() -> Result<Self> {
        let connection = Connection::open()?;
        let (queue, orders) = sync_channel(QUEUE);
        let thread = thread::Builder::new()
            .name("wharf-reaper".to_owned())
            .spawn(move || serve(&orders, connection))
            .map_err(|e: io::Error| wrap("start reaper", "wharf-reaper", &e))?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    /// Deletes a link; a missing link is not an error. True when the host side existed.
    pub(crate) async fn remove(&self, link: &LinkRef) -> Result<bool> {
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

fn ended(subject: String) -> wharf_core::kernel::KernelError {
    fail(OPERATION, subject, KernelErrorKind::Other, "the reaper thread has ended; restart the agent")
}

fn serve(orders: &Receiver<Order>, mut connection: Connection) {
    while let Ok(first) = orders.recv() {
        let mut batch = vec![first];
        batch.extend(orders.try_iter().take(BATCH - 1));
        let results = delete_all(&mut connection, random_group(), &batch);
        let failed = results.is_err();
        match results {
            Ok(results) => {
                for (order, result) in batch.into_iter().zip(results) {
                    // The caller may have given up; its retry finds the link gone.
                    let _unwanted = order.reply.send(result);
                }
            }
            Err(e) => {
                for order in batch {
                    let again = fail(OPERATION, order.link.host_ifname.to_string(), e.kind, e.cause.clone());
                    let _unwanted = order.reply.send(Err(again));
                }
            }
        }
        if failed {
            // Answers to the failed exchange may still lie in the old socket.
            match Connection::open() {
                Ok(fresh) => connection = fresh,
                Err(error) => tracing::warn!(%error, "the reaper keeps its old socket"),
            }
        }
    }
}

/// Deletes every link that is still there; one result for each order.
fn delete_all(connection: &mut Connection, group: u32, batch: &[Order]) -> Result<Vec<Result<bool>>> {
    let questions = batch.iter().map(|o| link::get_by_name(o.link.host_ifname.as_str())).collect();
    let answers = connection.batch(questions)?;
    let mut results = Vec::with_capacity(batch.len());
    let mut doomed: Vec<(usize, IfIndex)> = Vec::new();
    for (at, (order, answer)) in batch.iter().zip(answers).enumerate() {
        let name = order.link.host_ifname.as_str();
        results.push(match link::found(answer, name) {
            // The link is found by name, not by index: the name carries id and epoch and is never reused, but an
            // index may belong to another link by now.
            Ok(Some(seen)) if seen.veth => {
                doomed.push((at, seen.ifindex));
                Ok(true)
            }
            Ok(Some(_)) => {
                let cause = "it is not a veth link, so it is not ours; it was left alone";
                Err(fail(OPERATION, name, KernelErrorKind::Conflict, cause))
            }
            Ok(None) => renamed(connection, &order.link).map(|found| {
                doomed.extend(found.map(|ifindex| (at, ifindex)));
                found.is_some()
            }),
            Err(e) => Err(e),
        });
    }
    doomed.sort_by_key(|(_, ifindex)| *ifindex);
    doomed.dedup_by_key(|(_, ifindex)| *ifindex);
    crash::point("datapath/reaper/before-delete");
    if doomed.len() > 1 && delete_group(connection, group, &doomed)? {
        return Ok(results);
    }
    for (at, ifindex) in doomed {
        let Some(order) = batch.get(at) else { continue };
        if let Some(Err(refusal)) = connection.batch(vec![link::delete(ifindex)])?.pop()
            && !refusal.is(libc::ENODEV)
            && let Some(result) = results.get_mut(at)
        {
            *result = Err(refusal.into_error(OPERATION, order.link.host_ifname.to_string()));
        }
    }
    Ok(results)
}

/// Finds a renamed link by its index and by the mark that names its endpoint.
fn renamed(connection: &mut Connection, link: &LinkRef) -> Result<Option<IfIndex>> {
    let Some(ifindex) = link.host_ifindex else { return Ok(None) };
    let seen = link::look_up_index(connection, ifindex)?;
    let ours = |l: &link::LinkSeen| l.veth && link::names(l.alias.as_deref(), link.id, link.epoch);
    Ok(seen.filter(ours).map(|l| l.ifindex))
}

/// A link group number (`ip link show group N`) that nobody else uses: one in a billion, drawn anew for each batch.
/// So a batch need not dump every link to check the group for foreign members, and a link that a failed batch left in
/// its group is not deleted by a later batch.
fn random_group() -> u32 {
    // The standard library seeds its hash maps from the kernel's random numbers.
    let [a, b, c, d, ..] = RandomState::new().hash_one(0_u8).to_le_bytes();
    u32::from_le_bytes([a, b, c, d]) % GROUP_BASE + GROUP_BASE
}

/// Deletes several links in one kernel wait. False when the delete was refused: no link is sure to be gone.
fn delete_group(connection: &mut Connection, group: u32, doomed: &[(usize, IfIndex)]) -> Result<bool> {
    let requests = doomed
        .iter()
        .map(|(_, ifindex)| link::set(LinkUnspec::new_with_index(ifindex.0).link_group(group).build()))
        .collect();
    // A refusal means that the link is already gone.
    connection.batch(requests)?;
    crash::point("datapath/reaper/after-group");
    let message = LinkUnspec::new_with_index(0).link_group(group).build();
    let answer = connection.batch(vec![Request::new(RouteNetlinkMessage::DelLink(message), 0)])?.pop();
    match answer {
        // Every link of the group was already gone.
        Some(Err(refusal)) if refusal.is(libc::ENODEV) => Ok(true),
        Some(Err(refusal)) => {
            tracing::warn!(error = %refusal.errno, "deleting a link group was refused; deleting one by one");
            Ok(false)
        }
        _ => Ok(true),
    }
}
