//! The rooms of the agent: which of them imports which, and which take the whole node.

#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// A file without its comments.
fn code(source: &str) -> String {
    source.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Whether a file names the type `Node`. `LeaseOwner::Node` and the like are variants of other types.
fn names_the_node(source: &str) -> bool {
    let code = code(source);
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices("Node").any(|(at, name)| {
        let before = code[..at].trim_end_matches("Linux");
        let is_variant = before.ends_with("::") && !before.ends_with("node::");
        !before.ends_with(is_word) && !code[at + name.len()..].starts_with(is_word) && !is_variant
    })
}

/// The modules below the crate's root that a file names: in paths and in `use crate::{...}`.
fn named(source: &str) -> BTreeSet<String> {
    let code = code(source);
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

fn read(path: &Path, into: &mut Vec<String>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("listed") {
            read(&entry.expect("entry").path(), into);
        }
    } else if path.file_name().is_some_and(|name| !name.to_string_lossy().contains("tests")) {
        into.push(fs::read_to_string(path).expect("read"));
    }
}

/// The files of each room. The composition root is no room: it knows all.
fn files() -> BTreeMap<String, Vec<String>> {
    let mut rooms: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in fs::read_dir(source).expect("listed") {
        let path = entry.expect("entry").path();
        let room = path.file_stem().expect("a name").to_string_lossy().into_owned();
        read(&path, rooms.entry(room).or_default());
    }
    for root in ["lib", "process", "main", "crash_main"] {
        rooms.remove(root).expect("part of the composition root");
    }
    rooms
}

/// Each room with those that it imports.
fn rooms() -> BTreeMap<String, BTreeSet<String>> {
    let imports = |files: Vec<String>| files.iter().flat_map(|file| named(file)).collect();
    let mut rooms: BTreeMap<String, BTreeSet<String>> =
        files().into_iter().map(|(room, files)| (room, imports(files))).collect();
    for (room, imports) in &mut rooms {
        imports.remove(room);
    }
    rooms
}

/// The place of each room in the table of ARCHITECTURE.md, from the top.
fn rows() -> BTreeMap<String, usize> {
    let page = include_str!("../../ARCHITECTURE.md");
    let (_, table) = page.split_once("| rooms | content |\n").expect("a table of rooms");
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let rooms = |line: &str| -> Vec<String> {
        let cell = line.split('|').nth(1).unwrap_or_default();
        cell.split('`').skip(1).step_by(2).map(|name| name.trim_end_matches('/').to_owned()).collect()
    };
    rows.enumerate().flat_map(|(row, line)| rooms(line).into_iter().map(move |room| (room, row))).collect()
}

/// Of the composition root, too: a room that imports from it does not stand in the table.
#[test]
fn a_room_imports_rooms_of_its_row_and_of_lower_rows_only() {
    let (rooms, rows) = (rooms(), rows());
    for (room, imports) in &rooms {
        let row = rows.get(room).unwrap_or_else(|| panic!("the table of rooms in ARCHITECTURE.md lacks {room}"));
        for import in imports {
            assert!(rooms.contains_key(import), "{room} imports {import} of the composition root");
            assert!(rows[import] >= *row, "{room} imports {import}, which stands above it");
        }
    }
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

/// The life of endpoints, its checks and its restore take `node::lifecycle::Lifecycle` or less. The health endpoint,
/// the results of checks, the status and the settings that requests change are out of their reach.
#[test]
fn the_whole_node_is_taken_only_by_what_answers_the_outside() {
    let files = files();
    let whole: Vec<&str> = files
        .iter()
        .filter(|(_, files)| files.iter().any(|f| names_the_node(f)))
        .map(|(room, _)| room.as_str())
        .collect();
    assert_eq!(whole, ["admin", "explain", "node", "rest", "status", "watchdog"]);
}

#[test]
fn the_life_of_endpoints_has_nothing_of_what_only_the_outside_needs() {
    for part in ["lifecycle", "network", "endpoints", "telemetry"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/node/{part}.rs"));
        let code = code(&fs::read_to_string(path).expect("read"));
        for outside in ["Node<", "Health", "SelfChecks", "Parts", "Pulses", "findings", "changed_settings"] {
            assert!(!code.contains(outside), "{part} has {outside}");
        }
    }
}

#[test]
fn a_file_that_names_the_node_is_recognized() {
    for yes in ["node: &Node,", "use crate::node::Node;", "node::{Node, part::Fill},", "State<Arc<Node>>"] {
        assert!(names_the_node(yes), "{yes}");
    }
    for no in
        ["LeaseOwner::Node => 1,", "NodeProblem", "// Node", "EnsureNode", "wharf_api::NodeHealth", "Problem::Node(x)"]
    {
        assert!(!names_the_node(no), "{no}");
    }
}
