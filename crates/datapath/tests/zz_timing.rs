#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]
mod support;
use std::time::{Duration, Instant};
use support::*;
use wharf_core::kernel::*;
#[test]
fn timing() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        k.ensure_node(&node_spec()).await.unwrap();
        let mut t: Vec<(&str, Vec<Duration>)> = vec![];
        macro_rules! tm { ($name:literal, $e:expr) => {{ let s = Instant::now(); let r = $e; let d = s.elapsed();
            match t.iter_mut().find(|(n, _)| *n == $name) { Some((_, v)) => v.push(d), None => t.push(($name, vec![d])) }; r }} }
        let mut recs = vec![];
        for n in 1..=200u16 {
            let path = w.add_netns(&format!("n{n}"));
            let netns = tm!("observe_netns", k.observe_netns(&path).await.unwrap());
            let mut r = record(n, u64::from(n), &netns, "eth0");
            tm!("ensure_programs", k.ensure_programs(&program_spec(&r)).await.unwrap());
            let link = tm!("ensure_link", k.ensure_link(&link_spec(&r)).await.unwrap());
            r.host_ifindex = link.host_ifindex; r.container_ifindex = link.container_ifindex;
            tm!("ensure_config", k.ensure_config(r.id, &config_spec(&r)).await.unwrap());
            tm!("ensure_attached", k.ensure_attached(&link_ref(&r)).await.unwrap());
            tm!("ensure_connected", k.ensure_connected(&r).await.unwrap());
            tm!("ensure_reachable", k.ensure_reachable(&r).await.unwrap());
            recs.push(r);
        }
        let rss = std::fs::read_to_string("/proc/self/status").unwrap();
        println!("{}", rss.lines().filter(|l| l.starts_with("VmRSS") || l.starts_with("VmHWM")).collect::<Vec<_>>().join(" "));
        for r in &recs { tm!("observe_endpoint", assert_eq!(k.observe_endpoint(r).await.unwrap(), [])); }
        for r in &recs { tm!("observe_counters", k.observe_counters(r.id).await.unwrap()); }
        tm!("dump", k.dump().await.unwrap()); tm!("observe_maps", k.observe_maps().await.unwrap());
        for r in &recs[..20] { tm!("regen programs", k.ensure_programs(&program_spec(r)).await.unwrap()); tm!("regen attach", k.ensure_attached(&link_ref(r)).await.unwrap()); }
        for r in &recs[..50] {
            tm!("remove_attached", k.remove_attached(&link_ref(r)).await.unwrap());
            tm!("remove_reachable", k.remove_reachable(r).await.unwrap());
            tm!("remove_programs", k.remove_programs(r.id).await.unwrap());
            tm!("remove_link", k.remove_link(&link_ref(r)).await.unwrap());
        }
        let s = Instant::now();
        let mut set = tokio::task::JoinSet::new();
        for r in recs.drain(50..) { let k = k.clone(); set.spawn(async move {
            k.remove_attached(&link_ref(&r)).await.unwrap(); k.remove_reachable(&r).await.unwrap(); k.remove_programs(r.id).await.unwrap(); k.remove_link(&link_ref(&r)).await.unwrap(); }); }
        while let Some(x) = set.join_next().await { x.unwrap(); }
        println!("150 deletes together: {:?}", s.elapsed());
        // parallel ADDs
        let mut set = tokio::task::JoinSet::new();
        let paths: Vec<_> = (300..400u16).map(|n| (n, w.add_netns(&format!("p{n}")))).collect();
        let s = Instant::now();
        for (n, path) in paths { let k = k.clone(); set.spawn(async move { let netns = k.observe_netns(&path).await.unwrap(); let mut r = record(n, u64::from(n), &netns, "eth0"); create(&k, &mut r).await; }); }
        while let Some(x) = set.join_next().await { x.unwrap(); }
        println!("100 creates together: {:?}", s.elapsed());
        for (n, mut v) in t { v.sort(); println!("{n:18} median {:>9.0?} p95 {:>9.0?} max {:>9.0?}", v[v.len()/2], v[v.len()*95/100], v[v.len()-1]); }
    });
}
