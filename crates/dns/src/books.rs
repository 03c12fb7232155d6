//! Counts and bounds of queries and connections.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::mpsc;

use crate::{listener::Member, record::Record};

/// Maximum queries at once.
const QUERIES: usize = 1024;
/// Over all addresses of the endpoint.
const QUERIES_OF_CLIENT: usize = 100;
const CONNECTIONS: usize = 256;
const CONNECTIONS_OF_CLIENT: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Query,
    Connection,
}

#[derive(Debug)]
pub(crate) struct Books {
    /// Never held across an await.
    pages: Mutex<Pages>,
    records: mpsc::Sender<Record>,
}

#[derive(Debug, Default)]
pub(crate) struct Pages {
    clients: HashMap<Member, Load>,
    pub(crate) all: Load,
    pub(crate) totals: BTreeMap<&'static str, u64>,
    pub(crate) strangers: u64,
    pub(crate) connections_refused: u64,
    pub(crate) records_lost: u64,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) queries: usize,
    pub(crate) connections: usize,
}

impl Load {
    const fn of(&mut self, kind: Kind) -> &mut usize {
        match kind {
            Kind::Query => &mut self.queries,
            Kind::Connection => &mut self.connections,
        }
    }
}

impl Books {
    pub(crate) fn new(records: mpsc::Sender<Record>) -> Self {
        Self { pages: Mutex::default(), records }
    }

    pub(crate) fn pages(&self) -> MutexGuard<'_, Pages> {
        // Consistent after every step.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn record(&self, record: Record) {
        let mut pages = self.pages();
        *pages.totals.entry(record.outcome.name()).or_default() += 1;
        if self.records.try_send(record).is_err() {
            pages.records_lost += 1;
        }
    }

    pub(crate) fn place(self: &Arc<Self>, client: Member, kind: Kind) -> Option<Place> {
        let (of_all, of_client) = match kind {
            Kind::Query => (QUERIES, QUERIES_OF_CLIENT),
            Kind::Connection => (CONNECTIONS, CONNECTIONS_OF_CLIENT),
        };
        let mut pages = self.pages();
        let all = *pages.all.of(kind);
        let load = pages.clients.entry(client).or_default();
        if all >= of_all || *load.of(kind) >= of_client {
            pages.forget_idle(client);
            return None;
        }
        *load.of(kind) += 1;
        *pages.all.of(kind) += 1;
        Some(Place { books: Arc::clone(self), client, kind })
    }
}

impl Pages {
    fn forget_idle(&mut self, client: Member) {
        if self.clients.get(&client).is_some_and(|load| load.queries == 0 && load.connections == 0) {
            self.clients.remove(&client);
        }
    }
}

/// Freed on drop.
#[derive(Debug)]
pub(crate) struct Place {
    books: Arc<Books>,
    client: Member,
    kind: Kind,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut pages = self.books.pages();
        if let Some(load) = pages.clients.get_mut(&self.client) {
            *load.of(self.kind) = load.of(self.kind).saturating_sub(1);
        }
        *pages.all.of(self.kind) = pages.all.of(self.kind).saturating_sub(1);
        pages.forget_idle(self.client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_for_a_client_and_for_all_and_come_back() {
        let books = Arc::new(Books::new(mpsc::channel(1).0));
        let client = |n: u16| Member { id: n, epoch: 1 };
        for (kind, of_all, of_client) in [(Kind::Query, 1024, 100), (Kind::Connection, 256, 16)] {
            let mut places: Vec<_> = (0..of_client).filter_map(|_| books.place(client(0), kind)).collect();
            assert_eq!(places.len(), of_client);
            assert!(books.place(client(0), kind).is_none());
            places.extend((1..=255).flat_map(|n| vec![n; of_client]).map_while(|n| books.place(client(n), kind)));
            assert_eq!(places.len(), of_all);
            assert!(books.place(client(200), kind).is_none());
            places.pop();
            assert!(books.place(client(200), kind).is_some());
            drop(places);
            assert!(books.pages().clients.is_empty());
        }
        let all = books.pages().all;
        assert_eq!((all.queries, all.connections), (0, 0));
    }
}
