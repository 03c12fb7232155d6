//! CIDRs of the settings.

use std::{net::IpAddr, str::FromStr};

use ipnet::IpNet;
use serde::Deserialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Cidr(pub(super) IpNet);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CidrError {
    #[error("{0} needs a prefix length, e.g. {0}/{prefix}", prefix = if .0.is_ipv4() { 16 } else { 64 })]
    NoPrefix(IpAddr),
    #[error("{0:?} needs a prefix length from 0 to {1} behind the /")]
    Prefix(String, u8),
    #[error("{0:?} is no CIDR; write ADDRESS/PREFIX, e.g. 10.87.0.0/16")]
    Form(String),
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let text = text.trim();
        if let Ok(net) = text.parse() {
            return Ok(Self(net));
        }
        if let Ok(address) = text.parse() {
            return Err(CidrError::NoPrefix(address));
        }
        let address = text.split_once('/').and_then(|(address, _)| address.parse::<IpAddr>().ok());
        Err(match address {
            Some(address) => CidrError::Prefix(text.to_owned(), if address.is_ipv4() { 32 } else { 128 }),
            None => CidrError::Form(text.to_owned()),
        })
    }
}

impl TryFrom<String> for Cidr {
    type Error = CidrError;

    fn try_from(text: String) -> Result<Self, CidrError> {
        text.parse()
    }
}

pub(super) fn nets(cidrs: Vec<Cidr>) -> Vec<IpNet> {
    cidrs.into_iter().map(|cidr| cidr.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_says_what_to_write() {
        let told = |text: &str| text.parse::<Cidr>().map(|cidr| cidr.0.to_string()).map_err(|e| e.to_string());
        assert_eq!(told(" 10.87.0.0/16").as_deref(), Ok("10.87.0.0/16"));
        for (text, words) in [
            ("10.87.0.0", "10.87.0.0 needs a prefix length, e.g. 10.87.0.0/16"),
            ("fd57::", "fd57:: needs a prefix length, e.g. fd57::/64"),
            ("10.87.0.0/33", "\"10.87.0.0/33\" needs a prefix length from 0 to 32 behind the /"),
            ("fd57::/", "\"fd57::/\" needs a prefix length from 0 to 128 behind the /"),
            ("", "\"\" is no CIDR; write ADDRESS/PREFIX, e.g. 10.87.0.0/16"),
            ("10.87/16", "\"10.87/16\" is no CIDR; write ADDRESS/PREFIX, e.g. 10.87.0.0/16"),
        ] {
            assert_eq!(told(text), Err(words.to_owned()), "{text:?}");
        }
        let of_file = toml::from_str::<std::collections::BTreeMap<String, Vec<Cidr>>>("pool = [\"10.87.0.0\"]");
        let told = of_file.expect_err("no CIDR").to_string();
        assert!(told.contains("needs a prefix length, e.g. 10.87.0.0/16"), "{told}");
    }
}
