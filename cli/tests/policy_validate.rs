//! `wharf policy validate` for scripts: exit status and output.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may end so")]

use std::{
    fs::{self, File},
    io::Write as _,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::Value;

const VALID: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: NAME, namespace: shop}\n\
                     spec: {podSelector: {matchLabels: {app: db}}, ingress: [{ports: [{port: 5432}]}]}\n";

fn valid(name: &str) -> String {
    VALID.replace("NAME", name)
}

/// Misspelt field in line 4.
fn misspelt(name: &str) -> String {
    valid(name).replace("podSelector", "podselector")
}

type Ran = (Option<i32>, String, String);

/// Runs without an agent; kills after 20 s (status 124).
fn validate(directory: &Path, args: &[&str], input: &str) -> Ran {
    let mut command = Command::new("timeout");
    command.args(["20", env!("CARGO_BIN_EXE_wharf"), "policy", "validate"]).args(args).current_dir(directory);
    command.env("WHARF_SOCKET", directory.join("no.sock")).env_remove("NO_COLOR");
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().expect("starts");
    // The program may exit without reading.
    let _ = child.stdin.take().expect("standard input").write_all(input.as_bytes());
    let output = child.wait_with_output().expect("ends");
    (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, text) in files {
        fs::write(directory.path().join(name), text).expect("a file");
    }
    directory
}

#[test]
fn valid_documents_are_shown_without_an_agent() {
    let directory = directory(&[("b.yaml", &valid("b")), ("a.yml", &valid("a")), ("c.txt", "no policy")]);
    let (code, out, err) = validate(directory.path(), &["."], "");
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    let lines: Vec<Vec<&str>> =
        out.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()).collect();
    let cells = |name| vec![name, "namespaced", "k8s:app=db, in namespace shop", "ingress", "1/0"];
    let rows: Vec<_> = lines.iter().skip(1).cloned().collect();
    assert_eq!(rows, [cells("NetworkPolicy shop/a"), cells("NetworkPolicy shop/b")], "{out}");
    let (code, json, err) = validate(directory.path(), &["b.yaml", "a.yml", "-o", "json"], "");
    assert_eq!((code, err.as_str()), (Some(0), ""), "{json}");
    let rows: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(rows.as_array().map(Vec::len), Some(2));
    assert_eq!((&rows[0]["name"], &rows[0]["file"], &rows[0]["line"]), (&"b".into(), &"b.yaml".into(), &4.into()));
    let (code, yaml, _) = validate(directory.path(), &["b.yaml", "a.yml", "-o", "yaml"], "");
    assert_eq!((code, serde_norway::from_str::<Value>(&yaml).ok()), (Some(0), Some(rows)));
}

#[test]
fn every_file_is_looked_at_when_some_are_refused() {
    let files = [("1.yaml", misspelt("a")), ("2.yaml", valid("b")), ("3.json", "{".to_owned()), ("4.yaml", valid("c"))];
    let directory = directory(&files.each_ref().map(|(name, text)| (*name, text.as_str())));
    for format in ["table", "json"] {
        let (code, out, err) = validate(directory.path(), &["1.yaml", "2.yaml", "3.json", "4.yaml", "-o", format], "");
        assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
        let lines: Vec<&str> = err.lines().collect();
        assert_eq!(lines.len(), 3, "{err}");
        assert!(lines[0].starts_with("1.yaml:4: NetworkPolicy shop/a, spec.podselector: is no field here; "), "{err}");
        assert!(lines[1].starts_with("3.json:1: cannot be parsed as YAML or JSON: "), "{err}");
        assert_eq!(lines[2], "wharf: validate policies: 2 of 4 files refused");
    }
}

#[test]
fn a_policy_in_two_files_is_refused() {
    let directory = directory(&[("a.yaml", &valid("db")), ("b.yaml", &format!("\n{}", valid("db")))]);
    let (code, out, err) = validate(directory.path(), &["."], "");
    let wanted = "./b.yaml:5: NetworkPolicy shop/db, spec: the policy is in another file too: ./a.yaml:4; remove or \
                  rename one of them\nwharf: validate policies: 1 of 2 files refused\n";
    assert_eq!((code, out.as_str(), err.as_str()), (Some(1), "", wanted));
}

#[test]
fn standard_input_is_read_once() {
    let directory = directory(&[("a.yaml", &valid("a"))]);
    let (code, out, err) = validate(directory.path(), &["-"], &valid("b"));
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.contains("NetworkPolicy shop/b "), "{out}");
    let (code, out, err) = validate(directory.path(), &["-", "a.yaml"], &misspelt("b"));
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.starts_with("standard input:4: ") && err.contains("\nwharf: validate policies: 1 of 2 files"), "{err}");
    let (code, out, err) = validate(directory.path(), &["-", "a.yaml", "-"], &valid("b"));
    assert_eq!((code, out.as_str()), (Some(3), ""), "{err}");
    let (code, out, err) = validate(directory.path(), &["-"], "# nothing yet\n");
    assert_eq!((code, out.lines().count()), (Some(0), 1), "{out}");
    assert_eq!(err, "standard input: there is no policy in it\n");
}

#[test]
fn what_is_no_readable_file_is_refused_and_holds_nothing_up() {
    let directory = directory(&[("ok.yaml", &valid("a")), ("latin.yaml", "")]);
    let path = |name: &str| directory.path().join(name);
    fs::write(path("latin.yaml"), b"# first line\n# caf\xe9\n").expect("a file");
    // A sparse file.
    File::create(path("long.yaml")).and_then(|file| file.set_len((4 << 20) + 1)).expect("a file");
    fs::create_dir_all(path("dir/sub.yaml")).expect("a directory");
    fs::create_dir(path("empty")).expect("a directory");
    symlink("/dev/zero", path("dir/zero.yaml")).expect("a link");
    assert!(Command::new("mkfifo").arg(path("dir/fifo.yaml")).status().expect("mkfifo").success());
    let args = ["none.yaml", "ok.yaml", "latin.yaml", "long.yaml", "empty", "dir", "/dev/zero"];
    let (code, out, err) = validate(directory.path(), &args, "");
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    let lines: Vec<&str> = err.lines().collect();
    assert_eq!(
        lines,
        [
            "none.yaml: cannot be read: No such file or directory (os error 2); check the path and its permissions",
            "latin.yaml:2: is not UTF-8; save the file as UTF-8",
            "long.yaml: has more than 4194304 bytes; split the file",
            "empty: the directory has no *.yaml, *.yml or *.json; name files, or a directory that has some",
            "dir/fifo.yaml: is a FIFO, a socket or a device; name a file, or write `-` and pipe the text in",
            "dir/sub.yaml: is a directory; name it on the command line: directories in a directory are not read",
            "dir/zero.yaml: is a FIFO, a socket or a device; name a file, or write `-` and pipe the text in",
            "/dev/zero: is a FIFO, a socket or a device; name a file, or write `-` and pipe the text in",
            "wharf: validate policies: 8 of 9 files refused",
        ]
    );
}

#[test]
fn a_files_name_does_not_drive_the_terminal() {
    let directory = directory(&[("a\u{1b}[2J\nwharf: all is well.yaml", "{")]);
    let (code, out, err) = validate(directory.path(), &["."], "");
    assert_eq!((code, out.as_str(), err.lines().count()), (Some(1), "", 2), "{err}");
    assert!(err.starts_with("./a\\u{1b}[2J\\nwharf: all is well.yaml:1: cannot be parsed"), "{err:?}");
}

#[test]
fn the_quick_start_of_the_documentation_shows_what_the_command_says() {
    const PAGE: &str = include_str!("../../docs/policy.md");
    let directory = directory(&[]);
    let indented = |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    // Parts of the document before the command.
    let without_rules = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: db, namespace: shop}\nspec:\n  \
                         podSelector: {matchLabels: {app: db}}\n  policyTypes: [Ingress]\n";
    let rule = "  ingress:\n  - from:\n    - podselector: {matchLabels: {app: web}}\n    ports:\n    - port: 5432\n";
    let mut text = String::new();
    for (part, wanted) in [("", 0), (without_rules, 0), (rule, 1)] {
        text.push_str(part);
        fs::write(directory.path().join("db.yaml"), &text).expect("a file");
        let (code, out, err) = validate(directory.path(), &["db.yaml"], "");
        assert_eq!(code, Some(wanted), "{err}");
        assert!(PAGE.contains(&indented(part)), "{part}");
        assert!(PAGE.contains(&indented(&format!("$ wharf policy validate db.yaml\n{err}{out}"))), "{err}{out}");
    }
    fs::write(directory.path().join("db.yaml"), text.replace("podselector", "podSelector")).expect("a file");
    let (code, out, err) = validate(directory.path(), &["db.yaml"], "");
    assert!(code == Some(0) && out.contains("  1/0\n"), "{out}{err}");
}

#[test]
fn without_a_file_the_command_line_is_wrong() {
    let directory = directory(&[]);
    let (code, out, err) = validate(directory.path(), &[], "");
    assert_eq!((code, out.as_str()), (Some(3), ""), "{err}");
}
