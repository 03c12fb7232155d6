//! What forward chains of others do with packets of containers: rulesets as `nft` and `iptables-nft` write them.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use support::{in_namespaces, run};
use wharf_datapath::nft::Nft;

/// Chains in the way of the pools 10.77.0.0/16 and fd77::/64 with the uplink eth0: `name: pools`, or `name: ?`.
fn seen(nft: &Nft, published: bool) -> String {
    let pools = ["10.77.0.0/16", "fd77::/64"].map(|pool| pool.parse().unwrap());
    let chains = nft.refusing_forward_chains(&pools, published, Some("eth0")).expect("chains");
    let told = chains.iter().map(|chain| {
        let pools: Vec<_> = chain.refused.iter().map(ToString::to_string).collect();
        let unclear = if chain.unclear { "?" } else { "" };
        format!("{}: {}{unclear}", chain.name, pools.join(" "))
    });
    told.collect::<Vec<_>>().join("; ")
}

/// Judges a chain of this family and policy that has these rules, beside what else the table has.
fn judge(nft: &Nft, family: &str, policy: &str, others: &str, rules: &str, published: bool) -> String {
    let base = format!("type filter hook forward priority 0; policy {policy};");
    let table = format!("flush ruleset\ntable {family} t {{\n{others}\nchain c {{ {base}\n{rules}\n}}\n}}\n");
    let file = tempfile::NamedTempFile::new().expect("file");
    std::fs::write(file.path(), table).expect("ruleset");
    run("nft", &["-f", file.path().to_str().unwrap()]);
    seen(nft, published)
}

const FOUR: &str = "ip t c: 10.77.0.0/16";
const NONE: &str = "";
const UNCLEAR: &str = "ip t c: ?";
/// One way is refused, and the other depends.
const BOTH: &str = "ip t c: 10.77.0.0/16?";

#[test]
fn rules_of_nft() {
    in_namespaces(|_| {
        let nft = Nft::default();
        let answers = "ct state established,related accept\n";
        for (rules, expected) in [
            // Policy drop.
            ("", FOUR),
            ("ip saddr 10.77.0.0/16 accept; ip daddr 10.77.0.0/16 accept", NONE),
            ("ip saddr 10.0.0.0/8 accept; ip daddr { 10.76.0.0-10.78.0.0 } accept", NONE),
            // The other end may be anybody, another container too.
            ("ip saddr 10.77.0.0/16 accept", UNCLEAR),
            ("ip saddr 10.78.0.0/16 accept", BOTH),
            ("ip saddr 10.77.0.0/24 accept", UNCLEAR),
            (r#"iifname "wh*" accept; oifname "wh*" accept"#, NONE),
            (r#"iifname { "docker0", "wh*" } accept; oifname vmap { "wh*" : accept }"#, NONE),
            (r#"iifname "docker0" accept; oifname { "docker0", "br0" } accept"#, FOUR),
            (r#"oifname "eth0" counter accept"#, FOUR),
            ("meta l4proto icmp accept; udp dport 53 accept", FOUR),
            ("tcp dport 443 accept", UNCLEAR),
            ("meta mark 1 accept", UNCLEAR),
            ("ip protocol tcp accept", NONE),
            ("ip saddr @friends accept; ip daddr @friends accept", NONE),
            ("ip saddr @strangers accept; ip daddr @strangers accept", UNCLEAR),
            ("jump sub", NONE),
            ("goto sub", NONE),
            ("jump back; accept", NONE),
            ("jump deep", UNCLEAR),
            ("ip daddr 192.0.2.0/24 jump sub", BOTH),
            ("ct state vmap { established : accept, new : jump sub }", NONE),
            ("ct state vmap { established : accept, new : drop }", FOUR),
        ] {
            let others = "set friends { type ipv4_addr; flags interval; elements = { 10.64.0.0/10 } }
                          set strangers { type ipv4_addr; flags interval; elements = { 10.78.0.0/16 } }
                          chain sub { ip saddr 10.77.0.0/16 accept; ip daddr 10.77.0.0/16 accept; }
                          chain back { ip saddr 10.0.0.0/8 return; ip daddr 10.0.0.0/8 return; drop; }
                          chain deep { meta mark 7 return; accept; }";
            let told = judge(&nft, "ip", "drop", others, rules, false);
            assert_eq!(told, expected, "policy drop, {rules}");
        }
        for (rules, expected) in [
            ("", NONE),
            ("counter drop; accept", FOUR),
            ("log prefix \"no\" reject", FOUR),
            ("reject with icmp type admin-prohibited; ip saddr 10.0.0.0/8 accept", FOUR),
            ("iifname != \"docker0\" drop", FOUR),
            ("iifname \"docker0\" drop; ip daddr 192.0.2.0/24 drop", NONE),
            ("ip daddr != 192.0.2.0/24 drop", BOTH),
            ("ip saddr & 255.255.0.0 == 10.77.0.0 drop", FOUR),
            ("ip daddr . tcp dport { 192.0.2.1 . 80 } drop", NONE),
            ("ip daddr . tcp dport { 192.0.2.0/24 . 80-90 } drop", UNCLEAR),
            ("ct state invalid drop", NONE),
            ("meta mark 1 drop", UNCLEAR),
        ] {
            let told = judge(&nft, "ip", "accept", "", rules, false);
            assert_eq!(told, expected, "policy accept, {rules}");
        }
        // Connections to published ports are a matter of their own.
        let out = format!("{answers}iifname \"wh*\" accept\n");
        assert_eq!(judge(&nft, "ip", "drop", "", &out, false), NONE);
        assert_eq!(judge(&nft, "ip", "drop", "", &out, true), FOUR);
        assert_eq!(judge(&nft, "ip", "drop", "", &format!("{out}ct status dnat accept"), true), NONE);
        assert_eq!(judge(&nft, "inet", "drop", "", "", true), "inet t c: 10.77.0.0/16 fd77::/64");
        assert_eq!(judge(&nft, "inet", "drop", "", "ip version 4 accept", false), "inet t c: fd77::/64");
        assert_eq!(
            judge(&nft, "ip6", "drop", "", "ip6 saddr fd77::/64 accept; ip6 daddr fd77::/32 accept", true),
            NONE
        );
        assert_eq!(judge(&nft, "ip", "drop", "flags dormant", "", true), NONE);
        // A large set is not read to its end, and the socket is of use after it.
        let many: Vec<_> = (0..16_000).map(|n| format!("192.168.{}.{}", n / 256, n % 256)).collect();
        let set = |elements: &[String]| format!("set s {{ type ipv4_addr; elements = {{ {} }} }}", elements.join(", "));
        for (elements, expected) in [(&many[..], UNCLEAR), (&many[..100], NONE)] {
            let told = judge(&nft, "ip", "accept", &set(elements), "ip saddr != @s accept; ip saddr @s drop", false);
            assert_eq!(told, expected, "{} elements", elements.len());
        }
        // Jumps multiply, and end.
        let doubled = |n: usize| format!("chain c{n} {{ jump c{0}; jump c{0}; }}\n", n + 1);
        let chains: String = (0..14).rev().map(doubled).collect();
        let told = judge(&nft, "ip", "drop", &format!("chain c14 {{ counter; }}\n{chains}"), "jump c0", false);
        assert_eq!(told, UNCLEAR);
    });
}

#[test]
fn rules_of_iptables() {
    in_namespaces(|_| {
        let nft = Nft::default();
        let name = "ip filter FORWARD: 10.77.0.0/16";
        let answers = "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n";
        let docker = "-A FORWARD -j DOCKER-USER
             -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
             -A FORWARD -i docker0 ! -o docker0 -j ACCEPT\n";
        let accept = "-A DOCKER-USER -s 10.77.0.0/16 -j ACCEPT\n-A DOCKER-USER -d 10.77.0.0/16 -j ACCEPT\n";
        for (policy, rules, published, expected) in [
            ("DROP", docker.to_owned(), false, name),
            ("DROP", format!("{docker}{accept}"), true, ""),
            ("DROP", format!("{answers}-A FORWARD -i wh+ -j ACCEPT"), false, ""),
            ("DROP", format!("{answers}-A FORWARD -i wh+ -j ACCEPT"), true, name),
            ("DROP", format!("{answers}-A FORWARD -p udp -m udp --dport 53 -j ACCEPT"), false, name),
            ("ACCEPT", "-A FORWARD -m comment --comment no -j REJECT".to_owned(), false, name),
            ("ACCEPT", "-A FORWARD -j DOCKER-USER\n-A DOCKER-USER -j REJECT".to_owned(), false, name),
            ("ACCEPT", "-A FORWARD -m conntrack --ctstate INVALID -j DROP".to_owned(), false, ""),
            ("ACCEPT", "-A FORWARD -m conntrack ! --ctstate INVALID -j DROP".to_owned(), false, name),
            ("ACCEPT", "-A FORWARD -m addrtype --dst-type MULTICAST -j DROP".to_owned(), false, "ip filter FORWARD: ?"),
        ] {
            let file = tempfile::NamedTempFile::new().expect("file");
            let rules: String = rules.lines().map(|line| format!("{}\n", line.trim())).collect();
            let text = format!("*filter\n:FORWARD {policy} [0:0]\n:DOCKER-USER - [0:0]\n{rules}COMMIT\n");
            std::fs::write(file.path(), &text).expect("ruleset");
            run("iptables-nft-restore", &[file.path().to_str().unwrap()]);
            assert_eq!(seen(&nft, published), expected, "{text}");
        }
    });
}
