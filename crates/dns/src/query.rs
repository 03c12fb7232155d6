//! The life of a query.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant, SystemTime},
};

use tokio::time::timeout;

use crate::{
    books::{Books, Kind, Place},
    listener::{Answer, Listener, Member, Names, Served},
    record::{Outcome, Record, Transport},
    speaker::Speaker,
    upstream,
    wire::{self, Question},
};

/// Clients then repeat the query (resolv.conf(5)).
const ANSWER_TIME: Duration = Duration::from_secs(5);
const LEARN_TIME: Duration = Duration::from_secs(2);

pub(crate) struct Port {
    pub(crate) number: u16,
    /// Locked to copy or replace the pointer.
    served: RwLock<Arc<Served>>,
    node: Arc<dyn Names>,
    pub(crate) books: Arc<Books>,
    pub(crate) speaker: Arc<Speaker>,
}

pub(crate) enum Admitted {
    Ignored,
    Replied(Vec<u8>),
    Asked(Box<Query>),
}

pub(crate) struct Done {
    pub(crate) answer: Option<Vec<u8>>,
    outcome: Outcome,
    took: Option<Duration>,
}

pub(crate) struct Query {
    port: Arc<Port>,
    at: SystemTime,
    member: Member,
    client: SocketAddr,
    server: SocketAddr,
    transport: Transport,
    message: Vec<u8>,
    head: Vec<u8>,
    question: Question,
    _place: Place,
}

impl Port {
    pub(crate) fn new(
        number: u16,
        listener: Listener,
        node: Arc<dyn Names>,
        books: Arc<Books>,
        speaker: Arc<Speaker>,
    ) -> Self {
        Self { number, served: RwLock::new(Arc::new(Served::new(listener))), node, books, speaker }
    }

    pub(crate) fn serve(&self, listener: Listener) {
        let served = Arc::new(Served::new(listener));
        *self.served.write().unwrap_or_else(PoisonError::into_inner) = served;
    }

    fn served(&self) -> Arc<Served> {
        Arc::clone(&self.served.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// `None` without redirection (loopback destination), and for multicast: other addresses answer.
    pub(crate) fn member(&self, client: SocketAddr, server: SocketAddr) -> Option<Member> {
        let ip = server.ip();
        let may_be_asked = !ip.is_loopback() && !ip.is_multicast() && !ip.is_unspecified() && server.port() != 0;
        let member = self.served().member(client.ip()).filter(|_| may_be_asked && client.port() != 0);
        if member.is_none() {
            self.books.pages().strangers += 1;
        }
        member
    }

    pub(crate) fn round(&self, client: IpAddr) -> Option<u32> {
        let served = self.served();
        served.member(client).map(|member| served.round(member))
    }

    pub(crate) fn admit(
        self: &Arc<Self>,
        client: SocketAddr,
        server: SocketAddr,
        transport: Transport,
        message: &[u8],
    ) -> Admitted {
        let Some(member) = self.member(client, server) else { return Admitted::Ignored };
        let read = wire::question(message);
        let outcome = match &read {
            Err(malformed) => Outcome::Malformed(*malformed),
            Ok(question) if !self.served().passes(&question.name) => Outcome::Refused,
            Ok(question) => match self.books.place(member, Kind::Query) {
                Some(place) => {
                    return Admitted::Asked(Box::new(Query {
                        port: Arc::clone(self),
                        at: SystemTime::now(),
                        member,
                        client,
                        server,
                        transport,
                        message: message.to_vec(),
                        head: message.get(..question.end).unwrap_or_default().to_vec(),
                        question: question.clone(),
                        _place: place,
                    }));
                }
                None => Outcome::Overloaded,
            },
        };
        let question = read.ok();
        let reply = outcome.own_code().and_then(|code| wire::reply(message, question.as_ref(), code));
        self.books.record(Record {
            at: SystemTime::now(),
            listener: self.number,
            member,
            client,
            server,
            transport,
            question,
            outcome,
            took: None,
        });
        reply.map_or(Admitted::Ignored, Admitted::Replied)
    }
}

impl Query {
    pub(crate) async fn ask(&mut self) -> Done {
        let began = Instant::now();
        let message = std::mem::take(&mut self.message);
        let asked = upstream::ask(self.client, self.server, self.transport, message, &self.question);
        let (outcome, took) = match timeout(ANSWER_TIME, asked).await {
            Err(_) => (Outcome::Unanswered, None),
            Ok(Err(error)) => (Outcome::Failed(error.to_string()), None),
            Ok(Ok(mut answer)) => {
                let took = began.elapsed();
                // First: names in the answer can point to the id.
                wire::set_id(&mut answer, wire::id(&self.head).unwrap_or_default());
                match self.learn(&answer).await {
                    outcome @ Outcome::Answered { .. } => {
                        return Done { answer: Some(answer), outcome, took: Some(took) };
                    }
                    outcome => (outcome, Some(took)),
                }
            }
        };
        let reply = |code| wire::reply(&self.head, Some(&self.question), code);
        Done { answer: outcome.own_code().and_then(reply), outcome, took }
    }

    async fn learn(&self, answer: &[u8]) -> Outcome {
        // Another endpoint can have the address.
        if self.port.served().member(self.client.ip()) != Some(self.member) {
            return Outcome::Gone;
        }
        let Ok(addresses) = wire::addresses(answer, &self.question) else { return Outcome::Unreadable };
        let count = addresses.len();
        if count > 0 {
            let name = self.question.name.clone();
            let learned = self.port.node.learn(Answer { member: self.member, name, addresses });
            match timeout(LEARN_TIME, learned).await {
                Ok(Ok(())) => {}
                Ok(Err(why)) => return Outcome::NotLearned(why),
                Err(_) => return Outcome::NotLearned(format!("it took more than {} s", LEARN_TIME.as_secs())),
            }
        }
        Outcome::Answered { rcode: wire::rcode(answer), addresses: count }
    }

    pub(crate) fn send(&self, answer: &[u8]) -> Result<(), String> {
        self.port.speaker.send(self.server, self.client, answer).map_err(|error| error.to_string())
    }

    pub(crate) fn end(self, done: Done, sent: Result<(), String>) {
        self.port.books.record(Record {
            at: self.at,
            listener: self.port.number,
            member: self.member,
            client: self.client,
            server: self.server,
            transport: self.transport,
            question: Some(self.question),
            outcome: sent.map_or_else(Outcome::Undelivered, |()| done.outcome),
            took: done.took,
        });
    }
}
