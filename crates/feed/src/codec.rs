//! A codec that bounds decoded messages: an empty change needs two bytes encoded, some hundred in memory.

use std::marker::PhantomData;

use prost::{
    DecodeError, Message,
    bytes::{Buf as _, Bytes},
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};
use tonic::{
    Status,
    codec::{DecodeBuf, Decoder},
};
use tonic_prost::ProstEncoder;

/// Maximum changes of a message.
pub const MAX_CHANGES: usize = 1 << 16;

/// [`tonic_prost::ProstCodec`] with [`MAX_CHANGES`].
#[derive(Debug)]
pub(crate) struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = Bounded<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        Bounded(PhantomData)
    }
}

#[derive(Debug)]
pub(crate) struct Bounded<U>(PhantomData<U>);

impl<U: Message + Default> Decoder for Bounded<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let message = buffer.copy_to_bytes(buffer.remaining());
        let unreadable = |why: DecodeError| Status::invalid_argument(why.to_string());
        let count = count(message.clone()).map_err(unreadable)?;
        if count > MAX_CHANGES {
            return Err(Status::invalid_argument(format!("a message has {count} changes; at most {MAX_CHANGES} fit")));
        }
        U::decode(message).map(Some).map_err(unreadable)
    }
}

/// Counts the fields of the nested messages.
fn count(mut message: Bytes) -> Result<usize, DecodeError> {
    let mut count = 0;
    while message.has_remaining() {
        let (tag, kind) = decode_key(&mut message)?;
        if kind != WireType::LengthDelimited {
            skip_field(kind, tag, &mut message, DecodeContext::default())?;
            continue;
        }
        let length = decode_varint(&mut message)?;
        // The decoder refuses a cut message.
        let length = usize::try_from(length).unwrap_or(usize::MAX).min(message.remaining());
        let mut content = message.split_to(length);
        while content.has_remaining() {
            let (tag, kind) = decode_key(&mut content)?;
            skip_field(kind, tag, &mut content, DecodeContext::default())?;
            count += 1;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{Change, Changes, ProducerMessage, producer_message::Body};

    #[test]
    fn changes_are_counted_before_they_are_decoded() {
        let body = Some(Body::Changes(Changes { changes: vec![Change { change: None }; 300] }));
        let message = ProducerMessage { sequence: 7, body }.encode_to_vec();
        assert_eq!(count(message.clone().into()).ok(), Some(300));
        assert_eq!(count(message[..message.len() - 1].to_vec().into()).ok(), None, "the last change is cut");
        assert_eq!(count(Bytes::new()).ok(), Some(0));
    }
}
