//! The rooms of the agent: which of them imports which.

#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The modules below the crate's root that a file names: in paths and in `use crate::{...}`.
fn named(source: &str) -> BTreeSet<String> {
    let code: String =
        source.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let Some(list) = rest.strip_prefix('{') else {
            found.insert(word(rest));
            continue;
        };
        let (mut depth, mut first) = (0, true);
        for (i, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => first = true,
                c if first && !c.is_whitespace() => {
                    found.insert(word(&list[i..]));
                    first = false;
                }
                _ => {}
            }
        }
    }
    found
}

fn read(path: &Path, into: &mut BTreeSet<String>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("listed") {
            read(&entry.expect("entry").path(), into);
        }
    } else if path.file_name().is_some_and(|name| !name.to_string_lossy().contains("tests")) {
        into.extend(named(&fs::read_to_string(path).expect("read")));
    }
}

/// Each room with those that it imports. The composition root is no room: it knows all.
fn rooms() -> BTreeMap<String, BTreeSet<String>> {
    let mut rooms: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in fs::read_dir(source).expect("listed") {
        let path = entry.expect("entry").path();
        let room = path.file_stem().expect("a name").to_string_lossy().into_owned();
        read(&path, rooms.entry(room).or_default());
    }
    for root in ["lib", "process", "main", "crash_main", "next_main"] {
        rooms.remove(root).expect("part of the composition root");
    }
    let names: BTreeSet<String> = rooms.keys().cloned().collect();
    for (room, imports) in &mut rooms {
        imports.retain(|import| import != room && names.contains(import));
    }
    rooms
}

#[test]
fn no_two_rooms_import_each_other_directly_or_by_others() {
    let mut rooms = rooms();
    assert!(rooms.len() > 20 && rooms["endpoint"].contains("node"), "{rooms:?}");
    // Takes away the rooms that import nobody who is left, until none is left or a circle is.
    loop {
        let left: BTreeSet<String> = rooms.keys().cloned().collect();
        rooms.retain(|_, imports| !imports.is_disjoint(&left));
        if rooms.len() == left.len() {
            break;
        }
    }
    assert!(rooms.is_empty(), "rooms in circles, and those above them: {rooms:#?}");
}

#[test]
fn the_shared_state_knows_nobody_who_uses_it() {
    let rooms = rooms();
    assert!(!rooms["addresses"].contains("node"), "addresses take what they need");
    for above in ["endpoint", "audit", "health", "status", "explain", "rest", "restore", "selfcheck"] {
        assert!(rooms.contains_key(above) && !rooms["node"].contains(above), "{above}");
    }
}
