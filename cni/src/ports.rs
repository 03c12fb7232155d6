//! `runtimeConfig.portMappings`.

use std::{
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
};

use wharf_api::{Protocol, PublishedPort};

use crate::{fault::Fault, json::Object, rules::cut};

const KEY: &str = "portMappings";

/// Rejects two entries for one port of one address, even if identical.
pub(crate) fn parse(runtime: &Object<'_>) -> Result<Vec<PublishedPort>, Fault> {
    let mut ports: Vec<(String, PublishedPort)> = Vec::new();
    for (path, item) in runtime.list(KEY)? {
        let port = entry(&Object::at(path.clone(), item)?.in_any_case())?;
        if let Some((other, there)) = ports.iter().find(|(_, there)| there.overlaps(&port)) {
            let (mine, theirs) = (port.to_string(), there.to_string());
            return Err(Fault::config(format!(
                "netconf: key {path:?} publishes {mine}, and {other:?} publishes {theirs} already; publish one of them on \
                 another port or another address"
            )));
        }
        ports.push((path, port));
    }
    Ok(ports.into_iter().map(|(_, port)| port).collect())
}

fn entry(entry: &Object<'_>) -> Result<PublishedPort, Fault> {
    Ok(PublishedPort {
        protocol: protocol(entry)?,
        host_ip: host_ip(entry)?,
        host_port: port(entry, "hostPort")?,
        container_port: port(entry, "containerPort")?,
    })
}

fn refused(entry: &Object<'_>, key: &str, rule: &str) -> Fault {
    let found = entry.value(key).map_or_else(|| "nothing".to_owned(), |value| cut(&value.to_string()));
    Fault::config(format!("netconf: key {:?} must be {rule}, not {found}", entry.path_of(key)))
}

fn port(entry: &Object<'_>, key: &str) -> Result<NonZeroU16, Fault> {
    let number = entry.value(key).and_then(serde_json::Value::as_u64);
    let port = number.and_then(|n| u16::try_from(n).ok()).and_then(NonZeroU16::new);
    port.ok_or_else(|| refused(entry, key, "a port from 1 to 65535"))
}

fn protocol(entry: &Object<'_>) -> Result<Protocol, Fault> {
    let name = entry.string("protocol")?.unwrap_or_default();
    match name.to_ascii_lowercase().as_str() {
        "" | "tcp" => Ok(Protocol::Tcp),
        "udp" => Ok(Protocol::Udp),
        "sctp" => Ok(Protocol::Sctp),
        _ => Err(refused(entry, "protocol", "tcp, udp or sctp")),
    }
}

fn host_ip(entry: &Object<'_>) -> Result<Option<IpAddr>, Fault> {
    let rule = "an IP address of the node, without a prefix length";
    let Some(text) = entry.string("hostIP")?.filter(|text| !text.is_empty()) else { return Ok(None) };
    let ip: IpAddr = text.parse().map_err(|_| refused(entry, "hostIP", rule))?;
    if ip.is_multicast() || ip == Ipv4Addr::BROADCAST {
        return Err(refused(entry, "hostIP", rule));
    }
    Ok(Some(ip))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fault::Code;

    fn read(list: Value) -> Result<Vec<PublishedPort>, Fault> {
        let map = json!({ KEY: list }).as_object().unwrap().clone();
        parse(&Object::at("runtimeConfig".to_owned(), &Value::Object(map)).unwrap())
    }

    #[test]
    fn what_runtimes_send_is_read() {
        let ports = read(json!([
            {"hostPort": 8080, "containerPort": 80},
            {"hostPort": 8080, "containerPort": 80, "protocol": "UDP", "hostIP": ""},
            {"hostPort": 1, "containerPort": 65535, "protocol": "Sctp", "hostIP": "127.0.0.1"},
            {"hostPort": 1, "containerPort": 65535, "protocol": "sctp", "hostIP": "::1"},
            {"hostPort": 9, "containerPort": 9, "protocol": null, "hostIP": null, "extra": []},
            // containerd's spelling.
            {"HostPort": 10, "ContainerPort": 11, "Protocol": "udp", "HostIP": "127.0.0.1"},
        ]))
        .unwrap();
        let sides: Vec<_> = ports.iter().map(ToString::to_string).collect();
        assert_eq!(sides, ["8080/tcp", "8080/udp", "127.0.0.1:1/sctp", "[::1]:1/sctp", "9/tcp", "127.0.0.1:10/udp"]);
        assert_eq!(ports[2].container_port.get(), 65_535);
        assert_eq!(read(Value::Null), Ok(Vec::new()));
        assert_eq!(read(json!([])), Ok(Vec::new()));
    }

    #[test]
    fn a_bad_entry_is_a_config_error_that_names_it() {
        let good = json!({"hostPort": 8080, "containerPort": 80});
        for (key, value) in [
            ("hostPort", json!(0)),
            ("hostPort", json!(65_536)),
            ("hostPort", json!(-1)),
            ("hostPort", json!(80.5)),
            ("hostPort", json!("80")),
            ("hostPort", Value::Null),
            ("containerPort", json!(0)),
            ("containerPort", json!(4_295_032_832_u64)),
            ("containerPort", Value::Null),
            ("protocol", json!("icmp")),
            ("protocol", json!(6)),
            ("hostIP", json!("node")),
            ("hostIP", json!("10.0.0.1/24")),
            ("hostIP", json!("224.0.0.1")),
            ("hostIP", json!("255.255.255.255")),
            ("hostIP", json!("ff02::1")),
            ("hostIP", json!(["10.0.0.1"])),
        ] {
            let mut bad = good.clone();
            bad[key] = value.clone();
            bad["hostPort"] = if key == "hostPort" { value.clone() } else { json!(81) };
            let fault = read(json!([good, bad])).expect_err(&format!("{key} = {value}"));
            assert_eq!(fault.code, Code::Config, "{key} = {value}");
            assert!(fault.msg.contains(&format!("runtimeConfig.portMappings[1].{key}")), "{}", fault.msg);
        }
        assert!(read(json!({"hostPort": 1})).is_err_and(|f| f.msg.contains("runtimeConfig.portMappings")));
        assert!(read(json!([7])).is_err_and(|f| f.msg.contains("runtimeConfig.portMappings[0]")));
    }

    #[test]
    fn two_entries_for_one_port_of_one_address_are_refused() {
        let ask = |ip: &str, to: u16| json!({"hostPort": 8080, "containerPort": to, "hostIP": ip});
        for (a, b, clash) in [
            (ask("", 80), ask("", 80), true),
            (ask("", 80), ask("10.0.0.1", 81), true),
            (ask("0.0.0.0", 80), ask("10.0.0.1", 80), true),
            (ask("0.0.0.0", 80), ask("::", 80), false),
            (ask("10.0.0.1", 80), ask("10.0.0.2", 80), false),
        ] {
            let read = read(json!([a, b]));
            assert_eq!(read.is_err(), clash, "{a} {b}");
            if let Err(fault) = read {
                assert_eq!(fault.code, Code::Config);
                assert!(
                    fault.msg.contains("portMappings[1]") && fault.msg.contains("portMappings[0]"),
                    "{}",
                    fault.msg
                );
            }
        }
    }
}
