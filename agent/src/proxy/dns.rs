//! The agent's DNS proxy, for rules about names.

use std::{collections::BTreeMap, future::Future, net::IpAddr, pin::Pin, sync::Arc, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use wharf_core::ids::{EndpointId, Epoch};
use wharf_dns::{Answer, DnsProxy, Listener, Member, Names, Record};
use wharf_policy::model::Direction;

use super::{Completion, Leaving, ProxyError, Redirect, RedirectTable, Redirects, envoy::PATIENCE, look::name};

/// As many as concurrent queries.
const ANSWERS: usize = 1_024;
/// Retry interval of a port that did not open.
const AGAIN: Duration = Duration::from_secs(1);

/// A DNS answer, and the channel for policy's result.
pub type Noted = (Answer, oneshot::Sender<Result<(), String>>);

/// Redirects to the DNS proxy.
#[derive(Debug)]
pub struct Dns {
    /// Only the last state: the server skips states in between.
    asked: watch::Sender<Asked>,
    done: watch::Receiver<Done>,
}

/// Opens and closes the ports, and serves them.
pub struct Server {
    proxy: DnsProxy,
    asked: watch::Receiver<Asked>,
    done: watch::Sender<Done>,
}

#[derive(Debug, Default)]
struct Asked {
    number: u64,
    wanted: RedirectTable,
    leaving: Leaving,
}

#[derive(Debug, Default)]
struct Done {
    number: u64,
    refused: BTreeMap<u16, String>,
}

#[derive(Debug)]
struct Teller(mpsc::Sender<Noted>);

impl Names for Teller {
    fn learn<'a>(&'a self, answer: Answer) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>> {
        Box::pin(async move {
            let (noted, waits) = oneshot::channel();
            let ends = || "the agent ends".to_owned();
            self.0.send((answer, noted)).await.map_err(|_| ends())?;
            waits.await.map_err(|_| ends())?
        })
    }
}

impl Dns {
    /// Without redirects; returns server, learned answers and recorded verdicts.
    #[must_use]
    pub fn new(records: usize) -> (Self, Server, mpsc::Receiver<Noted>, mpsc::Receiver<Record>) {
        let (sender, answers) = mpsc::channel(ANSWERS);
        let (proxy, records) = DnsProxy::new(Arc::new(Teller(sender)), records);
        let (of_asked, of_done) = (watch::channel(Asked::default()), watch::channel(Done::default()));
        let server = Server { proxy, asked: of_asked.1, done: of_done.0 };
        (Self { asked: of_asked.0, done: of_done.1 }, server, answers, records)
    }

    /// Wanted redirects, and ports that did not open.
    #[must_use]
    pub fn look(&self) -> (RedirectTable, BTreeMap<u16, String>) {
        let (wanted, done) = (self.asked.borrow().wanted.clone(), self.done.borrow());
        let refused = done.refused.iter().filter(|(port, _)| wanted.contains_key(port));
        let refused = refused.map(|(port, why)| (*port, why.clone())).collect();
        (wanted, refused)
    }

    fn ask(&self, change: impl FnOnce(&mut Asked) -> Vec<(u16, Direction)>) -> Vec<(String, Completion)> {
        let (mut number, mut changed) = (0, Vec::new());
        self.asked.send_if_modified(|asked| {
            let before = asked.wanted.clone();
            changed = change(asked);
            let is_new = asked.wanted != before;
            asked.number += u64::from(is_new);
            number = asked.number;
            is_new
        });
        changed.into_iter().map(|(port, direction)| self.completion(number, port, direction)).collect()
    }

    fn completion(&self, number: u64, port: u16, direction: Direction) -> (String, Completion) {
        let mut done = self.done.clone();
        let opened = async move {
            let ends = |_| ProxyError::NoAnswer("the agent ends".to_owned());
            let done = done.wait_for(|done| done.number >= number).await.map_err(ends)?;
            done.refused.get(&port).map_or(Ok(()), |why| Err(super::refused(port, why.clone())))
        };
        (name(port, direction), Box::pin(opened))
    }
}

impl Server {
    /// Serves the wanted redirects until `halt`.
    pub async fn serve(mut self, halt: CancellationToken) {
        loop {
            let (number, listeners) = {
                let asked = self.asked.borrow_and_update();
                let listeners = asked.wanted.iter().map(|(port, redirect)| (*port, listener(redirect)));
                (asked.number, listeners.collect())
            };
            let opened = self.proxy.set(listeners).await.into_iter();
            let refused: BTreeMap<u16, String> =
                opened.filter_map(|(port, opened)| Some((port, opened.err()?.to_string()))).collect();
            let fails = !refused.is_empty();
            self.done.send_replace(Done { number, refused });
            tokio::select! {
                () = halt.cancelled() => return,
                changed = self.asked.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(AGAIN), if fails => {}
            }
        }
    }
}

fn listener(redirect: &Redirect) -> Listener {
    let requests = Arc::clone(&redirect.listener.requests);
    let asks = Arc::new(move |name: &str| requests.names.iter().any(|pattern| pattern.matches(name)));
    let member = |id, epoch| Member { id, epoch };
    Listener { asks, members: redirect.members(member), rounds: redirect.rounds(member) }
}

impl Redirects for Dns {
    fn set(&self, mut wanted: RedirectTable) -> Vec<(String, Completion)> {
        self.ask(|asked| {
            asked.leaving.leave_out_of(&mut wanted);
            let changed = wanted.iter().filter(|(port, redirect)| asked.wanted.get(port) != Some(redirect));
            let changed = changed.map(|(port, redirect)| (*port, redirect.listener.direction)).collect();
            asked.wanted = wanted;
            changed
        })
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn outstanding(&self) -> Vec<String> {
        self.look().1.into_values().collect()
    }

    fn remove_redirects(&self, id: EndpointId, epoch: Epoch) -> Vec<(String, Completion)> {
        self.ask(|asked| {
            let own = asked.wanted.iter_mut().filter_map(|(port, redirect)| {
                redirect.members.remove(&(id, epoch))?;
                Some((*port, redirect.listener.direction))
            });
            let own: Vec<_> = own.collect();
            if !own.is_empty() {
                asked.leaving.insert(id, epoch);
            }
            own
        })
    }

    fn count(&self) -> u64 {
        self.asked.borrow().wanted.values().map(|redirect| redirect.members.len() as u64).sum()
    }

    fn enabled(&self) -> bool {
        !self.asked.borrow().wanted.is_empty()
    }

    fn speakers(&self, _: IpAddr) -> Vec<String> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};

    use wharf_policy::{compile, names::NamePattern, requests::Requests};

    use super::*;

    fn wanted(port: u16) -> RedirectTable {
        let names = [NamePattern::pattern("*.test").expect("pattern")].into();
        let requests = Arc::new(Requests { names, ..Requests::default() });
        let listener =
            Arc::new(compile::Listener { direction: Direction::Egress, requests, share: compile::Share::default() });
        let members = [((EndpointId::try_from(7).expect("id"), Epoch(3)), vec![IpAddr::from([10, 0, 0, 7])])].into();
        [(port, Redirect { listener, members, rounds: BTreeMap::new() })].into()
    }

    #[tokio::test]
    async fn a_port_that_is_taken_is_told_and_opened_when_it_is_free() {
        let taken = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bound");
        let port = taken.local_addr().expect("address").port();
        let (dns, server, _answers, _records) = Dns::new(1);
        let halt = CancellationToken::new();
        let served = tokio::spawn(server.serve(halt.clone()));
        let [(told, opened)] = <[_; 1]>::try_from(dns.set(wanted(port))).ok().expect("one listener");
        let why = opened.await.expect_err("taken");
        assert_eq!(told, format!("egress-{port}"));
        assert!(why.to_string().contains(&port.to_string()), "{why}");
        assert_eq!(dns.outstanding(), [why.to_string()]);
        drop(taken);
        let mut done = dns.done.clone();
        done.wait_for(|done| done.refused.is_empty()).await.expect("opened");
        assert!(dns.set(wanted(port)).is_empty(), "nothing is new");
        for (_, removed) in dns.remove_redirects(EndpointId::try_from(7).expect("id"), Epoch(3)) {
            removed.await.expect("removed");
        }
        assert_eq!((dns.count(), dns.enabled()), (0, true));
        assert!(dns.set(wanted(port)).is_empty() && dns.count() == 0, "it is left out as long as policy names it");
        dns.set(RedirectTable::new());
        assert_eq!((dns.set(wanted(port)).len(), dns.count()), (1, 1), "another one of that name");
        halt.cancel();
        served.await.expect("ended");
    }
}
