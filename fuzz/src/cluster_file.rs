//! The file of `--cluster-file`.

use std::fmt::Write as _;

use wharf_cluster::file::parse;

/// Reads the file.
pub fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match parse(text) {
        Ok(nodes) => {
            let mut again = String::new();
            for node in nodes.iter() {
                let texts = |items: &mut dyn Iterator<Item = String>| items.collect::<Vec<_>>();
                let addresses = texts(&mut node.addresses.iter().map(ToString::to_string));
                let cidrs = texts(&mut node.pod_cidrs.iter().map(ToString::to_string));
                let health = texts(&mut node.health_addresses.iter().map(ToString::to_string));
                let routers = texts(&mut node.router_addresses.iter().map(ToString::to_string));
                let name = &node.name;
                writeln!(again, "[[node]]\nname = {name:?}\naddresses = {addresses:?}\npod-cidrs = {cidrs:?}")
                    .expect("text");
                writeln!(again, "health-addresses = {health:?}\nrouter-addresses = {routers:?}").expect("text");
            }
            assert_eq!(parse(&again).expect("what was written"), nodes);
        }
        Err(why) => assert!(!why.why.is_empty() && (1..=text.lines().count().max(1) + 1).contains(&why.line), "{why}"),
    }
}
