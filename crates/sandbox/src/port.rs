//! Published ports on a command line.

use std::{net::IpAddr, num::NonZeroU16, str::FromStr};

use serde_json::{Value, json};

/// A published port: `[HOSTIP:]HOST:CONTAINER[/PROTO]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    host_ip: Option<IpAddr>,
    host: NonZeroU16,
    container: NonZeroU16,
    protocol: &'static str,
}

impl Port {
    /// As capability `portMappings`.
    pub(crate) fn mapping(&self) -> Value {
        let mut mapping = json!({
            "hostPort": self.host, "containerPort": self.container, "protocol": self.protocol
        });
        if let (Some(object), Some(ip)) = (mapping.as_object_mut(), self.host_ip) {
            object.insert("hostIP".to_owned(), ip.to_string().into());
        }
        mapping
    }
}

impl FromStr for Port {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || format!("{text:?} is not [HOSTIP:]HOST:CONTAINER[/tcp|udp|sctp] with ports from 1 to 65535");
        let (ports, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
        let protocol = ["tcp", "udp", "sctp"].into_iter().find(|known| *known == protocol).ok_or_else(form)?;
        let mut parts = ports.rsplitn(3, ':');
        // No sign or leading zero, which could mean octal.
        let mut port =
            || parts.next().filter(|port| port.starts_with(|c| matches!(c, '1'..='9')))?.parse::<NonZeroU16>().ok();
        let (container, host) = (port().ok_or_else(form)?, port().ok_or_else(form)?);
        let host_ip = match parts.next() {
            Some(ip) => {
                let bare = ip.strip_prefix('[').and_then(|ip| ip.strip_suffix(']')).unwrap_or(ip);
                Some(bare.parse::<IpAddr>().map_err(|_| form())?)
            }
            None => None,
        };
        Ok(Self { host_ip, host, container, protocol })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_command_lines() {
        let mapping = |text: &str| text.parse::<Port>().map(|port| port.mapping());
        let of = |host: u16, container: u16, protocol: &str| json!({"hostPort": host, "containerPort": container, "protocol": protocol});
        assert_eq!(mapping("8080:80"), Ok(of(8080, 80, "tcp")));
        assert_eq!(mapping("53:53/udp"), Ok(of(53, 53, "udp")));
        let v6 = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "::1"});
        assert_eq!(mapping("[::1]:8080:80/tcp"), Ok(v6));
        assert_eq!(mapping("127.0.0.1:1:2").map(|m| m["hostIP"].clone()), Ok(json!("127.0.0.1")));
        for bad in [
            "",
            "80",
            "0:80",
            "80:0",
            "80:65536",
            "80:80/icmp",
            "a:80",
            "here:80:80",
            "80:80/",
            "+80:80",
            "80:+80",
            "080:80",
        ] {
            assert!(mapping(bad).is_err(), "{bad:?}");
        }
    }
}
