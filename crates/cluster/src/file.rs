//! The file of `--cluster-file`: a TOML table `[[node]]` for each node.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;
use toml::Spanned;

use crate::nodes::{NodeRow, Nodes, NodesError, Part};

/// Bytes of a file.
pub const MAX_FILE: usize = 1 << 20;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    node: Vec<Row>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Row {
    name: Spanned<String>,
    addresses: Vec<Spanned<String>>,
    #[serde(default)]
    pod_cidrs: Vec<Spanned<String>>,
    #[serde(default)]
    health_addresses: Vec<Spanned<String>>,
    #[serde(default)]
    router_addresses: Vec<Spanned<String>>,
}

/// Why a file is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct FileError {
    /// From 1.
    pub line: usize,
    pub why: String,
}

/// Reads a file.
///
/// # Errors
/// The first problem.
pub fn parse(text: &str) -> Result<Nodes, FileError> {
    let at = |offset: usize, why: String| {
        let before = text.as_bytes().iter().take(offset);
        FileError { line: 1 + before.filter(|byte| **byte == b'\n').count(), why }
    };
    if text.len() > MAX_FILE {
        return Err(at(0, format!("the file has more than {} KiB", MAX_FILE >> 10)));
    }
    let file: File =
        toml::from_str(text).map_err(|e| at(e.span().map_or(0, |span| span.start), e.message().replace('\n', " ")))?;
    let address = |text: &Spanned<String>| {
        let wrong = |_| at(text.span().start, format!("{:?} is no IP address", text.get_ref()));
        text.get_ref().parse::<IpAddr>().map_err(wrong)
    };
    let cidr = |text: &Spanned<String>| {
        let wrong = |_| at(text.span().start, format!("{:?} is no CIDR (ADDRESS/PREFIX)", text.get_ref()));
        text.get_ref().parse::<IpNet>().map_err(wrong)
    };
    let mut rows = Vec::with_capacity(file.node.len());
    for row in &file.node {
        rows.push(NodeRow {
            name: row.name.get_ref().clone(),
            addresses: row.addresses.iter().map(address).collect::<Result<_, _>>()?,
            pod_cidrs: row.pod_cidrs.iter().map(cidr).collect::<Result<_, _>>()?,
            health_addresses: row.health_addresses.iter().map(address).collect::<Result<_, _>>()?,
            router_addresses: row.router_addresses.iter().map(address).collect::<Result<_, _>>()?,
        });
    }
    Nodes::new(rows).map_err(|refused| {
        let NodesError::Row { row, part, why } = &refused else { return at(0, refused.to_string()) };
        let of_row = file.node.get(*row);
        let place = of_row.and_then(|row| match part {
            Part::Name => Some(row.name.span()),
            Part::Address(i) => row.addresses.get(*i).map(Spanned::span),
            Part::Cidr(i) => row.pod_cidrs.get(*i).map(Spanned::span),
            Part::Health(i) => row.health_addresses.get(*i).map(Spanned::span),
            Part::Router(i) => row.router_addresses.get(*i).map(Spanned::span),
        });
        at(place.map_or(0, |span| span.start), why.clone())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = r#"
[[node]]
name = "a"
addresses = ["192.0.2.1", "2001:db8::1"]
pod-cidrs = ["10.87.0.0/24", "fd57:0:0:1::/64"]

[[node]]
name = "b"
addresses = ["192.0.2.2"]
"#;

    #[test]
    fn a_file_lists_nodes() {
        let nodes = parse(TWO).expect("nodes");
        let told = nodes.iter().map(|node| (node.name.as_str(), node.addresses.len(), node.pod_cidrs.len()));
        let told: Vec<_> = told.collect();
        assert_eq!(told, [("a", 2, 2), ("b", 1, 0)]);
        assert_eq!(parse(""), Ok(Nodes::default()));
        let health = "health-addresses = [\"10.87.0.2\", \"fd57:0:0:1::2\"]";
        let inner = format!("{health}\nrouter-addresses = [\"10.87.0.1\"]\npod-cidrs");
        let nodes = parse(&TWO.replace("pod-cidrs", &inner)).expect("nodes");
        let told: Vec<_> =
            nodes.iter().map(|node| (node.health_addresses.len(), node.router_addresses.len())).collect();
        assert_eq!(told, [(2, 1), (0, 0)]);
    }

    #[test]
    fn a_refusal_names_the_line() {
        for (from, to, line, why) in [
            ("\"192.0.2.2\"", "\"192.0.2\"", 9, "\"192.0.2\" is no IP address"),
            ("\"10.87.0.0/24\"", "\"10.87.0.0\"", 5, "\"10.87.0.0\" is no CIDR (ADDRESS/PREFIX)"),
            ("\"192.0.2.2\"", "\"192.0.2.1\"", 9, "192.0.2.1 is an address of node a already"),
            ("name = \"b\"", "name = \"a\"", 8, "two nodes have the name a"),
            ("pod-cidrs", "pod-cidr", 5, "unknown field"),
            ("name = \"b\"", "name = b", 8, ""),
            ("name = \"b\"\n", "", 7, "missing field"),
            (
                "addresses = [\"192.0.2.2\"]",
                "addresses = [\"192.0.2.2\"]\nhealth-addresses = [\"10.9.0.2\"]",
                10,
                "10.9.0.2 is in no pod CIDR of node b",
            ),
            (
                "pod-cidrs = [",
                "router-addresses = [\"10.87.0.1\",\n\"10.88.0.1\"]\npod-cidrs = [",
                6,
                "10.88.0.1 is in no pod CIDR of node a",
            ),
            ("pod-cidrs = [", "health-addresses = [\"10.87.0\"]\npod-cidrs = [", 5, "\"10.87.0\" is no IP address"),
        ] {
            let refused = parse(&TWO.replace(from, to)).expect_err(to);
            assert_eq!(refused.line, line, "{refused}");
            assert!(refused.why.contains(why), "{refused}");
            assert!(!refused.why.contains('\n'), "{refused}");
        }
        assert!(parse(&"#".repeat(MAX_FILE + 1)).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_refused_or_follows_the_rules(text in "(?s).{0,400}") {
            if let Ok(nodes) = parse(&text) {
                proptest::prop_assert!(Nodes::new(nodes.iter().cloned().collect()).is_ok());
            }
        }
    }
}
