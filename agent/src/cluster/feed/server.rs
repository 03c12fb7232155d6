//! Socket and gRPC service.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener as _;
use futures::Stream;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming, transport::server::Connected};
use wharf_feed::v1::{
    self,
    cluster_feed_server::{ClusterFeed as Interface, ClusterFeedServer},
};
use wharf_kit::{socket::Socket, sync::lock};

use super::{ClusterFeed, session::Session};

/// One producer, its half-open connections and rejected ones; further ones are closed.
const MAX_CONNECTIONS: usize = 16;
/// Per connection.
const MAX_STREAMS: u32 = 1;
/// For an accepted opening, from the connection or the end of the last stream.
const PATIENCE: Duration = Duration::from_secs(10);
const PING: Duration = Duration::from_secs(10);
/// A producer that does not read would delay a stop.
const GRACE: Duration = Duration::from_secs(1);

/// Binds the socket in its directory.
///
/// # Errors
/// The group does not exist, another agent answers, or the file system refuses.
pub async fn bind(feed: &ClusterFeed) -> anyhow::Result<Socket> {
    Socket::bind_apart(&feed.socket, feed.group.clone(), feed.reach.clone()).await
}

/// Serves producers until `stop`, at most 1 s longer.
pub async fn serve(feed: Arc<ClusterFeed>, socket: Socket, stop: CancellationToken) {
    let service = ClusterFeedServer::new(Service { feed, stop: stop.clone() });
    let serving = tonic::transport::Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(PING))
        .http2_keepalive_timeout(Some(PING))
        .add_service(service.max_decoding_message_size(wharf_feed::MAX_MESSAGE))
        .serve_with_incoming_shutdown(incoming(socket), stop.clone().cancelled_owned());
    tokio::select! {
        result = serving => if let Err(error) = result {
            tracing::error!(%error, "no producer can connect to the cluster feed until the agent is restarted");
        },
        () = async {
            stop.cancelled().await;
            tokio::time::sleep(GRACE).await;
        } => {}
    }
}

fn incoming(socket: Socket) -> impl Stream<Item = Result<Connection, Infallible>> {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    futures::stream::unfold((socket, places), |(mut socket, places)| async move {
        loop {
            let (stream, _) = socket.accept().await;
            match Arc::clone(&places).try_acquire_owned() {
                Ok(permit) => return Some((Ok(Connection::new(stream, permit)), (socket, places))),
                Err(_) => {
                    tracing::warn!("the cluster feed has {MAX_CONNECTIONS} connections, and closes another one");
                }
            }
        }
    })
}

struct Service {
    feed: Arc<ClusterFeed>,
    stop: CancellationToken,
}

#[tonic::async_trait]
impl Interface for Service {
    type FeedStream = Pin<Box<dyn Stream<Item = Result<v1::AgentMessage, Status>> + Send>>;

    async fn feed(
        &self,
        request: Request<Streaming<v1::ProducerMessage>>,
    ) -> Result<Response<Self::FeedStream>, Status> {
        let place = request.extensions().get::<Place>().cloned();
        let session = Session::new(Arc::clone(&self.feed), request.into_inner(), self.stop.clone(), place);
        let answers = futures::stream::unfold(Some(session), |session| async move {
            let mut session = session?;
            match session.next().await {
                Ok(Some(body)) => Some((Ok(v1::AgentMessage { body: Some(body) }), Some(session))),
                Ok(None) => None,
                Err(status) => {
                    tracing::warn!("a stream of the cluster feed ends: {}", status.message());
                    Some((Err(status), None))
                }
            }
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

/// The accepted stream of the connection.
#[derive(Debug, Clone, Default)]
pub(super) struct Place(Arc<Mutex<Option<CancellationToken>>>);

impl Place {
    /// `replaced`: cancelled when another stream replaces this one.
    pub(super) fn opened(&self, replaced: CancellationToken) {
        *lock(&self.0) = Some(replaced);
    }

    pub(super) fn ended(&self) {
        *lock(&self.0) = None;
    }

    /// A replaced stream whose answers are not read does not end.
    fn has_stream(&self) -> bool {
        lock(&self.0).as_ref().is_some_and(|replaced| !replaced.is_cancelled())
    }
}

/// Ends after [`PATIENCE`] without a stream, when it is read next: at the latest for a ping.
struct Connection {
    stream: UnixStream,
    place: Place,
    end: Option<Pin<Box<Sleep>>>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    fn new(stream: UnixStream, permit: OwnedSemaphorePermit) -> Self {
        Self { stream, place: Place::default(), end: None, _permit: permit }
    }
}

impl Connected for Connection {
    type ConnectInfo = Place;

    fn connect_info(&self) -> Place {
        self.place.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.place.has_stream() {
            self.end = None;
        } else {
            let end = self.end.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + PATIENCE)));
            if end.as_mut().poll(context).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_whose_stream_is_replaced_ends_although_the_stream_does_not() {
        let (stream, _other) = UnixStream::pair().expect("a pair of sockets");
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("a place");
        let (mut connection, replaced) = (Connection::new(stream, permit), CancellationToken::new());
        let place = connection.connect_info();
        place.opened(replaced.clone());
        let long = 3 * PATIENCE;
        let mut buffer = [0; 8];
        assert!(tokio::time::timeout(long, connection.read(&mut buffer)).await.is_err(), "an accepted stream");
        replaced.cancel();
        let began = Instant::now();
        let ended = tokio::time::timeout(long, connection.read(&mut buffer)).await.expect("it ends");
        assert_eq!(ended.expect_err("nothing was sent").kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= PATIENCE, "after {:?}", began.elapsed());
    }
}
