//! Checks licences of dependencies against a list, which deny.toml repeats for `cargo deny`.

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// They require attribution at most.
const ALLOWED: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// No product contains libFuzzer. MPL-2.0 covers only its files (section 3.3).
const EXCEPTIONS: &[(&str, &str)] =
    &[("libfuzzer-sys", "NCSA"), ("imbl", "MPL-2.0+"), ("imbl-sized-chunks", "MPL-2.0+")];

pub(crate) fn check(metadata: &mut Command) -> Result<usize> {
    let output = metadata.output().context("check licences: run cargo metadata")?;
    if !output.status.success() {
        bail!("check licences: cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    check_metadata(&output.stdout)
}

fn check_metadata(metadata: &[u8]) -> Result<usize> {
    let metadata: Value = serde_json::from_slice(metadata).context("check licences: read cargo metadata's answer")?;
    let packages = metadata["packages"].as_array().context("check licences: cargo metadata lists no packages")?;
    let mut refused = Vec::new();
    let mut checked = 0;
    for package in packages {
        // The project's packages.
        if package["source"].is_null() {
            continue;
        }
        checked += 1;
        let name = format!("{} {}", text(&package["name"]), text(&package["version"]));
        match package["license"].as_str() {
            Some(expression) if allowed(text(&package["name"]), expression) => {}
            Some(expression) => refused.push(format!("{name}: {expression}")),
            None => refused.push(format!("{name}: no SPDX licence named")),
        }
    }
    if !refused.is_empty() {
        bail!("licences that are not on the list in xtask/src/licences.rs: {}", refused.join("; "));
    }
    Ok(checked)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

/// Rejects invalid SPDX expressions.
fn allowed(name: &str, expression: &str) -> bool {
    // Old crates write OR as a slash.
    let expression = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = expression.split_whitespace().peekable();
    let met = any(name, &mut words);
    met == Some(true) && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any(name: &str, words: &mut Words<'_>) -> Option<bool> {
    let mut met = all(name, words)?;
    while words.next_if_eq(&"OR").is_some() {
        met |= all(name, words)?;
    }
    Some(met)
}

fn all(name: &str, words: &mut Words<'_>) -> Option<bool> {
    let mut met = one(name, words)?;
    while words.next_if_eq(&"AND").is_some() {
        met &= one(name, words)?;
    }
    Some(met)
}

fn one(name: &str, words: &mut Words<'_>) -> Option<bool> {
    match words.next()? {
        "(" => {
            let met = any(name, words)?;
            (words.next() == Some(")")).then_some(met)
        }
        ")" | "OR" | "AND" | "WITH" => None,
        licence if words.next_if_eq(&"WITH").is_some() => {
            let licence = format!("{licence} WITH {}", words.next()?);
            Some(ALLOWED.contains(&licence.as_str()))
        }
        licence => Some(ALLOWED.contains(&licence) || EXCEPTIONS.contains(&(name, licence))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_met_or_not() {
        for good in [
            "MIT",
            "MIT OR Apache-2.0",
            "MIT/Apache-2.0",
            "GPL-3.0-only OR MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
        ] {
            assert!(allowed("any", good), "{good}");
        }
        for bad in [
            "GPL-3.0-only",
            "MIT AND GPL-3.0-only",
            "(MIT OR Apache-2.0) AND AGPL-3.0-only",
            "Apache-2.0 WITH Something-exception",
            "",
            "MIT OR",
            "(MIT",
            "MIT)",
            "MIT MIT",
            "WITH",
        ] {
            assert!(!allowed("any", bad), "{bad}");
        }
        assert!(allowed("libfuzzer-sys", "(MIT OR Apache-2.0) AND NCSA"));
        assert!(!allowed("any", "(MIT OR Apache-2.0) AND NCSA") && !allowed("libfuzzer-sys", "MIT AND GPL-3.0-only"));
    }

    #[test]
    fn a_refused_crate_is_named_and_ours_are_not_asked() {
        let metadata = br#"{"packages":[
            {"name":"ours","version":"1.0.0","source":null,"license":null},
            {"name":"good","version":"1.0.0","source":"registry","license":"MIT"},
            {"name":"bad","version":"2.0.0","source":"registry","license":"SSPL-1.0"},
            {"name":"silent","version":"3.0.0","source":"registry","license":null}]}"#;
        let message = check_metadata(metadata).map_err(|error| error.to_string()).err().unwrap_or_default();
        assert!(message.ends_with("bad 2.0.0: SSPL-1.0; silent 3.0.0: no SPDX licence named"), "{message}");
        assert_eq!(check_metadata(br#"{"packages":[]}"#).ok(), Some(0));
        assert!(check_metadata(b"not json").is_err());
    }

    #[test]
    fn cargo_deny_is_given_the_same_list() {
        let deny = include_str!("../../deny.toml");
        let list = deny.split_once("allow = [").and_then(|(_, rest)| rest.split_once(']')).map(|(list, _)| list);
        let list: Vec<_> = list.unwrap_or_default().split('"').skip(1).step_by(2).collect();
        assert_eq!(list, ALLOWED);
    }
}
