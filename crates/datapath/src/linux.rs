//! The implementation of the kernel traits on Linux.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
};

use async_trait::async_trait;
use ipnet::IpNet;
use wharf_common::PeerRow;
use wharf_core::{
    endpoint::{EndpointRecord, NetnsRef},
    finding::{EndpointProblem, NodeProblem},
    flow::{FlowFilter, FlowList, FlowUsage, ProxyClients},
    ids::{ContainerId, EndpointId, Epoch, IfName},
    kernel::{
        AttachMode, Attached, ConfigSpec, CounterRow, DeviceMode, EndpointKernel, FlowKernel, KernelDump, KernelError,
        KernelErrorKind, KernelFeatures, Link, LinkRef, LinkRelease, LinkSpec, MapInfo, MissingRoute, NatKernel,
        NatView, NodeKernel, NodeSpec, OverlayView, PeerRoute, PluginLink, PolicyKernel, ProgramSpec, Programs, Result,
        RouteRow,
    },
    mtu::Uplink,
    nat::{NatEntry, PortMapping},
    overlap::{NodeNetwork, NodeNetworks},
    policy::{Mode, PolicyRows, RowChange},
    selfcheck::{Case, CaseResult},
    upgrade::{Takeover, Upgraded, VersionTree},
};
use wharf_crash as crash;

use crate::{
    address_changes::AddressChanges,
    announce::Announcer,
    bpf::{self, Bpf, loader::Loader},
    connect, container_side,
    error::fail,
    events::{EventReader, Turn},
    features,
    link_watch::{self, Carriers, LinkWatch},
    mtu,
    nat::Nat,
    netlink,
    netns::{self, NetnsThread},
    networks, node, observe, peers, plugin_link, ports,
    program_log::ProgramLog,
    reaper::{self, Reaper, Removal},
    redirects, source_rule, speakers,
};

/// Options of [`LinuxKernel::open`].
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// Mount point of a bpffs. Pins go to `<bpffs>/wharf/v<ABI version>`.
    pub bpffs: PathBuf,
    /// For records of changed settings.
    pub run_dir: PathBuf,
    /// `None`: clsact.
    pub attach_mode: Option<AttachMode>,
    /// Of new links.
    pub device_mode: DeviceMode,
}

/// The kernel, in the network namespace of the opening thread. Calling threads must be in that namespace and in a tokio
/// runtime. Clones share one state.
#[derive(Clone)]
pub struct LinuxKernel {
    inner: Arc<Inner>,
}

struct Inner {
    features: KernelFeatures,
    bpf: Bpf,
    nat: Nat,
    announcer: Announcer,
    netns: NetnsThread,
    reaper: Reaper,
    /// Whether policy has redirects: the last argument of [`PolicyKernel::ensure_way_to_proxy`], else the first node
    /// specification's value (later ones may be stale). Locked, on threads that may block, while the way to the proxy
    /// changes.
    redirects: Mutex<Option<bool>>,
    events_taken: Arc<AtomicBool>,
    log_taken: Arc<AtomicBool>,
}

impl LinuxKernel {
    /// Opens or makes shared maps and sink, and starts two threads. Blocks for milliseconds.
    ///
    /// # Errors
    /// `Permission`: not root, `NotFound`: no bpffs, `Unsupported`: old kernel, `Conflict`: another version's maps.
    pub fn open(options: OpenOptions, loader: Loader) -> Result<Self> {
        features::check_capabilities()?;
        let features = features::probe(options.attach_mode, options.device_mode)?;
        let bpf = Bpf::open(&options.bpffs, &options.run_dir, features.attach_mode, loader)?;
        let netns = NetnsThread::start()?;
        let reaper = Reaper::start()?;
        let (events_taken, log_taken) = Default::default();
        let nat = Nat::new(&options.run_dir);
        let announcer = Announcer::new(&options.run_dir);
        let redirects = Mutex::default();
        let inner = Inner { features, bpf, nat, announcer, netns, reaper, redirects, events_taken, log_taken };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Opens the event ring buffer. Needs a tokio runtime.
    ///
    /// # Errors
    /// `Exhausted` when there is a reader already.
    pub fn events(&self) -> Result<EventReader> {
        let turn = Turn::take(&self.inner.events_taken)?;
        EventReader::new(self.inner.bpf.event_ring()?, turn)
    }

    /// Watches the endpoints' links. `before`: state of an earlier watch. Needs a tokio runtime.
    ///
    /// # Errors
    /// A refusal.
    pub async fn watch_links(&self, before: Carriers) -> Result<LinkWatch> {
        LinkWatch::new(self.blocking("watch links", move |_| link_watch::open(before)).await?)
    }

    /// Subscribes to address changes on the node.
    ///
    /// # Errors
    /// A refusal.
    pub fn address_changes(&self) -> Result<AddressChanges> {
        AddressChanges::subscribe()
    }

    /// Endpoints that other ABI versions have pinned.
    ///
    /// # Errors
    /// Unreadable pins.
    pub async fn other_versions(&self) -> Result<Vec<VersionTree>> {
        self.blocking("list pins", |k| k.bpf.other_versions()).await
    }

    /// Takes over endpoints from other ABI versions without packet loss, and removes those versions' pins except for
    /// the endpoints in `keep`. Repeatable, also after a SIGKILL.
    ///
    /// # Errors
    /// The error says which version's programs are in force.
    pub async fn upgrade(
        &self,
        endpoints: Vec<Takeover>,
        keep: BTreeSet<EndpointId>,
        moves: impl Fn() + Send + 'static,
    ) -> Result<Upgraded> {
        self.blocking("upgrade endpoints", move |k| k.bpf.upgrade(&endpoints, &keep, &moves)).await
    }

    /// Opens the log of the programs with debug on. `program_id`: any `deliver` of these.
    ///
    /// # Errors
    /// `NotFound`: gone or without debug, `Exhausted`: there is a reader already.
    pub async fn program_log(&self, program_id: u32) -> Result<ProgramLog> {
        let records = self.blocking("read program log", move |_| ProgramLog::find(program_id)).await?;
        ProgramLog::new(records, &self.inner.log_taken)
    }

    /// Completes even when the future is dropped.
    async fn blocking<T: Send + 'static>(
        &self,
        operation: &'static str,
        job: impl FnOnce(&Inner) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = Arc::clone(&self.inner);
        let span = tracing::Span::current();
        match tokio::task::spawn_blocking(move || span.in_scope(|| job(&inner))).await {
            Ok(result) => result,
            Err(e) => Err(fail(operation, "blocking job", KernelErrorKind::Other, e.to_string())),
        }
    }
}

impl Inner {
    /// Rows of the shared maps, and announcements for a link of Wharf's.
    fn ensure_reachable(&self, record: &EndpointRecord) -> Result<()> {
        let held = self.announcer.hold();
        self.bpf.ensure_reachable(record)?;
        if record.link_owner.is_wharf() {
            held.iter().for_each(|held| held.publish(record.addresses()));
        }
        Ok(())
    }

    /// Without chained endpoints.
    fn reachable(&self) -> Result<Vec<IpAddr>> {
        let rows = self.bpf.rows_if_any()?;
        Ok(rows.into_iter().filter(|row| row.direct != 0).map(|row| row.address).collect())
    }

    fn redirects(&self) -> MutexGuard<'_, Option<bool>> {
        self.redirects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_redirects<T>(&self, spec: &NodeSpec, job: impl FnOnce(&NodeSpec) -> T) -> T {
        let mut wanted = self.redirects();
        let redirects = *wanted.get_or_insert(spec.redirects);
        job(&NodeSpec { redirects, ..spec.clone() })
    }
}

#[async_trait]
impl NodeKernel for LinuxKernel {
    fn features(&self) -> &KernelFeatures {
        &self.inner.features
    }

    async fn ensure_node(&self, spec: &NodeSpec) -> Result<Vec<MissingRoute>> {
        let spec = spec.clone();
        self.blocking("set up node", move |k| {
            k.bpf.ensure_shared()?;
            crash::point("datapath/node/after-shared");
            let missing = node::ensure_node(&spec, &k.bpf)?;
            k.with_redirects(&spec, |spec| redirects::ensure(&k.bpf, spec.redirects))?;
            Ok(missing)
        })
        .await
    }

    async fn observe_maps(&self) -> Result<Vec<MapInfo>> {
        self.blocking("observe maps", move |k| {
            crash::hold("datapath/observe-maps");
            k.bpf.map_infos()
        })
        .await
    }

    async fn dump_map(&self, name: &str) -> Result<Vec<BTreeMap<String, String>>> {
        let name = name.to_owned();
        self.blocking("dump map", move |k| k.bpf.dump_map(&name)).await
    }

    async fn remove_endpoint_row(&self, ip: IpAddr, epoch: Epoch) -> Result<()> {
        self.blocking("remove endpoint row", move |k| {
            k.nat.forget(|entry| entry.container() == ip)?;
            let held = k.announcer.hold();
            k.bpf.remove_endpoint_row(ip, epoch)?;
            held.map_or(Ok(()), |held| held.unpublish([ip]))
        })
        .await
    }

    async fn remove_call_slot(&self, slot: u32) -> Result<()> {
        self.blocking("empty call slot", move |k| k.bpf.remove_call_slot(slot)).await
    }

    async fn remove_route(&self, route: &RouteRow) -> Result<()> {
        let route = route.clone();
        self.blocking("remove route", move |_| netlink::route::remove_row(&route)).await
    }

    async fn observe_node(&self, spec: &NodeSpec) -> Result<Vec<NodeProblem>> {
        let spec = spec.clone();
        self.blocking("observe node", move |k| {
            k.with_redirects(&spec, |spec| {
                let mut wrong = node::observe(spec, &k.bpf)?;
                wrong.extend(redirects::observe(&k.bpf, spec)?);
                wrong.extend(k.bpf.shared_problems());
                wrong.extend(k.nat.observe(spec).problems);
                wrong.extend(k.announcer.observe(spec, || k.reachable())?);
                Ok(wrong)
            })
        })
        .await
    }

    async fn observe_overlay(&self) -> Result<OverlayView> {
        self.blocking("observe overlay", |k| {
            Ok(OverlayView { failure: k.bpf.overlay_failure(), drops: k.bpf.overlay_drops()? })
        })
        .await
    }

    async fn observe_peers(&self) -> Result<Vec<PeerRoute>> {
        self.blocking("observe routes to other nodes", |_| peers::list(&mut netlink::Connection::open()?)).await
    }

    async fn observe_networks(&self, cidrs: &[IpNet]) -> Result<NodeNetworks> {
        let cidrs = cidrs.to_vec();
        self.blocking("observe networks", move |_| networks::observe(&cidrs)).await
    }

    async fn observe_networks_of(&self, ips: &[IpAddr]) -> Result<Vec<Option<NodeNetwork>>> {
        let ips = ips.to_vec();
        self.blocking("look up addresses", move |_| networks::of_addresses(&ips)).await
    }

    async fn observe_uplinks(&self) -> Result<Vec<Uplink>> {
        self.blocking("observe uplinks", |_| mtu::uplinks()).await
    }

    async fn observe_speakers(&self, ip: IpAddr) -> Result<Vec<String>> {
        self.blocking("observe speakers", move |k| {
            let mut found = Vec::new();
            if let Some(row) = k.bpf.endpoint_row(ip)? {
                found.push(speakers::row(&row));
            }
            if let Some(route) = netlink::route::of_address(&mut netlink::Connection::open()?, ip)? {
                found.push(speakers::route(ip, route.ifindex));
            }
            Ok(found)
        })
        .await
    }

    async fn dump(&self) -> Result<KernelDump> {
        self.blocking("dump kernel state", move |k| {
            let mut dump = k.bpf.dump()?;
            netlink::dump::dump_into(&mut dump)?;
            dump.nat = k.nat.strays();
            Ok(dump)
        })
        .await
    }

    async fn call_slots(&self) -> Result<Vec<u32>> {
        self.blocking("read call slots", move |k| k.bpf.filled_slots()).await
    }

    async fn remove_node(&self) -> Result<()> {
        self.blocking("remove node", move |k| {
            k.bpf.check_unused()?;
            k.nat.remove()?;
            k.announcer.remove()?;
            node::remove_node()?;
            k.bpf.remove_shared()
        })
        .await
    }
}

#[async_trait]
impl EndpointKernel for LinuxKernel {
    async fn observe_netns(&self, path: &Path) -> Result<NetnsRef> {
        let path = path.to_owned();
        self.blocking("open network namespace", move |k| netns::observe(&k.netns, &path)).await
    }

    async fn ensure_programs(&self, spec: &ProgramSpec) -> Result<Programs> {
        let spec = spec.clone();
        self.blocking("load programs", move |k| k.bpf.ensure_programs(&spec)).await
    }

    async fn ensure_link(&self, spec: &LinkSpec) -> Result<Link> {
        let spec = spec.clone();
        self.blocking("create link", move |k| netlink::link::ensure_link(&k.netns, &spec, k.features.device_mode)).await
    }

    async fn observe_plugin_link(&self, netns: &NetnsRef, ifname: &IfName) -> Result<PluginLink> {
        let (netns, ifname) = (netns.clone(), ifname.clone());
        self.blocking("look at link", move |k| plugin_link::find(&k.netns, &netns, &ifname)).await
    }

    async fn observe_plugin_links(&self) -> Result<Vec<LinkRef>> {
        self.blocking("list links of other plugins", |_| plugin_link::taken()).await
    }

    async fn remove_from_plugin_link(&self, link: &LinkRef) -> Result<()> {
        let link = link.clone();
        self.blocking("restore link", move |k| k.bpf.restore(&link)).await
    }

    async fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> Result<()> {
        let spec = spec.clone();
        self.blocking("write configuration", move |k| k.bpf.ensure_config(id, &spec)).await
    }

    async fn ensure_attached(&self, link: &LinkRef) -> Result<Attached> {
        let link = link.clone();
        self.blocking("attach programs", move |k| k.bpf.ensure_attached(&link)).await
    }

    async fn ensure_connected(&self, record: &EndpointRecord) -> Result<()> {
        let record = record.clone();
        self.blocking("connect endpoint", move |k| {
            if !record.link_owner.is_wharf() {
                return plugin_link::is_same(&k.netns, &record);
            }
            // `NotFound` is for the container's namespace and link.
            let other = |e: KernelError| match e.kind {
                KernelErrorKind::NotFound => KernelError { kind: KernelErrorKind::Other, ..e },
                _ => e,
            };
            let write_rows = || k.ensure_reachable(&record).map_err(other);
            let missing = !k.bpf.has_rows(&record)?;
            connect::ensure_connected(&k.netns, &record, missing.then_some(write_rows))
        })
        .await
    }

    async fn ensure_mtu(&self, record: &EndpointRecord, mtu: u32) -> Result<Option<u32>> {
        if !record.link_owner.is_wharf() {
            return Ok(record.container_mtu);
        }
        let record = record.clone();
        self.blocking("change MTU", move |k| mtu::ensure(&k.netns, &record, mtu)).await
    }

    async fn ensure_reachable(&self, record: &EndpointRecord) -> Result<()> {
        let record = record.clone();
        self.blocking("make reachable", move |k| {
            k.ensure_reachable(&record)?;
            crash::point("datapath/reachable/before-ports");
            k.nat.publish(&record)
        })
        .await
    }

    async fn remove_reachable(&self, record: &EndpointRecord) -> Result<()> {
        let record = record.clone();
        self.blocking("make unreachable", move |k| {
            let ports = k.nat.unpublish(&record);
            crash::point("datapath/unreachable/after-ports");
            let held = k.announcer.hold();
            let rows = k.bpf.remove_reachable(&record);
            crash::point("datapath/unreachable/after-slot");
            let announced = held.map_or(Ok(()), |held| held.unpublish(record.addresses()));
            let rules = source_rule::remove(&k.netns, &record);
            ports.and(rows).and(announced).and(rules)
        })
        .await
    }

    async fn remove_attached(&self, link: &LinkRef) -> Result<()> {
        let link = link.clone();
        self.blocking("detach programs", move |k| k.bpf.remove_attached(&link)).await
    }

    async fn remove_programs(&self, id: EndpointId) -> Result<Vec<CounterRow>> {
        self.blocking("unpin programs", move |k| k.bpf.remove_programs(id)).await
    }

    async fn unlist_link(&self, link: &LinkRef) -> Result<LinkRelease> {
        if !link.owner.is_wharf() {
            let link = link.clone();
            self.blocking("forget link", move |k| k.bpf.forget_closed(&link)).await?;
            return Ok(Box::pin(std::future::ready(Ok(()))));
        }
        let Removal { existed, unlisted, release } = self.inner.reaper.remove(link).await?;
        let subject = link.host_ifname.to_string();
        let release = async move { release.await.unwrap_or_else(|_| Err(reaper::ended(subject))) };
        let release: LinkRelease = if unlisted {
            Box::pin(release)
        } else {
            release.await?;
            Box::pin(std::future::ready(Ok(())))
        };
        crash::point("datapath/unlink/after-delete");
        let link = link.clone();
        self.blocking("remove link", move |k| {
            if let Some(side) = link.container.as_ref().filter(|_| !existed) {
                container_side::remove(&k.netns, side)?;
            }
            // The sink stays attached until the link is closed.
            k.bpf.forget_closed(&link)
        })
        .await?;
        Ok(release)
    }

    async fn observe_endpoints(&self, records: &[EndpointRecord]) -> Result<Vec<Vec<EndpointProblem>>> {
        let records = records.to_vec();
        self.blocking("observe endpoints", move |k| {
            let mut found = observe::observe_endpoints(&k.netns, &k.bpf, &records)?;
            let ports = k.nat.missing(&records)?;
            found.iter_mut().zip(ports).for_each(|(found, ports)| found.extend(ports));
            Ok(found)
        })
        .await
    }

    async fn observe_missing(&self, links: &[LinkRef]) -> Result<Vec<EndpointId>> {
        let links = links.to_vec();
        self.blocking("look for missing links", move |_| {
            let mut missing = Vec::new();
            for link in &links {
                if !bpf::present(link)? {
                    missing.push(link.id);
                }
            }
            Ok(missing)
        })
        .await
    }

    async fn observe_counters(&self, id: EndpointId) -> Result<Vec<CounterRow>> {
        self.blocking("read counters", move |k| k.bpf.counters(id)).await
    }

    async fn observe_verdicts(&self, checks: &[(EndpointId, Arc<[Case]>)]) -> Result<Vec<Result<Vec<CaseResult>>>> {
        let checks = checks.to_vec();
        self.blocking("check programs", move |k| {
            Ok(checks.iter().map(|(id, cases)| k.bpf.verdicts(*id, cases)).collect())
        })
        .await
    }
}

#[async_trait]
impl NatKernel for LinuxKernel {
    async fn ensure_nat(&self, spec: &NodeSpec) -> Result<()> {
        let spec = spec.clone();
        self.blocking("set up masquerading", move |k| {
            let nat = k.with_redirects(&spec, |spec| k.nat.ensure(spec));
            nat.and(k.announcer.ensure(&spec, || k.reachable()))
        })
        .await
    }

    async fn observe_nat(&self, spec: &NodeSpec) -> Result<NatView> {
        let spec = spec.clone();
        self.blocking("observe masquerading", move |k| {
            let mut view = k.with_redirects(&spec, |spec| k.nat.observe(spec));
            view.changed.extend(k.announcer.changed()?);
            Ok(view)
        })
        .await
    }

    async fn remove_nat_entry(&self, entry: &NatEntry) -> Result<()> {
        let entry = *entry;
        self.blocking("take back", move |k| k.nat.forget(|there| *there == entry)).await
    }

    async fn observe_ports(&self, container: &ContainerId, mappings: &[PortMapping]) -> Result<()> {
        let (container, mappings) = (container.clone(), mappings.to_vec());
        self.blocking("look at ports", move |_| ports::observe(&container, &mappings)).await
    }

    async fn remove_connections(&self, ips: &[IpAddr]) -> Result<u64> {
        let ips = ips.to_vec();
        self.blocking("remove connections", move |_| netlink::conntrack::remove(&ips)).await
    }

    async fn end_proxy_connections(&self, ips: &[IpAddr]) -> Result<u64> {
        let ips = ips.to_vec();
        self.blocking("end connections", move |k| {
            let redirects = *k.redirects() == Some(true);
            if redirects { netlink::sockets::end(&ips) } else { Ok(0) }
        })
        .await
    }
}

#[async_trait]
impl FlowKernel for LinuxKernel {
    async fn collect_flows(&self) -> Result<FlowUsage> {
        self.blocking("collect flows", |k| k.bpf.collect_flows()).await
    }

    async fn observe_opened_to_proxies(&self) -> Result<u32> {
        self.blocking("observe clients of the proxies", |k| k.bpf.opened_to_proxies()).await
    }

    async fn limit_proxy_clients(&self, share: u32) -> Result<ProxyClients> {
        self.blocking("limit clients of the proxies", move |k| k.bpf.limit_proxy_clients(share)).await
    }

    async fn observe_flows(&self, filter: &FlowFilter, limit: usize) -> Result<FlowList> {
        let filter = filter.clone();
        self.blocking("observe flows", move |k| k.bpf.flows(&filter, limit)).await
    }

    async fn remove_flows(&self, filter: &FlowFilter) -> Result<u64> {
        let filter = filter.clone();
        self.blocking("remove flows", move |k| k.bpf.flush_flows(&filter)).await
    }
}

#[async_trait]
impl PolicyKernel for LinuxKernel {
    async fn change_policy(&self, changes: Vec<RowChange>, mode: Mode) -> Result<()> {
        self.blocking("change policy", move |k| k.bpf.change_policy(&changes, mode)).await
    }

    async fn ensure_way_to_proxy(&self, wanted: bool) -> Result<()> {
        self.blocking("set up redirects", move |k| {
            let mut redirects = k.redirects();
            let done = redirects::ensure(&k.bpf, wanted).and_then(|()| k.nat.ensure_redirects(wanted));
            // The caller retries a failed setup, but not a failed removal.
            if done.is_ok() || !wanted {
                *redirects = Some(wanted);
            }
            done
        })
        .await
    }

    async fn observe_addresses(&self) -> Result<Vec<IpAddr>> {
        self.blocking("observe addresses", |_| {
            let all = netlink::address::list_all(&mut netlink::Connection::open()?)?;
            Ok(all.into_iter().map(|(_, ip)| ip).collect())
        })
        .await
    }

    async fn observe_peer_rows(&self, ips: &[IpAddr]) -> Result<Vec<Option<PeerRow>>> {
        let ips = ips.to_vec();
        self.blocking("observe policy", move |k| k.bpf.observe_peer_rows(&ips)).await
    }

    async fn observe_policy(&self) -> Result<PolicyRows> {
        self.blocking("observe policy", |k| k.bpf.observe_policy()).await
    }

    async fn observe_peers_max(&self) -> Result<u32> {
        self.blocking("observe policy", |k| Ok(k.bpf.peers_max())).await
    }
}
