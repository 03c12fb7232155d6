//! Who reaches whom.

use std::{collections::BTreeMap, thread, time::Duration};

use anyhow::{Result, bail, ensure};

use super::{
    super::{
        api::{Pod, in_url},
        cluster::Cluster,
        images::PAGE,
        place::until,
    },
    basic,
};

/// Prints `yes` for each URL with the page, otherwise `no`; connects concurrently.
const PROBE: &str = r#"page=$1; shift
for url; do
    (if [ "$(timeout 2 wget -q -O - "$url" 2>/dev/null)" = "$page" ]; then echo "$url yes"; else echo "$url no"; fi) &
done
wait"#;

/// Whether each URL answers a pod.
pub(super) fn probe(cluster: &Cluster<'_>, from: &Pod, urls: &[String]) -> Result<BTreeMap<String, bool>> {
    let mut words = vec![PAGE];
    words.extend(urls.iter().map(String::as_str));
    let said = cluster.api.script(from, PROBE, &words)?;
    let found: BTreeMap<_, _> = said
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(url, word)| (url.to_owned(), word == "yes"))
        .collect();
    ensure!(found.len() == urls.len(), "{} of {} answers in {}", found.len(), urls.len(), from.name);
    Ok(found)
}

pub(super) fn probe_all<'a>(
    cluster: &Cluster<'_>,
    pods: impl Iterator<Item = &'a Pod>,
    urls: &[String],
) -> Result<Vec<(&'a Pod, BTreeMap<String, bool>)>> {
    thread::scope(|scope| {
        let started: Vec<_> = pods.map(|pod| (pod, scope.spawn(move || probe(cluster, pod, urls)))).collect();
        let ended = started.into_iter().map(|(pod, thread)| match thread.join() {
            Ok(found) => Ok((pod, found?)),
            Err(_) => bail!("the thread of {} died", pod.name),
        });
        ended.collect()
    })
}

pub(super) fn urls(pods: &[Pod]) -> Vec<String> {
    let addresses = pods.iter().flat_map(|pod| &pod.addresses);
    addresses.map(|address| format!("http://{}/", in_url(address))).collect()
}

pub(super) fn pods(cluster: &Cluster<'_>) -> Result<String> {
    let pods = basic::pods(cluster)?;
    all_reach(cluster, &pods)?;
    Ok(format!("{} pairs, IPv4 and IPv6", pods.len() * urls(&pods).len()))
}

pub(super) fn all_reach(cluster: &Cluster<'_>, pods: &[Pod]) -> Result<()> {
    all_answer(cluster, pods, &urls(pods))
}

pub(super) fn all_answer(cluster: &Cluster<'_>, pods: &[Pod], urls: &[String]) -> Result<()> {
    let mut silent = Vec::new();
    for (pod, found) in probe_all(cluster, pods.iter(), urls)? {
        let none = found.iter().filter(|(_, answers)| !**answers);
        silent.extend(none.map(|(url, _)| format!("{} on {} does not reach {url}", pod.name, pod.node)));
    }
    ensure!(silent.is_empty(), "{} of {}: {}", silent.len(), pods.len() * urls.len(), silent.join("; "));
    Ok(())
}

pub(super) fn nodes(cluster: &Cluster<'_>) -> Result<String> {
    let urls = urls(&basic::pods(cluster)?);
    for node in &cluster.nodes {
        for url in &urls {
            let reach = || basic::page(&node.place, url);
            until(&format!("{} reaches {url}", node.name()), Duration::from_secs(5), || reach().map(Some))?;
        }
    }
    Ok(format!("{} pairs, IPv4 and IPv6", cluster.nodes.len() * urls.len()))
}
