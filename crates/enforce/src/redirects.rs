//! Redirects to the proxy, and the file of their ports.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use wharf_core::ids::{EndpointId, Epoch};
use wharf_policy::{
    compile::{Listener, ListenerId, SetId, Tables},
    model::Direction,
};

use crate::{members::Members, rounds::Place, rows};

/// By the proxy's port, host byte order.
pub type RedirectTable = BTreeMap<u16, Redirect>;

/// Connections redirected to a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    /// Allowed content of connections.
    pub listener: Arc<Listener>,
    pub members: BTreeMap<(EndpointId, Epoch), Vec<IpAddr>>,
    /// How often connections restarted because rows led some elsewhere.
    pub rounds: BTreeMap<(EndpointId, Epoch), u32>,
}

/// Why the proxy did not apply a change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProxyError {
    /// Refused with a reason; the previous state stays.
    #[error("{0}")]
    Refused(String),
    /// Refused because another program has the port.
    #[error("{1}")]
    Taken(u16, String),
    /// No answer, or no proxy.
    #[error("{0}")]
    NoAnswer(String),
}

const VERSION: u32 = 1;
/// A listener keeps a member after rows last led there, for connections before the proxy's accept: a closed socket
/// resets its queue, and nothing reports that the queue is empty.
pub const HANDSHAKES: Duration = Duration::from_millis(500);

/// What the proxy owes before a revision is realized.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Owed {
    #[default]
    Nothing,
    /// Acknowledge; if `ends`, then end connections judged by earlier requests.
    Answer {
        /// Afterwards, connections under earlier rules must end.
        ends: bool,
    },
    /// Connections under earlier rules end by this time.
    Ends(Instant),
}

impl Owed {
    pub(crate) fn ends(self) -> bool {
        matches!(self, Self::Answer { ends: true } | Self::Ends(_))
    }
}

pub(crate) type Outgoing = BTreeMap<Place, Instant>;

/// Listeners by port.
pub type Listeners = BTreeMap<u16, Arc<Listener>>;

/// The file's content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ports {
    /// By port.
    pub listeners: Listeners,
    /// Other numbers would end connections.
    pub(crate) rounds: BTreeMap<Place, u32>,
}

#[derive(Serialize, Deserialize)]
struct File {
    version: u32,
    listeners: Listeners,
    /// Port, endpoint, epoch, round. Absent in older files.
    #[serde(default)]
    rounds: Vec<(u16, u16, u64, u32)>,
}

pub(crate) fn wanted(tables: &Tables, members: &Members) -> RedirectTable {
    let mut ports: BTreeMap<SetId, Vec<ListenerId>> = BTreeMap::new();
    for (listener, set) in tables.redirects.keys() {
        ports.entry(*set).or_default().push(*listener);
    }
    let redirect = |(port, listener): (&ListenerId, &Arc<Listener>)| {
        (port.0, Redirect { listener: Arc::clone(listener), members: BTreeMap::new(), rounds: BTreeMap::new() })
    };
    let mut wanted: RedirectTable = tables.listeners.iter().map(redirect).collect();
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

/// A port with two listeners gets `other`'s: no row of `one` leads there.
pub(crate) fn both(one: &RedirectTable, other: &RedirectTable) -> RedirectTable {
    let mut both = one.clone();
    for (port, redirect) in other {
        match both.get_mut(port) {
            Some(own) if own.listener == redirect.listener => own.members.extend(redirect.members.clone()),
            _ => drop(both.insert(*port, redirect.clone())),
        }
    }
    both
}

/// Keeps leaving members for [`HANDSHAKES`].
pub(crate) fn with_outgoing(
    after: &RedirectTable,
    told: &RedirectTable,
    members: &Members,
    outgoing: &mut Outgoing,
    now: Instant,
) -> RedirectTable {
    let mut wanted = after.clone();
    let mut stay = Outgoing::new();
    for (port, member) in losses(told, after, members) {
        let until = outgoing.get(&(port, member)).copied().unwrap_or(now + HANDSHAKES);
        let Some(redirect) = told.get(&port).filter(|_| until > now) else { continue };
        let listener =
            || Redirect { listener: Arc::clone(&redirect.listener), members: BTreeMap::new(), rounds: BTreeMap::new() };
        let staying = wanted.entry(port).or_insert_with(listener);
        // Another listener would decide by other rules.
        if let Some(addresses) = redirect.members.get(&member).filter(|_| staying.listener == redirect.listener) {
            staying.members.insert(member, addresses.clone());
            stay.insert((port, member), until);
        }
    }
    *outgoing = stay;
    wanted
}

/// Whether remaining endpoints' connections end: the listener goes, loses them, or begins a round.
pub(crate) fn end(before: &RedirectTable, after: &RedirectTable, members: &Members) -> bool {
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

/// Endpoints that lose an Envoy listener; the DNS proxy decides each query.
fn losses<'a>(
    before: &'a RedirectTable,
    after: &'a RedirectTable,
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

pub(crate) fn listeners(wanted: &RedirectTable) -> Listeners {
    wanted.iter().map(|(port, redirect)| (*port, Arc::clone(&redirect.listener))).collect()
}

impl Ports {
    /// Bytes of a readable file.
    pub const MAX_FILE: u64 = 128 << 20;
    /// Reads the file's content.
    ///
    /// # Errors
    /// Another format.
    pub fn parse(text: &[u8]) -> io::Result<Self> {
        let File { version, listeners, rounds } = serde_json::from_slice(text)?;
        if version != VERSION {
            return Err(io::Error::other(format!("it is of version {version}, this agent knows {VERSION}")));
        }
        let rounds = rounds.into_iter().filter_map(|(port, id, epoch, round)| {
            Some(((port, (EndpointId::try_from(id).ok()?, Epoch(epoch))), round))
        });
        Ok(Self { listeners, rounds: rounds.collect() })
    }

    /// The file's content.
    ///
    /// # Errors
    /// Too large to be read.
    pub fn to_text(&self) -> io::Result<Vec<u8>> {
        let Self { listeners, rounds } = self;
        let rounds = rounds.iter().map(|((port, (id, epoch)), round)| (*port, id.get(), epoch.0, *round)).collect();
        let text = serde_json::to_vec(&File { version: VERSION, listeners: listeners.clone(), rounds })?;
        if text.len() as u64 > Self::MAX_FILE {
            let (bytes, most) = (text.len(), Self::MAX_FILE);
            return Err(io::Error::other(format!("{bytes} bytes, at most {most} are read again")));
        }
        Ok(text)
    }
}

impl Redirect {
    /// Members by another key, made of endpoint id and epoch.
    #[must_use]
    pub fn members<M: Ord>(&self, member: impl Fn(u16, u64) -> M) -> BTreeMap<M, Vec<IpAddr>> {
        let members = self.members.iter();
        members.map(|((id, epoch), addresses)| (member(id.get(), epoch.0), addresses.clone())).collect()
    }

    /// Rounds, keyed as in [`Redirect::members`].
    #[must_use]
    pub fn rounds<M: Ord>(&self, member: impl Fn(u16, u64) -> M) -> BTreeMap<M, u32> {
        self.rounds.iter().map(|((id, epoch), round)| (member(id.get(), epoch.0), *round)).collect()
    }
}
