//! CHECK without an agent: programs and link outlive it.

use std::net::IpAddr;

use super::{Ip, PrevResult};
use crate::{
    fault::{Code, Fault, first_of},
    link::{
        LinkError,
        sides::{self, Attached, Inside, Outside, Owner},
    },
    netconf::NetConf,
    request::Target,
    rules::cut,
};

#[derive(Debug)]
pub(crate) enum Seen {
    Well,
    Fault(Fault),
    Failed(LinkError),
}

/// `has_host_side`: Wharf creates the network.
pub(crate) async fn look(
    subject: &str,
    conf: &NetConf,
    target: &Target,
    netns: &str,
    prev: &PrevResult,
    has_host_side: bool,
) -> Seen {
    let found = match both_sides(conf, target, netns, has_host_side).await {
        Ok((inside, outside)) => differences(prev, target, &inside, has_host_side.then_some(outside.as_ref())),
        Err(error @ LinkError::Netns(..)) => Differences { kernel: vec![error.to_string()], ..Differences::default() },
        Err(error) => return Seen::Failed(error),
    };
    let fault = |code, found: &[String]| Seen::Fault(Fault::new(code, format!("{subject}: {}", first_of(found))));
    match found {
        Differences { attachment, .. } if !attachment.is_empty() => fault(Code::OtherAttachment, &attachment),
        Differences { kernel, .. } if !kernel.is_empty() => fault(Code::NotAsItShouldBe, &kernel),
        _ => Seen::Well,
    }
}

async fn both_sides(
    conf: &NetConf,
    target: &Target,
    netns: &str,
    has_host_side: bool,
) -> Result<(Option<Inside>, Option<Outside>), LinkError> {
    let inside = sides::inside(netns, &target.ifname)?;
    let outside = match inside.as_ref().and_then(|inside| inside.peer) {
        Some(peer) if has_host_side => sides::outside(peer, conf, target).await?,
        _ => None,
    };
    Ok((inside, outside))
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Differences {
    attachment: Vec<String>,
    kernel: Vec<String>,
}

fn differences(
    prev: &PrevResult,
    target: &Target,
    inside: &Option<Inside>,
    outside: Option<Option<&Outside>>,
) -> Differences {
    let (ifname, mut found) = (&target.ifname, Differences::default());
    let Some((index, told)) = prev.container_side(ifname) else {
        found.attachment.push(format!("prevResult has no interface {ifname} with a sandbox"));
        return found;
    };
    let Some(inside) = inside else {
        found.kernel.push(format!("the container has no interface {ifname}"));
        return found;
    };
    if !told.mac.is_empty() && !told.mac.eq_ignore_ascii_case(&inside.mac) {
        found.kernel.push(format!("{ifname}: expected MAC {}, found {}", cut(&told.mac), inside.mac));
    }
    if !inside.up {
        found.kernel.push(format!("{ifname}: expected up, is down"));
    }
    let ips: Vec<&Ip> = prev.ips.iter().filter(|ip| ip.interface == Some(index)).collect();
    for ip in ips.iter().filter(|ip| !inside.addresses.contains(&ip.address)) {
        found.kernel.push(format!("{ifname}: address {} is missing", ip.address));
    }
    // Routes through other gateways belong to other interfaces.
    let gateways: Vec<IpAddr> = ips.iter().filter_map(|ip| ip.gateway).collect();
    for (to, gateway) in prev.routes.iter().filter(|(_, gateway)| gateways.contains(gateway)) {
        if !inside.routes.contains(&(*to, Some(*gateway))) {
            found.kernel.push(format!("{ifname}: route to {to} by {gateway} is missing"));
        }
    }
    match outside {
        None => {}
        Some(None) => found.kernel.push(format!("the host side of {ifname} is not in the node's network namespace")),
        Some(Some(outside)) => compare_outside(prev, outside, &mut found),
    }
    found
}

fn compare_outside(prev: &PrevResult, outside: &Outside, found: &mut Differences) {
    let name = &outside.name;
    let is_told = || prev.interfaces.iter().any(|i| i.name == *name && i.sandbox.is_empty());
    match outside.owner {
        Owner::Target if !is_told() => {
            found.attachment.push(format!("prevResult does not have the link's host side {name}"));
        }
        Owner::Other => found.attachment.push(format!("the host side {name} is another attachment's")),
        Owner::Target | Owner::Plugin => {}
    }
    if !outside.up {
        found.kernel.push(format!("{name}: expected up, is down"));
    }
    for (hook, attached) in ["ingress", "egress"].into_iter().zip(outside.hooks) {
        match attached {
            Attached::Program | Attached::Unknown => {}
            Attached::Sink => found.kernel.push(format!("{name}: the program on {hook} drops everything")),
            Attached::Nothing => found.kernel.push(format!("{name}: no program of Wharf's is on {hook}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::json::Object;

    fn prev() -> Value {
        json!({
            "interfaces": [
                {"name": "wh000700000009", "mac": "02:00:00:00:00:0b"},
                {"name": "eth0", "mac": "02:00:00:00:00:0A", "sandbox": "/run/netns/c1"},
            ],
            "ips": [
                {"address": "10.0.0.7/32", "gateway": "10.0.0.1", "interface": 1},
                {"address": "fd00::7/128", "gateway": "fd00::1", "interface": 1},
            ],
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}, {"dst": "::/0", "gw": "fd00::1"}],
        })
    }

    fn inside() -> Inside {
        let route = |to: &str, by: &str| (to.parse().unwrap(), Some(by.parse().unwrap()));
        Inside {
            up: true,
            mac: "02:00:00:00:00:0a".into(),
            peer: Some(9),
            addresses: vec!["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()],
            routes: vec![route("0.0.0.0/0", "10.0.0.1"), route("::/0", "fd00::1")],
        }
    }

    fn outside() -> Outside {
        let (name, owner) = ("wh000700000009".into(), Owner::Target);
        Outside { name, up: true, owner, hooks: [Attached::Program; 2] }
    }

    fn compare(prev: &Value, inside: Option<Inside>, outside: Option<Option<&Outside>>) -> Differences {
        let document = json!({ "prevResult": prev });
        let prev = PrevResult::parse(&Object::root(document.as_object().unwrap())).unwrap().unwrap();
        let target = Target { container_id: "c1".into(), ifname: "eth0".into() };
        differences(&prev, &target, &inside, outside)
    }

    #[test]
    fn a_network_that_is_as_added_passes() {
        let well = Differences::default();
        assert_eq!(compare(&prev(), Some(inside()), Some(Some(&outside()))), well);
        let unknown = Outside { hooks: [Attached::Unknown; 2], ..outside() };
        assert_eq!(compare(&prev(), Some(inside()), Some(Some(&unknown))), well);
        let other = Outside { name: "veth1".into(), owner: Owner::Plugin, ..outside() };
        assert_eq!(compare(&prev(), Some(inside()), Some(Some(&other))), well);
        assert_eq!(compare(&prev(), Some(inside()), None), well);
        let mut more = prev();
        more["ips"].as_array_mut().unwrap().push(json!({"address": "192.0.2.2/24"}));
        more["routes"].as_array_mut().unwrap().push(json!({"dst": "192.0.2.0/24", "gw": "192.0.2.1"}));
        more["routes"].as_array_mut().unwrap().push(json!({"dst": "198.51.100.0/24"}));
        assert_eq!(compare(&more, Some(inside()), Some(Some(&outside()))), well);
    }

    #[test]
    fn whatever_is_missing_is_named() {
        type Breaks = fn(&mut Inside, &mut Outside);
        let broken: [(Breaks, &str); 9] = [
            (|i, _| i.up = false, "eth0: expected up"),
            (|i, _| i.mac = "02:00:00:00:00:0c".into(), "eth0: expected MAC"),
            (|i, _| _ = i.addresses.remove(0), "address 10.0.0.7 is missing"),
            (|i, _| _ = i.addresses.remove(1), "address fd00::7 is missing"),
            (|i, _| _ = i.routes.remove(0), "route to 0.0.0.0/0 by 10.0.0.1 is missing"),
            (|_, o| o.up = false, "wh000700000009: expected up"),
            (|_, o| o.hooks = [Attached::Nothing, Attached::Program], "no program of Wharf's is on ingress"),
            (|_, o| o.hooks = [Attached::Nothing; 2], "no program of Wharf's is on egress"),
            (|_, o| o.hooks = [Attached::Sink; 2], "on ingress drops everything"),
        ];
        for (breaks, words) in broken {
            let (mut inside, mut outside) = (inside(), outside());
            breaks(&mut inside, &mut outside);
            let found = compare(&prev(), Some(inside), Some(Some(&outside)));
            assert!(found.kernel.iter().any(|text| text.contains(words)), "{words}: {found:?}");
            assert_eq!(found.attachment, [""; 0]);
        }
        let found = compare(&prev(), Some(inside()), Some(None));
        assert!(found.kernel[0].contains("host side of eth0"), "{found:?}");
        assert!(compare(&prev(), None, Some(None)).kernel[0].contains("no interface eth0"));
    }

    #[test]
    fn a_link_of_another_attachment_is_not_the_one_that_was_added() {
        let later = Outside { name: "wh00070000000a".into(), ..outside() };
        let other = Outside { owner: Owner::Other, ..outside() };
        for outside in [later, other] {
            assert_eq!(compare(&prev(), Some(inside()), Some(Some(&outside))).attachment.len(), 1, "{outside:?}");
        }
        assert_eq!(compare(&json!({}), Some(inside()), Some(Some(&outside()))).attachment.len(), 1);
    }
}
