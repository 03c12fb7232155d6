//! DNS queries over UDP.

use std::{
    io::{self, IoSliceMut},
    net::SocketAddr,
    os::fd::AsRawFd as _,
    sync::Arc,
};

use nix::{
    cmsg_space,
    sys::socket::{ControlMessageOwned, MsgFlags, SockaddrIn, SockaddrIn6, SockaddrStorage, recvmsg},
};
use tokio::{io::Interest, net::UdpSocket, task::JoinSet};

use crate::{
    proxy::{PAUSE, ended},
    query::{Admitted, Port},
    record::Transport,
    upstream::MAX_MESSAGE,
};

/// Message, client, server.
type Datagram<'a> = (&'a [u8], SocketAddr, SocketAddr);

pub(crate) async fn serve(port: Arc<Port>, socket: UdpSocket) {
    // Bounded by the query places.
    let mut queries = JoinSet::new();
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        tokio::select! {
            Some(end) = queries.join_next(), if !queries.is_empty() => ended(end, port.number),
            received = receive(&socket, &mut buffer) => match received {
                Ok(Some((message, client, server))) => admit(&port, message, client, server, &mut queries),
                Ok(None) => port.books.pages().strangers += 1,
                Err(error) => {
                    tracing::warn!(port = port.number, %error, "cannot receive DNS queries");
                    // A lasting error must not use a core.
                    tokio::time::sleep(PAUSE).await;
                }
            },
        }
    }
}

fn admit(port: &Arc<Port>, message: &[u8], client: SocketAddr, server: SocketAddr, queries: &mut JoinSet<()>) {
    match port.admit(client, server, Transport::Udp, message) {
        Admitted::Ignored => {}
        Admitted::Replied(reply) => {
            if let Err(error) = port.speaker.send(server, client, &reply) {
                tracing::debug!(port = port.number, %client, %error, "cannot send a DNS answer");
            }
        }
        Admitted::Asked(mut query) => {
            queries.spawn(async move {
                let done = query.ask().await;
                let sent = done.answer.as_ref().map_or(Ok(()), |answer| query.send(answer));
                query.end(done, sent);
            });
        }
    }
}

/// `None` if the kernel does not report source or destination.
async fn receive<'a>(socket: &UdpSocket, buffer: &'a mut [u8]) -> io::Result<Option<Datagram<'a>>> {
    let (length, addresses) = socket.async_io(Interest::READABLE, || Ok(receive_now(socket, buffer)?)).await?;
    Ok(addresses.and_then(|(client, server)| Some((buffer.get(..length)?, client, server))))
}

fn receive_now(socket: &UdpSocket, buffer: &mut [u8]) -> nix::Result<(usize, Option<(SocketAddr, SocketAddr)>)> {
    let mut control = cmsg_space!(libc::sockaddr_in6);
    let mut parts = [IoSliceMut::new(buffer)];
    let received = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty())?;
    let server = received.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::Ipv4OrigDstAddr(address) => Some(SockaddrIn::from(address).into()),
        ControlMessageOwned::Ipv6OrigDstAddr(address) => Some(SockaddrIn6::from(address).into()),
        _ => None,
    });
    let client = received.address.and_then(|address| {
        let v4 = address.as_sockaddr_in().map(|address| SocketAddr::from(*address));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| SocketAddr::from(*address)))
    });
    Ok((received.bytes, client.zip(server)))
}
