//! Limits connections of users other than root.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Instant,
};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio_util::sync::CancellationToken;

use crate::sync::lock;

/// When all are taken, a new connection replaces the longest idle.
pub(super) struct Places {
    limit: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    next: u64,
    connections: BTreeMap<u64, Connection>,
}

struct Connection {
    /// `None` during a request.
    idle: Option<Instant>,
    closed: CancellationToken,
}

/// Released on drop.
pub(super) struct Place {
    places: Arc<Places>,
    id: u64,
    pub(super) closed: CancellationToken,
}

/// A request; on drop the connection becomes idle.
pub(super) struct Busy(Arc<Place>);

impl Places {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, taken: Mutex::default() }
    }

    /// `None`: all are busy.
    pub(super) fn take(self: &Arc<Self>) -> Option<Place> {
        let mut taken = lock(&self.taken);
        if taken.connections.len() >= self.limit {
            let idle = taken.connections.iter().filter_map(|(id, connection)| Some((connection.idle?, *id)));
            let (_, oldest) = idle.min()?;
            if let Some(connection) = taken.connections.remove(&oldest) {
                connection.closed.cancel();
            }
        }
        let (id, closed) = (taken.next, CancellationToken::new());
        taken.next += 1;
        taken.connections.insert(id, Connection { idle: Some(Instant::now()), closed: closed.clone() });
        Some(Place { places: Arc::clone(self), id, closed })
    }

    fn set_idle(&self, id: u64, idle: Option<Instant>) {
        if let Some(connection) = lock(&self.taken).connections.get_mut(&id) {
            connection.idle = idle;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.places.taken).connections.remove(&self.id);
    }
}

impl Busy {
    pub(super) fn begin(place: &Arc<Place>) -> Self {
        place.places.set_idle(place.id, None);
        Self(Arc::clone(place))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.places.set_idle(self.0.id, Some(Instant::now()));
    }
}

/// Busy until the body ends.
pub(super) struct Answer {
    pub(super) body: Body,
    pub(super) _busy: Option<Busy>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_set_of_places_gives_that_of_the_oldest_idle_connection() {
        let places = Arc::new(Places::new(2));
        let take = || places.take().map(Arc::new);
        let (first, second) = (take().expect("a place"), take().expect("a place"));
        let busy = Busy::begin(&first);
        let third = take().expect("the place of the second");
        assert!(second.closed.is_cancelled() && !first.closed.is_cancelled());
        drop(second);
        let also = Busy::begin(&third);
        assert!(take().is_none(), "both have requests");
        drop((busy, also));
        let fourth = take().expect("the place of the first, which was idle first");
        assert!(first.closed.is_cancelled() && !third.closed.is_cancelled());
        drop((first, third, fourth));
        assert!(lock(&places.taken).connections.is_empty());
    }
}
