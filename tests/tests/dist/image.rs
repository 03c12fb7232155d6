//! The container image: a sound OCI layout, and an agent that serves a node from it under podman, with no more than the
//! DaemonSet gives it.

use std::{collections::BTreeSet, fs, os::unix::fs::MetadataExt as _, path::Path};

use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;
use serde_json::Value;
use wharf_tests::{
    Node, NodeConfig, Sandbox, icmp,
    podman::{IMAGE, Podman},
    scratch, wait,
};

use crate::{kubernetes, package, tool};

fn json(path: &Path) -> Result<Value> {
    serde_json::from_slice(&fs::read(path).with_context(|| format!("read {}", path.display()))?)
        .with_context(|| format!("read {}", path.display()))
}

#[test]
fn the_layout_is_sound_and_holds_programs_and_no_shell() -> Result<()> {
    let root = scratch::fresh_dir("layout")?;
    let archive = package(".oci.tar")?.display().to_string();
    tool("tar", &["--extract", "--directory", &root.display().to_string(), "--file", &archive])?.ok()?;
    ensure!(json(&root.join("oci-layout"))?["imageLayoutVersion"] == "1.0.0", "the layout's version");
    let blob = |descriptor: &Value| -> Result<std::path::PathBuf> {
        let sum = descriptor["digest"].as_str().and_then(|d| d.strip_prefix("sha256:")).context("no digest")?;
        let path = root.join("blobs/sha256").join(sum);
        ensure!(descriptor["size"] == fs::metadata(&path)?.len(), "size of {sum}");
        let said = tool("sha256sum", &[&path.display().to_string()])?.ok()?;
        ensure!(said.starts_with(sum), "{said}");
        Ok(path)
    };
    let manifest = json(&blob(&json(&root.join("index.json"))?["manifests"][0])?)?;
    let config = json(&blob(&manifest["config"])?)?;
    let layer = blob(&manifest["layers"][0])?;
    let plain = root.join("layer.tar");
    std::io::copy(&mut GzDecoder::new(fs::File::open(&layer)?), &mut fs::File::create(&plain)?)?;
    let sum = tool("sha256sum", &[&plain.display().to_string()])?.ok()?;
    let sum = format!("sha256:{}", sum.split(' ').next().unwrap_or_default());
    ensure!(config["rootfs"]["diff_ids"][0] == sum.as_str(), "the layer is not {sum}");
    let mut programs = BTreeSet::new();
    for entry in tar::Archive::new(fs::File::open(&plain)?).entries()? {
        let entry = entry?;
        let header = entry.header();
        ensure!((header.uid()?, header.gid()?) == (0, 0), "{:?} is not root's", entry.path()?);
        if header.entry_type().is_file() && header.mode()? & 0o111 != 0 {
            programs.insert(entry.path()?.display().to_string().trim_start_matches("./").to_owned());
        }
    }
    let expected =
        ["opt/cni/bin/wharf-cni", "usr/bin/wharf", "usr/bin/wharf-agent", "usr/bin/wharf-kube", "usr/bin/wharf-node"];
    ensure!(programs == expected.map(str::to_owned).into(), "{programs:?}");
    Ok(())
}

#[test]
fn the_agent_serves_a_node_from_its_image_with_what_the_daemonset_gives_it() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let podman = Podman::start(&node)?;
    let archive = package(".oci.tar")?.display().to_string();
    let loaded = podman.ok(&["load", "--input", &archive])?;
    let image = format!("localhost/wharf:{}", env!("CARGO_PKG_VERSION"));
    ensure!(loaded.contains(&image), "{loaded}");
    let ours = |line: Vec<&str>| -> Vec<String> {
        line.into_iter().map(|word| if word == IMAGE { image.clone() } else { word.to_owned() }).collect()
    };
    // The test build's programs are linked dynamically, and the image holds no library.
    let libraries = ["/lib", "/lib64"].into_iter().filter(|directory| Path::new(directory).exists());
    let libraries: Vec<String> = libraries.map(|directory| format!("--volume={directory}:{directory}:ro")).collect();
    let podman_run = |options: &[&str], program: &[&str]| -> Result<String> {
        let options: Vec<&str> = libraries.iter().map(String::as_str).chain(options.iter().copied()).collect();
        let line = ours(podman.run_line(&options, program));
        podman.ok(&line.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let pod = kubernetes::pod()?;
    let container = kubernetes::container(&pod, "agent")?;

    // The init container.
    let host = node.dirs().root.join("host");
    fs::create_dir_all(host.join("plugins"))?;
    fs::create_dir(host.join("networks"))?;
    fs::create_dir(host.join("servers"))?;
    let conflist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/10-wharf.conflist");
    let network = host.join("networks/10-wharf.conflist");
    // Of an earlier boot.
    fs::copy(&conflist, &network)?;
    let volume = format!("{}:/host", host.display());
    let command = kubernetes::texts(&pod["initContainers"][0]["command"]);
    let (entry, arguments) = command.split_first().context("no command")?;
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let user = kubernetes::container(&pod, "wharf-kube")?["securityContext"]["runAsUser"].to_string();
    let options = ["--rm", "--network", "none", "--cap-drop", "all", "--cap-add", "CHOWN", "--read-only", "--volume"];
    let options = [&options[..], &[volume.as_str(), "--entrypoint", entry.as_str()]].concat();
    // Also a later pod, which finds the directory.
    for _ in 0..2 {
        podman_run(&options, &arguments)?;
        let servers = fs::metadata(host.join("servers"))?;
        ensure!(servers.uid().to_string() == user && servers.mode() & 0o7777 == 0o700, "{servers:?}");
    }
    let same = |file: &Path, source: &Path| Ok::<_, std::io::Error>(fs::read(file)? == fs::read(source)?);
    ensure!(same(&host.join("plugins/wharf-cni"), &wharf_tests::process::bin("wharf-cni")?)?, "another plugin");
    ensure!(!network.exists(), "the network is there before the agent");

    // The agent. podman's default profile is the one that containerd takes for RuntimeDefault.
    let dirs = node.dirs();
    let mut options: Vec<String> =
        ["--detach", "--name", "agent", "--network", "host", "--read-only", "--cap-drop", "all"]
            .map(str::to_owned)
            .into();
    for capability in kubernetes::texts(&container["securityContext"]["capabilities"]["add"]) {
        options.extend(["--cap-add".to_owned(), capability]);
    }
    // Kubernetes makes this one of the host's; the test's agent has its own.
    fs::create_dir_all("/run/netns")?;
    for (from, to) in [
        (dirs.run.as_path(), "/run/wharf"),
        (&dirs.state, "/var/lib/wharf"),
        (&dirs.bpffs, "/sys/fs/bpf"),
        (&host, "/host"),
        (Path::new("/run/netns"), "/run/netns:rslave"),
    ] {
        options.extend(["--volume".to_owned(), format!("{}:{to}", from.display())]);
    }
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let feed = ["--cluster-feed", "/run/wharf/feed", "--cluster-feed-group", "wharf-feed"];
    podman_run(&options, &[&["--node-name", "quay", "--health-interval-ms", "0"][..], &feed].concat())?;
    let logs = || podman.finish(&["logs", "agent"]).map(|said| said.describe()).unwrap_or_default();
    let probe = |name: &str| {
        let command = kubernetes::texts(&container[name]["exec"]["command"]);
        let line: Vec<&str> = ["exec", "agent"].into_iter().chain(command.iter().map(String::as_str)).collect();
        podman.finish(&line)
    };
    for name in ["startupProbe", "livenessProbe", "readinessProbe"] {
        wait::until(name, || Ok((probe(name)?.code() == 0).then_some(()))).with_context(logs)?;
    }
    ensure!(same(&network, &conflist)?, "another network");

    // wharf-kube: its program, and its group at the feed.
    let feed = fs::metadata(dirs.run.join("feed/feed.sock"))?;
    ensure!(feed.gid().to_string() == user && feed.mode() & 0o777 == 0o660, "{feed:?}");
    let options = ["--rm", "--network", "none", "--cap-drop", "all", "--read-only", "--user", &user];
    let options = [&options[..], &["--entrypoint", "/usr/bin/wharf-kube"]].concat();
    let said = podman_run(&options, &["--version"])?;
    ensure!(said.contains(env!("CARGO_PKG_VERSION")), "{said}");

    // Forwarding is on: the agent could write below /proc/sys.
    let forwarding = node.space().run(|| fs::read_to_string("/proc/sys/net/ipv4/ip_forward"))??;
    ensure!(forwarding.trim() == "1", "{}", logs());

    // Namespaces that are made after the container was.
    let [web, db] = ["web", "db"].map(|name| Sandbox::create(Path::new("/run/netns"), name));
    let (web, db) = (web?, db?);
    let at_web = node.attach(&web).with_context(logs)?;
    let at_db = node.attach(&db).with_context(logs)?;
    let reached = |to| icmp::ping(web.space()?, to)?.must_answer();
    reached(at_db.v4()?.into())?;
    reached(at_db.v6()?.into())?;

    // A restart of the pod.
    podman.ok(&["restart", "agent"])?;
    wait::until("readiness", || Ok((probe("readinessProbe")?.code() == 0).then_some(()))).with_context(logs)?;
    reached(at_db.v4()?.into())?;
    node.detach(&at_web)?;
    node.detach(&at_db)?;
    let findings = node.audit()?.findings;
    ensure!(findings.is_empty(), "{findings:?}");
    podman.ok(&["rm", "--force", "agent"])?;
    Ok(())
}
