//! Addresses of names for policy.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use wharf_dns::cache::{Cache, Changed};
use wharf_policy::compile::Event;

pub(crate) fn events(names: &Cache, changed: &Changed, services: &[IpNet]) -> Vec<Event> {
    let event = |name: &Arc<str>| {
        let addresses = names.addresses_of(name).map(|(address, _)| address.to_canonical());
        let addresses: BTreeSet<IpAddr> = addresses.filter(|address| is_of_the_world(*address, services)).collect();
        Event::Name(Arc::clone(name), addresses)
    };
    changed.iter().map(event).collect()
}

pub(crate) fn all(names: &Cache, services: &[IpNet]) -> Vec<Event> {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
