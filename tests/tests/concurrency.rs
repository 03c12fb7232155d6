//! Many at once.

use std::{collections::BTreeSet, net::IpAddr, thread};

use anyhow::{Result, anyhow, ensure};
use wharf_tests::{Attached, Node, NodeConfig, Sandbox, icmp::Ping, scenario};

const PARALLEL: usize = 16;

fn on_threads<T: Send>(sandboxes: &[Sandbox], f: impl Fn(&Sandbox) -> Result<T> + Sync) -> Result<Vec<T>> {
    let f = &f;
    thread::scope(|scope| {
        let threads: Vec<_> = sandboxes.iter().map(|s| scope.spawn(move || f(s))).collect();
        threads.into_iter().map(|t| t.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    })
}

fn sandboxes(node: &Node) -> Result<Vec<Sandbox>> {
    (0..PARALLEL).map(|n| node.sandbox(&format!("c{n}"))).collect()
}

#[test]
fn sixteen_at_once_get_addresses_of_their_own_and_go_without_a_trace() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandboxes = sandboxes(node)?;
        for round in 0..5 {
            let shared = &*node;
            let attached = on_threads(&sandboxes, |s| shared.attach(s))?;
            let addresses: BTreeSet<IpAddr> = attached.iter().flat_map(Attached::addresses).collect();
            ensure!(addresses.len() == 2 * PARALLEL, "round {round}: an address was given out twice: {addresses:?}");
            let ids: BTreeSet<u16> = node.endpoints()?.iter().map(|e| e.id).collect();
            ensure!(ids.len() == PARALLEL, "round {round}: {ids:?}");
            // Everyone pings the next, all at once.
            let next: Vec<IpAddr> =
                attached.iter().cycle().skip(1).take(PARALLEL).map(|e| Ok(e.v4()?.into())).collect::<Result<_>>()?;
            on_threads(&sandboxes, |s| {
                let place = sandboxes.iter().position(|o| o.name() == s.name()).and_then(|n| next.get(n));
                let to = *place.ok_or_else(|| anyhow!("no neighbour"))?;
                Ping { to, count: 3, payload: 56 }.run(s.space()?)?.must_answer()
            })?;
            on_threads(&sandboxes, |s| {
                let mine = attached.iter().find(|e| e.container == s.name()).ok_or_else(|| anyhow!("not attached"))?;
                shared.detach(mine)
            })?;
            let left = node.left_behind()?;
            ensure!(left.is_empty(), "round {round}: {left:?}");
        }
        Ok(())
    })
}

#[test]
fn of_many_adds_for_one_interface_exactly_one_succeeds() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        for round in 0..5 {
            let shared = &*node;
            let outcomes: Vec<Option<Attached>> = thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| shared.attach(&a).ok())).collect();
                threads.into_iter().map(|t| t.join().map_err(|_| anyhow!("a thread panicked"))).collect::<Result<_>>()
            })?;
            let won: Vec<Attached> = outcomes.into_iter().flatten().collect();
            ensure!(won.len() == 1, "round {round}: {} of 8 ADDs of one interface succeeded", won.len());
            for e in &won {
                Ping { to: e.gateways()?[0], count: 1, payload: 56 }.run(a.space()?)?.must_answer()?;
                node.detach(e)?;
            }
            let left = node.left_behind()?;
            ensure!(left.is_empty(), "round {round}: {left:?}");
        }
        Ok(())
    })
}

#[test]
fn adds_racing_their_own_dels_leave_nothing() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandboxes = sandboxes(node)?;
        let shared = &*node;
        for _ in 0..3 {
            on_threads(&sandboxes, |s| {
                thread::scope(|scope| {
                    // Whoever wins is right; both outcomes of the ADD are fine.
                    let add = scope.spawn(|| shared.attach(s).map(drop));
                    let del = || shared.cni("DEL").of(s.name(), s.path(), "eth0").conf(&shared.netconf()).run();
                    del()?;
                    add.join().map_err(|_| anyhow!("a thread panicked"))?.ok();
                    del()?.silent()
                })
            })?;
            let left = node.left_behind()?;
            ensure!(left.is_empty(), "{left:?}");
        }
        Ok(())
    })
}
