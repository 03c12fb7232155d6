//! A file of the deletion queue or the reports, and the header that names a command. A queue file gets the name that
//! its content implies, because another name is refused at once.

use std::{fs, path::Path};

use wharf_handover::{
    command::Command,
    queue::{Deletion, Entry, Queue},
    report::{MAX_MESSAGE_BYTES, Reports},
};
use wharf_names::rules as names;

/// Maximum bytes of a reason: 80 escaped characters, and the words around them.
const MAX_WHY: usize = 1200;

/// Reads the input as each of them.
pub fn run(data: &[u8]) {
    if let Ok((command, age)) = Command::of_header(data) {
        let header = command.to_header(age);
        assert_eq!(Command::of_header(header.as_bytes()).expect("a header that was written"), (command, age));
    }
    report(data);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let queue = Queue::new(&directory.path().join("run"));
    queue.ensure_directory().expect("the queue's directory");
    let named = serde_json::from_slice::<Deletion>(data).map(|record| record.file_name());
    let name = named.unwrap_or_else(|_| Queue::file_name("net", "c1", "eth0"));
    fs::write(queue.path().join(&name), data).expect("write the record");

    let entry = only(&queue);
    assert_eq!(entry.name, name);
    match &entry.content {
        Ok(deletion) => accepted(&queue, &entry, deletion, directory.path()),
        Err(why) => refused(&queue, &entry, &why.to_string(), data),
    }
}

/// An accepted report can be written, and stays the same except for the length of its message.
fn report(data: &[u8]) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let reports = Reports::new(directory.path());
    reports.ensure_directory().expect("the reports' directory");
    fs::write(reports.path().join("1"), data).expect("write the report");
    let listed = reports.list().expect("the reports can be read");
    assert_eq!(listed.len(), 1);
    for entry in listed {
        reports.remove(&entry).expect("a report can be removed");
        match entry.content {
            Err(why) => assert!(why.to_string().len() <= MAX_WHY, "{why}"),
            Ok(mut report) => {
                reports.put(&report).expect("a report can be put");
                report.message.truncate(report.message.floor_char_boundary(MAX_MESSAGE_BYTES));
                let again = reports.list().expect("the reports can be read");
                assert_eq!(again.into_iter().map(|e| e.content).collect::<Vec<_>>(), [Ok(report)]);
            }
        }
    }
}

fn accepted(queue: &Queue, entry: &Entry, deletion: &Deletion, scratch: &Path) {
    names::name(&deletion.network).expect("a network name that keeps the rules");
    names::name(&deletion.container_id).expect("a container id that keeps the rules");
    names::ifname(&deletion.ifname).expect("an interface name that keeps the rules");
    assert_eq!(entry.written_unix_ms, deletion.written_unix_ms);
    let attachment = (&deletion.network, &deletion.container_id, &deletion.ifname);
    assert_eq!(
        queue.contains(attachment.0, attachment.1, attachment.2),
        deletion.canary.is_none(),
        "a delete is known by its attachment, a canary never"
    );
    let other = Queue::new(&scratch.join("other"));
    assert_eq!(other.put(deletion).expect("an accepted record can be put"), entry.name);
    assert_eq!(only(&other), *entry, "a record changes on its way");
    other.put(deletion).expect("an accepted record can be put again");
    assert_eq!(only(&other), *entry);
    queue.remove(&entry.name).expect("a record can be removed");
    assert_eq!(queue.list().expect("the queue can be read"), []);
}

fn refused(queue: &Queue, entry: &Entry, why: &str, data: &[u8]) {
    assert!(!why.is_empty() && why.len() <= MAX_WHY, "a reason of {} bytes", why.len());
    // Kept for inspection.
    queue.set_aside(&entry.name).expect("an unusable file can be set aside");
    assert_eq!(queue.list().expect("the queue can be read"), []);
    let bad: Vec<_> =
        fs::read_dir(queue.path().join(wharf_handover::queue::BAD)).expect("what was set aside").collect();
    assert_eq!(bad.len(), 1);
    for file in bad {
        let kept = fs::read(file.expect("what was set aside").path()).expect("what was set aside");
        assert_eq!(kept, data, "what was set aside is not what was there");
    }
}

fn only(queue: &Queue) -> Entry {
    let mut entries = queue.list().expect("the queue can be read");
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries.remove(0)
}
