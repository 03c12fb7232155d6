//! The health endpoint's addresses, kept over a reboot in `<state-dir>/health.json`.
//!
//! A caller name owns the leases, so a delete keeps them. They are claimed before the agent serves.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use wharf_core::{
    ids::PoolName,
    ipam::{IpamError, LeaseRequest, Wanted},
    store::{Change, Lease, LeaseOwner},
};
use wharf_kit::{clock, kept, sync::lock};

use super::error::HealthError;
use crate::{
    addresses::{Addresses, resting},
    config::AgentConfig,
    endpoint::unknown,
    node::{
        aside,
        health::{self, Health, NAME, holds},
        lifecycle::Lifecycle,
    },
};

const VERSION: u32 = 1;
const MAX_FILE: u64 = 4_096;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    version: u32,
    #[serde(default)]
    pub(super) ipv4: Option<Ipv4Addr>,
    #[serde(default)]
    pub(super) ipv6: Option<Ipv6Addr>,
}

impl Kept {
    pub(super) fn addresses(self) -> Vec<IpAddr> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6)).collect()
    }
}

fn owner() -> LeaseOwner {
    LeaseOwner::Caller { name: NAME.to_owned() }
}

fn path(config: &AgentConfig) -> PathBuf {
    config.state_dir.join("health.json")
}

/// Releases the leases of a disabled health endpoint; the file stays.
pub(super) async fn let_go(addresses: &Addresses) -> Result<(), HealthError> {
    let leases = lock(&addresses.ipam).owned_by(holds);
    if leases.is_empty() {
        return Ok(());
    }
    resting::release(addresses, &leases, Vec::new()).await.map_err(|e| HealthError::Store("give its addresses back", e))
}

/// The kept addresses if possible.
pub(super) async fn lease(life: &Arc<Lifecycle>, health: &Health) -> Result<Kept, HealthError> {
    if let Ok(attachment) = health::attachment() {
        for error in unknown::remove(life, &aside::Wanted::of(&attachment)).await.errors {
            tracing::warn!(step = error.step, "take away what is left of the health endpoint: {}", error.message);
        }
    }
    let (config, addresses) = (&*life.config, &life.network.addresses);
    let path = path(config);
    let (in_file, mut notes) = read_back(path.clone()).await;
    let wanted = in_file.unwrap_or_default();
    let default = config.pools.iter().find(|p| p.name == config.default_pool);
    let has = |v6: bool| default.is_some_and(|p| p.cidrs.iter().any(|c| c.addr().is_ipv6() == v6));
    let mut got = Kept { version: VERSION, ..Kept::default() };
    let mut new = Vec::new();
    for v6 in [false, true] {
        let kept = if v6 { wanted.ipv6.map(IpAddr::V6) } else { wanted.ipv4.map(IpAddr::V4) };
        if !has(v6) {
            if let Some(ip) = kept {
                notes.push(format!("{ip}, kept from before, is given up: the default pool has none of its family"));
            }
            continue;
        }
        let had = match kept.map(|ip| (ip, claim(addresses, config, ip))) {
            Some((ip, Ok(lease))) => {
                new.push(lease);
                Some(ip)
            }
            Some((ip, Err(why))) => {
                notes.push(format!("{ip}, kept from before, cannot be had again ({why}); another was taken"));
                None
            }
            None => held(addresses, config, v6),
        };
        let ip = match had {
            Some(ip) => ip,
            None => {
                let lease = take(addresses, v6).await?;
                let ip = lease.ip;
                new.push(lease);
                ip
            }
        };
        match ip {
            IpAddr::V4(ip) => got.ipv4 = Some(ip),
            IpAddr::V6(ip) => got.ipv6 = Some(ip),
        }
    }
    let mut stale = lock(&addresses.ipam).owned_by(holds);
    stale.retain(|lease| !got.addresses().contains(&lease.ip));
    let puts = new.into_iter().map(Change::PutLease).collect();
    resting::release(addresses, &stale, puts).await.map_err(|e| HealthError::Store("lease its addresses", e))?;
    if in_file != Some(got)
        && let Err(error) = keep(path.clone(), got).await
    {
        let path = path.display();
        notes.push(format!("its addresses cannot be kept in {path}: {error}; after a reboot they may be others"));
    }
    for note in &notes {
        tracing::warn!("health endpoint: {note}");
    }
    if !notes.is_empty() {
        health.update(|h| h.address_note = Some(notes.join("; ")));
    }
    Ok(got)
}

/// Also while it rests: it had no other owner.
fn claim(addresses: &Addresses, config: &AgentConfig, ip: IpAddr) -> Result<Lease, IpamError> {
    let pool = pool_of(config, ip);
    let in_a_pool = pool.is_some();
    let pool = pool.unwrap_or_else(|| config.default_pool.clone());
    let lease = Lease { ip, pool, owner: owner(), since_unix_ms: clock::unix_ms() };
    let mut ipam = lock(&addresses.ipam);
    if let Some(held) = ipam.get(ip).filter(|held| in_a_pool && holds(&held.owner)) {
        return Ok(held.clone());
    }
    ipam.claim(lease.clone())?;
    Ok(lease)
}

fn pool_of(config: &AgentConfig, ip: IpAddr) -> Option<PoolName> {
    config.pools.iter().find(|p| p.cidrs.iter().any(|c| c.contains(&ip))).map(|p| p.name.clone())
}

fn held(addresses: &Addresses, config: &AgentConfig, v6: bool) -> Option<IpAddr> {
    let leases = lock(&addresses.ipam).owned_by(holds);
    leases.into_iter().map(|l| l.ip).find(|ip| ip.is_ipv6() == v6 && pool_of(config, *ip).is_some())
}

async fn take(addresses: &Addresses, v6: bool) -> Result<Lease, HealthError> {
    let (ipv4, ipv6) = if v6 { (Wanted::None, Wanted::Any) } else { (Wanted::Any, Wanted::None) };
    let request = LeaseRequest { pool: None, ipv4, ipv6 };
    let leased = resting::lease(addresses, &request, &owner()).await?;
    let ip = leased.ipv4.map(IpAddr::V4).or(leased.ipv6.map(IpAddr::V6));
    let lease = ip.and_then(|ip| lock(&addresses.ipam).get(ip).cloned());
    lease.ok_or(HealthError::NoAddress)
}

async fn read_back(path: PathBuf) -> (Option<Kept>, Vec<String>) {
    let read = move || match read(&path) {
        Ok(kept) => (kept, Vec::new()),
        Err(why) => {
            let aside = path.with_extension("json.unusable");
            let done = match fs::rename(&path, &aside) {
                Ok(()) => format!("it was moved to {}", aside.display()),
                Err(error) => format!("it cannot be moved to {}: {error}", aside.display()),
            };
            (None, vec![format!("{} cannot be used: {why}; {done}, and a new one is written", path.display())])
        }
    };
    match tokio::task::spawn_blocking(read).await {
        Ok(read) => read,
        Err(error) => (None, vec![format!("read the kept addresses: {error}")]),
    }
}

fn read(path: &Path) -> io::Result<Option<Kept>> {
    let Some(text) = kept::read(path, MAX_FILE)? else { return Ok(None) };
    let kept: Kept = serde_json::from_slice(&text)?;
    match kept.version {
        VERSION => Ok(Some(kept)),
        other => Err(io::Error::other(format!("it is of version {other}, this agent knows {VERSION}"))),
    }
}

async fn keep(path: PathBuf, kept: Kept) -> io::Result<()> {
    tokio::task::spawn_blocking(move || write(&path, kept)).await.map_err(io::Error::other).flatten()
}

fn write(path: &Path, kept: Kept) -> io::Result<()> {
    kept::write(path, (serde_json::to_string_pretty(&kept)? + "\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("make directory");
        let path = directory.path().join("health.json");
        fs::write(&path, text).expect("write");
        (directory, path)
    }

    #[test]
    fn what_is_written_is_read_back() {
        let (_directory, path) = file(b"");
        let kept = Kept { version: VERSION, ipv4: Some(Ipv4Addr::new(10, 0, 0, 2)), ipv6: None };
        write(&path, kept).expect("write");
        assert_eq!(read(&path).expect("read"), Some(kept));
        assert!(!path.with_extension("json.new").exists());
    }

    #[test]
    fn no_file_is_no_error_and_a_damaged_one_is() {
        let (_directory, path) = file(b"");
        assert_eq!(read(&path.with_file_name("none.json")).expect("read"), None);
        let long = vec![b' '; 5_000];
        let newer = b"{\"version\":2,\"ipv4\":null,\"ipv6\":null}";
        for text in [&b""[..], b"{", b"[]", b"{\"version\":1,\"ipv4\":\"10.0.0\"}", b"\0\xff", &long, newer] {
            fs::write(&path, text).expect("write");
            assert!(read(&path).is_err(), "{:?}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn a_pipe_in_its_place_is_not_waited_for() {
        let (_directory, path) = file(b"");
        fs::remove_file(&path).expect("remove");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("make a pipe");
        assert_eq!(read(&path).expect_err("no file").to_string(), "it is not a file");
    }

    #[tokio::test]
    async fn a_damaged_file_is_set_aside_and_said() {
        let (_directory, path) = file(b"{\"version\":1,");
        let (kept, notes) = read_back(path.clone()).await;
        assert_eq!(kept, None);
        assert!(notes.iter().any(|n| n.contains("cannot be used") && n.contains("health.json.unusable")), "{notes:?}");
        assert!(!path.exists() && path.with_extension("json.unusable").exists());
        assert_eq!(read_back(path).await, (None, Vec::new()));
    }
}
