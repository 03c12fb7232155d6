//! Pods that live and go as they should.

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv6Addr, SocketAddr, TcpStream},
    thread,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::json;
use wharf_api::BandwidthLimit;
use wharf_tests::{
    Node,
    containerd::{Containerd, Pod, PortMapping},
};

use crate::support::{SLEEP, WITHOUT_CAPABILITIES, endpoint, endpoints, fetch, nothing_left, serve, with_containerd};

/// As many as a small node has.
const MANY: usize = 50;

#[test]
fn pods_of_containerd_are_what_was_asked_for_and_stop_as_often_as_one_likes() -> Result<()> {
    with_containerd(|node, containerd| {
        pods_talk(node, containerd).context("pods talk")?;
        what_a_pod_asks_for(node, containerd).context("what a pod asks for")?;
        host_ports(node, containerd).context("host ports")?;
        gc_of_another_runtime(node, containerd).context("GC of another runtime")?;
        deletes(node, containerd).context("deletes")
    })
}

fn pods_talk(node: &Node, containerd: &Containerd) -> Result<()> {
    let (a, b) = (containerd.run(containerd.pod("a"))?, containerd.run(containerd.pod("b"))?);
    endpoint(node, &a)?;
    endpoint(node, &b)?;
    serve(containerd, &a, "a")?;
    let client = containerd.container(&b, &SLEEP)?;
    for address in a.both()? {
        containerd.cri().exec(&client, &["ping", "-c", "2", "-W", "5", &address.to_string()])?;
        let answer = fetch(containerd, &client, &format!("http://{}/", SocketAddr::new(address, 80)))?;
        ensure!(answer == "a", "{address} answered {answer:?}");
    }
    containerd.remove(&a.id)?;
    containerd.remove(&b.id)?;
    nothing_left(node, containerd)
}

fn what_a_pod_asks_for(node: &Node, containerd: &Containerd) -> Result<()> {
    let mut config = containerd.pod("asks");
    let annotations = [
        ("kubernetes.io/ingress-bandwidth", "10M"),
        ("kubernetes.io/egress-bandwidth", "20M"),
        ("wharf/ips", "10.87.3.77,fd57:4a7f:e8f::3:78"),
        ("wharf/mac", "02:57:00:00:00:77"),
    ];
    config.annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    config.labels = [("app".to_owned(), "web".to_owned())].into();
    let pod = containerd.run(config)?;
    let there = endpoint(node, &pod)?;
    let rate = |limit: Option<BandwidthLimit>| limit.map(|limit| limit.rate);
    ensure!(
        (rate(there.bandwidth.ingress), rate(there.bandwidth.egress)) == (Some(10_000_000), Some(20_000_000)),
        "{there:#?}"
    );
    ensure!((pod.v4, pod.v6) == ([10, 87, 3, 77].into(), Some("fd57:4a7f:e8f::3:78".parse::<Ipv6Addr>()?)), "{pod:#?}");
    ensure!(there.container_mac == "02:57:00:00:00:77", "{there:#?}");
    // The pod's namespace, name and UID come by CNI_ARGS; its labels by no way that CNI has.
    let labels = [
        "k8s:io.kubernetes.pod.name=asks",
        "k8s:io.kubernetes.pod.namespace=default",
        "k8s:io.kubernetes.pod.uid=uid-asks",
    ];
    ensure!(there.labels == labels, "{there:#?}");
    containerd.remove(&pod.id)
}

/// With the shipped list a host port is there; with a list that does not ask for the capability, containerd runs the
/// pod and nobody hears of its port.
fn host_ports(node: &Node, containerd: &Containerd) -> Result<()> {
    let published = |name: &str, host_port: i32, handler: &str| -> Result<Pod> {
        let port = PortMapping { container_port: 80, host_port, ..PortMapping::default() };
        let mut config = containerd.pod(name);
        config.port_mappings = vec![port];
        let pod = containerd.run_as(config, handler)?;
        serve(containerd, &pod, name)?;
        Ok(pod)
    };
    let (with, without) = (published("with", 8080, "")?, published("without", 8081, WITHOUT_CAPABILITIES)?);
    let there = endpoint(node, &with)?;
    let sides: Vec<String> = there.ports.iter().map(ToString::to_string).collect();
    ensure!(sides == ["8080/tcp"] && endpoint(node, &without)?.ports.is_empty(), "{there:#?}");
    let client = containerd.run(containerd.pod("client"))?;
    let shell = containerd.container(&client, &SLEEP)?;
    let gateways = [there.gateway4.context("gateway")?.into(), there.gateway6.context("gateway")?.into()];
    for gateway in gateways {
        let answer = fetch(containerd, &shell, &format!("http://{}/", SocketAddr::new(gateway, 8080)))?;
        ensure!(answer == "with", "{gateway} answered {answer:?}");
        let (open, refused) = (SocketAddr::new(gateway, 8080), SocketAddr::new(gateway, 8081));
        node.space().run(|| TcpStream::connect(open))?.with_context(|| format!("{open} from the node"))?;
        let tried = node.space().run(|| TcpStream::connect(refused))?;
        ensure!(tried.is_err(), "{refused} is open, and nobody asked for it");
    }
    for pod in [&with, &without, &client] {
        containerd.remove(&pod.id)?;
    }
    let left = node.wharf(&["port", "list", "-o", "json"])?.ok()?;
    ensure!(left.trim() == "[]", "{left}");
    Ok(())
}

/// Another runtime, with the same network name, lists what it has itself; that is not containerd's pods.
fn gc_of_another_runtime(node: &Node, containerd: &Containerd) -> Result<()> {
    let pod = containerd.run(containerd.pod("kept"))?;
    let before = endpoint(node, &pod)?;
    let conf = node.netconf().with("name", json!(before.network));
    let sandbox = node.sandbox("own")?;
    let own = node.attach_with(&sandbox, "eth0", &conf)?;
    let gc = conf.with("cni.dev/valid-attachments", json!([])).with("log-level", json!("info"));
    let answer = node.cni("GC").conf(&gc).run()?;
    answer.silent()?;
    let told = format!("kept endpoint {}, which containerd added", before.id);
    ensure!(answer.finished.stderr.contains(&told), "{:?}", answer.finished);
    ensure!(node.endpoint(&own).is_err(), "what the runtime added itself and does not list stays");
    ensure!(endpoint(node, &pod)? == before, "{:#?}", endpoint(node, &pod)?);
    let shown = node.wharf(&["endpoint", "get", &before.id.to_string()])?.ok()?;
    ensure!(shown.lines().any(|line| line.split_whitespace().eq(["Runtime:", "containerd"])), "{shown}");
    let explained = node.wharf(&["explain", &before.id.to_string()])?.ok()?;
    ensure!(explained.contains("containerd added it"), "{explained}");
    containerd.remove(&pod.id)
}

/// containerd sends DEL again with each further StopPodSandbox, with an empty CNI_NETNS and without prevResult.
fn deletes(node: &Node, containerd: &Containerd) -> Result<()> {
    let (dir, cri) = (containerd.dir().display(), containerd.cri());
    let real = fs::read(containerd.plugins().join("wharf-cni")).context("read the plugin")?;
    fs::copy(containerd.plugins().join("wharf-cni"), containerd.dir().join("real")).context("copy the plugin")?;
    let recorder = format!(
        "#!/bin/sh\ncat > {dir}/input\n\
         echo \"$CNI_COMMAND netns=${{CNI_NETNS:+set}} prevResult=$(grep -c prevResult {dir}/input)\" >> {dir}/calls\n\
         exec {dir}/real < {dir}/input\n"
    );
    containerd.set_plugin(recorder.as_bytes())?;
    let pod = containerd.run(containerd.pod("twice"))?;
    // Through `exec` in the recorder the plugin still has containerd as its parent.
    endpoint(node, &pod)?;
    cri.stop_pod(&pod.id)?;
    ensure!(endpoints(node, &pod.id)?.is_empty(), "{:#?}", endpoints(node, &pod.id)?);
    cri.stop_pod(&pod.id).context("StopPodSandbox again")?;
    cri.remove_pod(&pod.id)?;
    for unknown in [pod.id.as_str(), "0123456789abcdef"] {
        cri.remove_pod(unknown).context("RemovePodSandbox of the unknown")?;
    }
    let calls = fs::read_to_string(containerd.dir().join("calls")).context("what the recorder wrote")?;
    let calls: Vec<&str> = calls.lines().collect();
    let [add, first, again @ ..] = calls.as_slice() else { anyhow::bail!("{calls:?}") };
    ensure!(*add == "ADD netns=set prevResult=0" && *first == "DEL netns=set prevResult=1", "{calls:?}");
    ensure!(!again.is_empty() && again.iter().all(|call| *call == "DEL netns= prevResult=0"), "{calls:?}");
    containerd.set_plugin(&real)
}

#[test]
fn fifty_pods_come_and_go_at_once() -> Result<()> {
    with_containerd(|node, containerd| {
        let names: Vec<String> = (0..MANY).map(|n| format!("pod{n}")).collect();
        let pods = at_once(&names, |name| containerd.run(containerd.pod(name)))?;
        for pod in &pods {
            endpoint(node, pod)?;
        }
        let addresses: BTreeSet<_> =
            pods.iter().map(Pod::both).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        ensure!(addresses.len() == 2 * MANY && node.endpoints()?.len() == MANY, "{addresses:?}");
        ensure!(node.audit()?.findings.is_empty(), "{:#?}", node.audit()?.findings);
        at_once(&pods, |pod| containerd.remove(&pod.id)).map(drop)
    })
}

/// Does it for all of them at the same time.
fn at_once<I: Sync, T: Send>(items: &[I], work: impl Fn(&I) -> Result<T> + Sync) -> Result<Vec<T>> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = items.iter().map(|item| scope.spawn(move || work(item))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    })
}
