use std::sync::Arc;

use wharf_core::ids::Epoch;
use wharf_policy::{
    compile::{Listener, Share},
    model::Direction,
    requests::{HttpRule, Pattern, Requests},
};

use super::*;
use crate::proxy::Redirect;

#[test]
fn redirects_are_facts_of_their_endpoint_alone() {
    let id = |n: u16| EndpointId::try_from(n).expect("id");
    let path = |path: &str| HttpRule { path: Some(Pattern::Prefix(path.to_owned())), ..HttpRule::default() };
    let requests = Arc::new(Requests { http: [path("/a"), path("/b")].into(), ..Requests::default() });
    let listener = Arc::new(Listener { direction: Direction::Egress, requests, share: Share::default() });
    let redirect = Redirect { listener, members: [((id(7), Epoch(1)), Vec::new())].into(), rounds: [].into() };
    let look = Look { wanted: [(15_001, redirect)].into(), ..Look::default() };
    let words =
        "egress, port 15001 of the proxy: any method /a...; any method /b...; no proxy serves (Envoy is absent)";
    assert_eq!(redirects(&look, id(7)), [fact("redirect", words)]);
    assert_eq!(redirects(&look, id(8)), []);
}
