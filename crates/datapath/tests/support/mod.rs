//! Worlds that the contract runs in: the fake, and the real kernel inside namespaces that the test makes.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod ctnetlink;
pub(crate) mod nft_of_thread;
pub(crate) mod sctp;
pub(crate) mod traffic;
pub(crate) mod uplink;

use std::{
    collections::BTreeSet,
    fs::{self, File},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    thread,
};

use aya::maps::{HashMap, Map, MapData};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};
use wharf_common::{CellKey, CellRow};
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner, NetnsRef, host_ifname},
    identity::Identity,
    ids::{Attachment, ContainerId, EndpointId, Epoch, IfIndex, IfName, MacAddr, NetworkName, PoolName},
    kernel::{
        self, AttachMode, ConfigSpec, DeviceMode, EndpointKernel, Kernel, LinkRef, LinkSpec, NodeSpec, ProgramSpec,
    },
    policy::Judged,
    selfcheck::{Case, CaseResult},
};
use wharf_datapath::{FakeKernel, LinuxKernel, Loader, OpenOptions};

/// Test packets for one endpoint.
pub(crate) async fn verdicts(k: &impl Kernel, id: EndpointId, cases: &[Case]) -> kernel::Result<Vec<CaseResult>> {
    let mut answers = k.observe_verdicts(&[(id, Arc::from(cases))]).await?;
    answers.pop().expect("an answer for each endpoint")
}

/// A place to test in.
pub(crate) trait World: Send + Sync + 'static {
    type K: Kernel;
    fn kernel(&self) -> &Self::K;
    /// Makes a container's namespace; the name may be used again after it ended.
    fn add_netns(&self, name: &str) -> PathBuf;
    /// Ends a namespace and takes its path away.
    fn end_netns(&self, path: &Path);
    /// Puts an interface that is not ours into a namespace.
    fn add_foreign_interface(&self, netns: &Path, ifname: &str);
    /// A file that is no namespace.
    fn plain_file(&self) -> PathBuf;
    /// Deletes a host side behind the agent's back.
    fn delete_link(&self, host_ifname: &str);
    /// Gives a host side another alias behind the agent's back.
    fn set_alias(&self, host_ifname: &str, alias: &str);
    /// Puts a veth pair into a namespace as another plugin does: both sides up, with the addresses of the record in the
    /// container.
    fn add_plugin_link(&self, record: &EndpointRecord);
    /// Whether an interface of the node exists.
    fn has_link(&self, host_ifname: &str) -> bool;
    /// Takes something of the node's own part away behind the agent's back.
    fn break_node(&self);
    /// Adds a conntrack row of the node's. False where the kernel tracks nothing.
    fn add_connection(&self, source: IpAddr, destination: IpAddr) -> bool;
    /// Sets what was judged by a cell of policy.
    fn set_judged(&self, key: &CellKey, judged: Judged);
}

#[derive(Default)]
pub(crate) struct FakeWorld(FakeKernel);

impl World for FakeWorld {
    type K = FakeKernel;
    fn kernel(&self) -> &FakeKernel {
        &self.0
    }
    fn add_netns(&self, name: &str) -> PathBuf {
        let path = PathBuf::from(format!("/run/netns/{name}"));
        self.0.add_netns(&path);
        path
    }
    fn end_netns(&self, path: &Path) {
        self.0.remove_netns(path);
    }
    fn add_foreign_interface(&self, netns: &Path, ifname: &str) {
        assert!(self.0.add_foreign_interface(netns, ifname));
    }
    fn plain_file(&self) -> PathBuf {
        self.0.add_plain_file("/etc/hostname");
        PathBuf::from("/etc/hostname")
    }
    fn delete_link(&self, host_ifname: &str) {
        assert!(self.0.remove_link_behind_the_back(host_ifname));
    }
    fn set_alias(&self, host_ifname: &str, alias: &str) {
        assert!(self.0.set_alias_behind_the_back(host_ifname, Some(alias)));
    }
    fn add_plugin_link(&self, record: &EndpointRecord) {
        let (path, ifname) = (&record.netns.path, record.attachment.ifname.clone());
        assert!(self.0.add_plugin_link(path, ifname, record.host_ifname.clone(), record.addresses()));
    }
    fn has_link(&self, host_ifname: &str) -> bool {
        self.0.has_link(host_ifname)
    }
    fn break_node(&self) {
        self.0.break_node(wharf_core::finding::NodeProblem::LinkDown { name: "wharf0".to_owned() });
    }
    fn add_connection(&self, source: IpAddr, destination: IpAddr) -> bool {
        self.0.add_connection(source, destination);
        true
    }
    fn set_judged(&self, key: &CellKey, judged: Judged) {
        assert!(self.0.set_judged(key, judged));
    }
}

/// The real kernel, in a network and a mount namespace of this test's own. Everything in it goes when the test's
/// threads end.
pub(crate) struct LinuxWorld {
    pub(crate) dir: Scratch,
    pub(crate) kernel: LinuxKernel,
}

/// A directory with a tmpfs on it that only this test's mount namespace sees, and a bpffs at `bpf` inside.
pub(crate) struct Scratch(tempfile::TempDir);

impl Scratch {
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // With it go the bpffs and the bound namespaces; then the directory can be removed.
        if let Err(e) = umount2(self.path(), MntFlags::MNT_DETACH) {
            eprintln!("cannot unmount {}: {e}", self.path().display());
        }
    }
}

/// Where this version's pins are on a bpffs.
pub(crate) fn pins_on(bpffs: &Path) -> PathBuf {
    bpffs.join("wharf").join(format!("v{}", wharf_common::ABI_VERSION))
}

impl LinuxWorld {
    pub(crate) fn bpffs(&self) -> PathBuf {
        self.dir.path().join("bpf")
    }

    /// Where this version's pins are.
    pub(crate) fn pins(&self) -> PathBuf {
        pins_on(&self.bpffs())
    }

    /// Runs a job in the namespace at a path.
    pub(crate) fn inside<T: Send + 'static>(path: &Path, job: impl FnOnce() -> T + Send + 'static) -> T {
        let ns = File::open(path).expect("open netns");
        let visitor = thread::spawn(move || {
            setns(ns, CloneFlags::CLONE_NEWNET).expect("setns");
            job()
        });
        visitor.join().expect("job in namespace")
    }
}

impl World for LinuxWorld {
    type K = LinuxKernel;
    fn kernel(&self) -> &LinuxKernel {
        &self.kernel
    }
    fn add_netns(&self, name: &str) -> PathBuf {
        new_netns(self.dir.path(), name)
    }
    fn end_netns(&self, path: &Path) {
        umount2(path, MntFlags::MNT_DETACH).expect("unbind namespace");
        fs::remove_file(path).expect("remove namespace file");
    }
    fn add_foreign_interface(&self, netns: &Path, ifname: &str) {
        let ifname = ifname.to_owned();
        LinuxWorld::inside(netns, move || {
            run("ip", &["link", "add", &ifname, "type", "veth", "peer", "name", "other0"])
        });
    }
    fn plain_file(&self) -> PathBuf {
        let path = self.dir.path().join("plain");
        File::create(&path).expect("plain file");
        path
    }
    fn delete_link(&self, host_ifname: &str) {
        run("ip", &["link", "del", host_ifname]);
    }
    fn set_alias(&self, host_ifname: &str, alias: &str) {
        run("ip", &["link", "set", "dev", host_ifname, "alias", alias]);
    }
    fn add_plugin_link(&self, record: &EndpointRecord) {
        let (path, ifname) = (record.netns.path.display().to_string(), record.attachment.ifname.to_string());
        let host = record.host_ifname.as_str();
        run("ip", &["link", "add", host, "type", "veth", "peer", "name", &ifname, "netns", &path]);
        run("ip", &["link", "set", host, "up"]);
        let addresses: Vec<_> = record.addresses().map(|a| a.to_string()).collect();
        LinuxWorld::inside(&record.netns.path, move || {
            for address in &addresses {
                run("ip", &["addr", "add", address, "dev", &ifname, "nodad"]);
            }
            run("ip", &["link", "set", &ifname, "up"]);
        });
    }
    fn has_link(&self, host_ifname: &str) -> bool {
        nix::net::if_::if_nametoindex(host_ifname).is_ok()
    }
    fn break_node(&self) {
        run("ip", &["link", "set", "dev", "wharf0", "down"]);
    }
    fn add_connection(&self, source: IpAddr, destination: IpAddr) -> bool {
        ctnetlink::add(source, destination, ctnetlink::UDP, 0)
    }
    fn set_judged(&self, key: &CellKey, judged: Judged) {
        let data = MapData::from_pin(self.pins().join("shared/POLICY_CELLS")).expect("the cells");
        let mut cells: HashMap<_, CellKey, CellRow> = Map::HashMap(data).try_into().expect("rows");
        let row = cells.get(key, 0).expect("the cell");
        cells.insert(key, CellRow { packets: judged.packets, bytes: judged.bytes, ..row }, 0).expect("set");
    }
}

/// Makes a network namespace and binds it to a file in the directory.
pub(crate) fn new_netns(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    File::create(&path).expect("file to bind a namespace to");
    let target = path.clone();
    let maker = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("new network namespace");
        let here = Path::new("/proc/thread-self/ns/net");
        mount(Some(here), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("bind namespace");
    });
    maker.join().expect("make namespace");
    path
}

/// Runs a command to its end.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("start {program}: {error}"));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {told}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Makes the namespaces and the bpffs on this thread; the threads it starts are born into them.
fn isolate() -> Scratch {
    assert!(nix::unistd::geteuid().is_root(), "this test makes namespaces: run it as root");
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).expect("new namespaces");
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private mounts");
    let dir = tempfile::tempdir().expect("temp dir");
    mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), none).expect("mount tmpfs");
    let dir = Scratch(dir);
    let bpffs = dir.path().join("bpf");
    fs::create_dir(&bpffs).expect("bpffs dir");
    mount(Some("bpf"), &bpffs, Some("bpf"), MsFlags::empty(), none).expect("mount bpffs");
    dir
}

/// A guest's environment can ask for netkit.
pub(crate) fn open(bpffs: &Path, run_dir: &Path, attach_mode: Option<AttachMode>) -> kernel::Result<LinuxKernel> {
    let device_mode = match std::env::var("WHARF_DEVICE_MODE").as_deref() {
        Ok("netkit") => DeviceMode::Netkit,
        _ => DeviceMode::Veth,
    };
    let (bpffs, run_dir) = (bpffs.to_owned(), run_dir.to_owned());
    LinuxKernel::open(OpenOptions { bpffs, run_dir, attach_mode, device_mode }, Loader::default())
}

/// Runs a test on a thread of its own inside fresh namespaces, with a runtime born there.
pub(crate) fn in_linux_world<F>(mode: Option<AttachMode>, test: impl FnOnce(LinuxWorld) -> F + Send + 'static)
where
    F: Future<Output = ()>,
{
    let isolated = thread::spawn(move || {
        let dir = isolate();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
        runtime.block_on(async {
            let kernel = open(&dir.path().join("bpf"), dir.path(), mode).expect("open kernel");
            test(LinuxWorld { dir, kernel }).await;
        });
    });
    if let Err(panic) = isolated.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs a job on a thread of its own inside fresh namespaces, with a bpffs at `bpf` in the directory given.
pub(crate) fn in_namespaces(job: impl FnOnce(&Path) + Send + 'static) {
    let isolated = thread::spawn(move || {
        let dir = isolate();
        job(dir.path());
    });
    if let Err(panic) = isolated.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs a test on the fake.
pub(crate) fn in_fake_world<F: Future<Output = ()>>(test: impl FnOnce(FakeWorld) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(test(FakeWorld::default()));
}

pub(crate) const ROUTER4: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub(crate) const ROUTER6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);

pub(crate) fn id(n: u16) -> EndpointId {
    EndpointId::try_from(n).expect("endpoint id")
}

pub(crate) fn node_spec() -> NodeSpec {
    NodeSpec {
        router4: Some(ROUTER4),
        router6: Some(ROUTER6),
        former_routers: Vec::new(),
        cidrs: vec!["10.77.0.0/16".parse().expect("cidr"), "fd77::/64".parse().expect("cidr")],
        peers: Vec::new(),
        overlay: None,
        mtu: 1500,
        masquerade: None,
        local_by_stack: false,
        announce: false,
        redirects: false,
    }
}

/// The record of endpoint `n` in a namespace; its link's indexes are not known yet. Address `n + 1` of the pools.
pub(crate) fn record(n: u16, epoch: u64, netns: &NetnsRef, ifname: &str) -> EndpointRecord {
    let [high, low] = (n + 1).to_be_bytes();
    let name = format!("container-{n}");
    EndpointRecord {
        id: id(n),
        epoch: Epoch(epoch),
        attachment: Attachment {
            network: NetworkName::parse("test").expect("network"),
            container_id: ContainerId::parse(&name).expect("container id"),
            ifname: IfName::parse(ifname).expect("ifname"),
        },
        netns: netns.clone(),
        pool: PoolName::parse("default").expect("pool"),
        ip_owner: IpOwner::Endpoint,
        ipv4: Some(Ipv4Addr::new(10, 77, high, low)),
        ipv6: Some(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, n + 1)),
        gateway4: Some(ROUTER4),
        gateway6: Some(ROUTER6),
        host_ifname: host_ifname(id(n), Epoch(epoch)),
        host_ifindex: IfIndex(0),
        container_ifindex: IfIndex(0),
        container_mac: MacAddr([2, 0x77, 0, 0, high, low]),
        host_mac: MacAddr([2, 0x77, 0, 1, high, low]),
        mtu: 1500,
        mtu_follows: true,
        container_mtu: None,
        labels: BTreeSet::new(),
        identity: Identity(256 + u32::from(n)),
        pod_name: None,
        pod_namespace: None,
        runtime: None,
        created_unix_ms: 0,
        ports: Vec::new(),
        masquerade: None,
        bandwidth: Default::default(),
        sources: Default::default(),
        policy_enforcement: wharf_core::policy::Enforcement::Default,
        named_ports: std::collections::BTreeMap::new(),
        awaits_labels: false,
        ipam: None,
        routes: None,
        link_owner: Default::default(),
        pod_row: None,
    }
}

pub(crate) fn program_spec(r: &EndpointRecord) -> ProgramSpec {
    ProgramSpec { id: r.id, container_mac: r.container_mac, host_mac: r.host_mac, debug: false, keep: false }
}

pub(crate) fn link_spec(r: &EndpointRecord) -> LinkSpec {
    LinkSpec {
        id: r.id,
        epoch: r.epoch,
        attachment: r.attachment.clone(),
        host_ifname: r.host_ifname.clone(),
        netns: r.netns.clone(),
        ifname: r.attachment.ifname.clone(),
        container_mac: r.container_mac,
        host_mac: r.host_mac,
        mtu: r.mtu,
    }
}

pub(crate) fn link_ref(r: &EndpointRecord) -> LinkRef {
    LinkRef::of(r)
}

pub(crate) fn config_spec(r: &EndpointRecord) -> ConfigSpec {
    ConfigSpec {
        epoch: r.epoch,
        host_ifindex: r.host_ifindex,
        identity: r.identity,
        ipv4: r.ipv4,
        ipv6: r.ipv6,
        gateway4: r.gateway4,
        gateway6: r.gateway6,
        live: true,
        trace: false,
        local_by_stack: false,
        chained: !r.link_owner.is_wharf(),
        bandwidth: r.bandwidth,
        sources: r.sources.clone(),
    }
}

/// Creates an endpoint in the order the agent does; fills in the link's indexes.
pub(crate) async fn create<K: Kernel>(kernel: &K, record: &mut EndpointRecord) {
    kernel.ensure_programs(&program_spec(record)).await.expect("programs");
    let link = kernel.ensure_link(&link_spec(record)).await.expect("link");
    record.host_ifindex = link.host_ifindex;
    record.container_ifindex = link.container_ifindex;
    kernel.ensure_config(record.id, &config_spec(record)).await.expect("config");
    kernel.ensure_attached(&link_ref(record)).await.expect("attached");
    kernel.ensure_connected(record).await.expect("connected");
    kernel.ensure_reachable(record).await.expect("reachable");
}

/// Deletes an endpoint in the order the agent does.
pub(crate) async fn delete<K: Kernel>(kernel: &K, record: &EndpointRecord) {
    kernel.remove_attached(&link_ref(record)).await.expect("detached");
    kernel.remove_reachable(record).await.expect("unreachable");
    kernel.remove_programs(record.id).await.expect("programs gone");
    kernel.remove_link(&link_ref(record)).await.expect("link gone");
}

/// Creates an endpoint in a fresh namespace.
pub(crate) async fn new_endpoint<W: World>(world: &W, n: u16, epoch: u64) -> EndpointRecord {
    let path = world.add_netns(&format!("ns-{n}-{epoch}"));
    let netns = world.kernel().observe_netns(&path).await.expect("netns");
    let mut record = record(n, epoch, &netns, "eth0");
    create(world.kernel(), &mut record).await;
    record
}

/// Asserts that nothing of any endpoint is left.
pub(crate) async fn assert_no_endpoints<K: Kernel>(kernel: &K) {
    let dump = kernel.dump().await.expect("dump");
    assert_eq!(dump.links, [], "links");
    assert_eq!(dump.routes.iter().filter(|r| r.ifindex.is_some()).collect::<Vec<_>>(), Vec::<&_>::new(), "routes");
    assert_eq!(dump.endpoint_rows, [], "rows");
    assert_eq!(kernel.call_slots().await.expect("slots"), Vec::<u32>::new());
    assert_eq!(dump.pins, [], "pins");
    assert_eq!(dump.foreign_pins, Vec::<PathBuf>::new(), "foreign pins");
}

/// The address as text, with the scope of its family.
pub(crate) fn first_address(record: &EndpointRecord) -> IpAddr {
    record.addresses().next().expect("an address")
}
