//! `wharf endpoint list --watch`.

use std::collections::BTreeMap;

use serde::Serialize;
use wharf_api::{Endpoint, EndpointFilter, EndpointState};

use super::{Context, repeat::INTERVAL};
use crate::{
    args::Choice,
    error::{CliError, Exit},
    output::write_text,
    render::endpoint::{Columns, Following},
};

/// Names in JSON and YAML.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Change {
    Added,
    Changed,
    Deleted,
}

#[derive(Debug, Serialize)]
struct Told<'a> {
    change: Change,
    endpoint: &'a Endpoint,
}

/// Shows matching endpoints, then changes, until a request fails.
pub(super) async fn run(
    cx: &Context,
    filter: EndpointFilter,
    choice: &Choice,
    columns: Columns,
) -> Result<Exit, CliError> {
    // Endpoints that leave `state` are shown once more.
    let state = filter.state;
    let filter = EndpointFilter { state: None, ..filter };
    let mut shown = BTreeMap::new();
    let mut table = Following::new(columns, &cx.out.style());
    let mut first = true;
    loop {
        let mut all = cx.client.endpoints(&filter).await?;
        all.retain(|e| choice.has(e));
        let changes = changes(&mut shown, &all, state);
        if cx.out.is_table() {
            let changed: Vec<Endpoint> = changes.into_iter().map(|(_, e)| e).collect();
            if first || !changed.is_empty() {
                write_text(&table.rows(&changed, &all, &cx.out.style()))?;
            }
        } else {
            for (change, endpoint) in &changes {
                cx.out.emit_line(&Told { change: *change, endpoint }, |_| String::new())?;
            }
        }
        first = false;
        tokio::time::sleep(INTERVAL).await;
    }
}

type Key = (u16, u64);

/// With a `state`, follows only endpoints in it.
fn changes(
    shown: &mut BTreeMap<Key, Endpoint>,
    all: &[Endpoint],
    state: Option<EndpointState>,
) -> Vec<(Change, Endpoint)> {
    let key = |e: &Endpoint| (e.id, e.epoch);
    let now: BTreeMap<Key, &Endpoint> = all.iter().map(|e| (key(e), e)).collect();
    let mut changes = Vec::new();
    shown.retain(|key, old| {
        let is_there = now.contains_key(key);
        if !is_there {
            changes.push((Change::Deleted, old.clone()));
        }
        is_there
    });
    for (key, e) in now {
        let follows = state.is_none_or(|wanted| wanted == e.state);
        let change = match shown.get(&key) {
            None if follows => Change::Added,
            Some(old) if !is_same(old, e) => Change::Changed,
            None | Some(_) => continue,
        };
        changes.push((change, e.clone()));
        if follows {
            shown.insert(key, e.clone());
        } else {
            shown.remove(&key);
        }
    }
    changes
}

/// Ignores a regeneration between two polls.
fn is_same(a: &Endpoint, b: &Endpoint) -> bool {
    let settled = |e: &Endpoint| (e.state, e.identity, e.ipv4, e.ipv6, e.status.failures);
    let why = |e: &Endpoint| (e.status.last_error.clone(), e.status.problem.clone());
    settled(a) == settled(b) && a.labels == b.labels && why(a) == why(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample;

    fn told(shown: &mut BTreeMap<Key, Endpoint>, all: &[Endpoint], state: Option<EndpointState>) -> Vec<(Change, u16)> {
        changes(shown, all, state).into_iter().map(|(change, e)| (change, e.id)).collect()
    }

    #[test]
    fn each_change_is_told_once() {
        let mut shown = BTreeMap::new();
        let one = sample::endpoint();
        let two = Endpoint { id: 9, ..one.clone() };
        assert_eq!(told(&mut shown, std::slice::from_ref(&one), None), [(Change::Added, 7)]);
        assert_eq!(told(&mut shown, std::slice::from_ref(&one), None), []);
        let mut busy = one.clone();
        busy.state = EndpointState::Regenerating;
        assert_eq!(told(&mut shown, &[busy.clone(), two.clone()], None), [(Change::Changed, 7), (Change::Added, 9)]);
        let next = Endpoint { epoch: 42, ..busy };
        assert_eq!(told(&mut shown, &[next], None), [(Change::Deleted, 7), (Change::Deleted, 9), (Change::Added, 7)]);
    }

    #[test]
    fn an_endpoint_that_leaves_the_state_is_shown_once_more() {
        let mut shown = BTreeMap::new();
        let ready = Some(EndpointState::Ready);
        let one = sample::endpoint();
        let mut gone = one.clone();
        gone.state = EndpointState::Disconnecting;
        assert_eq!(told(&mut shown, std::slice::from_ref(&gone), ready), []);
        assert_eq!(told(&mut shown, std::slice::from_ref(&one), ready), [(Change::Added, 7)]);
        assert_eq!(told(&mut shown, std::slice::from_ref(&gone), ready), [(Change::Changed, 7)]);
        assert_eq!(told(&mut shown, &[gone], ready), []);
        assert_eq!(told(&mut shown, &[], ready), []);
    }
}
