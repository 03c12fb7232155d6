//! How an operator names an endpoint, and how that becomes an id of the API.

use std::{net::IpAddr, str::FromStr};

use wharf_api::Endpoint;

use crate::error::CliError;

/// Prefixes that the API itself understands.
const PREFIXES: [&str; 5] = ["container-id:", "cni-attachment-id:", "pod-name:", "ipv4:", "ipv6:"];
const MAX_ENDPOINT_ID: u16 = 16_383;

/// What the operator wrote for an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// An id of the API: a number or a prefixed name.
    Api(String),
    /// A bare container id, or the start of one as tables show it.
    Container(String),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() <= 5 && !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
            return match text.parse::<u16>() {
                Ok(n @ 1..=MAX_ENDPOINT_ID) => Ok(Self::Api(n.to_string())),
                _ => Err(format!("endpoint numbers are 1 to {MAX_ENDPOINT_ID}")),
            };
        }
        match text.parse::<IpAddr>() {
            Ok(IpAddr::V4(ip)) => return Ok(Self::Api(format!("ipv4:{ip}"))),
            Ok(IpAddr::V6(ip)) => return Ok(Self::Api(format!("ipv6:{ip}"))),
            Err(_) => {}
        }
        if let Some(prefix) = PREFIXES.iter().find(|p| text.starts_with(**p)) {
            return if text.len() > prefix.len() {
                Ok(Self::Api(text.to_owned()))
            } else {
                Err(format!("nothing follows {prefix}"))
            };
        }
        if text.contains(':') {
            return Err(format!("not an IP address, and the prefixes are {}", PREFIXES.join(" ")));
        }
        let container = text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
        if container {
            Ok(Self::Container(text.to_owned()))
        } else {
            Err("not a number, an IP address, a container id or a prefixed name".to_owned())
        }
    }
}

/// Finds the one endpoint whose container id is `text`, or, when none is, starts with it.
///
/// # Errors
/// When none matches, or several do: a cut id must never choose for the operator.
pub(crate) fn pick<'a>(text: &str, endpoints: &'a [Endpoint]) -> Result<&'a Endpoint, CliError> {
    let exact: Vec<&Endpoint> = endpoints.iter().filter(|e| e.container_id == text).collect();
    let found =
        if exact.is_empty() { endpoints.iter().filter(|e| e.container_id.starts_with(text)).collect() } else { exact };
    match found.as_slice() {
        [one] => Ok(one),
        [] => Err(CliError::refused(format!("no endpoint belongs to a container {text}"))
            .hint("`wharf endpoint list` shows every endpoint")),
        several => {
            let shown: Vec<String> = several.iter().take(8).map(|e| format!("{} ({})", e.id, e.ifname)).collect();
            let more = if several.len() > shown.len() { ", ..." } else { "" };
            Err(CliError::refused(format!("{} endpoints match {text}: {}{more}", several.len(), shown.join(", ")))
                .hint("name one by its number"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample;

    #[test]
    fn every_way_to_name_an_endpoint() {
        let api = |s: &str| Ok(Target::Api(s.to_owned()));
        assert_eq!("7".parse(), api("7"));
        assert_eq!("007".parse(), api("7"));
        assert_eq!("16383".parse(), api("16383"));
        assert_eq!("10.88.0.7".parse(), api("ipv4:10.88.0.7"));
        assert_eq!("FD00:0::7".parse(), api("ipv6:fd00::7"));
        assert_eq!("pod-name:default/web".parse(), api("pod-name:default/web"));
        assert_eq!("container-id:7".parse(), api("container-id:7"));
        assert_eq!("3f9c51aa01b2".parse(), Ok(Target::Container("3f9c51aa01b2".to_owned())));
        assert_eq!("123456789012".parse(), Ok(Target::Container("123456789012".to_owned())));
        for bad in ["", "0", "16384", "99999", "foo:bar", "pod-name:", "-x", "a/b", "a b", "a\x1b[2J", "../x", "é"] {
            assert!(bad.parse::<Target>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_cut_id_chooses_only_when_it_is_enough() {
        let mut a = sample::endpoint();
        a.container_id = "abc1".to_owned();
        let mut b = a.clone();
        b.id = 9;
        b.container_id = "abc12".to_owned();
        let both = [a, b];
        assert_eq!(pick("abc1", &both).map(|e| e.id).ok(), Some(7), "an exact id wins over a longer one");
        assert_eq!(pick("abc12", &both).map(|e| e.id).ok(), Some(9));
        let err = pick("abc", &both).err().map(|e| e.message);
        assert_eq!(err.as_deref(), Some("2 endpoints match abc: 7 (eth0), 9 (eth0)"));
        assert!(pick("zzz", &both).is_err());
        assert!(pick("abc", &[]).is_err());
    }
}
