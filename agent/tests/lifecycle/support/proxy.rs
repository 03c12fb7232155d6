//! A proxy that acknowledges as it is told to.

use std::{
    collections::{BTreeMap, VecDeque},
    future::pending,
    net::IpAddr,
    sync::Mutex,
    time::Duration,
};

use tokio::sync::{oneshot, watch};
use wharf_agent::proxy::{Completion, Look, ProxyError, Redirect, RedirectTable, Redirects, name};
use wharf_core::ids::{EndpointId, Epoch};
use wharf_kit::sync::lock;

/// Redirects in force, and who was asked to remove theirs.
#[derive(Default)]
pub(crate) struct Proxy {
    redirects: Mutex<VecDeque<(EndpointId, String, Completion)>>,
    asked: Mutex<Vec<(EndpointId, Epoch)>>,
    listeners: Mutex<Vec<IpAddr>>,
    told: Mutex<Vec<RedirectTable>>,
    /// Whether what is told is not acknowledged.
    silent: watch::Sender<bool>,
    /// Whether that is known, so that nobody waits for it.
    is_gone: Mutex<bool>,
    /// A port whose listener it will refuse.
    refused_port: Mutex<Option<u16>>,
    /// Listeners that it refused, and why.
    refused: Mutex<BTreeMap<String, String>>,
}

impl Proxy {
    fn add(&self, id: EndpointId, name: &str, completion: Completion) {
        lock(&self.redirects).push_back((id, name.to_owned(), completion));
    }

    /// A redirect whose removal is acknowledged at once.
    pub(crate) fn answers(&self, id: EndpointId, name: &str) {
        self.add(id, name, Box::pin(async { Ok(()) }));
    }

    /// A redirect whose removal the proxy refuses.
    pub(crate) fn refuses(&self, id: EndpointId, name: &str, why: &'static str) {
        self.add(id, name, Box::pin(async move { Err(ProxyError::Refused(why.to_owned())) }));
    }

    /// A redirect whose removal is acknowledged when the test says so.
    pub(crate) fn answers_late(&self, id: EndpointId, name: &str) -> oneshot::Sender<()> {
        let (acknowledge, acknowledged) = oneshot::channel();
        self.add(
            id,
            name,
            Box::pin(async move { acknowledged.await.map_err(|_| ProxyError::NoAnswer("the proxy ended".to_owned())) }),
        );
        acknowledge
    }

    /// A redirect whose removal is never acknowledged.
    pub(crate) fn never_answers(&self, id: EndpointId, name: &str) {
        self.add(id, name, Box::pin(pending()));
    }

    /// A listener that speaks for an address, whoever has it.
    pub(crate) fn listens(&self, ip: IpAddr) {
        lock(&self.listeners).push(ip);
    }

    /// No listener speaks for the address any more.
    pub(crate) fn closes(&self, ip: IpAddr) {
        lock(&self.listeners).retain(|l| *l != ip);
    }

    /// What it was told, oldest first.
    pub(crate) fn told(&self) -> Vec<RedirectTable> {
        lock(&self.told).clone()
    }

    /// Acknowledges nothing from now on, or everything.
    pub(crate) fn is_silent(&self, silent: bool) {
        self.silent.send_replace(silent);
    }

    /// There is none, and everybody knows.
    pub(crate) fn is_gone(&self) {
        self.is_silent(true);
        *lock(&self.is_gone) = true;
    }

    /// It refuses a listener at this port; `None`: none.
    pub(crate) fn refuses_port(&self, port: Option<u16>) {
        *lock(&self.refused_port) = port;
    }

    pub(crate) fn refuses_listener(&self, name: &str, why: &str) {
        lock(&self.refused).insert(name.to_owned(), why.to_owned());
    }

    /// Refuses nothing any more.
    pub(crate) fn accepts(&self) {
        lock(&self.refused).clear();
    }

    /// Endpoints whose redirects were asked away, oldest first.
    pub(crate) fn asked(&self) -> Vec<(EndpointId, Epoch)> {
        lock(&self.asked).clone()
    }
}

impl Redirects for Proxy {
    fn set(&self, wanted: RedirectTable) -> Vec<(String, Completion)> {
        let mut told = lock(&self.told);
        let before = told.last().cloned().unwrap_or_default();
        let changed = wanted.iter().filter(|(port, redirect)| before.get(port) != Some(redirect));
        let gone = before.iter().filter(|(port, _)| !wanted.contains_key(port));
        let refused = *lock(&self.refused_port);
        let completion = |(port, redirect): (&u16, &Redirect)| -> (String, Completion) {
            let mut silent = self.silent.subscribe();
            let is_refused = refused == Some(*port);
            let answer = async move {
                if is_refused {
                    return Err(ProxyError::Refused("the port is taken".to_owned()));
                }
                silent
                    .wait_for(|silent| !silent)
                    .await
                    .map(drop)
                    .map_err(|_| ProxyError::NoAnswer("it ended".to_owned()))
            };
            (name(*port, redirect.listener.direction), Box::pin(answer))
        };
        let completions = changed.chain(gone).map(completion).collect();
        told.push(wanted);
        completions
    }

    fn patience(&self) -> Duration {
        if *lock(&self.is_gone) { Duration::ZERO } else { Duration::from_millis(500) }
    }

    fn outstanding(&self) -> Vec<String> {
        let silent = self.silent.borrow().then(|| "it is silent".to_owned());
        silent.into_iter().chain(lock(&self.refused).keys().cloned()).collect()
    }

    fn remove_redirects(&self, id: EndpointId, epoch: Epoch) -> Vec<(String, Completion)> {
        lock(&self.asked).push((id, epoch));
        let mut all = lock(&self.redirects);
        let (mine, others): (VecDeque<_>, VecDeque<_>) = all.drain(..).partition(|(of, ..)| *of == id);
        *all = others;
        mine.into_iter().map(|(_, name, completion)| (name, completion)).collect()
    }

    fn count(&self) -> u64 {
        lock(&self.redirects).len() as u64
    }

    fn enabled(&self) -> bool {
        true
    }

    fn speakers(&self, ip: IpAddr) -> Vec<String> {
        let speaks = lock(&self.listeners).contains(&ip);
        speaks.then(|| format!("a listener of the proxy on {ip}")).into_iter().collect()
    }

    fn look(&self) -> Look {
        let refused = lock(&self.refused).clone();
        let unacknowledged = refused.into_iter().map(|(name, why)| (name, Some(why))).collect();
        Look { wanted: self.told().pop().unwrap_or_default(), unacknowledged, ..Look::default() }
    }
}
