//! Parsers of Envoy's input for the fuzz targets. Each accepts any bytes.

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

/// Records of an access log message, if decodable.
#[must_use]
pub fn access_log(message: &[u8]) -> Option<Vec<Record>> {
    StreamAccessLogsMessage::decode(message).ok().map(records)
}

/// Envoy's forwarded counter, if decodable.
#[must_use]
pub fn counter(message: &[u8]) -> Option<u64> {
    forwarded::counter(&StreamMetricsMessage::decode(message).ok()?)
}

/// Successive listener streams of an Envoy.
#[derive(Debug)]
pub struct Conversation {
    ledgers: Ledgers,
    stream: Stream,
    variant: Variant,
    streams: u64,
}

/// Parts of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// Resource type.
    pub type_url: String,
    /// Nonce for the answer.
    pub nonce: String,
    /// Number of resources.
    pub resources: usize,
    /// Encoded size, bytes.
    pub bytes: usize,
}

impl Conversation {
    /// An Envoy and an empty server.
    #[must_use]
    pub fn new(variant: Variant) -> Self {
        let mut ledgers = Ledgers::new(1);
        ledgers.process_began();
        Self { ledgers, stream: Stream::new(variant, 0), variant, streams: 0 }
    }

    /// The same Envoy reconnects.
    pub fn reconnect(&mut self, variant: Variant) {
        self.streams = self.streams.saturating_add(1);
        (self.stream, self.variant) = (Stream::new(variant, self.streams), variant);
    }

    /// Sets or removes a listener; returns the wait's number, if any.
    pub fn want(&mut self, listener: &str, content: Option<u8>) -> Option<u64> {
        let resource = content.map(|content| Any { type_url: LISTENER_TYPE.to_owned(), value: vec![content] });
        let removal = resource.is_none();
        self.ledgers.listeners.set(listener, resource);
        match self.ledgers.listeners.wait(listener, removal) {
            Registered::Ended => None,
            Registered::Pending(id) => Some(id.number()),
        }
    }

    /// Handles a decodable request; returns ended waits.
    ///
    /// # Errors
    /// Why the stream must end.
    pub fn request(&mut self, message: &[u8]) -> Option<Result<Vec<u64>, String>> {
        let request = match self.variant {
            Variant::Sotw => xds::sotw_request(DiscoveryRequest::decode(message).ok()?),
            Variant::Delta => xds::delta_request(DeltaDiscoveryRequest::decode(message).ok()?),
        };
        let ended = self.stream.on_request(request, &mut self.ledgers);
        Some(ended.map(numbers).map_err(|why| why.to_string()))
    }

    /// Next response, and ended waits.
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

    /// Encodes a first request (empty nonce) or an answer.
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

    /// Number of open waits.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.ledgers.listeners.pending()
    }

    /// Number of unacknowledged listeners.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.ledgers.listeners.unacknowledged().count()
    }
}

/// Resource type of [`Conversation::want`].
#[must_use]
pub const fn listener_type() -> &'static str {
    LISTENER_TYPE
}

fn numbers(ended: Ended) -> Vec<u64> {
    ended.into_iter().map(|(id, _)| id.number()).collect()
}
