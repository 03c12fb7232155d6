//! Operator actions for problems, the same in every view.

use super::{EndpointProblem, Kept, Mender, NodeProblem, Problem, RouteSeen, Side, Stray};
use crate::{ids::EndpointId, kernel::MIN_MTU, overlap::Overlap, state::Level};

const REPAIR: &str = "`wharf audit --repair` mends it; the leak audit does so by itself when it has seen it twice";

impl Problem {
    /// Operator's action.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Endpoint(id, problem) => problem.remedy(*id),
            Self::Node(problem) => match problem {
                NodeProblem::LinkForeign { name } => {
                    format!("rename or remove the interface {name} that is not Wharf's, then restart the agent")
                }
                NodeProblem::PoolOverlap(Overlap { pool, network, .. }) => format!(
                    "remove {network}, or start the agent with another range for pool {pool} (--ipv4-pool, --ipv6-pool or \
                     `cidrs` of the pool)"
                ),
                NodeProblem::Bpffs { path, .. } => {
                    format!("mount a bpffs at {path} (`mount -t bpf bpf {path}`), then restart the agent")
                }
                NodeProblem::Pin { repairable: false, .. } => {
                    "unmount what covers the agent's bpffs, or restart the agent".to_owned()
                }
                NodeProblem::Outbound { repairable: false, .. } | NodeProblem::Overlay { repairable: false, .. } => {
                    "remove the cause; the agent tries again every 10 s (page \"Connectivity\" of the documentation)"
                        .to_owned()
                }
                NodeProblem::Setting { repairable: false, name, expected, .. } => format!(
                    "`sysctl -w {name}={expected}`, or start the agent with `--masquerade on` or `--local-delivery direct`"
                ),
                NodeProblem::LinkMissing { .. }
                | NodeProblem::LinkRenamed { .. }
                | NodeProblem::LinkDown { .. }
                | NodeProblem::LinkMtu { .. }
                | NodeProblem::Address { .. }
                | NodeProblem::PoolRoute { .. }
                | NodeProblem::PeerRoute { .. }
                | NodeProblem::PeerUnreachable { .. }
                | NodeProblem::Overlay { .. }
                | NodeProblem::Outbound { .. }
                | NodeProblem::Setting { .. }
                | NodeProblem::Pin { .. }
                | NodeProblem::PinMissing { .. } => REPAIR.to_owned(),
            },
            Self::Stray(stray) => match stray {
                Stray::Link { ours: true, .. } => "if its container still runs, recreate the container; `wharf audit \
                                                   --repair` removes the link, and with it the container's network"
                    .to_owned(),
                Stray::Link { ours: false, name, .. } | Stray::MarkedLink { name, .. } => {
                    format!("if nobody needs it: `ip link del {name}`")
                }
                Stray::ForeignPin { .. } => "remove it by hand if nobody needs it".to_owned(),
                Stray::Route { ours: false, to, .. } => format!("if nobody needs it: `ip route del {to}`"),
                Stray::UnstoredLease { nobodys: false, .. } => {
                    "`wharf status` says whether the store can be written; restart the agent when it can".to_owned()
                }
                Stray::Delete { id, .. } => format!(
                    "`wharf explain {id}` says what it waits for; the agent tries again every 30 s, `wharf endpoint delete \
                     {id}` at once"
                ),
                Stray::Pins { .. }
                | Stray::Row { .. }
                | Stray::CallSlot { .. }
                | Stray::Nat { .. }
                | Stray::Route { ours: true, .. }
                | Stray::Lease { .. }
                | Stray::NodeLease { .. }
                | Stray::UnstoredLease { nobodys: true, .. }
                | Stray::Intent { .. } => REPAIR.to_owned(),
            },
            Self::Kept(kept) => match kept {
                Kept::LeaseMissing { id, .. } => {
                    format!("restart the agent, or recreate the container of endpoint {id}")
                }
                Kept::LeaseHeld { id, .. } => {
                    format!("recreate the container of endpoint {id}: it gets another address")
                }
                Kept::LeaseOutside { id: Some(id), .. } => format!(
                    "recreate the container of endpoint {id}: it gets an address of a pool; or start the agent with a pool \
                     that has this address"
                ),
                Kept::LeaseOutside { ip, id: None, .. } => format!(
                    "when no container has it: `wharf ipam release {ip}`; or start the agent with a pool that has this address"
                ),
                Kept::SharedAddress { .. } => {
                    "delete all but one of these endpoints (`wharf endpoint delete`)".to_owned()
                }
                Kept::RecordAside { .. } | Kept::RecordUnreadable { .. } => {
                    "recreate its container; `wharf audit --repair` takes the container's network away and gives its \
                     addresses back"
                        .to_owned()
                }
                Kept::RecordMissing { .. } => "recreate its container".to_owned(),
                Kept::Queue { path, .. } => format!(
                    "{path} is to be a directory that the agent can read; move away what is in its place, and the agent \
                     makes it again"
                ),
                Kept::QueueAside { path, .. } => {
                    format!(
                        "delete its container if it is still there (`wharf endpoint list`), then remove the file (`rm -r {path}`)"
                    )
                }
                Kept::RestLeased { .. }
                | Kept::RestOutside { .. }
                | Kept::QueueFile { .. }
                | Kept::QueuedDelete { .. } => REPAIR.to_owned(),
            },
        }
    }
}

impl EndpointProblem {
    fn remedy(&self, id: EndpointId) -> String {
        use Side::{Container, Node};
        let regenerate = format!("`wharf endpoint regenerate {id} --level datapath`");
        match self {
            Self::Netns { .. } => format!(
                "`wharf endpoint delete {id}` if the container is gone; the agent deletes it (--gone-grace-ms) once the \
                 link is gone too. If the container runs, recreate it: nothing else brings its network back"
            ),
            Self::LinkMissing { side: Node, .. } | Self::LinkDeleted { .. } | Self::LinkReplaced { .. } => {
                "recreate the container: nothing else brings its network back".to_owned()
            }
            Self::LinkMissing { side: Container, name } => format!(
                "move {name} back into the container's network namespace, then {regenerate}; or recreate the container"
            ),
            Self::LinkRenamed { side: Node, name, found } => {
                format!(
                    "rename it back (`ip link set {found} down`, `ip link set {found} name {name}`), then {regenerate}"
                )
            }
            Self::LinkRenamed { side: Container, name, found } => format!(
                "rename it back in the container (`ip link set {found} down`, `ip link set {found} name {name}`), then \
                 {regenerate}; or recreate the container"
            ),
            Self::NodeRoute { to, found: Some(RouteSeen::Foreign(_)), .. } => {
                format!("remove it (`ip route del {to}`), then {regenerate}")
            }
            Self::NodeRouteShadowed { to, found, .. } => {
                let (ip, address) = (if to.addr().is_ipv4() { "ip" } else { "ip -6" }, to.addr());
                let table = found.as_ref().map_or_else(|| "all".to_owned(), |f| f.table.to_string());
                format!(
                    "remove the rule or route that is not Wharf's, or exclude the pools from it: `{ip} route get {address}`, \
                     `{ip} rule` and `{ip} route show table {table}` show it"
                )
            }
            Self::LinkQueue { name, .. } => format!(
                "if the plugin `bandwidth` is behind wharf-cni in the network's list, remove it there and declare `\"capabilities\": \
                 {{\"bandwidth\": true}}` for wharf-cni, which limits by itself; then recreate the container, or `tc qdisc del dev \
                 {name} root`"
            ),
            Self::PluginLink { .. } => "put it right where the plugin that made the link is configured, or recreate the container; Wharf changes \
                 nothing of that link"
                .to_owned(),
            Self::LinkMac { side: Container, expected, .. } => format!(
                "a container sends and receives with the MAC address it was given, {expected}: {regenerate} puts it back; a \
                 container that needs another asks for it in its ADD (`runtimeConfig.mac`, `args.cni.mac`)"
            ),
            Self::LinkMtu { side: Container, found, .. } if *found < MIN_MTU => format!(
                "an interface with an MTU below {MIN_MTU} bytes has no IPv6: {regenerate} puts the MTU and the addresses back"
            ),
            Self::LinkMtu { side: Container, expected, found, .. } if found < expected => {
                "nothing: a container may use a smaller MTU".to_owned()
            }
            Self::LinkMtu { side: Container, expected, .. } => format!(
                "packets above {expected} bytes that the container sends are lost: {regenerate} puts the MTU back; a \
                 network whose containers need a larger one says so in its configuration (`mtu`)"
            ),
            Self::LinkDown { side: Container, .. }
            | Self::LinkArp { side: Container, .. }
            | Self::Address { .. }
            | Self::ContainerRoute { .. }
            | Self::ContainerRule { .. } => format!(
                "the container changed it itself, or somebody in its namespace: {regenerate} puts it back; the agent does \
                 not by itself"
            ),
            Self::LinkDown { side: Node, .. }
            | Self::LinkMac { side: Node, .. }
            | Self::LinkMtu { side: Node, .. }
            | Self::LinkArp { side: Node, .. }
            | Self::LinkEnslaved { .. }
            | Self::LinkAlias { .. }
            | Self::NodeRoute { .. }
            | Self::Program { .. }
            | Self::Sink { .. }
            | Self::StrayFilter { .. }
            | Self::StrayLink { .. }
            | Self::PinMissing { .. }
            | Self::PinsMissing
            | Self::PinStale { .. }
            | Self::MapUnused { .. }
            | Self::MapUnreadable { .. }
            | Self::Config { .. }
            | Self::Row { .. }
            | Self::CallSlot { .. }
            | Self::Nat { .. } => {
                let level = if self.mender() == Mender::Regeneration(Level::Policy) { "" } else { " --level datapath" };
                format!(
                    "`wharf endpoint regenerate {id}{level}` puts in place what is missing; the leak audit does so by itself \
                     when it has seen it twice"
                )
            }
        }
    }
}
