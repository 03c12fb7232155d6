//! Addresses of names that containers looked up, for `toFQDNs`; `<state-dir>/names.json` keeps them over restarts.
//!
//! An answer waits until the kernel has its rows. The file is written before them, so that a restart removes no address
//! in use.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use wharf_api::{ProxyName, ProxyNameAddress};
use wharf_core::flow::FlowFilter;
use wharf_dns::{
    Answer,
    cache::{Cache, Changed},
};
use wharf_kit::{clock, kept};
use wharf_policy::compile::Event;

use super::{Guard, Policy, error::PolicyError};
use crate::proxy::dns::Noted;

/// Controller that expires addresses.
pub const CONTROLLER: &str = "names";
/// An expired address stays open up to this much longer.
pub const INTERVAL: Duration = Duration::from_secs(15);
/// Answers in one change, which writes the file once.
const AT_ONCE: usize = 64;
/// Bytes: 10,000 addresses with different names of maximum length, and 50,000 claims.
const MAX_FILE: u64 = 16 << 20;
/// Addresses searched at once; each flow is compared with all.
const LOOKED_FOR: usize = 256;
/// Flows searched; beyond it, all addresses count as used.
const FLOWS: usize = 100_000;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// Boot whose clock expires names; no connection outlives it.
    boot: String,
    names: serde_json::Value,
}

pub(super) fn load(path: &Path) -> io::Result<Cache> {
    let Some(text) = kept::read(path, MAX_FILE)? else { return Ok(Cache::default()) };
    let Kept { boot, names } = serde_json::from_slice(&text)?;
    if boot != clock::boot_id()? {
        return Ok(Cache::default());
    }
    Cache::from_json(names, clock::boot_ms()).map_err(io::Error::other)
}

fn save(path: &Path, names: &Cache) -> io::Result<()> {
    let kept = Kept { boot: clock::boot_id()?, names: names.to_json()? };
    kept::write(path, &serde_json::to_vec(&kept)?)
}

fn events(names: &Cache, changed: &Changed, services: &[IpNet]) -> Vec<Event> {
    let event = |name: &Arc<str>| {
        let addresses = names.addresses_of(name).map(|(address, _)| address.to_canonical());
        Event::Name(Arc::clone(name), addresses.filter(|address| is_of_the_world(*address, services)).collect())
    };
    changed.iter().map(event).collect()
}

pub(super) fn all(names: &Cache, services: &[IpNet]) -> Vec<Event> {
    events(names, &names.iter().map(|(name, ..)| Arc::from(name)).collect(), services)
}

/// Whether a name may open the address: not services, nor link-local addresses of the node or its cloud
/// (169.254.169.254).
fn is_of_the_world(address: IpAddr, services: &[IpNet]) -> bool {
    let is_near = match address {
        IpAddr::V4(ip) => matches!(ip.octets(), [0, ..]) || ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let is_near = is_near || address.is_loopback() || address.is_unspecified() || address.is_multicast();
    !is_near && !services.iter().any(|service| service.contains(&address))
}

impl Policy {
    /// Learns DNS answers and reports each result, until `halt`.
    pub async fn follow_names(&self, mut answers: mpsc::Receiver<Noted>, halt: CancellationToken) {
        let mut batch = Vec::new();
        loop {
            let more = tokio::select! {
                () = halt.cancelled() => 0,
                more = answers.recv_many(&mut batch, AT_ONCE) => more,
            };
            if more == 0 {
                return;
            }
            let (answers, waiting): (Vec<_>, Vec<_>) = batch.drain(..).unzip();
            for (noted, waits) in self.learn_each(&answers).await.into_iter().zip(waiting) {
                waits.send(noted.map_err(|why| why.to_string())).ok();
            }
        }
    }

    /// As one change, or one by one if they do not fit.
    pub async fn learn_each(&self, answers: &[Answer]) -> Vec<Result<(), PolicyError>> {
        match self.learn(answers, self.names_now()).await {
            Err(PolicyError::Rows(_)) if answers.len() > 1 => {
                let mut noted = Vec::new();
                for answer in answers {
                    noted.push(self.learn(std::slice::from_ref(answer), self.names_now()).await);
                }
                noted
            }
            noted => vec![noted; answers.len()],
        }
    }

    /// Milliseconds since the boot: setting the clock expires no name.
    #[must_use]
    pub fn names_now(&self) -> u64 {
        clock::boot_ms()
    }

    /// Learns answers of `now` ([`Policy::names_now`]), and writes their rows.
    ///
    /// # Errors
    /// Rows do not fit: nothing learned. The kernel refused: retried.
    pub async fn learn(&self, answers: &[Answer], now: u64) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        let before = inner.names.clone();
        let mut changed = Changed::new();
        for Answer { member, name, addresses } in answers {
            changed.extend(inner.names.learn(*member, name, addresses.iter().copied(), now));
        }
        inner.names_stale = true;
        // Rows of an earlier change may be missing.
        if changed.is_empty() && (inner.engine.is_some() || !inner.active) {
            return Ok(());
        }
        let events = events(&inner.names, &changed, &self.services);
        let (mut inner, computed) = self.compute(inner, events).await;
        match self.prepare(&mut inner, computed).await {
            Ok(prepared) => {
                let mut inner = self.keep_names(inner).await;
                match prepared {
                    Some(prepared) => self.write(&mut inner, prepared).await,
                    None => Ok(()),
                }
            }
            // A later import finds the names.
            Err(PolicyError::Lost { .. }) => Ok(()),
            Err(why) => {
                inner.names = before;
                Err(why)
            }
        }
    }

    /// Number of addresses.
    pub async fn name_addresses(&self) -> u64 {
        self.lock().await.names.len() as u64
    }

    /// Names with addresses, by name.
    pub async fn names(&self) -> Vec<ProxyName> {
        let inner = self.lock().await;
        let (unix, now) = (clock::unix_ms(), self.names_now());
        let mut all: Vec<ProxyName> = Vec::new();
        for (name, address, end) in inner.names.iter() {
            let until_unix_ms = unix.saturating_add(end).saturating_sub(now);
            let address = ProxyNameAddress { address, until_unix_ms };
            match all.last_mut().filter(|last| last.name == name) {
                Some(last) => last.addresses.push(address),
                None => all.push(ProxyName { name: name.to_owned(), addresses: vec![address] }),
            }
        }
        all
    }

    /// Takes the lock along: writes keep their order even if cancelled.
    async fn keep_names(&self, mut inner: Guard) -> Guard {
        let file: PathBuf = self.names_file.clone();
        let kept = tokio::task::spawn_blocking(move || {
            let kept = save(&file, &inner.names);
            inner.names_stale = kept.is_err();
            if let Err(why) = kept {
                let file = file.display();
                tracing::warn!(%file, "keep names: {why}; after a restart containers must ask for them again");
            }
            inner
        });
        kept.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
    }
}

impl Policy {
    /// Expires addresses at `now` ([`Policy::names_now`]) that no flow uses; without any, saves names that the file
    /// lacks.
    ///
    /// # Errors
    /// Unreadable flows or refused rows: retried.
    pub async fn forget_names(&self, now: u64) -> Result<(), PolicyError> {
        let inner = self.lock().await;
        let over: Vec<IpAddr> = inner.names.over(now).take(LOOKED_FOR).collect();
        if over.is_empty() {
            if inner.names_stale {
                self.keep_names(inner).await;
            }
            return Ok(());
        }
        drop(inner);
        let filter = FlowFilter { addresses: over, ..FlowFilter::default() };
        let found = self.kernel.observe_flows(&filter, FLOWS).await?;
        let ends = found.flows.iter().flat_map(|flow| [flow.source.address, flow.destination.address]);
        let used: BTreeSet<IpAddr> = ends.collect();
        let looked_for: BTreeSet<IpAddr> = filter.addresses.into_iter().collect();
        let mut inner = self.lock().await;
        // The others expire in a later pass.
        let is_used = |address| looked_for.contains(&address).then(|| found.more > 0 || used.contains(&address));
        let changed = inner.names.expire(now, is_used);
        let events = events(&inner.names, &changed, &self.services);
        let inner = self.keep_names(inner).await;
        self.realize(inner, events).await.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_opens_a_service_or_what_is_near_the_node() {
        let services = ["10.96.0.0/12", "fd96::/108"].map(|net| net.parse().expect("network"));
        let (good, bad) = (
            ["192.0.2.1", "10.95.0.1", "2001:db8::1", "fd00:ec2::1"],
            [
                "169.254.169.254",
                "127.0.0.1",
                "0.0.0.0",
                "0.1.2.3",
                "224.0.0.1",
                "255.255.255.255",
                "10.96.0.1",
                "fd96::1",
                "::",
                "::1",
                "fe80::1",
                "ff02::1",
                "::ffff:169.254.169.254",
                "::ffff:10.96.0.1",
            ],
        );
        let mut names = Cache::default();
        let ip_of = |text: &str| text.parse::<IpAddr>().expect("address");
        let member = wharf_dns::Member { id: 1, epoch: 1 };
        let answer = good.iter().chain(&bad).map(|text| (ip_of(text), Duration::from_secs(60)));
        names.learn(member, "a.test", answer, 0);
        let [Event::Name(_, addresses)] = &all(&names, &services)[..] else { panic!("one name") };
        assert_eq!(*addresses, good.map(ip_of).into());
    }
}
