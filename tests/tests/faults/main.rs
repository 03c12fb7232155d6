//! Ten prepared faults. An operator who knows nothing finds the cause of each with `wharf status`, `wharf explain` or
//! `wharf audit`: the first command points the way, another names the object, its owner, both sides and the remedy, and
//! after the remedy all is well. docs/operations.md walks through the same ten with the same words and the same
//! commands ([`phrases`]).

mod addresses;
mod deletes;
mod health;
mod kernel;
mod phrases;
mod store;
mod support;

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};

/// Each fault has a section in docs/operations.md that has every phrase, and no command that its scenario leaves out.
#[test]
fn the_page_quotes_what_the_commands_say() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations.md");
    let page = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let sections: Vec<&str> = page.split("\n## ").collect();
    let mut missing = Vec::new();
    for fault in phrases::ALL {
        let section = sections.iter().find(|s| s.lines().next().is_some_and(|l| l.ends_with(fault.title)));
        let section = section.with_context(|| format!("no section {:?}", fault.title))?;
        let text = support::flat(section);
        let said = [fault.status, fault.explain, fault.audit, fault.other, fault.over].concat();
        missing.extend(said.iter().filter(|p| !text.contains(*p)).map(|p| format!("{}: {p:?}", fault.title)));
        // A command that a scenario runs is in the remedy, and the other way round.
        let commands = support::commands_of(section);
        let known = [fault.remedy, fault.beside].concat();
        missing.extend(
            known
                .iter()
                .filter(|c| !commands.iter().any(|there| there == *c))
                .map(|c| format!("{}: `{c}`", fault.title)),
        );
        let untried: Vec<_> = commands.iter().filter(|c| !known.contains(&c.as_str())).collect();
        ensure!(untried.is_empty(), "{}: no scenario runs {untried:?}", fault.title);
    }
    let whole = support::flat(&page);
    missing.extend(phrases::OVER.iter().filter(|p| !whole.contains(*p)).map(|p| format!("{p:?}")));
    ensure!(missing.is_empty(), "{} lacks\n{}", path.display(), missing.join("\n"));
    let wide: Vec<&str> = page.lines().filter(|l| l.starts_with("    ") && l.chars().count() > 104).collect();
    ensure!(wide.is_empty(), "samples wider than a screen: {wide:#?}");
    Ok(())
}
