//! Redirects of tables, and `<state-dir>/redirects.json`, which keeps their ports.

use std::{collections::BTreeMap, io, path::Path, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use wharf_core::ids::{EndpointId, Epoch};
use wharf_kit::kept;
use wharf_policy::{
    compile::{Listener, ListenerId, SetId, Tables},
    model::Direction,
};

use super::{members::Members, rounds::Place, rows};
use crate::proxy::{Redirect, Wanted};

const VERSION: u32 = 1;
const MAX_FILE: u64 = 128 << 20;
/// A listener keeps a member after rows last led there, for connections before the proxy's accept: a closed socket
/// resets its queue, and nothing reports that the queue is empty.
pub(super) const HANDSHAKES: Duration = Duration::from_millis(500);

/// Of the proxy, before a revision is realized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owed {
    Nothing,
    /// Acknowledge; if `ends`, then end connections judged by earlier requests.
    Answer {
        ends: bool,
    },
    /// End connections judged by earlier requests, the last one at this time.
    Ends(Instant),
}

impl Owed {
    pub(super) fn ends(self) -> bool {
        matches!(self, Self::Answer { ends: true } | Self::Ends(_))
    }
}

pub(super) type Outgoing = BTreeMap<Place, Instant>;

/// Listeners by port.
pub type Listeners = BTreeMap<u16, Arc<Listener>>;

/// The file's content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ports {
    /// By port.
    pub listeners: Listeners,
    /// Other numbers would end connections.
    pub(super) rounds: BTreeMap<Place, u32>,
}

#[derive(Serialize, Deserialize)]
struct File {
    version: u32,
    listeners: Listeners,
    /// Port, endpoint, epoch, round. Missing in older files.
    #[serde(default)]
    rounds: Vec<(u16, u16, u64, u32)>,
}

pub(super) fn wanted(tables: &Tables, members: &Members) -> Wanted {
    let mut ports: BTreeMap<SetId, Vec<ListenerId>> = BTreeMap::new();
    for (listener, set) in tables.redirects.keys() {
        ports.entry(*set).or_default().push(*listener);
    }
    let redirect = |(port, listener): (&ListenerId, &Arc<Listener>)| {
        (port.0, Redirect { listener: Arc::clone(listener), members: BTreeMap::new(), rounds: BTreeMap::new() })
    };
    let mut wanted: Wanted = tables.listeners.iter().map(redirect).collect();
    if ports.is_empty() {
        return wanted;
    }
    for (key, sets) in &tables.sets {
        let Some((id, place)) = rows::endpoint(*key).and_then(|id| Some((id, members.get(id)?))) else { continue };
        let of = |direction| ports.get(&sets.of(direction)).into_iter().flatten();
        for port in of(Direction::Ingress).chain(of(Direction::Egress)) {
            if let Some(redirect) = wanted.get_mut(&port.0) {
                redirect.members.insert((id, place.epoch), place.member.endpoint.addresses.to_vec());
            }
        }
    }
    wanted
}

/// Union of both states. A port with two listeners is `other`'s: no row of `one` leads there.
pub(super) fn both(one: &Wanted, other: &Wanted) -> Wanted {
    let mut both = one.clone();
    for (port, redirect) in other {
        match both.get_mut(port) {
            Some(own) if own.listener == redirect.listener => own.members.extend(redirect.members.clone()),
            _ => drop(both.insert(*port, redirect.clone())),
        }
    }
    both
}

/// Leaving members stay for [`HANDSHAKES`].
pub(super) fn with_outgoing(
    after: &Wanted,
    told: &Wanted,
    members: &Members,
    outgoing: &mut Outgoing,
    now: Instant,
) -> Wanted {
    let mut wanted = after.clone();
    let mut stay = Outgoing::new();
    for (port, member) in losses(told, after, members) {
        let until = outgoing.get(&(port, member)).copied().unwrap_or(now + HANDSHAKES);
        let Some(redirect) = told.get(&port).filter(|_| until > now) else { continue };
        let listener =
            || Redirect { listener: Arc::clone(&redirect.listener), members: BTreeMap::new(), rounds: BTreeMap::new() };
        let staying = wanted.entry(port).or_insert_with(listener);
        // Another listener would judge by other rules.
        if let Some(addresses) = redirect.members.get(&member).filter(|_| staying.listener == redirect.listener) {
            staying.members.insert(member, addresses.clone());
            stay.insert((port, member), until);
        }
    }
    *outgoing = stay;
    wanted
}

/// Whether remaining endpoints' connections end: the listener goes, loses them, or begins another round.
pub(super) fn end(before: &Wanted, after: &Wanted, members: &Members) -> bool {
    let is_envoys = |redirect: &Redirect| redirect.listener.requests.names.is_empty();
    let anew = |(port, redirect): (&u16, &Redirect)| {
        let before = before.get(port).filter(|before| is_envoys(before));
        before.is_some_and(|before| {
            let round = |of: &Redirect, member| of.rounds.get(member).copied().unwrap_or(0);
            let mut both = redirect.members.keys().filter(|member| before.members.contains_key(member));
            both.any(|member| round(before, member) != round(redirect, member))
        })
    };
    losses(before, after, members).next().is_some() || after.iter().any(anew)
}

/// Endpoints that lose a listener of Envoy's; the DNS proxy judges each query.
fn losses<'a>(
    before: &'a Wanted,
    after: &'a Wanted,
    members: &'a Members,
) -> impl Iterator<Item = (u16, (EndpointId, Epoch))> + 'a {
    let stays = |(id, epoch): (EndpointId, Epoch)| members.get(id).is_some_and(|place| place.epoch == epoch);
    before.iter().filter(|(_, redirect)| redirect.listener.requests.names.is_empty()).flat_map(
        move |(port, redirect)| {
            let has = |member| after.get(port).is_some_and(|after| after.members.contains_key(member));
            let lost = redirect.members.keys().filter(move |member| stays(**member) && !has(member));
            lost.map(|member| (*port, *member))
        },
    )
}

pub(super) fn listeners(wanted: &Wanted) -> Listeners {
    wanted.iter().map(|(port, redirect)| (*port, Arc::clone(&redirect.listener))).collect()
}

/// Reads the file; empty without one.
///
/// # Errors
/// Unreadable, or of another format.
pub fn load(path: &Path) -> io::Result<Ports> {
    let Some(text) = kept::read(path, MAX_FILE)? else { return Ok(Ports::default()) };
    let File { version, listeners, rounds } = serde_json::from_slice(&text)?;
    if version != VERSION {
        return Err(io::Error::other(format!("it is of version {version}, this agent knows {VERSION}")));
    }
    let rounds = rounds
        .into_iter()
        .filter_map(|(port, id, epoch, round)| Some(((port, (EndpointId::try_from(id).ok()?, Epoch(epoch))), round)));
    Ok(Ports { listeners, rounds: rounds.collect() })
}

/// Writes the file.
///
/// # Errors
/// Unwritable, or too large to read.
pub fn save(path: &Path, Ports { listeners, rounds }: &Ports) -> io::Result<()> {
    let rounds = rounds.iter().map(|((port, (id, epoch)), round)| (*port, id.get(), epoch.0, *round)).collect();
    let text = serde_json::to_vec(&File { version: VERSION, listeners: listeners.clone(), rounds })?;
    if text.len() as u64 > MAX_FILE {
        return Err(io::Error::other(format!("{} bytes, at most {MAX_FILE} are read again", text.len())));
    }
    kept::write(path, &text)
}
