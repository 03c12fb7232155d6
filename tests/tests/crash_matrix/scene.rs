//! A node on which two containers live through everything, and what must be so after each crash; with policy
//! ([`Guard`]), three more, and with rules about requests ([`Redirected`]) two.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use wharf_handover::queue::{self, Deletion, Queue};
use wharf_tests::{
    Attached, Node, Sandbox,
    cni::{Answer, NETWORK},
    echo::{self, EchoServer},
    icmp::ping,
    process::ip,
    wait,
};

use crate::{
    guard::{self, Guard},
    redirected::{self, Redirected},
};

/// The node, its two witnesses, and the container that operations are about.
pub(crate) struct Scene<'n> {
    pub(crate) node: &'n mut Node,
    /// Sends.
    pub(crate) a: (Sandbox, Attached),
    /// Echoes.
    pub(crate) b: (Sandbox, Attached),
    echo: EchoServer,
    /// What operations are about.
    pub(crate) x: Sandbox,
    /// Set while it is attached.
    pub(crate) ex: Option<Attached>,
    /// A container that died while no agent ran.
    pub(crate) dead: Option<Attached>,
    /// Policy, where the operation is about it.
    pub(crate) guard: Option<Guard>,
    /// Rules about requests, where the operation is about them.
    redirected: Option<Redirected>,
    /// The agent that runs, if one does, is one with crash points.
    armed: bool,
}

impl<'n> Scene<'n> {
    /// Attaches the witnesses; an agent must run.
    pub(crate) fn new(node: &'n mut Node) -> Result<Self> {
        let (a, b, x) = (node.sandbox("a")?, node.sandbox("b")?, node.sandbox("x")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        let echo = EchoServer::start(b.space()?)?;
        let (a, b) = ((a, ea), (b, eb));
        let scene = Self { node, a, b, echo, x, ex: None, dead: None, guard: None, redirected: None, armed: false };
        scene.witnesses_talk()?;
        Ok(scene)
    }

    /// Takes the witnesses away.
    pub(crate) fn end(self) -> Result<()> {
        drop(self.echo);
        if let Some(guard) = self.guard {
            guard.end(self.node)?;
        }
        if let Some(redirected) = self.redirected {
            redirected.end(self.node)?;
        }
        self.node.detach(&self.a.1)?;
        self.node.detach(&self.b.1)
    }

    /// Policies are in force, these and those of every guard.
    pub(crate) fn guarded(&mut self, more: &[String]) -> Result<()> {
        if self.guard.is_none() {
            self.guard = Some(Guard::new(self.node, &self.b, &self.x)?);
        }
        self.guard()?.reset(self.node, more)
    }

    pub(crate) fn guard(&self) -> Result<&Guard> {
        self.guard.as_ref().context("a guard")
    }

    /// Rules about requests are in force, or were and are no longer.
    pub(crate) fn redirecting(&mut self, judged: bool) -> Result<()> {
        if self.redirected.is_none() {
            self.redirected = Some(Redirected::new(self.node, &self.x)?);
        }
        let redirected = self.redirected.as_mut().context("rules about requests")?;
        redirected.reset(self.node, judged)
    }

    pub(crate) fn redirected(&self) -> Result<&Redirected> {
        self.redirected.as_ref().context("rules about requests")
    }

    /// The proxy takes a connection to `x`.
    pub(crate) fn hold_x(&mut self) -> Result<()> {
        let ex = self.ex.as_ref().context("x is not attached")?;
        self.redirected.as_mut().context("rules about requests")?.hold(ex)
    }

    /// Whether `x` has the label that policies name.
    pub(crate) fn is_labelled(&self) -> bool {
        self.guard.is_some() || self.redirected.is_some()
    }

    /// With policy: the kernel has the rows that follow from what is wanted, see [`Guard::rules_follow`].
    pub(crate) fn rules_follow(&mut self, is_whole: bool) -> Result<()> {
        if let Some(redirected) = &self.redirected {
            await_quiet(self.node)?;
            redirected.follow(self.node)?;
        }
        let Some(guard) = &mut self.guard else { return Ok(()) };
        await_quiet(self.node)?;
        guard.rules_follow(self.node, is_whole)
    }

    /// One exchange of each protocol between the witnesses. With policy, nothing enters beside them.
    pub(crate) fn witnesses_talk(&self) -> Result<()> {
        if let Some(guard) = &self.guard {
            guard.holds()?;
        }
        if let Some(redirected) = &self.redirected {
            redirected.holds()?;
        }
        let (from, to) = (self.a.0.space()?, &self.b.1);
        echo::udp(from, self.echo.udp_at(to.v4()?.into()), 1000).context("UDP between containers that live on")?;
        echo::tcp(from, self.echo.tcp_at(to.v6()?.into()), 1000).context("TCP between containers that live on")
    }

    /// Makes sure that an agent with crash points runs, which has nothing to do. One that was started after a crash
    /// stays: without a wish it is like any other.
    pub(crate) fn arm(&mut self) -> Result<()> {
        if self.node.has_agent() && !self.armed {
            self.node.kill_agent()?;
        }
        if !self.node.has_agent() {
            self.start()?;
        }
        self.await_quiet()
    }

    /// Starts an agent that comes to no wish.
    pub(crate) fn start(&mut self) -> Result<()> {
        ensure!(self.node.start_armed_agent()?, "the agent died at a crash point that nobody wished for");
        self.armed = true;
        Ok(())
    }

    /// Waits until the agent has done everything that follows from its start, so that the next crash point that is
    /// passed belongs to what comes next.
    pub(crate) fn await_quiet(&self) -> Result<()> {
        await_quiet(self.node)
    }

    /// CNI ADD of `x`, which must go well.
    pub(crate) fn add_x(&mut self) -> Result<()> {
        let conf = self.node.netconf();
        let conf = if self.is_labelled() { conf.with("args", guard::labels_of_x()) } else { conf };
        self.ex = Some(self.node.attach_with(&self.x, "eth0", &conf)?);
        Ok(())
    }

    /// CNI DEL of `x`.
    pub(crate) fn del_x(&self) -> Result<Answer> {
        let node = &*self.node;
        node.cni("DEL").of(self.x.name(), self.x.path(), "eth0").conf(&node.netconf()).run()
    }

    /// CNI DEL until it succeeds, as runtimes repeat it: on a busy machine the kernel's grace periods can take longer
    /// than a step may.
    pub(crate) fn delete(&self, attached: &Attached) -> Result<()> {
        self.until_deleted(|| {
            let conf = attached.conf.clone().after(&attached.result);
            self.node.cni("DEL").of(&attached.container, &attached.netns, &attached.ifname).conf(&conf).run()
        })
    }

    /// The same of `x`, attached or not.
    pub(crate) fn delete_x(&self) -> Result<()> {
        self.until_deleted(|| self.del_x())
    }

    fn until_deleted(&self, del: impl Fn() -> Result<Answer>) -> Result<()> {
        wait::until("DEL to succeed", || {
            let answer = del()?;
            if answer.finished.status.success() {
                return answer.silent().map(Some);
            }
            let failure = answer.failure()?;
            ensure!(failure.code == 11, "a DEL that can be finished later is to be tried again: {failure:?}");
            Ok(None)
        })
    }

    /// Leaves a record of a delete of `x`, as a shim does that finds no agent, and one that is none.
    pub(crate) fn queue_x(&self) -> Result<()> {
        let queue = Queue::new(&self.node.dirs().run);
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").context("read the boot id")?;
        let deletion = Deletion {
            version: queue::VERSION,
            network: NETWORK.into(),
            container_id: self.x.name().into(),
            ifname: "eth0".into(),
            endpoint: None,
            boot_id: boot_id.trim().into(),
            written_unix_ms: 1,
            canary: None,
        };
        queue.ensure_directory()?;
        std::fs::write(queue.path().join("rubbish.json"), b"{").context("put rubbish into the queue")?;
        queue.put(&deletion)?;
        Ok(())
    }

    /// Everything that is not as it should be.
    fn amiss(&self) -> Result<Vec<String>> {
        let guards = self.guard.iter().flat_map(Guard::ends);
        let servers = self.redirected.iter().flat_map(Redirected::ends);
        let own = [&self.a.1, &self.b.1].into_iter();
        let expected: Vec<&Attached> = own.chain(guards).chain(servers).chain(&self.ex).collect();
        amiss(self.node, &expected)
    }

    /// After a crash, with everything retried: witnesses talk, an ADD and a DEL go as ever, nothing is left but what
    /// should be. `x` is deleted when it is still there.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.await_quiet()?;
        wait::until_equal("what is amiss", &Vec::new(), || self.amiss())?;
        self.witnesses_talk()?;
        if let Some(ex) = &self.ex {
            if self.guard.is_some() {
                // Until the gateways are resolved, its flood pushes other packets out of their queues.
                for gateway in ex.gateways()? {
                    let known = format!("neigh show to {gateway} nud reachable nud stale nud delay nud permanent");
                    wait::until("the gateway", || Ok((!ip(self.x.space()?, &known)?.is_empty()).then_some(())))?;
                }
            }
            ping(self.x.space()?, ex.gateways()?[0])?.must_answer().context("the container that was retried")?;
            echo::udp(self.x.space()?, self.echo.udp_at(self.b.1.v6()?.into()), 100)?;
            if let Some(redirected) = &self.redirected {
                redirected.serves(self.node, ex)?;
            }
        }
        if self.redirected.is_some() {
            redirected::left(self.node)?;
        }
        {
            let y = self.node.sandbox("y")?;
            let ey = self.node.attach(&y).context("a new ADD")?;
            echo::udp(y.space()?, self.echo.udp_at(self.b.1.v4()?.into()), 100).context("a new container")?;
            self.delete(&ey).context("its DEL")?;
            ensure!(y.space()?.links()? == ["lo"], "{:?}", y.space()?.links()?);
        }
        if let Some(ex) = self.ex.take() {
            self.delete(&ex)?;
        }
        wait::until_equal("what is amiss at the end", &Vec::new(), || self.amiss())?;
        let links = self.x.space()?.links()?;
        ensure!(links == ["lo"], "the container still has {links:?}");
        Ok(())
    }
}

/// See [`Scene::await_quiet`].
pub(crate) fn await_quiet(node: &Node) -> Result<()> {
    wait::until("the agent to be done with its start", || {
        let status = node.ask(async |client| client.status().await)?;
        let queue = &status.deletion_queue;
        let drained = queue.records == 0 && queue.canary.starts_with("came out");
        let builds = ["restoring", "waiting-to-regenerate", "regenerating"];
        let rebuilt = builds.iter().all(|state| !status.endpoints.contains_key(*state));
        Ok((drained && rebuilt && status.prepared.ready >= status.prepared.target).then_some(()))
    })
}

fn amiss(node: &Node, expected: &[&Attached]) -> Result<Vec<String>> {
    let mut amiss = Vec::new();
    let mut differ = |what: &str, seen: BTreeSet<String>, wanted: BTreeSet<String>| {
        amiss.extend(seen.difference(&wanted).map(|s| format!("{what} {s} is there and should not be")));
        amiss.extend(wanted.difference(&seen).map(|s| format!("{what} {s} should be there")));
    };
    let endpoints = node.endpoints()?;
    differ(
        "endpoint",
        endpoints.iter().map(|e| format!("{}:{} {:?}", e.container_id, e.ifname, e.state)).collect(),
        expected.iter().map(|e| format!("{}:{} Ready", e.container, e.ifname)).collect(),
    );
    let leases = node.ask(async |client| client.ipam().await)?.leases;
    differ(
        "lease",
        leases.iter().filter(|l| l.owner != "node").map(|l| l.ip.to_string()).collect(),
        expected.iter().flat_map(|e| e.addresses()).map(|ip| ip.to_string()).collect(),
    );
    differ(
        "interface",
        node.endpoint_links()?.into_iter().collect(),
        endpoints.iter().map(|e| e.host_ifname.clone()).collect(),
    );
    let records = Queue::new(&node.dirs().run).list()?.into_iter().filter(|entry| !entry.is_canary());
    differ("deletion record", records.map(|e| e.name).collect(), BTreeSet::new());
    amiss.extend(node.found_amiss()?.into_iter().map(|finding| format!("audit: {finding}")));
    Ok(amiss)
}
