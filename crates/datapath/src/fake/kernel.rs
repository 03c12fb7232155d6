//! The fake's body of the edge.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    sync::Arc,
};

use ipnet::IpNet;
use wharf_core::{
    endpoint::{EndpointRecord, NetnsRef},
    finding::{EndpointProblem, NodeProblem},
    flow::{Flow, FlowFilter, FlowList, FlowUsage},
    ids::{EndpointId, Epoch, IfIndex},
    kernel::{
        Attached, ConfigSpec, CounterRow, Kernel, KernelDump, KernelError, KernelErrorKind, KernelFeatures, Link,
        LinkRef, LinkRelease, LinkRow, LinkSpec, MIN_MTU, MapInfo, NatView, NodeSpec, ProgramSpec, Programs, Result,
        RouteRow,
    },
    mtu::Uplink,
    nat::{NatEntry, PortMapping},
    overlap::{NodeNetwork, NodeNetworks},
    policy::{Mode, PolicyRows, RowChange},
    selfcheck::{Case, CaseResult},
};

use super::{
    FakeKernel, Operation, observe,
    policy::Policy,
    selfcheck,
    state::{Hook, HostSide, Inside, Pinned, State, host_net},
};
use crate::{bpf::policy::TABLES, error::fail, netlink::link};

impl FakeKernel {
    /// Logs the call, waits at a hold, fails if the test asked for it, and applies the effect.
    async fn call<T>(
        &self,
        operation: Operation,
        subject: String,
        effect: impl FnOnce(&mut State) -> Result<T> + Send,
    ) -> Result<T> {
        let waiter = self.controls().enter(operation, &subject);
        if let Some(waiter) = waiter {
            waiter.wait().await;
        }
        let asked = |kind| fail(operation.as_str(), subject.clone(), kind, "the test asked for this failure");
        match self.controls().failure(operation) {
            Some(f) if f.after_effect => {
                effect(&mut self.state())?;
                Err(asked(f.kind))
            }
            Some(f) => Err(asked(f.kind)),
            None => effect(&mut self.state()),
        }
    }

    /// [`Self::call`] for a change of an endpoint. A held call continues after its caller is dropped, as in the real
    /// kernel.
    async fn change<T: Send + 'static>(
        &self,
        operation: Operation,
        subject: String,
        effect: impl FnOnce(&mut State) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let is_held = self.controls().is_held(operation);
        if !is_held {
            return self.call(operation, subject, effect).await;
        }
        let kernel = self.clone();
        let held = tokio::spawn(async move { kernel.call(operation, subject, effect).await });
        match held.await.map_err(tokio::task::JoinError::try_into_panic) {
            Ok(result) => result,
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // The task was cancelled because the runtime ends; the caller ends with it.
            Err(Err(_)) => std::future::pending().await,
        }
    }
}

pub(super) fn endpoint(id: EndpointId) -> String {
    format!("endpoint {id}")
}

fn not_found(operation: Operation, subject: String, cause: &str) -> KernelError {
    fail(operation.as_str(), subject, KernelErrorKind::NotFound, cause)
}

impl Kernel for FakeKernel {
    fn features(&self) -> &KernelFeatures {
        &self.features
    }

    async fn ensure_nat(&self, spec: &NodeSpec) -> Result<()> {
        self.call(Operation::EnsureNat, "node".to_owned(), |s| {
            s.masquerade = spec.masquerade.clone();
            Ok(())
        })
        .await
    }

    async fn observe_ports(&self, mappings: &[PortMapping]) -> Result<()> {
        self.call(Operation::ObservePorts, format!("{} ports", mappings.len()), |s| {
            match mappings.iter().find(|m| s.held.contains(&m.host_port.get())) {
                Some(held) => Err(fail("publish", held.to_string(), KernelErrorKind::Exists, "a process has it")),
                None => Ok(()),
            }
        })
        .await
    }

    async fn remove_nat_entry(&self, entry: &NatEntry) -> Result<()> {
        self.call(Operation::RemoveNatEntry, entry.to_string(), |s| {
            if !s.published.contains(entry) {
                s.nat.remove(entry);
            }
            Ok(())
        })
        .await
    }

    async fn observe_nat(&self, spec: &NodeSpec) -> Result<NatView> {
        self.call(Operation::ObserveNat, "node".to_owned(), |s| Ok(observe::nat(s, spec))).await
    }

    async fn ensure_node(&self, spec: &NodeSpec) -> Result<()> {
        self.call(Operation::EnsureNode, "node".to_owned(), |s| {
            s.routes.retain(|_, via| via.is_some());
            for cidr in &spec.cidrs {
                s.routes.entry(cidr.trunc()).or_insert(None);
            }
            s.node = Some(spec.clone());
            s.broken.clear();
            Ok(())
        })
        .await
    }

    async fn observe_netns(&self, path: &Path) -> Result<NetnsRef> {
        self.call(Operation::ObserveNetns, path.display().to_string(), |s| {
            if let Some(ns) = s.namespaces.get(path) {
                return Ok(ns.identity.clone());
            }
            let subject = path.display().to_string();
            if s.plain_files.contains(path) {
                let cause = "not a network namespace";
                return Err(fail("open network namespace", subject, KernelErrorKind::NotANetns, cause));
            }
            Err(not_found(Operation::ObserveNetns, subject, "no such file"))
        })
        .await
    }

    async fn ensure_programs(&self, spec: &ProgramSpec) -> Result<Programs> {
        let spec = spec.clone();
        self.change(Operation::EnsurePrograms, endpoint(spec.id), move |s| {
            if let Some(old) = s.pins.get(&spec.id).filter(|p| spec.keep && p.is_of(&spec)) {
                return Ok(Programs { program_ids: old.program_ids, map_ids: old.map_ids, memlock_bytes: 3 * 8192 });
            }
            let program_ids = [s.fresh(), s.fresh(), s.fresh()];
            let map_ids = match s.pins.get(&spec.id) {
                Some(old) => old.map_ids,
                None => [s.fresh(), s.fresh(), s.fresh()],
            };
            match s.pins.get_mut(&spec.id) {
                Some(old) => (old.program_ids, old.spec) = (program_ids, spec.clone()),
                None => {
                    let counters = Vec::new();
                    let new = Pinned { spec: spec.clone(), program_ids, map_ids, config: None, counters, links: false };
                    s.pins.insert(spec.id, new);
                }
            }
            Ok(Programs { program_ids, map_ids, memlock_bytes: 3 * 8192 })
        })
        .await
    }

    async fn ensure_link(&self, spec: &LinkSpec) -> Result<Link> {
        let spec = spec.clone();
        self.change(Operation::EnsureLink, endpoint(spec.id), move |s| {
            let host = spec.host_ifname.as_str();
            let name = spec.ifname.as_str();
            let mark = link::mark(spec.id, spec.epoch, &spec.attachment);
            let same = |l: &HostSide| {
                l.inode == spec.netns.inode
                    && l.container_ifname == spec.ifname
                    && l.container_mac == spec.container_mac
                    && l.host_mac == spec.host_mac
                    && l.mtu == spec.mtu
                    && (l.alias.as_ref() == Some(&mark) || link::is_unowned(l.alias.as_deref(), spec.id, spec.epoch))
            };
            let container_lives = s.netns(&spec.netns).is_some();
            if let Some(l) = s.links.get_mut(host)
                && same(l)
                && container_lives
            {
                l.alias = Some(mark);
                return Ok(Link { host_ifindex: l.ifindex, container_ifindex: l.container_ifindex });
            }
            s.remove_link_named(host);
            let (host_ifindex, container_ifindex) = (IfIndex(s.fresh()), IfIndex(s.fresh()));
            let Some(ns) = s.netns_mut(&spec.netns) else {
                let subject = spec.netns.path.display().to_string();
                return Err(not_found(Operation::EnsureLink, subject, "the namespace is gone"));
            };
            if ns.interfaces.contains_key(name) {
                let cause = format!("the container already has an interface {name}");
                return Err(fail("create link", endpoint(spec.id), KernelErrorKind::Exists, cause));
            }
            let inside = Inside {
                ifindex: container_ifindex,
                host: Some(spec.host_ifname.clone()),
                up: false,
                addresses: BTreeSet::new(),
            };
            ns.interfaces.insert(name.to_owned(), inside);
            s.links.insert(
                host.to_owned(),
                HostSide {
                    ifindex: host_ifindex,
                    container_ifindex,
                    container_ifname: spec.ifname.clone(),
                    inode: spec.netns.inode,
                    container_mac: spec.container_mac,
                    host_mac: spec.host_mac,
                    mtu: spec.mtu,
                    alias: Some(mark),
                    up: false,
                    arp: false,
                    container_mtu: spec.mtu,
                    attached: None,
                },
            );
            Ok(Link { host_ifindex, container_ifindex })
        })
        .await
    }

    async fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> Result<()> {
        let spec = spec.clone();
        self.change(Operation::EnsureConfig, endpoint(id), move |s| match s.pins.get_mut(&id) {
            Some(pinned) => {
                pinned.config = Some(spec.clone());
                Ok(())
            }
            None => Err(not_found(Operation::EnsureConfig, endpoint(id), "its maps are not pinned")),
        })
        .await
    }

    async fn ensure_attached(&self, link: &LinkRef) -> Result<Attached> {
        let link = link.clone();
        self.change(Operation::EnsureAttached, endpoint(link.id), move |s| {
            let Some(pinned) = s.pins.get_mut(&link.id) else {
                return Err(not_found(Operation::EnsureAttached, endpoint(link.id), "its programs are not pinned"));
            };
            let Some(host) = s
                .links
                .get_mut(link.host_ifname.as_str())
                .filter(|l| link.host_ifindex.is_none_or(|want| want == l.ifindex))
            else {
                return Err(not_found(Operation::EnsureAttached, link.host_ifname.to_string(), "the link is gone"));
            };
            let before = host.attached.replace(Hook::Programs(pinned.program_ids[0]));
            pinned.links = true;
            if let Some(slot) = s.calls.get_mut(&link.id) {
                *slot = pinned.program_ids[2];
            }
            Ok(if before.is_some() { Attached::Replaced } else { Attached::New })
        })
        .await
    }

    async fn ensure_connected(&self, record: &EndpointRecord) -> Result<()> {
        let record = record.clone();
        self.change(Operation::EnsureConnected, endpoint(record.id), move |s| {
            let gone = |what: &str| Err(not_found(Operation::EnsureConnected, endpoint(record.id), what));
            if s.links.get(record.host_ifname.as_str()).is_none_or(|l| l.ifindex != record.host_ifindex) {
                return gone("the link is gone");
            }
            let Some(ns) = s.netns_mut(&record.netns) else { return gone("the namespace is gone") };
            let Some(inside) = ns
                .interfaces
                .get_mut(record.attachment.ifname.as_str())
                .filter(|i| i.host.as_ref() == Some(&record.host_ifname))
            else {
                return gone("the container's side of the link is gone");
            };
            inside.up = true;
            inside.addresses.extend(record.addresses());
            if let Some(host) = s.links.get_mut(record.host_ifname.as_str()) {
                host.up = true;
                (host.host_mac, host.mtu, host.arp) = (record.host_mac, record.mtu, false);
                host.container_mac = record.container_mac;
                if !(MIN_MTU..=record.mtu).contains(&host.container_mtu) {
                    host.container_mtu = record.mtu;
                }
                host.alias = Some(link::mark(record.id, record.epoch, &record.attachment));
            }
            for address in record.addresses() {
                s.routes.insert(host_net(address), Some(record.host_ifindex));
            }
            Ok(())
        })
        .await
    }

    async fn ensure_mtu(&self, record: &EndpointRecord, mtu: u32) -> Result<Option<u32>> {
        let record = record.clone();
        self.change(Operation::EnsureMtu, endpoint(record.id), move |s| {
            let Some(link) = s.links.get_mut(record.host_ifname.as_str()) else { return Ok(record.container_mtu) };
            let own;
            link.mtu = mtu;
            (link.container_mtu, own) = record.container_mtu_of(link.container_mtu, mtu);
            Ok(own)
        })
        .await
    }

    async fn ensure_reachable(&self, record: &EndpointRecord) -> Result<()> {
        let record = record.clone();
        self.change(Operation::EnsureReachable, endpoint(record.id), move |s| {
            let Some(pinned) = s.pins.get(&record.id) else {
                return Err(not_found(Operation::EnsureReachable, endpoint(record.id), "its programs are not pinned"));
            };
            s.calls.insert(record.id, pinned.program_ids[2]);
            for address in record.addresses() {
                s.rows.insert(address, observe::table_row(&record, address));
            }
            if s.masquerade.is_some() {
                s.nat.extend(record.nat_entries());
                s.published.extend(record.nat_entries());
            }
            Ok(())
        })
        .await
    }

    async fn remove_reachable(&self, record: &EndpointRecord) -> Result<()> {
        let record = record.clone();
        self.change(Operation::RemoveReachable, endpoint(record.id), move |s| {
            for entry in record.nat_entries() {
                s.nat.remove(&entry);
                s.published.remove(&entry);
            }
            for address in record.addresses() {
                if s.rows.get(&address).is_some_and(|r| r.epoch == record.epoch) {
                    s.rows.remove(&address);
                }
            }
            if s.config_epoch(record.id).is_none_or(|e| e <= record.epoch) {
                s.calls.remove(&record.id);
            }
            Ok(())
        })
        .await
    }

    async fn remove_attached(&self, link: &LinkRef) -> Result<()> {
        let link = link.clone();
        self.change(Operation::RemoveAttached, endpoint(link.id), move |s| {
            let known = s.links.get_mut(link.host_ifname.as_str());
            if let Some(host) = known.filter(|l| link.host_ifindex.is_none_or(|want| want == l.ifindex)) {
                host.attached = Some(Hook::Sink);
                if let Some(pinned) = s.pins.get_mut(&link.id) {
                    pinned.links = false;
                }
            }
            Ok(())
        })
        .await
    }

    async fn remove_programs(&self, id: EndpointId) -> Result<Vec<CounterRow>> {
        self.change(Operation::RemovePrograms, endpoint(id), move |s| {
            Ok(s.pins.remove(&id).map(|p| p.counters).unwrap_or_default())
        })
        .await
    }

    async fn unlist_link(&self, link: &LinkRef) -> Result<LinkRelease> {
        let (kernel, link) = (self.clone(), link.clone());
        let subject = endpoint(link.id);
        self.change(Operation::RemoveLink, subject.clone(), move |s| {
            s.remove_link_named(link.host_ifname.as_str());
            Ok(())
        })
        .await?;
        Ok(Box::pin(async move { kernel.change(Operation::ReleaseLink, subject, |_| Ok(())).await }))
    }

    async fn observe_endpoints(&self, records: &[EndpointRecord]) -> Result<Vec<Vec<EndpointProblem>>> {
        let mut found = Vec::with_capacity(records.len());
        for record in records {
            let look = |s: &mut _| Ok(observe::endpoint_problems(s, record));
            found.push(self.call(Operation::ObserveEndpoint, endpoint(record.id), look).await?);
        }
        Ok(found)
    }

    async fn observe_missing(&self, links: &[LinkRef]) -> Result<Vec<EndpointId>> {
        self.call(Operation::ObserveMissing, format!("{} links", links.len()), |s| {
            let is_there = |link: &LinkRef| {
                let seen = s.links.get(link.host_ifname.as_str());
                seen.is_some_and(|seen| link.host_ifindex.is_none_or(|wanted| wanted == seen.ifindex))
            };
            Ok(links.iter().filter(|link| !is_there(link)).map(|link| link.id).collect())
        })
        .await
    }

    async fn observe_counters(&self, id: EndpointId) -> Result<Vec<CounterRow>> {
        self.call(Operation::ObserveCounters, endpoint(id), |s| match s.pins.get(&id) {
            Some(pinned) => Ok(pinned.counters.clone()),
            None => Err(not_found(Operation::ObserveCounters, endpoint(id), "its maps are not pinned")),
        })
        .await
    }

    async fn observe_verdicts(&self, checks: &[(EndpointId, Arc<[Case]>)]) -> Result<Vec<Result<Vec<CaseResult>>>> {
        let mut results = Vec::with_capacity(checks.len());
        for (id, cases) in checks {
            let gone = || not_found(Operation::ObserveVerdicts, endpoint(*id), "its maps are not pinned");
            let look = |s: &mut _| selfcheck::verdicts(s, *id, cases).ok_or_else(gone);
            results.push(self.call(Operation::ObserveVerdicts, endpoint(*id), look).await);
        }
        Ok(results)
    }

    async fn observe_maps(&self) -> Result<Vec<MapInfo>> {
        self.call(Operation::ObserveMaps, "maps".to_owned(), |s| {
            let info = |name: String, kind: &str, entries: Option<usize>, max: u32| MapInfo {
                name,
                kind: kind.to_owned(),
                entries: entries.map(|n| n as u64),
                max_entries: u64::from(max),
                memlock_bytes: 4096,
            };
            use wharf_common::map;
            let mut maps = vec![
                info(map::ENDPOINTS.to_owned(), "hash", Some(s.rows.len()), map::ENDPOINTS_MAX),
                info(map::CALLS.to_owned(), "prog_array", Some(s.calls.len()), map::CALLS_MAX),
                info(map::NODE_CALLS.to_owned(), "prog_array", None, map::NODE_CALLS_MAX),
                info(map::PROFILES.to_owned(), "array", None, map::PROFILES_MAX),
                info(map::EVENTS.to_owned(), "ringbuf", None, map::EVENTS_BYTES),
                info(map::STACK_PATHS.to_owned(), "lru_hash", Some(0), map::STACK_PATHS_MAX),
                info(map::STACK_USERS.to_owned(), "array", None, map::STACK_USERS_MAX),
                info(map::FLOWS.to_owned(), "hash", Some(0), map::FLOWS_MAX),
                info(map::FLOWS_NEW.to_owned(), "lru_hash", None, map::FLOWS_NEW_MAX),
                info(map::FRAGMENTS.to_owned(), "lru_hash", None, map::FRAGMENTS_MAX),
                info(map::FLOW_USE.to_owned(), "array", None, map::FLOW_USE_MAX),
                info(map::FLOW_TOTALS.to_owned(), "array", None, 1),
                info(map::IPCACHE.to_owned(), "lpm_trie", None, map::IPCACHE_MAX),
                info(map::POLICY_PORTS.to_owned(), "lpm_trie", None, map::POLICY_PORTS_MAX),
                info(map::POLICY_CELLS.to_owned(), "hash", None, map::POLICY_CELLS_MAX),
                info(map::POLICY_SETS.to_owned(), "array", None, map::POLICY_SETS_MAX),
                info(map::POLICY_STATE.to_owned(), "array", None, 1),
            ];
            for (id, pinned) in &s.pins {
                maps.push(info(format!("{id}/{}", map::CONFIG), "array", Some(1), 1));
                let counted = pinned.counters.len();
                maps.push(info(format!("{id}/{}", map::METRICS), "percpu_array", Some(counted), map::METRICS_MAX));
                maps.push(info(format!("{id}/{}", map::BANDWIDTH), "array", Some(2), map::BANDWIDTH_MAX));
            }
            Ok(maps)
        })
        .await
    }

    async fn dump_map(&self, name: &str) -> Result<Vec<BTreeMap<String, String>>> {
        self.call(Operation::DumpMap, name.to_owned(), |s| dump_map(s, name)).await
    }

    async fn collect_flows(&self) -> Result<FlowUsage> {
        self.call(Operation::CollectFlows, "flows".to_owned(), |s| {
            let before = s.flows.len();
            s.flows.retain(|flow| !flow.left.is_zero());
            s.flow_usage.expired += before.abs_diff(s.flows.len()) as u64;
            if s.flow_usage.limit == 0 {
                s.flow_usage.limit = u64::from(wharf_common::map::FLOWS_MAX);
            }
            s.flow_usage.rows = s.flows.iter().filter(|flow| flow.kept).count() as u64;
            Ok(s.flow_usage)
        })
        .await
    }

    async fn observe_flows(&self, filter: &FlowFilter, limit: usize) -> Result<FlowList> {
        self.call(Operation::ObserveFlows, format!("{limit} flows"), |s| {
            let meant: Vec<Flow> = s.flows.iter().filter(|flow| filter.matches(flow)).copied().collect();
            let more = meant.len().saturating_sub(limit) as u64;
            Ok(FlowList { flows: meant.into_iter().take(limit).collect(), more })
        })
        .await
    }

    async fn remove_flows(&self, filter: &FlowFilter) -> Result<u64> {
        self.call(Operation::RemoveFlows, "flows".to_owned(), |s| {
            let before = s.flows.len();
            s.flows.retain(|flow| !filter.matches(flow));
            Ok(before.abs_diff(s.flows.len()) as u64)
        })
        .await
    }

    async fn remove_endpoint_row(&self, ip: IpAddr, epoch: Epoch) -> Result<()> {
        self.call(Operation::RemoveEndpointRow, ip.to_string(), |s| {
            if s.rows.get(&ip).is_some_and(|r| r.epoch == epoch) {
                s.rows.remove(&ip);
            }
            Ok(())
        })
        .await
    }

    async fn remove_call_slot(&self, slot: u32) -> Result<()> {
        self.call(Operation::RemoveCallSlot, slot.to_string(), |s| {
            s.calls.retain(|id, _| u32::from(id.get()) != slot);
            Ok(())
        })
        .await
    }

    async fn remove_route(&self, route: &RouteRow) -> Result<()> {
        self.call(Operation::RemoveRoute, route.destination.to_string(), |s| {
            if s.routes.get(&route.destination) == Some(&route.ifindex) {
                s.routes.remove(&route.destination);
            }
            Ok(())
        })
        .await
    }

    async fn change_policy(&self, changes: Vec<RowChange>, mode: Mode) -> Result<()> {
        let subject = format!("{} rows", changes.len());
        self.change(Operation::ChangePolicy, subject, move |s| s.policy.change(&changes, mode)).await
    }

    async fn observe_addresses(&self) -> Result<Vec<IpAddr>> {
        self.call(Operation::ObserveAddresses, "node".to_owned(), |s| {
            let routers = s.node.as_ref().map(|spec| (spec.router4, spec.router6)).unwrap_or_default();
            Ok(routers.0.map(IpAddr::V4).into_iter().chain(routers.1.map(IpAddr::V6)).collect())
        })
        .await
    }

    async fn observe_policy(&self) -> Result<PolicyRows> {
        self.call(Operation::ObservePolicy, "policy".to_owned(), |s| Ok(s.policy.rows.clone())).await
    }

    async fn observe_node(&self, spec: &NodeSpec) -> Result<Vec<NodeProblem>> {
        self.call(Operation::ObserveNode, "node".to_owned(), |s| Ok(observe::node_problems(s, spec))).await
    }

    async fn observe_speakers(&self, ip: IpAddr) -> Result<Vec<String>> {
        self.call(Operation::ObserveSpeakers, ip.to_string(), |s| Ok(observe::speakers_of(s, ip))).await
    }

    async fn remove_connections(&self, ips: &[IpAddr]) -> Result<u64> {
        self.call(Operation::RemoveConnections, format!("{} addresses", ips.len()), |s| {
            let before = s.connections.len();
            s.connections.retain(|(a, b)| !ips.contains(a) && !ips.contains(b));
            Ok(before.abs_diff(s.connections.len()) as u64)
        })
        .await
    }

    async fn observe_networks(&self, cidrs: &[IpNet]) -> Result<NodeNetworks> {
        self.call(Operation::ObserveNetworks, format!("{} CIDRs", cidrs.len()), |s| {
            let shares = |net: &IpNet| cidrs.iter().any(|c| c.contains(net) || net.contains(c));
            let ours = s.routes.iter().filter(|(d, via)| via.is_some() && shares(d));
            Ok(NodeNetworks {
                foreign: s.networks.iter().filter(|n| shares(&n.net)).cloned().collect(),
                endpoints: ours.map(|(d, _)| d.addr()).collect(),
                pools: s.routes.iter().filter(|(_, via)| via.is_none()).map(|(d, _)| *d).collect(),
            })
        })
        .await
    }

    async fn observe_networks_of(&self, ips: &[IpAddr]) -> Result<Vec<Option<NodeNetwork>>> {
        self.call(Operation::ObserveNetworksOf, format!("{} addresses", ips.len()), |s| {
            let of = |ip| {
                let holds = s.networks.iter().filter(|n| n.net.contains(ip));
                holds.max_by_key(|n| n.net.prefix_len()).cloned()
            };
            Ok(ips.iter().map(of).collect())
        })
        .await
    }

    async fn observe_uplinks(&self) -> Result<Vec<Uplink>> {
        self.call(Operation::ObserveUplinks, "node".to_owned(), |s| Ok(s.uplinks.clone())).await
    }

    async fn dump(&self) -> Result<KernelDump> {
        self.call(Operation::Dump, "node".to_owned(), |s| {
            let links = s
                .links
                .iter()
                .map(|(name, l)| LinkRow { name: name.clone(), ifindex: l.ifindex, alias: l.alias.clone() })
                .collect();
            let routes = s.routes.iter().map(|(d, via)| RouteRow { destination: *d, ifindex: *via }).collect();
            let pins = s
                .pins
                .iter()
                .map(|(id, p)| {
                    let mut names = vec!["BANDWIDTH", "CONFIG", "METRICS", "deliver", "from_container"];
                    if p.links {
                        names.extend(["link_from_container", "link_to_container"]);
                    }
                    names.push("to_container");
                    (id.to_string(), names.into_iter().map(str::to_owned).collect())
                })
                .collect();
            Ok(KernelDump {
                links,
                routes,
                endpoint_rows: s.rows.values().cloned().collect(),
                call_slots: s.calls.keys().map(|id| u32::from(id.get())).collect(),
                pins,
                foreign_pins: Vec::new(),
                nat: s.stray_nat(),
            })
        })
        .await
    }

    async fn remove_node(&self) -> Result<()> {
        self.call(Operation::RemoveNode, "node".to_owned(), |s| {
            s.routes.retain(|_, via| via.is_some());
            s.node = None;
            s.broken.clear();
            s.policy = Policy::default();
            Ok(())
        })
        .await
    }
}

fn dump_map(s: &State, name: &str) -> Result<Vec<BTreeMap<String, String>>> {
    let row = |columns: &[(&str, String)]| columns.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
    match name {
        "ENDPOINTS" => Ok(s
            .rows
            .values()
            .map(|r| row(&[("address", r.address.to_string()), ("endpoint", r.endpoint_id.to_string())]))
            .collect()),
        "CALLS" => {
            Ok(s.calls.iter().map(|(id, p)| row(&[("slot", id.to_string()), ("program", p.to_string())])).collect())
        }
        _ => {
            let pinned = name.split_once('/').and_then(|(id, kind)| Some((s.pins.get(&id.parse().ok()?)?, kind)));
            match pinned {
                Some((p, "CONFIG")) => Ok(p.config.iter().map(|c| row(&[("epoch", c.epoch.to_string())])).collect()),
                Some((_, "BANDWIDTH")) => Ok(Vec::new()),
                Some((p, "METRICS")) => Ok(p
                    .counters
                    .iter()
                    .map(|c| row(&[("reason", c.reason.clone()), ("packets", c.packets.to_string())]))
                    .collect()),
                None if TABLES.contains(&name) => Ok(s.policy.dump(name)),
                _ => Err(not_found(Operation::DumpMap, name.to_owned(), "there is no such map")),
            }
        }
    }
}
