//! What comes from Envoy, readable without a socket, for the fuzz targets.
//!
//! Each function takes the bytes of a message and accepts any.

use envoy_types::pb::{
    envoy::service::{
        accesslog::v3::StreamAccessLogsMessage,
        discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest},
        metrics::v3::StreamMetricsMessage,
    },
    google::{protobuf::Any, rpc::Status},
};
use prost::Message;

use crate::{
    forwarded,
    ledger::{Ended, LISTENER_TYPE, Ledgers, Registered},
    records::{Record, records},
    xds::{self, Stream},
};

pub use crate::xds::Variant;

/// The records of a message of access logs. `None` for bytes that are no message.
#[must_use]
pub fn access_log(message: &[u8]) -> Option<Vec<Record>> {
    StreamAccessLogsMessage::decode(message).ok().map(records)
}

/// What Envoy sent on to servers, by a message of its counters. `None` for bytes that are no message, or have no such counter.
#[must_use]
pub fn counter(message: &[u8]) -> Option<u64> {
    forwarded::counter(&StreamMetricsMessage::decode(message).ok()?)
}

/// What an Envoy on one stream after the other is told of listeners, and the waits for its answers.
#[derive(Debug)]
pub struct Conversation {
    ledgers: Ledgers,
    stream: Stream,
    variant: Variant,
    streams: u64,
}

/// A response, as far as a client must know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// Type of its resources.
    pub type_url: String,
    /// What an answer names.
    pub nonce: String,
    /// How many resources it holds.
    pub resources: usize,
    /// Bytes that it has on the wire.
    pub bytes: usize,
}

impl Conversation {
    /// An Envoy connects to a server that wants nothing yet.
    #[must_use]
    pub fn new(variant: Variant) -> Self {
        let mut ledgers = Ledgers::new(1);
        ledgers.process_began();
        Self { ledgers, stream: Stream::new(variant, 0), variant, streams: 0 }
    }

    /// The same Envoy connects again.
    pub fn reconnect(&mut self, variant: Variant) {
        self.streams = self.streams.saturating_add(1);
        (self.stream, self.variant) = (Stream::new(variant, self.streams), variant);
    }

    /// Wants that content of a listener, or that there is none; gives the number of the wait for it, unless Envoy has it.
    pub fn want(&mut self, listener: &str, content: Option<u8>) -> Option<u64> {
        let resource = content.map(|content| Any { type_url: LISTENER_TYPE.to_owned(), value: vec![content] });
        let removal = resource.is_none();
        self.ledgers.listeners.set(listener, resource);
        match self.ledgers.listeners.wait(listener, removal) {
            Registered::Ended => None,
            Registered::Pending(id) => Some(id.number()),
        }
    }

    /// Takes a request in; gives the waits that it ended. `None` for bytes that are no request.
    ///
    /// # Errors
    /// The stream must be ended, and why.
    pub fn request(&mut self, message: &[u8]) -> Option<Result<Vec<u64>, String>> {
        let request = match self.variant {
            Variant::Sotw => xds::sotw_request(DiscoveryRequest::decode(message).ok()?),
            Variant::Delta => xds::delta_request(DeltaDiscoveryRequest::decode(message).ok()?),
        };
        let ended = self.stream.on_request(request, &mut self.ledgers);
        Some(ended.map(numbers).map_err(|why| why.to_string()))
    }

    /// The next response that is due, and the waits that ended because nothing had to be sent for them.
    pub fn response(&mut self) -> (Option<Told>, Vec<u64>) {
        let (response, ended) = self.stream.next_response(&mut self.ledgers);
        let told = response.map(|response| {
            let (type_url, nonce) = (response.type_url.clone(), response.nonce.clone());
            let resources = response.resources.len();
            let bytes = match self.variant {
                Variant::Sotw => xds::sotw_response(response).encoded_len(),
                Variant::Delta => xds::delta_response(response).encoded_len(),
            };
            Told { type_url, nonce, resources, bytes }
        });
        (told, numbers(ended))
    }

    /// A request as Envoy writes it: the first one of a type (without a nonce), or the answer to a response.
    #[must_use]
    pub fn answer(&self, type_url: &str, response_nonce: &str, refusal: Option<&str>) -> Vec<u8> {
        let (type_url, response_nonce) = (type_url.to_owned(), response_nonce.to_owned());
        let error_detail = refusal.map(|message| Status { message: message.to_owned(), ..Status::default() });
        match self.variant {
            Variant::Sotw => DiscoveryRequest { type_url, response_nonce, error_detail, ..DiscoveryRequest::default() }
                .encode_to_vec(),
            Variant::Delta => {
                DeltaDiscoveryRequest { type_url, response_nonce, error_detail, ..DeltaDiscoveryRequest::default() }
                    .encode_to_vec()
            }
        }
    }

    /// Waits that have not ended.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.ledgers.listeners.pending()
    }

    /// Listeners of which Envoy has not the last version.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.ledgers.listeners.unacknowledged().count()
    }
}

/// Type of the resources that [`Conversation::want`] asks for.
#[must_use]
pub const fn listener_type() -> &'static str {
    LISTENER_TYPE
}

fn numbers(ended: Ended) -> Vec<u64> {
    ended.into_iter().map(|(id, _)| id.number()).collect()
}
