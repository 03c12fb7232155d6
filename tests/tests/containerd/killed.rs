//! Pods whose runtime, plugin, shim or agent dies at a bad moment. What a kubelet does next must leave nothing.

use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use wharf_tests::{
    Node,
    containerd::{Containerd, CriError, Pod},
    crash,
    icmp::ping,
    space::Space,
    stream::UdpStream,
    wait,
};

use crate::support::{SLEEP, endpoint, endpoints, nothing_left, with_containerd};

/// Who dies while the plugin waits at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Plugin,
    Containerd,
    Agent,
}

/// What a kubelet asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Run,
    Stop,
}

const HELD: [(Verb, &str); 4] = [
    (Verb::Run, "shim/add/before-ask"),
    (Verb::Run, "shim/add/after-answer"),
    (Verb::Stop, "shim/del/before-ask"),
    (Verb::Stop, "shim/del/after-answer"),
];

/// Where the agent dies by itself, in the middle of its work.
const INSIDE: [(Verb, &str); 4] = [
    (Verb::Run, "datapath/link/after-create"),
    (Verb::Run, "store/after-commit"),
    (Verb::Stop, "datapath/unlink/after-delete"),
    (Verb::Stop, "datapath/unpin/after-links"),
];

#[test]
fn plugin_containerd_and_agent_killed_at_any_moment_leave_nothing() -> Result<()> {
    with_containerd(|node, containerd| {
        containerd.arm(node.dirs())?;
        for (verb, point) in HELD {
            for victim in [Victim::Plugin, Victim::Containerd, Victim::Agent] {
                held(node, containerd, verb, point, victim).with_context(|| format!("{victim:?} killed at {point}"))?;
            }
        }
        node.stop_agent()?;
        for (verb, point) in INSIDE {
            inside(node, containerd, verb, point).with_context(|| format!("the agent killed at {point}"))?;
        }
        node.start_agent()
    })
}

/// The victim dies while the plugin is at a point; then the plugin, if it lives, goes on.
fn held(node: &mut Node, containerd: &mut Containerd, verb: Verb, point: &str, victim: Victim) -> Result<()> {
    let dirs = node.dirs().clone();
    let pod = prepare(containerd, verb)?;
    crash::forget_trace(&dirs)?;
    crash::hold(&dirs, &[point])?;
    let call = call(containerd, verb, pod.as_ref());
    let outcome = thread::scope(|scope| {
        let asked = scope.spawn(call);
        let killed = wait::until("the plugin to be at the point", || {
            Ok(crash::trace(&dirs)?.iter().any(|passed| passed == point).then_some(()))
        });
        let killed = killed.and_then(|()| match victim {
            Victim::Plugin => containerd.kill_process("plugins/wharf-cni"),
            Victim::Containerd => containerd.kill_daemon(),
            Victim::Agent => node.kill_agent(),
        });
        // Whatever happened: nobody is to wait for the point.
        crash::release(&dirs)?;
        let outcome = asked.join().map_err(|_| anyhow!("a thread panicked"))?;
        killed.map(|()| outcome)
    })?;
    if victim == Victim::Containerd {
        ensure!(outcome.is_err(), "the call was answered by a containerd that was killed");
        // It outlives the runtime that started it, and nobody reads its answer.
        wait::until("the plugin to end", || Ok((!containerd.is_running("plugins/wharf-cni")?).then_some(())))?;
        containerd.start_daemon()?;
    }
    if victim == Victim::Agent {
        node.start_agent()?;
    }
    go_on(node, containerd)
}

/// The agent dies at one of its own points, and comes back.
fn inside(node: &mut Node, containerd: &Containerd, verb: Verb, point: &str) -> Result<()> {
    ensure!(node.start_armed_agent()?, "the agent died at its start");
    let pod = prepare(containerd, verb)?;
    crash::wish(node.dirs(), point)?;
    let call = call(containerd, verb, pod.as_ref());
    let outcome = thread::scope(|scope| {
        let asked = scope.spawn(call);
        let died = node.await_crash();
        crash::forget_wish(node.dirs())?;
        let outcome = asked.join().map_err(|_| anyhow!("a thread panicked"))?;
        died.map(|()| outcome)
    })?;
    match verb {
        Verb::Run => ensure!(outcome.is_err(), "a pod runs whose ADD has no answer"),
        Verb::Stop => outcome.context("StopPodSandbox without an agent")?,
    }
    node.start_agent()?;
    go_on(node, containerd)?;
    node.stop_agent()
}

/// The pod that is to be stopped.
fn prepare(containerd: &Containerd, verb: Verb) -> Result<Option<Pod>> {
    match verb {
        Verb::Run => Ok(None),
        Verb::Stop => containerd.run(containerd.pod("stopped")).map(Some),
    }
}

/// The call that is interrupted; it borrows nothing.
fn call(
    containerd: &Containerd,
    verb: Verb,
    pod: Option<&Pod>,
) -> impl FnOnce() -> Result<(), CriError> + Send + use<> {
    let (cri, config) = (containerd.cri(), containerd.pod("interrupted"));
    let id = pod.map(|pod| pod.id.clone()).unwrap_or_default();
    move || match verb {
        Verb::Run => cri.run_pod(&config, "").map(drop),
        Verb::Stop => cri.stop_pod(&id),
    }
}

/// What a kubelet does after an error: it stops and removes what the runtime lists, and runs the pod again.
fn go_on(node: &Node, containerd: &Containerd) -> Result<()> {
    for pod in containerd.cri().pods()? {
        containerd.remove(&pod.id)?;
    }
    let pod = containerd.run(containerd.pod("interrupted")).context("the pod again")?;
    let space = Space::open(endpoint(node, &pod)?.netns.as_ref())?;
    for gateway in gateways(node, &pod)? {
        ping(&space, gateway)?.must_answer()?;
    }
    drop(space);
    containerd.remove(&pod.id)?;
    nothing_left(node, containerd)
}

fn gateways(node: &Node, pod: &Pod) -> Result<[std::net::IpAddr; 2]> {
    let there = endpoint(node, pod)?;
    Ok([there.gateway4.context("gateway")?.into(), there.gateway6.context("gateway")?.into()])
}

#[test]
fn pods_outlive_containerd_and_stop_without_shim_or_agent() -> Result<()> {
    with_containerd(|node, containerd| {
        let (a, b) = (containerd.run(containerd.pod("a"))?, containerd.run(containerd.pod("b"))?);
        let space = |pod: &Pod| Space::open(endpoint(node, pod)?.netns.as_ref());
        let (sa, sb) = (space(&a)?, space(&b)?);
        let shell = containerd.container(&a, &SLEEP)?;
        let udp = UdpStream::start(&sa, &sb, b.v4.into(), 1000)?;
        udp.await_more(100)?;
        containerd.kill_daemon()?;
        udp.await_more(100)?;
        containerd.start_daemon()?;
        udp.await_more(100)?;
        udp.stop()?.must_be_perfect()?;
        // It knows its pods again, and takes new ones beside them.
        let c = containerd.run(containerd.pod("c"))?;
        for address in b.both()?.into_iter().chain(c.both()?) {
            containerd.cri().exec(&shell, &["ping", "-c", "1", "-W", "5", &address.to_string()])?;
        }
        drop((sa, sb));

        // A shim that was killed takes its containers with it; the network is still to be taken away.
        containerd.kill_process(&format!("-id {}", a.id)).context("kill the shim")?;
        containerd.remove(&a.id).context("a pod whose shim was killed")?;
        ensure!(endpoints(node, &a.id)?.is_empty(), "{:#?}", endpoints(node, &a.id)?);

        // Without an agent the pod stops all the same, and its link goes at once.
        let links = node.endpoint_links()?.len();
        node.kill_agent()?;
        containerd.remove(&b.id).context("a pod whose agent is away")?;
        ensure!(node.endpoint_links()?.len() + 1 == links, "{:?}", node.endpoint_links()?);
        node.start_agent()?;
        wait::until("the agent to take the deletion up", || Ok(endpoints(node, &b.id)?.is_empty().then_some(())))?;
        endpoint(node, &c)?;
        containerd.remove(&c.id)
    })
}
