use wharf_api::EndpointState;

use super::{super::tests::hostile, *};
use crate::render::sample;

const USUAL: Columns = Columns { wide: false, labels: false };
const LABELS: Columns = Columns { wide: false, labels: true };
const WIDE: Columns = Columns { wide: true, labels: false };

fn shown(endpoints: &[Endpoint], columns: Columns) -> String {
    list(endpoints, &Style::plain(), columns)
}

/// Waiting, with a pod, and without a pod.
fn several() -> Vec<Endpoint> {
    let mut waiting = sample::endpoint();
    waiting.id = 12_345;
    waiting.container_id = "3f9c51aa01b2d4e6aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".to_owned();
    waiting.state = EndpointState::WaitingToRegenerate;
    waiting.labels = (0..18).map(|i| format!("k8s:label-{i}=value")).collect();
    waiting.ipv6 = "fd00:88:1234:5678:9abc:def0:1234:5678".parse().ok();
    waiting.pod_namespace = Some("kube-system".to_owned());
    waiting.pod_name = Some("coredns-5d78c9869d-abcde".to_owned());
    waiting.status.failures = 2;
    let mut bare = sample::endpoint();
    bare.id = 3;
    bare.container_id = "c1".to_owned();
    bare.ipv4 = None;
    bare.ipv6 = None;
    bare.labels.clear();
    (bare.pod_name, bare.pod_namespace) = (None, None);
    bare.identity = 5;
    vec![waiting, sample::endpoint(), bare]
}

#[test]
fn no_endpoints() {
    insta::assert_snapshot!(shown(&[], USUAL), @"ID  STATE  IDENTITY  CONTAINER  IFNAME  IPV4  IPV6");
}

#[test]
fn one_and_several() {
    let one = shown(&[sample::endpoint()], USUAL);
    let mut bare = sample::endpoint();
    bare.pod_name = None;
    insta::assert_snapshot!([one, shown(&[bare], USUAL), shown(&several(), USUAL)].join("\n"));
}

#[test]
fn an_endpoint_without_its_link_is_failing() {
    let mut lost = sample::endpoint();
    lost.status.problem = Some("its link is gone".to_owned());
    let told = shown(&[lost], USUAL);
    assert!(told.contains(" failing ") && !told.contains("ready"), "{told}");
    assert!(told.ends_with("\nendpoint 7: its link is gone; `wharf explain 7`\n"), "{told}");
}

#[test]
fn labels_and_every_column() {
    insta::assert_snapshot!([shown(&several(), LABELS), shown(&several(), WIDE)].join("\n"));
}

#[test]
fn the_usual_columns_fit_a_screen() {
    let mut long = sample::endpoint();
    long.pod_name = Some("a-deployment-with-a-long-name-5d78c9869d-abcde".to_owned());
    long.ipv6 = "fd00:88:1234:5678:9abc:def0:1234:5678".parse().ok();
    let mut waiting = sample::endpoint();
    waiting.state = EndpointState::WaitingToRegenerate;
    for endpoints in [[long, sample::endpoint()], [waiting, sample::endpoint()]] {
        let text = shown(&endpoints, USUAL);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    }
}

#[test]
fn ids_are_as_long_as_it_takes_to_tell_them_apart() {
    let of = |ids: &[&str]| -> Vec<String> {
        let endpoints: Vec<Endpoint> =
            ids.iter().map(|id| Endpoint { container_id: (*id).to_owned(), ..sample::endpoint() }).collect();
        let short = ShortIds::of(&endpoints);
        ids.iter().map(|id| short.short(id)).collect()
    };
    assert_eq!(of(&["3f9c51aa01b2d4e5f6", "4f9c51aa01b2d4e5f6"]), ["3f9c51aa01b2d", "4f9c51aa01b2d"]);
    assert_eq!(of(&["churn-container-001", "churn-container-002"]), ["churn-container-001", "churn-container-002"]);
    assert_eq!(of(&["3f9c51aa01b2d4e5f6", "3f9c51aa01b2d4e6f6"]), ["3f9c51aa01b2d4e5", "3f9c51aa01b2d4e6"]);
    // Ids can be equal (two interfaces) or prefixes of others.
    assert_eq!(of(&["abc", "abc", "abcd"]), ["abc", "abc", "abcd"]);
    assert_eq!(of(&["3f9c51aa01b2d4e5", "3f9c51aa01b2d4e5f6"]), ["3f9c51aa01b2d4e5", "3f9c51aa01b2d4e5f"]);
    assert_eq!(of(&["größe-größe-größe-1", "größe-größe-größe-2"])[1], "größe-größe-größe-2");
}

#[test]
fn rows_that_follow_stand_below_the_first() {
    let mut following = Following::new(USUAL, &Style::plain());
    let mut text = following.rows(&[], &[], &Style::plain());
    let one = sample::endpoint();
    text += &following.rows(std::slice::from_ref(&one), std::slice::from_ref(&one), &Style::plain());
    let mut longer = Endpoint { id: 12, state: EndpointState::WaitingToRegenerate, ..one.clone() };
    longer.ipv6 = "fd57:4a7f:e8f::fff1".parse().ok();
    longer.pod_name = Some("coredns-5d78c9869d-abcde".to_owned());
    text += &following.rows(std::slice::from_ref(&longer), &[one.clone(), longer.clone()], &Style::plain());
    text += &following.rows(std::slice::from_ref(&one), &[longer], &Style::plain());
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn hostile_names_do_not_reach_the_terminal() {
    for columns in [USUAL, LABELS, WIDE] {
        let text = shown(&[hostile()], columns);
        assert!(!text.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{text:?}");
    }
}
