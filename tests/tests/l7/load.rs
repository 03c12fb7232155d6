//! Changes of policy under load, by both families: no request fails that every policy allows, and none passes that the
//! policy in force denies.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use wharf_tests::{
    Node, NodeConfig, scenario,
    space::Space,
    wait,
    web::{ONCE, WebClient},
};

use crate::{Scene, await_realized, ingress, pods::import};

/// Changes of policy. Each may take seconds: Envoy ends connections of a listener about 2 s after it was taken away.
const FLIPS: usize = 6;
/// Paths that are allowed in turn.
const IN_TURN: [&str; 2] = ["/a", "/b"];
/// The path that every policy allows.
const ALWAYS: &str = "/always";
/// Rounds of each asker between two changes: a round is a request for each path.
const ROUNDS: u64 = 5;
/// Askers of each family.
const ASKERS: usize = 2;
/// Pause after each round, which bounds the load.
const PAUSE: Duration = Duration::from_millis(10);
/// Failures of an asker that are told.
const TOLD: usize = 5;

/// Which of [`IN_TURN`] the policy in force allows.
#[derive(Debug)]
struct InForce(AtomicUsize);

impl InForce {
    /// Since when, as a number that no other time has, and the path; no path while the policy changes.
    fn now(&self) -> (usize, Option<&'static str>) {
        let moment = self.0.load(Ordering::SeqCst);
        (moment, (moment % 2 == 1).then(|| IN_TURN[moment / 2 % 2]))
    }

    /// From one state to the other: in force, or changing.
    fn next(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Asks for every path, again and again.
struct Asker {
    from: Space,
    to: SocketAddr,
    /// Keeps its connection.
    keeps: bool,
    rounds: AtomicU64,
}

/// What an asker saw.
#[derive(Debug, Default)]
struct Seen {
    failures: Vec<String>,
    /// Connections that the other side had closed between two requests.
    reopened: u64,
}

impl Asker {
    fn run(&self, in_force: &InForce, stop: &AtomicBool) -> Seen {
        let (mut seen, mut kept) = (Seen::default(), None);
        while !stop.load(Ordering::SeqCst) {
            for path in [ALWAYS, IN_TURN[0], IN_TURN[1]] {
                if let Err(why) = self.judged(in_force, path, &mut kept, &mut seen.reopened) {
                    seen.failures.push(format!("{path} of {}: {why:#}", self.to));
                    kept = None;
                }
            }
            self.rounds.fetch_add(1, Ordering::SeqCst);
            thread::sleep(PAUSE);
        }
        seen
    }

    /// One request, and whether its answer is that of the policy in force, if one policy was in force from before it
    /// until after it.
    fn judged(&self, in_force: &InForce, path: &str, kept: &mut Option<WebClient>, reopened: &mut u64) -> Result<()> {
        let before = in_force.now();
        let status = self.ask(path, kept, reopened)?;
        let after = in_force.now();
        let allowed = match before.1 {
            _ if path == ALWAYS => true,
            Some(allowed) if before == after => path == allowed,
            // While the policy changes, either may have judged.
            _ => status == 200,
        };
        let wanted = if allowed { 200 } else { 403 };
        ensure!(status == wanted, "{status} in place of {wanted}, from {before:?} until {after:?}");
        Ok(())
    }

    fn ask(&self, path: &str, kept: &mut Option<WebClient>, reopened: &mut u64) -> Result<u16> {
        if let Some(mut client) = kept.take() {
            if let Some(status) = client.ask_if_open("GET", path, "db", "")? {
                *kept = Some(client);
                return Ok(status);
            }
            *reopened += 1;
        }
        let mut client = WebClient::connect(&self.from, self.to)?;
        // Envoy keeps its connection to the server for seconds, unless the server closes it.
        let status = client.ask("GET", path, "db", if self.keeps { "" } else { ONCE });
        let status = status.with_context(|| format!("from {:?}", client.local()))?;
        *kept = self.keeps.then_some(client);
        Ok(status)
    }
}

/// Flips the policy; gives what each asker saw.
fn flip(node: &Node, askers: &[Asker]) -> Result<Vec<Seen>> {
    let (in_force, stop) = (InForce(AtomicUsize::new(0)), AtomicBool::new(false));
    let change = |flip: usize| -> Result<()> {
        import(node, &ingress("db", &format!("[{{path: {}}}, {{path: {ALWAYS}}}]", IN_TURN[flip % 2])))?;
        await_realized(node)
    };
    change(0)?;
    in_force.next();
    thread::scope(|scope| {
        let (in_force, stop) = (&in_force, &stop);
        let asking: Vec<_> = askers.iter().map(|asker| scope.spawn(move || asker.run(in_force, stop))).collect();
        let flips = || -> Result<()> {
            for flip in 1..=FLIPS {
                await_rounds(askers)?;
                in_force.next();
                change(flip).with_context(|| format!("flip {flip}"))?;
                in_force.next();
            }
            await_rounds(askers)
        };
        let flipped = flips();
        stop.store(true, Ordering::SeqCst);
        let seen = asking.into_iter().map(|asker| asker.join().map_err(|_| anyhow!("an asker panicked")));
        let seen = seen.collect::<Result<Vec<_>>>()?;
        flipped.with_context(|| format!("{seen:?}"))?;
        Ok(seen)
    })
}

fn await_rounds(askers: &[Asker]) -> Result<()> {
    let goals = askers.iter().map(|asker| asker.rounds.load(Ordering::SeqCst) + ROUNDS).collect::<Vec<_>>();
    wait::until("more requests", || {
        let mut all = askers.iter().zip(&goals);
        Ok(all.all(|(asker, goal)| asker.rounds.load(Ordering::SeqCst) >= *goal).then_some(()))
    })
}

fn under_load(keeps: bool) -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let asker = |to| Ok(Asker { from: scene.web.space()?.try_clone()?, to, keeps, rounds: AtomicU64::new(0) });
        let servers = scene.servers()?;
        let askers = servers.into_iter().cycle().take(ASKERS * servers.len());
        let askers = askers.map(asker).collect::<Result<Vec<_>>>()?;
        let seen = flip(node, &askers)?;
        let rounds: Vec<u64> = askers.iter().map(|asker| asker.rounds.load(Ordering::SeqCst)).collect();
        let reopened: Vec<u64> = seen.iter().map(|seen| seen.reopened).collect();
        println!("{FLIPS} changes, rounds {rounds:?}, connections opened again {reopened:?}");
        let failures: Vec<&String> = seen.iter().flat_map(|seen| &seen.failures).collect();
        let first: Vec<_> = seen.iter().map(|seen| &seen.failures[..seen.failures.len().min(TOLD)]).collect();
        ensure!(failures.is_empty(), "{} requests failed, the first: {first:#?}", failures.len());
        // A change ends a kept connection once, and one that began amid the change once more.
        let most = 2 * FLIPS as u64;
        ensure!(
            reopened.iter().all(|times| *times <= most),
            "connections ended more often than policy changed: {reopened:?}"
        );
        scene.end(node)
    })
}

#[test]
fn changes_under_load_lose_no_new_connection_and_let_none_pass_that_is_denied() -> Result<()> {
    under_load(false)
}

#[test]
fn changes_under_load_lose_no_request_of_a_kept_connection_and_let_none_pass_that_is_denied() -> Result<()> {
    under_load(true)
}
