//! DNS queries over TCP (RFC 7766).

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use crate::{
    books::{Kind, Place},
    proxy::{PAUSE, ended},
    query::{Admitted, Port},
    record::Transport,
    upstream::messages,
};

/// Also for a client to read an answer (RFC 7766, section 6.2.3).
const IDLE: Duration = Duration::from_secs(10);

pub(crate) async fn serve(port: Arc<Port>, listener: TcpListener) {
    // Bounded by the connection places.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(end) = connections.join_next(), if !connections.is_empty() => ended(end, port.number),
            accepted = listener.accept() => match accepted {
                Ok((stream, client)) => {
                    let Some((server, place)) = admit(&port, &stream, client) else { continue };
                    connections.spawn(connection(Arc::clone(&port), stream, client, server, place));
                }
                Err(error) => {
                    tracing::warn!(port = port.number, %error, "cannot accept connections with DNS queries");
                    // A lasting error must not use a core.
                    tokio::time::sleep(PAUSE).await;
                }
            },
        }
    }
}

fn admit(port: &Port, stream: &TcpStream, client: SocketAddr) -> Option<(SocketAddr, Place)> {
    let server = stream.local_addr().ok()?;
    let member = port.member(client, server)?;
    let place = port.books.place(member, Kind::Connection);
    if place.is_none() {
        port.books.pages().connections_refused += 1;
    }
    Some((server, place?))
}

/// Answers are in completion order (RFC 7766, section 6.2.1.1).
async fn connection(port: Arc<Port>, stream: TcpStream, client: SocketAddr, server: SocketAddr, _place: Place) {
    let round = port.round(client.ip());
    let mut stream = Framed::new(stream, messages());
    let mut queries = JoinSet::new();
    let mut open = true;
    while open || !queries.is_empty() {
        let idle = Instant::now() + IDLE;
        tokio::select! {
            message = stream.next(), if open => match message {
                // The client's connections were restarted.
                Some(Ok(_)) if port.round(client.ip()) != round => return,
                Some(Ok(message)) => match port.admit(client, server, Transport::Tcp, &message) {
                    Admitted::Ignored => return,
                    Admitted::Replied(reply) => if send(&mut stream, reply).await.is_err() { return },
                    Admitted::Asked(mut query) => {
                        queries.spawn(async move { (query.ask().await, query) });
                    }
                },
                Some(Err(_)) | None => open = false,
            },
            Some(end) = queries.join_next(), if !queries.is_empty() => match end {
                Ok((mut done, query)) => {
                    let sent = match done.answer.take() {
                        Some(answer) => send(&mut stream, answer).await,
                        None => Ok(()),
                    };
                    let lost = sent.is_err();
                    query.end(done, sent);
                    if lost { return }
                }
                Err(end) => ended(Err(end), port.number),
            },
            () = sleep_until(idle), if queries.is_empty() => return,
        }
    }
}

async fn send(stream: &mut Framed<TcpStream, LengthDelimitedCodec>, answer: Vec<u8>) -> Result<(), String> {
    match timeout(IDLE, stream.send(Bytes::from(answer))).await {
        Ok(sent) => sent.map_err(|error| error.to_string()),
        Err(_) => Err(format!("the client did not read it within {} s", IDLE.as_secs())),
    }
}
