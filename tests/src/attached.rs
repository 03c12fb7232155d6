//! An endpoint as the test knows it: what CNI ADD answered.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::cni::NetConf;

/// An attachment made by CNI ADD.
#[derive(Debug, Clone)]
pub struct Attached {
    /// CNI_CONTAINERID.
    pub container: String,
    /// CNI_NETNS.
    pub netns: PathBuf,
    /// CNI_IFNAME.
    pub ifname: String,
    /// What ADD was given.
    pub conf: NetConf,
    /// What ADD answered.
    pub result: Value,
}

impl Attached {
    /// Its addresses, without prefix lengths, in the result's order.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let ips = self.result.get("ips").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        ips.iter().filter_map(|ip| ip.get("address")?.as_str()?.split('/').next()?.parse().ok()).collect()
    }

    /// Its IPv4 address.
    ///
    /// # Errors
    /// When it has none.
    pub fn v4(&self) -> Result<Ipv4Addr> {
        let found = self.addresses().into_iter().find_map(|a| if let IpAddr::V4(v4) = a { Some(v4) } else { None });
        found.with_context(|| format!("no IPv4 address in {}", self.result))
    }

    /// Its IPv6 address.
    ///
    /// # Errors
    /// When it has none.
    pub fn v6(&self) -> Result<Ipv6Addr> {
        let found = self.addresses().into_iter().find_map(|a| if let IpAddr::V6(v6) = a { Some(v6) } else { None });
        found.with_context(|| format!("no IPv6 address in {}", self.result))
    }

    /// Both addresses, IPv4 first.
    ///
    /// # Errors
    /// When one family is missing.
    pub fn both(&self) -> Result<[IpAddr; 2]> {
        Ok([self.v4()?.into(), self.v6()?.into()])
    }

    /// The gateway of its IPv4 address, which is the node's own address.
    ///
    /// # Errors
    /// When the result names none.
    pub fn gateways(&self) -> Result<[IpAddr; 2]> {
        let ips = self.result.get("ips").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let gateways: Vec<IpAddr> = ips.iter().filter_map(|ip| ip.get("gateway")?.as_str()?.parse().ok()).collect();
        let v4 = gateways.iter().find(|g| g.is_ipv4()).copied();
        let v6 = gateways.iter().find(|g| g.is_ipv6()).copied();
        Ok([
            v4.with_context(|| format!("no IPv4 gateway in {}", self.result))?,
            v6.with_context(|| format!("no IPv6 gateway in {}", self.result))?,
        ])
    }

    /// The name the agent's API knows it by.
    #[must_use]
    pub fn id(&self) -> String {
        format!("cni-attachment-id:{}:{}", self.container, self.ifname)
    }
}
