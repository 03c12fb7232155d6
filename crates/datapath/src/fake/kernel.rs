//! The kernel traits of the fake.

use std::{collections::BTreeMap, net::IpAddr};

use async_trait::async_trait;
use ipnet::IpNet;
use wharf_common::{PeerRow, map};
use wharf_core::{
    finding::NodeProblem,
    flow::{Flow, FlowFilter, FlowList, FlowUsage, ProxyClients},
    ids::{ContainerId, EndpointId, Epoch},
    kernel::{
        FlowKernel, KernelDump, KernelError, KernelErrorKind, KernelFeatures, LinkRow, MapInfo, MissingRoute,
        NatKernel, NatView, NodeKernel, NodeSpec, OverlayView, PeerRoute, PolicyKernel, Result, RouteRow,
    },
    mtu::Uplink,
    nat::{NatEntry, PortMapping},
    overlap::{NodeNetwork, NodeNetworks},
    policy::{Mode, PolicyRows, RowChange},
};

use super::{FakeKernel, Operation, observe, peers::Peers, policy::Policy, state::State};
use crate::error::fail;

const POLICY_MAPS: [&str; 6] =
    [map::IPCACHE, map::POLICY_PORTS, map::POLICY_CELLS, map::POLICY_SETS, map::POLICY_STATE, map::ADDRESS_GENERATIONS];

impl FakeKernel {
    /// Logs, waits at a hold, fails if a test asked for it, and applies the effect.
    pub(super) async fn call<T>(
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

    /// A held call outlives its caller.
    pub(super) async fn change<T: Send + 'static>(
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
            Err(Err(_)) => std::future::pending().await,
        }
    }
}

pub(super) fn endpoint(id: EndpointId) -> String {
    format!("endpoint {id}")
}

pub(super) fn not_found(operation: Operation, subject: String, cause: &str) -> KernelError {
    fail(operation.as_str(), subject, KernelErrorKind::NotFound, cause)
}

#[async_trait]
impl NodeKernel for FakeKernel {
    fn features(&self) -> &KernelFeatures {
        &self.features
    }

    async fn ensure_node(&self, spec: &NodeSpec) -> Result<Vec<MissingRoute>> {
        let hold = self.controls().node_hold();
        if let Some((changes, waiter)) = hold {
            let is_done = self.state().peers.change(spec, changes);
            if !is_done {
                waiter.wait().await;
            }
        }
        self.call(Operation::EnsureNode, "node".to_owned(), |s| {
            s.peers.change(spec, usize::MAX);
            s.routes.retain(|_, via| via.is_some());
            for cidr in &spec.cidrs {
                s.routes.entry(cidr.trunc()).or_insert(None);
            }
            s.node = Some(spec.clone());
            s.broken.clear();
            let State { peers, missing_routes, .. } = s;
            let missing = missing_routes.iter().filter(|missing| peers.routes.remove(&missing.to).is_some());
            Ok(missing.cloned().collect())
        })
        .await
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
                info(map::SOURCES.to_owned(), "hash", Some(s.sources().count()), map::SOURCES_MAX),
                info(map::FLOWS.to_owned(), "hash", Some(0), map::FLOWS_MAX),
                info(map::FLOWS_RECENT.to_owned(), "hash", None, map::FLOWS_RECENT_MAX),
                info(map::FLOWS_NEW.to_owned(), "lru_hash", None, map::FLOWS_NEW_MAX),
                info(map::FLOW_CACHE.to_owned(), "percpu_array", None, map::FLOW_CACHE_MAX),
                info(map::FLOW_CACHE_ENDS.to_owned(), "array", None, map::FLOW_CACHE_ENDS_MAX),
                info(map::FRAGMENT_SLOTS.to_owned(), "hash", None, map::FRAGMENT_SLOTS_MAX),
                info(map::FRAGMENTS.to_owned(), "lru_hash", None, map::FRAGMENTS_MAX),
                info(map::FLOW_USE.to_owned(), "array", None, map::FLOW_USE_MAX),
                info(map::FLOW_TOTALS.to_owned(), "array", None, 1),
                info(map::PROXY_USE.to_owned(), "array", None, map::PROXY_USE_MAX),
                info(map::IPCACHE.to_owned(), "lpm_trie", None, map::IPCACHE_MAX),
                info(map::POLICY_PORTS.to_owned(), "lpm_trie", None, map::POLICY_PORTS_MAX),
                info(map::POLICY_CELLS.to_owned(), "hash", None, map::POLICY_CELLS_MAX),
                info(map::POLICY_SETS.to_owned(), "array", None, map::POLICY_SETS_MAX),
                info(map::POLICY_STATE.to_owned(), "array", None, 1),
                info(map::ADDRESS_GENERATIONS.to_owned(), "array", None, map::ADDRESS_GENERATIONS_MAX),
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

    async fn observe_node(&self, spec: &NodeSpec) -> Result<Vec<NodeProblem>> {
        self.call(Operation::ObserveNode, "node".to_owned(), |s| Ok(observe::node_problems(s, spec))).await
    }

    async fn observe_speakers(&self, ip: IpAddr) -> Result<Vec<String>> {
        self.call(Operation::ObserveSpeakers, ip.to_string(), |s| Ok(observe::speakers_of(s, ip))).await
    }

    async fn observe_overlay(&self) -> Result<OverlayView> {
        Ok(OverlayView::default())
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

    async fn observe_peers(&self) -> Result<Vec<PeerRoute>> {
        self.call(Operation::ObservePeers, "node".to_owned(), |s| Ok(s.peers.list())).await
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
                .filter(|(_, l)| !l.plugin)
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
                pins,
                foreign_pins: Vec::new(),
                nat: s.stray_nat(),
            })
        })
        .await
    }

    async fn call_slots(&self) -> Result<Vec<u32>> {
        self.call(Operation::CallSlots, "node".to_owned(), |s| {
            Ok(s.calls.keys().map(|id| u32::from(id.get())).collect())
        })
        .await
    }

    async fn remove_node(&self) -> Result<()> {
        self.call(Operation::RemoveNode, "node".to_owned(), |s| {
            s.routes.retain(|_, via| via.is_some());
            s.node = None;
            s.peers = Peers::default();
            s.broken.clear();
            s.policy = Policy::default();
            Ok(())
        })
        .await
    }
}

#[async_trait]
impl NatKernel for FakeKernel {
    async fn ensure_nat(&self, spec: &NodeSpec) -> Result<()> {
        self.call(Operation::EnsureNat, "node".to_owned(), |s| {
            s.masquerade = spec.masquerade.clone();
            Ok(())
        })
        .await
    }

    async fn observe_ports(&self, _: &ContainerId, mappings: &[PortMapping]) -> Result<()> {
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

    async fn end_proxy_connections(&self, ips: &[IpAddr]) -> Result<u64> {
        self.call(Operation::EndProxyConnections, format!("{} addresses", ips.len()), |_| Ok(0)).await
    }

    async fn remove_connections(&self, ips: &[IpAddr]) -> Result<u64> {
        self.call(Operation::RemoveConnections, format!("{} addresses", ips.len()), |s| {
            let before = s.connections.len();
            s.connections.retain(|(a, b)| !ips.contains(a) && !ips.contains(b));
            Ok(before.abs_diff(s.connections.len()) as u64)
        })
        .await
    }
}

#[async_trait]
impl FlowKernel for FakeKernel {
    async fn collect_flows(&self) -> Result<FlowUsage> {
        self.call(Operation::CollectFlows, "flows".to_owned(), |s| {
            let before = s.flows.len();
            s.flows.retain(|flow| !flow.left.is_zero());
            s.flow_usage.expired += before.abs_diff(s.flows.len()) as u64;
            if s.flow_usage.limit == 0 {
                s.flow_usage.limit = u64::from(wharf_common::map::FLOWS_KEPT_MAX);
            }
            s.flow_usage.rows = s.flows.iter().filter(|flow| flow.kept).count() as u64;
            Ok(s.flow_usage)
        })
        .await
    }

    async fn observe_opened_to_proxies(&self) -> Result<u32> {
        self.call(Operation::ObserveOpenedToProxies, "clients of the proxies".to_owned(), |_| Ok(0)).await
    }

    async fn limit_proxy_clients(&self, share: u32) -> Result<ProxyClients> {
        self.call(Operation::LimitProxyClients, format!("{share} connections"), |_| Ok(ProxyClients::default())).await
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
}

#[async_trait]
impl PolicyKernel for FakeKernel {
    async fn change_policy(&self, changes: Vec<RowChange>, mode: Mode) -> Result<()> {
        let subject = format!("{} rows", changes.len());
        self.change(Operation::ChangePolicy, subject, move |s| s.policy.change(&changes, mode)).await
    }

    async fn ensure_way_to_proxy(&self, wanted: bool) -> Result<()> {
        let subject = if wanted { "wanted" } else { "not wanted" };
        self.call(Operation::EnsureWayToProxy, subject.to_owned(), |_| Ok(())).await
    }

    async fn observe_addresses(&self) -> Result<Vec<IpAddr>> {
        self.call(Operation::ObserveAddresses, "node".to_owned(), |s| {
            let routers = s.node.as_ref().map(|spec| (spec.router4, spec.router6)).unwrap_or_default();
            let routers = routers.0.map(IpAddr::V4).into_iter().chain(routers.1.map(IpAddr::V6));
            Ok(routers.chain(s.node_addresses.iter().copied()).collect())
        })
        .await
    }

    async fn observe_peer_rows(&self, ips: &[IpAddr]) -> Result<Vec<Option<PeerRow>>> {
        let ips = ips.to_vec();
        self.call(Operation::ObservePolicy, "peers".to_owned(), move |s| {
            let row = |ip: &IpAddr| {
                let found = s.policy.rows.peers.iter().filter(|(net, _)| net.contains(ip));
                found.max_by_key(|(net, _)| net.prefix_len()).map(|(_, row)| *row)
            };
            Ok(ips.iter().map(row).collect())
        })
        .await
    }

    async fn observe_policy(&self) -> Result<PolicyRows> {
        self.call(Operation::ObservePolicy, "policy".to_owned(), |s| Ok(s.policy.rows.clone())).await
    }

    async fn observe_peers_max(&self) -> Result<u32> {
        Ok(self.state().policy.peers_max.unwrap_or(map::IPCACHE_MAX))
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
        "SOURCES" => Ok(s
            .sources()
            .map(|(id, c)| {
                let prefixes: Vec<String> = c.sources.iter().map(ToString::to_string).collect();
                row(&[
                    ("ifindex", c.host_ifindex.to_string()),
                    ("endpoint", id.to_string()),
                    ("epoch", c.epoch.to_string()),
                    ("prefixes", prefixes.join(",")),
                ])
            })
            .collect()),
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
                None if POLICY_MAPS.contains(&name) => Ok(s.policy.dump(name)),
                _ => Err(not_found(Operation::DumpMap, name.to_owned(), "there is no such map")),
            }
        }
    }
}
