//! Addresses of names that containers looked up, for `toFQDNs`, kept over restarts in `<state-dir>/names.json`.
//!
//! An answer waits until the kernel has its rows. The file is written before them, so that a restart removes no address
//! in use.

use std::{collections::BTreeSet, io, net::IpAddr, path::Path, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use wharf_api::{ProxyName, ProxyNameAddress};
use wharf_core::flow::FlowFilter;
use wharf_dns::{
    Answer,
    cache::{Cache, Changed},
};
use wharf_enforce::{
    inputs::Input,
    transaction::{File, Terms},
};
use wharf_kit::{clock, kept};

use super::{Policy, error::PolicyError, or_lost};
use crate::proxy::dns::Noted;

/// Controller that expires addresses.
pub const CONTROLLER: &str = "names";
/// An expired address stays open up to this much longer.
pub const INTERVAL: Duration = Duration::from_secs(15);
/// Per change, which writes the file once.
const AT_ONCE: usize = 64;
/// Bytes: 10,000 addresses with names of maximum length, and 50,000 claims.
const MAX_FILE: u64 = 16 << 20;
/// Addresses searched at once; each flow is compared with all.
const LOOKED_FOR: usize = 256;
/// Searched flows; beyond, all addresses count as used.
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

pub(super) fn save(path: &Path, names: &Cache) -> io::Result<()> {
    let kept = Kept { boot: clock::boot_id()?, names: names.to_json()? };
    kept::write(path, &serde_json::to_vec(&kept)?)
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
        let mut names = inner.state.inputs().names.clone();
        let mut changed = Changed::new();
        for Answer { member, name, addresses } in answers {
            changed.extend(names.learn(*member, name, addresses.iter().copied(), now));
        }
        inner.names_stale = true;
        // Otherwise, rows of an earlier change may be missing.
        if changed.is_empty() && inner.state.is_settled() {
            inner.state.take(Input::Names(names, changed));
            return Ok(());
        }
        or_lost(self.realize(inner, Terms::ANSWERS, vec![Input::Names(names, changed)]).await.1)
    }

    pub async fn name_addresses(&self) -> u64 {
        self.lock().await.state.inputs().names.len() as u64
    }

    /// Names with addresses, by name.
    pub async fn names(&self) -> Vec<ProxyName> {
        let inner = self.lock().await;
        let (unix, now) = (clock::unix_ms(), self.names_now());
        let mut all: Vec<ProxyName> = Vec::new();
        for (name, address, end) in inner.state.inputs().names.iter() {
            let until_unix_ms = unix.saturating_add(end).saturating_sub(now);
            let address = ProxyNameAddress { address, until_unix_ms };
            match all.last_mut().filter(|last| last.name == name) {
                Some(last) => last.addresses.push(address),
                None => all.push(ProxyName { name: name.to_owned(), addresses: vec![address] }),
            }
        }
        all
    }
}

impl Policy {
    /// Expires addresses at `now` ([`Policy::names_now`]) that no flow uses; without any, saves names that the file
    /// lacks.
    ///
    /// # Errors
    /// Unreadable flows or refused rows: retried.
    pub async fn forget_names(&self, now: u64) -> Result<(), PolicyError> {
        let mut inner = self.lock().await;
        let over: Vec<IpAddr> = inner.state.inputs().names.over(now).take(LOOKED_FOR).collect();
        if over.is_empty() {
            if inner.names_stale {
                let names = inner.state.inputs().names.clone();
                drop(self.save(&mut inner.names_stale, File::Names(names)).await);
            }
            return Ok(());
        }
        drop(inner);
        let filter = FlowFilter { addresses: over, ..FlowFilter::default() };
        let found = self.kernel.observe_flows(&filter, FLOWS).await?;
        let ends = found.flows.iter().flat_map(|flow| [flow.source.address, flow.destination.address]);
        let used: BTreeSet<IpAddr> = ends.collect();
        let looked_for: BTreeSet<IpAddr> = filter.addresses.into_iter().collect();
        let inner = self.lock().await;
        let mut names = inner.state.inputs().names.clone();
        let is_used = |address| looked_for.contains(&address).then(|| found.more > 0 || used.contains(&address));
        let changed = names.expire(now, is_used);
        self.realize(inner, Terms::EXPIRED_NAMES, vec![Input::Names(names, changed)]).await.1
    }
}
