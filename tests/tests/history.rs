//! Random histories on the real kernel, held against a reference model: who has an endpoint, and with which addresses.
//!
//! The same idea as the model of the agent on the fake kernel (`agent/tests/model`), with fewer runs and all of the
//! real thing: plugin, agent, netlink, programs.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use proptest::{
    prelude::*,
    strategy::ValueTree as _,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use serde_json::json;
use wharf_tests::{Attached, Node, NodeConfig, Sandbox, icmp::ping, scenario, wait};

/// Containers; each may have both interfaces.
const CONTAINERS: [&str; 4] = ["a", "b", "c", "d"];
const INTERFACES: [&str; 2] = ["eth0", "net1"];
const STEPS: usize = 25;
const HISTORIES: u8 = 3;

type Who = (usize, usize);

#[derive(Debug, Clone)]
enum Step {
    Add(Who),
    Del(Who),
    Check(Who),
    /// Containers that the runtime still lists.
    Gc([bool; CONTAINERS.len()]),
    Restart,
    Kill,
    /// The agent is killed, the DELs find none, and it comes back.
    DelWhileAway(Vec<Who>),
}

fn step() -> impl Strategy<Value = Step> {
    let who = (0..CONTAINERS.len(), 0..INTERFACES.len());
    prop_oneof![
        8 => who.clone().prop_map(Step::Add),
        5 => who.clone().prop_map(Step::Del),
        2 => who.clone().prop_map(Step::Check),
        1 => any::<[bool; CONTAINERS.len()]>().prop_map(Step::Gc),
        1 => Just(Step::Restart),
        1 => Just(Step::Kill),
        2 => prop::collection::vec(who, 1..3).prop_map(Step::DelWhileAway),
    ]
}

/// What the runtime believes.
#[derive(Default)]
struct Model(BTreeMap<Who, Attached>);

struct Play<'a> {
    node: &'a mut Node,
    sandboxes: Vec<Sandbox>,
    model: Model,
}

impl Play<'_> {
    fn step(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::Add(who) => self.add(*who),
            Step::Del(who) => self.del(*who),
            Step::Check(who) => self.check(*who),
            Step::Gc(listed) => self.gc(*listed),
            Step::Restart => {
                self.node.stop_agent()?;
                self.node.start_agent()
            }
            Step::Kill => {
                self.node.kill_agent()?;
                self.node.start_agent()
            }
            Step::DelWhileAway(all) => {
                self.node.kill_agent()?;
                all.iter().try_for_each(|who| self.del(*who))?;
                self.node.start_agent()
            }
        }
    }

    fn sandbox(&self, who: Who) -> Result<(&Sandbox, &'static str)> {
        let ifname = INTERFACES.get(who.1).context("an interface")?;
        Ok((self.sandboxes.get(who.0).context("a container")?, ifname))
    }

    fn add(&mut self, who: Who) -> Result<()> {
        let (sandbox, ifname) = self.sandbox(who)?;
        let conf = self.node.netconf();
        if self.model.0.contains_key(&who) {
            let call = self.node.cni("ADD").of(sandbox.name(), sandbox.path(), ifname).conf(&conf);
            let failure = call.run()?.failure()?;
            ensure!(failure.code == 4, "a second ADD: {failure:?}");
            return Ok(());
        }
        let attached = self.node.attach_with(sandbox, ifname, &conf)?;
        ping(sandbox.space()?, *attached.gateways()?.first().context("a gateway")?)?.must_answer()?;
        self.model.0.insert(who, attached);
        Ok(())
    }

    fn del(&mut self, who: Who) -> Result<()> {
        let (sandbox, ifname) = self.sandbox(who)?;
        let conf = self.node.netconf();
        self.node.cni("DEL").of(sandbox.name(), sandbox.path(), ifname).conf(&conf).run()?.silent()?;
        self.model.0.remove(&who);
        let links = self.sandbox(who)?.0.space()?.links()?;
        ensure!(!links.iter().any(|l| l == ifname), "DEL left {ifname}: {links:?}");
        Ok(())
    }

    fn check(&self, who: Who) -> Result<()> {
        match self.model.0.get(&who) {
            // What it answers is judged where nothing else goes on: an endpoint may be under rebuild after a start.
            Some(attached) => {
                wait::until("CHECK to be silent", || Ok(self.node.check(attached)?.silent().is_ok().then_some(())))
            }
            None => Ok(()),
        }
    }

    fn gc(&mut self, listed: [bool; CONTAINERS.len()]) -> Result<()> {
        let keeps = |who: &Who| listed.get(who.0).copied().unwrap_or(false);
        let valid: Vec<_> = self.model.0.iter().filter(|(who, _)| keeps(who)).collect();
        let valid: Vec<_> =
            valid.iter().map(|(_, a)| json!({"containerID": a.container, "ifname": a.ifname})).collect();
        let conf = self.node.netconf().with("cni.dev/valid-attachments", json!(valid));
        self.node.cni("GC").conf(&conf).run()?.silent()?;
        self.model.0.retain(|who, _| keeps(who));
        Ok(())
    }

    /// Endpoints and leases are those of the model, and no address is in two hands.
    fn holds(&self) -> Result<()> {
        let mut there: Vec<_> = self
            .node
            .endpoints()?
            .into_iter()
            .map(|e| (e.container_id.clone(), e.ifname.clone(), e.ipv4.map(Into::into), e.ipv6.map(Into::into)))
            .collect();
        let mut expected = Vec::new();
        for attached in self.model.0.values() {
            let (v4, v6) = (attached.v4()?.into(), attached.v6()?.into());
            expected.push((attached.container.clone(), attached.ifname.clone(), Some(v4), Some(v6)));
        }
        there.sort();
        expected.sort();
        if there != expected {
            bail!("endpoints are {there:?}, the runtime knows {expected:?}");
        }
        let leases = self.node.ask(async |c| c.ipam().await)?.leases;
        let mut leased: Vec<std::net::IpAddr> =
            leases.into_iter().filter(|l| l.owner != "node").map(|l| l.ip).collect();
        let mut owned: Vec<std::net::IpAddr> = expected.iter().flat_map(|e| [e.2, e.3]).flatten().collect();
        leased.sort_unstable();
        owned.sort_unstable();
        ensure!(leased == owned, "leased are {leased:?}, the endpoints have {owned:?}");
        Ok(())
    }
}

#[test]
fn random_histories_on_the_real_kernel_leave_what_the_runtime_believes() -> Result<()> {
    for history in 0..HISTORIES {
        // The same histories each time; the model on the fake kernel is where many are tried.
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[history; 32]);
        let mut runner = TestRunner::new_with_rng(Config::default(), rng);
        let steps = prop::collection::vec(step(), STEPS).new_tree(&mut runner).map_err(|e| anyhow::anyhow!("{e}"))?;
        scenario(NodeConfig::default(), |node| {
            let sandboxes = CONTAINERS.iter().map(|name| node.sandbox(name)).collect::<Result<Vec<_>>>()?;
            let mut play = Play { node, sandboxes, model: Model::default() };
            for (n, step) in steps.current().iter().enumerate() {
                let what = || format!("history {history}, step {n}: {step:?}");
                play.step(step).with_context(what)?;
                play.holds().with_context(what)?;
            }
            wait::until_equal("findings of the audit", &Vec::new(), || {
                Ok(play.node.audit()?.findings.into_iter().map(|f| format!("{} {}", f.subject, f.problem)).collect())
            })?;
            let left: Vec<Who> = play.model.0.keys().copied().collect();
            left.into_iter().try_for_each(|who| play.del(who))
        })?;
    }
    Ok(())
}
