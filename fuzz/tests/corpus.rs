//! Every checked-in input, without libFuzzer: what was found once stays mended. A program that libFuzzer runs does this
//! too, before anything else; this needs no coverage counters.

use std::{fs, path::Path};

fn replay(target: &str, run: fn(&[u8])) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let mut inputs = 0;
    for entry in fs::read_dir(&directory).expect("the target's inputs") {
        let path = entry.expect("an input").path();
        eprintln!("{}", path.display());
        run(&fs::read(&path).expect("an input"));
        inputs += 1;
    }
    assert!(inputs > 0, "{} is empty", directory.display());
}

#[test]
fn stdin() {
    replay("stdin", wharf_fuzz::stdin::run);
}

#[test]
fn rest_body() {
    replay("rest_body", wharf_fuzz::rest_body::run);
}

#[test]
fn queue_record() {
    replay("queue_record", wharf_fuzz::queue_record::run);
}

#[test]
fn store() {
    replay("store", wharf_fuzz::store::run);
}

#[test]
fn mark() {
    replay("mark", wharf_fuzz::mark::run);
}

#[test]
fn netlink() {
    replay("netlink", wharf_fuzz::netlink::run);
}

#[test]
fn map_rows() {
    replay("map_rows", wharf_fuzz::map_rows::run);
}

#[test]
fn policy_documents() {
    replay("policy_documents", wharf_fuzz::policy_documents::run);
}

#[test]
fn xds() {
    replay("xds", wharf_fuzz::xds::run);
}

#[test]
fn access_log() {
    replay("access_log", wharf_fuzz::access_log::run);
}

#[test]
fn redirects_file() {
    replay("redirects_file", wharf_fuzz::redirects_file::run);
}

#[test]
fn dns() {
    replay("dns", wharf_fuzz::dns::run);
}

#[test]
fn names_file() {
    replay("names_file", wharf_fuzz::names_file::run);
}

#[test]
fn ipam_answer() {
    replay("ipam_answer", wharf_fuzz::ipam_answer::run);
}

#[test]
fn sandbox() {
    replay("sandbox", wharf_fuzz::sandbox::run);
}

#[test]
fn delegate_answer() {
    replay("delegate_answer", wharf_fuzz::delegate_answer::run);
}
