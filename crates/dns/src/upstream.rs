//! Queries a server.

use std::{io, net::SocketAddr};

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use tokio::io::Interest;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use crate::{
    record::Transport,
    socket,
    wire::{self, Question},
};

pub(crate) const MAX_MESSAGE: usize = u16::MAX as usize;

/// Wrong messages before the query fails.
const MAX_WRONG: usize = 1_000;

/// RFC 1035, section 4.2.2.
pub(crate) fn messages() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder().length_field_length(2).max_frame_length(MAX_MESSAGE).new_codec()
}

/// With a new id. The caller sets the deadline.
pub(crate) async fn ask(
    client: SocketAddr,
    server: SocketAddr,
    transport: Transport,
    mut query: Vec<u8>,
    question: &Question,
) -> io::Result<Vec<u8>> {
    let id = rand::random();
    wire::set_id(&mut query, id);
    match transport {
        Transport::Udp => ask_udp(client, server, query, id, question).await,
        Transport::Tcp => ask_tcp(client, server, query, id, question).await,
    }
}

async fn ask_udp(
    client: SocketAddr,
    server: SocketAddr,
    query: Vec<u8>,
    id: u16,
    question: &Question,
) -> io::Result<Vec<u8>> {
    let socket = socket::upstream_udp(client, server)?;
    socket.send(&query).await?;
    // A waiting query keeps little memory.
    drop(query);
    let (mut answer, mut wrong) = (Vec::new(), 0);
    loop {
        // An always ready socket consumes no task budget, which timers need: a flooding server would exceed the
        // deadline.
        tokio::task::coop::consume_budget().await;
        // An ICMP error does not make a socket readable.
        let ready = socket.ready(Interest::READABLE | Interest::ERROR).await?;
        if ready.is_error() {
            return Err(socket.take_error()?.unwrap_or_else(|| io::ErrorKind::ConnectionRefused.into()));
        }
        answer.clear();
        answer.reserve_exact(MAX_MESSAGE);
        match socket.try_recv_buf_from(&mut answer) {
            // Other hosts' messages can precede the connect.
            Ok((_, from))
                if (from.ip(), from.port()) == (server.ip(), server.port())
                    && wire::is_answer(&answer, id, question) =>
            {
                answer.shrink_to_fit();
                return Ok(answer);
            }
            Ok(_) if wrong == MAX_WRONG => return Err(flooded()),
            Ok(_) => wrong += 1,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => answer = Vec::new(),
            Err(error) => return Err(error),
        }
    }
}

fn flooded() -> io::Error {
    io::Error::other(format!("it sent more than {MAX_WRONG} messages that do not answer the query"))
}

async fn ask_tcp(
    client: SocketAddr,
    server: SocketAddr,
    query: Vec<u8>,
    id: u16,
    question: &Question,
) -> io::Result<Vec<u8>> {
    let mut connection = Framed::new(socket::upstream_tcp(client, server).await?, messages());
    connection.send(Bytes::from(query)).await?;
    let mut wrong = 0;
    while let Some(answer) = connection.next().await {
        let answer = answer?;
        if wire::is_answer(&answer, id, question) {
            return Ok(answer.to_vec());
        }
        if wrong == MAX_WRONG {
            return Err(flooded());
        }
        wrong += 1;
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection without an answer"))
}
