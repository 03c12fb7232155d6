use super::*;

#[test]
fn a_type_of_icmp_has_eight_bits_and_a_port_sixteen() {
    for (protocol, v6) in [(PolicyProtocol::Icmp, false), (PolicyProtocol::Icmpv6, true)] {
        assert_eq!(destination(protocol, 255), Some(Destination::Icmp { v6, kind: 255 }));
        assert_eq!([256, u16::MAX].map(|kind| destination(protocol, kind)), [None, None]);
    }
    let tcp = Destination::Ports { protocol: Protocol::Tcp, port: u16::MAX };
    assert_eq!(destination(PolicyProtocol::Tcp, u16::MAX), Some(tcp));
}
