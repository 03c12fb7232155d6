use std::sync::Arc;

use wharf_policy::{
    compile::{Event, Identity, Member},
    model::{Endpoint, Labels},
    read::read,
};

use super::*;
use crate::policy::limits::LIMITS;

const WEB: &str = "
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  endpointSelector: {}
  ingress:
  - toPorts:
    - ports: [{port: '80', protocol: TCP}]
      rules: {http: [{method: GET, path: '/public.*'}], failOpen: true}
";

#[test]
fn a_flow_through_the_proxy_is_told_with_what_passes() {
    let mut inner = Inner::new(Enforcement::Default);
    let id = EndpointId::try_from(7).expect("id");
    let namespace = Labels::from([("kubernetes.io/metadata.name".to_owned(), "shop".to_owned())]);
    let endpoint = Endpoint {
        addresses: ["10.0.0.7".parse().expect("address")].into(),
        namespace: Some(namespace.into()),
        ..Endpoint::default()
    };
    let member = Member { identity: Identity(1), endpoint: Arc::new(endpoint) };
    let policies = read("web.yaml", WEB).expect("policies");
    let mut engine = Engine::new(LIMITS).with_listeners_from(15_000);
    let events = policies.into_iter().map(Event::Policy).chain([Event::Endpoint(key(id), member)]);
    engine.apply(events).expect("rows");
    inner.engine = Some(engine);

    let peer = "10.0.0.9".parse().expect("address");
    let to = |port| Destination::Ports { protocol: Protocol::Tcp, port };
    let judged = judge(&inner, id, Direction::Ingress, peer, to(80));
    let way = judged.redirect.expect("a redirect");
    assert_eq!((way.port, way.passes.concat(), way.fails_open), (15_000, "GET /public...".to_owned(), true));
    assert_eq!((judged.verdict, judged.rule.is_some()), (PolicyVerdict::Accept, true));
    let denied = judge(&inner, id, Direction::Ingress, peer, to(81));
    assert_eq!((denied.verdict, denied.redirect), (PolicyVerdict::Deny, None));
    let rows = rules(&inner, &PolicyRows::default(), id, Direction::Ingress).rows;
    assert!(rows.iter().any(|row| row.verdict == "redirect 15000" && row.ports == ["TCP 80"]), "{rows:?}");
}

#[test]
fn a_type_of_icmp_has_eight_bits_and_a_port_sixteen() {
    for (protocol, v6) in [(PolicyProtocol::Icmp, false), (PolicyProtocol::Icmpv6, true)] {
        assert_eq!(destination(protocol, 255), Some(Destination::Icmp { v6, kind: 255 }));
        assert_eq!([256, u16::MAX].map(|kind| destination(protocol, kind)), [None, None]);
    }
    let tcp = Destination::Ports { protocol: Protocol::Tcp, port: u16::MAX };
    assert_eq!(destination(PolicyProtocol::Tcp, u16::MAX), Some(tcp));
}
