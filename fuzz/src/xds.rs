//! Envoy's requests on its xDS streams, between changes of the wanted listeners. The first byte selects the first
//! stream's protocol (`s`: state of the world; else delta), the rest are events:
//!
//! | bytes | event |
//! |---|---|
//! | `w`, name, content | a listener is wanted |
//! | `u`, name | it is not wanted |
//! | `r` | all due responses are taken |
//! | `a`, which | a recent response is acknowledged |
//! | `n`, which, a line | it is refused for this reason |
//! | `m`, length (two bytes, little-endian), message | any request |
//! | `c`, variant | Envoy reconnects |

use std::collections::BTreeSet;

use wharf_proxy::outside::{Conversation, Told, Variant, listener_type};

/// Wanted listeners; one name is the prefix of another.
const NAMES: [&str; 4] = ["egress-1", "egress-10", "ingress-1", "ingress-2"];
/// Maximum unanswered responses of a stream: one per type.
const MOST_TYPES: usize = 16;
/// Responses after which an acknowledging Envoy has everything.
const SETTLED: usize = 8;

/// Runs a session.
pub fn run(data: &[u8]) {
    let Some((first, mut rest)) = data.split_first() else { return };
    let mut session = Session::new(variant(*first));
    while let Some((command, after)) = rest.split_first() {
        rest = session.step(*command, after);
    }
    session.settle(variant(*first));
}

fn variant(byte: u8) -> Variant {
    if byte == b's' { Variant::Sotw } else { Variant::Delta }
}

struct Session {
    conversation: Conversation,
    waits: BTreeSet<u64>,
    nonces: BTreeSet<String>,
    /// Responses of this stream, last first.
    told: Vec<Told>,
    over: bool,
}

impl Session {
    fn new(variant: Variant) -> Self {
        let conversation = Conversation::new(variant);
        Self { conversation, waits: BTreeSet::new(), nonces: BTreeSet::new(), told: Vec::new(), over: false }
    }

    /// Performs the event, and returns the remaining bytes.
    fn step<'a>(&mut self, command: u8, data: &'a [u8]) -> &'a [u8] {
        let byte = data.first().copied().unwrap_or_default();
        let after = data.get(1..).unwrap_or_default();
        match command {
            b'w' => {
                self.want(byte, after.first().copied());
                after.get(1..).unwrap_or_default()
            }
            b'u' => {
                self.want(byte, None);
                after
            }
            b'r' => {
                self.take();
                data
            }
            b'a' => {
                self.answer(byte, None);
                after
            }
            b'n' => {
                let (lines, rest) = crate::head(after, 1);
                self.answer(byte, Some(&String::from_utf8_lossy(lines[0])));
                rest
            }
            b'm' => {
                let length = usize::from(byte) + (usize::from(after.first().copied().unwrap_or_default()) << 8);
                let message = after.get(1..).unwrap_or_default();
                let (message, rest) = message.split_at(length.min(message.len()));
                self.request(message);
                rest
            }
            b'c' => {
                self.reconnect(variant(byte));
                after
            }
            _ => data,
        }
    }

    fn reconnect(&mut self, variant: Variant) {
        self.conversation.reconnect(variant);
        (self.told, self.over) = (Vec::new(), false);
    }

    fn want(&mut self, name: u8, content: Option<u8>) {
        let name = NAMES[usize::from(name) % NAMES.len()];
        if let Some(wait) = self.conversation.want(name, content) {
            assert!(self.waits.insert(wait), "a wait was given twice");
        }
    }

    fn ended(&mut self, ended: Vec<u64>) {
        for wait in ended {
            assert!(self.waits.remove(&wait), "a wait ended twice, or was never given");
        }
        assert_eq!(self.conversation.pending(), self.waits.len(), "a wait was lost");
    }

    fn request(&mut self, message: &[u8]) {
        // The server reads nothing from a stream that it ended.
        if self.over {
            return;
        }
        match self.conversation.request(message) {
            Some(Ok(ended)) => self.ended(ended),
            Some(Err(why)) => {
                assert!(!why.is_empty());
                self.over = true;
            }
            None => {}
        }
    }

    fn take(&mut self) {
        if self.over {
            return;
        }
        for _ in 0..=MOST_TYPES {
            let (told, ended) = self.conversation.response();
            self.ended(ended);
            let Some(told) = told else { return };
            assert!(self.nonces.insert(told.nonce.clone()), "two responses have the nonce {}", told.nonce);
            assert!(told.resources == 0 || told.type_url == listener_type(), "{} is not served", told.type_url);
            self.told.insert(0, told);
        }
        panic!("more responses than types");
    }

    fn answer(&mut self, which: u8, refusal: Option<&str>) {
        let Some(told) = self.told.get(usize::from(which)) else { return };
        let message = self.conversation.answer(&told.type_url, &told.nonce, refusal);
        self.request(&message);
    }

    /// In any state, an Envoy that connects and acknowledges everything gets everything, and no change waits.
    fn settle(&mut self, variant: Variant) {
        self.reconnect(variant);
        let first = self.conversation.answer(listener_type(), "", None);
        self.request(&first);
        for _ in 0..SETTLED {
            self.take();
            self.answer(0, None);
        }
        assert_eq!((self.conversation.pending(), self.conversation.outstanding()), (0, 0), "it never settles");
    }
}
