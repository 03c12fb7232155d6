//! The computation of rows alone, for more identities than a node has endpoints.

use std::{net::IpAddr, net::Ipv4Addr, net::Ipv6Addr, sync::Arc, time::Instant};

use anyhow::{Result, anyhow, ensure};
use wharf_common::map::{IPCACHE_MAX, POLICY_CELLS_MAX, POLICY_PORTS_MAX};
use wharf_policy::{
    compile::{Change, EndpointKey, Engine, Event, Identity, Limits, Member},
    model::{Endpoint, NAMESPACE_NAME, Policy},
    read::read,
};

use super::{
    Extent,
    crowd::{FEWEST, LONGEST},
    documents,
};
use crate::bench::churn::ms;

/// Rows that the agent's tables have.
const LIMITS: Limits = Limits {
    ipcache: IPCACHE_MAX as usize,
    ports: POLICY_PORTS_MAX as usize,
    rules: POLICY_CELLS_MAX as usize,
    sets: 4 * wharf_common::MAX_ENDPOINT_ID as usize,
    listeners: 1_000,
};

/// As [`super::crowd::added_rules`], of the engine alone. Beside the endpoints that have policies there are others,
/// each with an identity of its own, until there are `identities`.
pub(super) fn added_rules(extent: &Extent, identities: usize) -> Result<(Vec<f64>, Vec<f64>)> {
    let mut engine = Engine::new(LIMITS);
    let crowd = (0..extent.members).map(|n| {
        let identity = n % extent.identities;
        member(n, identity, "default", [("k8s:app", documents::app(identity))])
    });
    let others = (extent.identities..identities).map(|n| {
        let labels = [("k8s:app", "elsewhere".to_owned()), ("k8s:number", n.to_string())];
        member(extent.members + n, n, "elsewhere", labels)
    });
    let endpoints: Vec<Event> = crowd.chain(others).collect::<Result<_>>()?;
    engine.apply(endpoints)?;
    engine.apply(policies(&documents::of_identities(extent.identities))?)?;
    let (mut times, mut written) = (Vec::new(), Vec::new());
    let begin = Instant::now();
    for n in (0..extent.changes).take_while(|n| *n < FEWEST || begin.elapsed() < LONGEST) {
        let identity = n % extent.identities;
        let event = |added| policies(&documents::of_identity(identity, extent.identities, added));
        let (events, back) = (event(true)?, event(false)?);
        let start = Instant::now();
        // As the agent does: what the kernel has is kept until it has the new rows.
        let mut next = engine.clone();
        let changes = next.apply(events)?;
        times.push(ms(start.elapsed()));
        let rows = changes.iter().filter(|c| !matches!(c, Change::PutOrigin(..) | Change::DropOrigin(_))).count();
        ensure!(rows > 0, "the added rule of identity {identity} writes no row");
        // A few hundred thousand at most: exact.
        written.push(rows as f64);
        next.apply(back)?;
        engine = next;
    }
    Ok((times, written))
}

fn policies(text: &str) -> Result<Vec<Event>> {
    let read: Vec<Policy> =
        read("bench.yaml", text).map_err(|refused| anyhow!("a policy of the benchmark is refused: {refused:?}"))?;
    Ok(read.into_iter().map(Event::Policy).collect())
}

/// An endpoint with an address of each family.
fn member<const N: usize>(
    number: usize,
    identity: usize,
    namespace: &str,
    labels: [(&str, String); N],
) -> Result<Event> {
    let (number, identity) = (u32::try_from(number)?, u32::try_from(identity)?);
    let v4 = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 1).to_bits() + number);
    let v6 = Ipv6Addr::from_bits(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).to_bits() + u128::from(number));
    let endpoint = Endpoint {
        addresses: [IpAddr::V4(v4), IpAddr::V6(v6)].into(),
        labels: Arc::new(labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        namespace: Some(Arc::new([(NAMESPACE_NAME.to_owned(), namespace.to_owned())].into())),
        ..Endpoint::default()
    };
    // Zero is no identity.
    let member = Member { identity: Identity(identity + 1), endpoint: Arc::new(endpoint) };
    Ok(Event::Endpoint(EndpointKey(number), member))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_added_rule_writes_as_many_rows_among_many_identities() -> Result<()> {
        let extent = Extent { members: 40, identities: 20, changes: 3, ..Extent::of(true, 1, 1) };
        let (few, many) = (added_rules(&extent, 20)?.1, added_rules(&extent, 500)?.1);
        assert_eq!((few.len(), &few), (3, &many));
        Ok(())
    }
}
