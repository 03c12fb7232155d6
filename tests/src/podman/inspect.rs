//! Containers as `podman inspect` shows them.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;

use crate::space::Space;

/// A container as `podman inspect` shows it.
#[derive(Debug, Clone)]
pub struct Container {
    /// Its id, which is the CNI container id.
    pub id: String,
    /// Path of its network namespace; empty while it does not run.
    pub netns: PathBuf,
    /// Its networks, by name.
    pub networks: BTreeMap<String, Attachment>,
}

/// A container's place in a network, as podman read it out of the plugin's result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// IPv4 address; none while the container does not run.
    pub v4: Option<Ipv4Addr>,
    /// Length of its prefix.
    pub v4_prefix: u8,
    /// IPv6 address; none while the container does not run.
    pub v6: Option<Ipv6Addr>,
    /// Length of its prefix.
    pub v6_prefix: u8,
    /// IPv4 gateway.
    pub gateway4: Option<Ipv4Addr>,
    /// IPv6 gateway.
    pub gateway6: Option<Ipv6Addr>,
    /// MAC address.
    pub mac: String,
}

impl Container {
    /// Reads what `podman inspect` printed of one container.
    pub(super) fn read(text: &str) -> Result<Self> {
        let parsed: Vec<Inspected> = serde_json::from_str(text).context("not the JSON that was expected")?;
        let [one] = <[_; 1]>::try_from(parsed).map_err(|all| anyhow!("{} containers instead of one", all.len()))?;
        let networks = one.settings.networks.into_iter().map(|(name, n)| Ok((name, n.attachment()?)));
        Ok(Self { id: one.id, netns: one.settings.netns, networks: networks.collect::<Result<_>>()? })
    }

    /// Its place in a network, with both addresses.
    ///
    /// # Errors
    /// When it has none, or not both addresses.
    pub fn on(&self, network: &str) -> Result<(Ipv4Addr, Ipv6Addr)> {
        let place = self.networks.get(network).with_context(|| format!("not on {network}: {self:?}"))?;
        match (place.v4, place.v6) {
            (Some(v4), Some(v6)) => Ok((v4, v6)),
            _ => bail!("no addresses on {network}: {self:?}"),
        }
    }

    /// Its network namespace, so that the harness too can send from it.
    ///
    /// # Errors
    /// When it does not run.
    pub fn space(&self) -> Result<Space> {
        Space::open(&self.netns)
    }
}

#[derive(Deserialize)]
struct Inspected {
    #[serde(rename = "Id")]
    id: String,
    #[serde(rename = "NetworkSettings")]
    settings: InspectedSettings,
}

#[derive(Deserialize)]
struct InspectedSettings {
    #[serde(rename = "SandboxKey")]
    netns: PathBuf,
    #[serde(rename = "Networks", default)]
    networks: BTreeMap<String, InspectedNetwork>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InspectedNetwork {
    #[serde(rename = "IPAddress")]
    ip_address: String,
    #[serde(rename = "IPPrefixLen")]
    ip_prefix_len: u8,
    #[serde(rename = "GlobalIPv6Address")]
    global_ipv6_address: String,
    #[serde(rename = "GlobalIPv6PrefixLen")]
    global_ipv6_prefix_len: u8,
    gateway: String,
    #[serde(rename = "IPv6Gateway")]
    ipv6_gateway: String,
    mac_address: String,
}

impl InspectedNetwork {
    fn attachment(self) -> Result<Attachment> {
        Ok(Attachment {
            v4: address(&self.ip_address)?,
            v4_prefix: self.ip_prefix_len,
            v6: address(&self.global_ipv6_address)?,
            v6_prefix: self.global_ipv6_prefix_len,
            gateway4: address(&self.gateway)?,
            gateway6: address(&self.ipv6_gateway)?,
            mac: self.mac_address,
        })
    }
}

/// Podman writes an empty string for none.
fn address<T>(text: &str) -> Result<Option<T>>
where
    T: std::str::FromStr,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    if text.is_empty() { Ok(None) } else { text.parse().map(Some).with_context(|| format!("address {text:?}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_address_is_none_and_a_bad_one_is_an_error() {
        assert_eq!(address::<Ipv4Addr>("").ok(), Some(None));
        assert_eq!(address("192.0.2.1").ok(), Some(Some(Ipv4Addr::new(192, 0, 2, 1))));
        assert!(address::<Ipv4Addr>("192.0.2").is_err());
    }
}
