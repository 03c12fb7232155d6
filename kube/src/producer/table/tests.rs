use std::time::Duration;

use super::*;

fn defined(object: &str, uid: &str, row: Option<&str>) -> Defined {
    let row = row.map(|content| {
        let row = v1::Namespace { name: object.into(), labels: [("l".to_owned(), content.to_owned())].into() };
        v1::Row { row: Some(v1::row::Row::Namespace(row)) }.encode_to_vec().into_boxed_slice()
    });
    Defined { object: object.into(), uid: uid.into(), row }
}

fn apply(table: &mut Table, source: Source, event: Event) {
    table.apply(Update { source, at: Instant::now(), event });
}

/// All other sources have an empty list.
fn table(without: Source) -> Table {
    let mut table = Table::default();
    for source in Source::ALL.into_iter().filter(|source| *source != without) {
        apply(&mut table, source, Event::Absent);
    }
    table
}

fn drain(table: &mut Table) -> Vec<String> {
    let mut words = Vec::new();
    while let Some(message) = table.next_message() {
        assert!(!message.changes.is_empty());
        for change in message.changes {
            words.push(match change.change.expect("a change") {
                Sent::Begin(begin) => format!("begin {}", begin.kind),
                Sent::Complete(complete) => format!("complete {}", complete.kind),
                Sent::Delete(delete) => format!("delete {} {}", delete.kind, delete.key),
                Sent::Put(v1::Row { row: Some(v1::row::Row::Namespace(row)) }) => {
                    format!("put {} {}", row.name, row.labels["l"])
                }
                Sent::Put(row) => panic!("{row:?}"),
            });
        }
    }
    assert!(!table.is_waiting());
    words
}

fn of_pods(table: &mut Table, event: Event) -> Vec<String> {
    apply(table, Source::Pod, event);
    drain(table)
}

/// With the pod `s/a` in the stream.
fn with_a_pod() -> Table {
    let mut table = table(Source::Pod);
    apply(&mut table, Source::Pod, Event::Begin);
    apply(&mut table, Source::Pod, Event::Put(defined("s/a", "u1", Some("1"))));
    table.open_stream();
    let before = drain(&mut table);
    assert!(before.contains(&"begin pod".to_owned()) && !before.contains(&"complete pod".to_owned()), "{before:?}");
    assert_eq!(before.iter().filter(|word| word.starts_with("complete")).count(), 3);
    assert_eq!(of_pods(&mut table, Event::Complete), ["complete pod"]);
    table
}

#[test]
fn only_differences_are_sent() {
    let mut table = with_a_pod();
    assert_eq!(of_pods(&mut table, Event::Put(defined("s/a", "u1", Some("1")))), [""; 0]);
    assert_eq!(of_pods(&mut table, Event::Put(defined("s/a", "u1", Some("2")))), ["put s/a 2"]);
    assert_eq!(of_pods(&mut table, Event::Put(defined("s/a", "u1", None))), ["delete pod u1"]);
    assert_eq!(of_pods(&mut table, Event::Gone { object: "s/a".into(), uid: "u1".into() }), [""; 0]);
}

#[test]
fn the_end_of_a_list_deletes_what_it_did_not_contain() {
    let mut table = with_a_pod();
    apply(&mut table, Source::Pod, Event::Put(defined("s/b", "u2", Some("1"))));
    apply(&mut table, Source::Pod, Event::Put(defined("s/c", "u3", Some("1"))));
    drain(&mut table);
    apply(&mut table, Source::Pod, Event::Begin);
    apply(&mut table, Source::Pod, Event::Keep { object: "s/c".into(), uid: "u3".into() });
    assert_eq!(of_pods(&mut table, Event::Put(defined("s/b", "u2", Some("1")))), [""; 0]);
    assert_eq!(of_pods(&mut table, Event::Complete), ["delete pod u1"]);
    assert_eq!(of_pods(&mut table, Event::Absent), ["delete pod u2", "delete pod u3"]);
}

#[test]
fn a_list_that_begins_again_is_not_complete_with_the_first_part() {
    let mut table = with_a_pod();
    apply(&mut table, Source::Pod, Event::Begin);
    apply(&mut table, Source::Pod, Event::Put(defined("s/a", "u1", Some("1"))));
    apply(&mut table, Source::Pod, Event::Begin);
    assert_eq!(of_pods(&mut table, Event::Complete), ["delete pod u1"]);
}

#[test]
fn a_deletion_does_not_hit_a_successor() {
    let mut table = with_a_pod();
    assert_eq!(of_pods(&mut table, Event::Put(defined("s/a", "u2", Some("2")))), ["delete pod u1", "put s/a 2"]);
    assert_eq!(of_pods(&mut table, Event::Gone { object: "s/a".into(), uid: "u1".into() }), [""; 0]);
}

#[test]
fn changes_that_wait_are_one_a_key_and_brief_objects_leave_nothing() {
    let mut table = with_a_pod();
    for i in 0..100 {
        apply(&mut table, Source::Pod, Event::Put(defined("s/a", "u1", Some(&i.to_string()))));
        apply(&mut table, Source::Pod, Event::Put(defined("s/brief", &format!("b{i}"), Some("1"))));
        apply(&mut table, Source::Pod, Event::Gone { object: "s/brief".into(), uid: format!("b{i}") });
        assert_eq!(table.waiting(), 1);
    }
    assert_eq!(drain(&mut table), ["put s/a 99"]);
    let mut names = table_of_names();
    apply(&mut names, Source::Namespace, Event::Gone { object: "n".into(), uid: "1".into() });
    apply(&mut names, Source::Namespace, Event::Put(defined("n", "2", Some("2"))));
    assert_eq!(drain(&mut names), ["put n 2"]);
    apply(&mut names, Source::Namespace, Event::Gone { object: "n".into(), uid: "2".into() });
    assert_eq!(drain(&mut names), ["delete namespace n"]);
}

fn table_of_names() -> Table {
    let mut table = table(Source::Namespace);
    table.open_stream();
    apply(&mut table, Source::Namespace, Event::Begin);
    apply(&mut table, Source::Namespace, Event::Put(defined("n", "1", Some("1"))));
    apply(&mut table, Source::Namespace, Event::Complete);
    drain(&mut table);
    table
}

#[test]
fn refused_rows_are_sent_again_once() {
    let mut table = with_a_pod();
    assert_eq!(of_pods(&mut table, Event::Put(defined("s/b", "u2", Some("1")))), ["put s/b 1"]);
    let refused =
        [(Kind::Pod, "u1"), (Kind::Node, "u2"), (Kind::Pod, "gone")].map(|(kind, key)| (kind, key.to_owned()));
    let refused = BTreeSet::from(refused);
    table.resend(&refused);
    table.resend(&refused);
    assert_eq!(drain(&mut table), ["put s/a 1"]);
    assert_eq!(of_pods(&mut table, Event::Put(defined("s/a", "u1", None))), ["delete pod u1"]);
    table.resend(&refused);
    assert_eq!(drain(&mut table), [""; 0]);
}

#[test]
fn a_new_stream_has_a_snapshot() {
    let mut table = with_a_pod();
    apply(&mut table, Source::Pod, Event::Put(defined("s/b", "u2", Some("1"))));
    table.open_stream();
    apply(&mut table, Source::Pod, Event::Gone { object: "s/a".into(), uid: "u1".into() });
    let words = drain(&mut table);
    let of_pods: Vec<_> = words.iter().filter(|word| !word.contains("policy") && !word.contains("n")).collect();
    assert_eq!(of_pods, ["put s/b 1", "complete pod"], "{words:?}");
}

#[test]
fn messages_are_bounded_and_the_last_one_completes() {
    let mut table = table(Source::Pod);
    let large = "x".repeat(200 << 10);
    apply(&mut table, Source::Pod, Event::Begin);
    for i in 0..10 {
        apply(&mut table, Source::Pod, Event::Put(defined(&format!("s/{i}"), &format!("u{i}"), Some(&large))));
    }
    for i in 0..5_000 {
        apply(&mut table, Source::Pod, Event::Put(defined(&format!("t/{i}"), &format!("t{i}"), Some("1"))));
    }
    apply(&mut table, Source::Pod, Event::Complete);
    table.open_stream();
    let (mut count, mut completes) = (0, Vec::new());
    while let Some(message) = table.next_message() {
        assert!(message.changes.len() <= CHANGES + 8);
        let bytes: usize = message.changes.iter().map(prost::Message::encoded_len).sum();
        assert!(bytes < MESSAGE + (256 << 10), "{bytes}");
        count += 1;
        completes.push(message.completes);
    }
    assert!(count >= 5, "{count}");
    assert_eq!(completes.iter().filter(|completes| **completes).count(), 1);
    assert_eq!(completes.last(), Some(&true));
}

#[tokio::test(start_paused = true)]
async fn a_message_has_the_time_of_its_oldest_change() {
    let mut table = with_a_pod();
    let began = Instant::now();
    apply(&mut table, Source::Pod, Event::Put(defined("s/a", "u1", Some("2"))));
    tokio::time::advance(Duration::from_secs(3)).await;
    apply(&mut table, Source::Pod, Event::Put(defined("s/b", "u2", Some("2"))));
    assert_eq!(table.next_message().and_then(|message| message.since), Some(began));
}
