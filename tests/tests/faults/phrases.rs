//! What the commands say, and docs/operations.md quotes: one place, so that neither the program nor the page can change
//! alone. Numbers, names and times are not part of a phrase, nor is where a line breaks.

/// The words of one fault.
#[derive(Debug)]
pub(crate) struct Fault {
    /// Its heading in docs/operations.md.
    pub(crate) title: &'static str,
    /// What `wharf status` says, which is asked first.
    pub(crate) status: &'static [&'static str],
    /// What `wharf explain` says.
    pub(crate) explain: &'static [&'static str],
    /// What `wharf audit` says.
    pub(crate) audit: &'static [&'static str],
    /// What another command says, or `wharf status` later on.
    pub(crate) other: &'static [&'static str],
    /// What is said when it is over, besides [`OVER`].
    pub(crate) over: &'static [&'static str],
    /// Commands of the remedy, as the page has them; the scenario runs them in this order ([`remedy`]). Capital words
    /// stand for what differs from node to node.
    ///
    /// [`remedy`]: crate::support::remedy
    pub(crate) remedy: &'static [&'static str],
    /// Commands that the page names beside the remedy: they only show something, or the test harness stands in for
    /// them.
    pub(crate) beside: &'static [&'static str],
}

/// What is said on any node where all is well.
pub(crate) const OVER: [&str; 2] = ["Wharf: OK", "nothing amiss"];

pub(crate) const PROGRAMS_OFF: Fault = Fault {
    title: "The programs are off a container's link",
    status: &["leaks is degraded: 2 findings", "wharf audit --repair"],
    explain: &["program from_container: expected program id", "puts in place what is missing"],
    audit: &[
        "program from_container: expected program id",
        "found none of ours (was it removed, or its clsact qdisc?)",
        "--level datapath` puts in place what is missing",
        "owner harbour/web-3f9c51aa:eth0 (endpoint",
        "2 found, 2 repairable",
    ],
    other: &[],
    over: &["; mended"],
    remedy: &["wharf endpoint regenerate ID --level datapath", "wharf audit --repair"],
    beside: &[],
};

pub(crate) const FOREIGN_ROUTE: Fault = Fault {
    title: "Another route is in the place of a container's",
    status: &["leaks is degraded: 1 finding;"],
    explain: &[
        "a route that is not Wharf's is in its place and goes to interface",
        "remove it (`ip route del 10.87.0.2/32`), then `wharf endpoint regenerate",
    ],
    audit: &[
        "a route that is not Wharf's is in its place and goes to interface",
        "-> remove it (`ip route del 10.87.0.2/32`)",
        "web-3f9c51aa",
    ],
    other: &[],
    over: &[],
    remedy: &["ip route del ADDRESS/32", "wharf endpoint regenerate ID --level datapath"],
    beside: &[],
};

pub(crate) const RENAMED_LINK: Fault = Fault {
    title: "The host side of a link has another name",
    status: &["leaks is degraded", "wharf audit"],
    explain: &[
        "was renamed on the node to uplink0",
        "rename it back (`ip link set uplink0 down`, `ip link set uplink0 name",
    ],
    audit: &[
        "was renamed on the node to uplink0",
        "-> rename it back (`ip link set uplink0 down`, `ip link set uplink0 name",
        "web-3f9c51aa",
    ],
    other: &[],
    over: &[],
    remedy: &[
        "ip link set uplink0 down",
        "ip link set uplink0 name LINK",
        "wharf endpoint regenerate ID --level datapath",
    ],
    beside: &[],
};

pub(crate) const POOL_EXHAUSTED: Fault = Fault {
    title: "No address is left",
    status: &["has no free IPv4 address: 6/6 (100.0%)", "wharf ipam list"],
    explain: &[
        "its create failed",
        "pool default has no free IPv4 address: all of its 6 addresses are in use",
        "delete endpoints, release leases (`wharf ipam list`), or give the pool another CIDR",
    ],
    audit: &[],
    other: &["harbour/job-0:eth0"],
    over: &["addresses free in every pool"],
    remedy: &["wharf ipam release ADDRESS"],
    beside: &["wharf audit"],
};

pub(crate) const DISK_FULL: Fault = Fault {
    title: "The disk of the run directory is full",
    status: &["store is failing", "is the disk full?", "endpoints is degraded: need attention: endpoint"],
    explain: &["waits for another delete", "No space left on device", "mend what the last error names"],
    audit: &[],
    other: &[],
    over: &["deleted"],
    remedy: &["wharf endpoint delete ID"],
    beside: &[],
};

pub(crate) const STUCK_DELETE: Fault = Fault {
    title: "A delete does not finish",
    status: &["endpoints is degraded: need attention: endpoint", "wharf explain ID"],
    explain: &[
        "disconnecting for",
        "waits for another delete",
        "it holds what is not ours: backup; it was left alone",
        "the agent's own try every 30 s",
        "mend what the last error names",
    ],
    audit: &[
        "not of Wharf's making: never touched",
        "-> remove it by hand if nobody needs it",
        "delete begun and not finished",
    ],
    other: &[],
    over: &["deleted"],
    remedy: &["rmdir PATH", "wharf endpoint delete ID"],
    beside: &[],
};

pub(crate) const AGENT_DOWN: Fault = Fault {
    title: "The agent was down while containers ended",
    status: &["is wharf-agent running?"],
    explain: &["deleted", "its link is gone"],
    audit: &[],
    other: &[
        "deletion-queue is degraded: empty, 1 put aside as unusable in",
        "a record that was put aside is a delete that nobody does: delete its container, remove the file",
    ],
    over: &[],
    remedy: &["rm PATH"],
    beside: &[
        "systemctl start wharf-agent",
        "journalctl -u wharf-agent -e",
        "wharf endpoint list",
        "wharf endpoint delete ID",
    ],
};

pub(crate) const FALSE_SOURCE: Fault = Fault {
    title: "A container spoofs its source address",
    status: &["Wharf: OK"],
    explain: &[
        "packets with a spoofed source address were dropped: invalid-source-ip",
        "it may use its own addresses and its own MAC only",
    ],
    audit: &[],
    other: &["egress invalid-source-ip: UDP 10.99.1.5:4000 -> 10.87.0.3:53"],
    over: &[],
    remedy: &[],
    beside: &[],
};

pub(crate) const WRONG_ANSWER: Fault = Fault {
    title: "Something else answers at the health endpoint's address",
    status: &["health is degraded: wrong-answer", "something else answers", "wharf health status"],
    explain: &["its probes say wrong-answer", "`wharf health status` tells what its probes find"],
    audit: &[],
    other: &[
        "something else answers (a health endpoint that says it is of node \"pier\", with another nonce)",
        "its own endpoint is as it should be, so it is not relaunched; find who else has the address",
    ],
    over: &[],
    remedy: &["ip addr del ADDRESS/32 dev LINK", "wharf health probe"],
    beside: &["ip addr show to ADDRESS", "ip route get ADDRESS"],
};

pub(crate) const DAMAGED_STORE: Fault = Fault {
    title: "The records are lost",
    status: &[
        "records is degraded: 2 endpoints lost their records with the previous store",
        "recreate their containers one after the other",
    ],
    explain: &[
        "its record was lost with a damaged store",
        "its container has its network as before",
        "recreate the container; `wharf audit --repair` disconnects",
    ],
    audit: &[
        "no record: its name says endpoint",
        "if its container still runs, recreate the container; `wharf audit --repair` removes the link",
    ],
    other: &[],
    over: &[],
    remedy: &[],
    beside: &["wharf audit --repair"],
};

/// Every fault, in the page's order.
pub(crate) const ALL: [&Fault; 10] = [
    &PROGRAMS_OFF,
    &FOREIGN_ROUTE,
    &RENAMED_LINK,
    &POOL_EXHAUSTED,
    &DISK_FULL,
    &STUCK_DELETE,
    &AGENT_DOWN,
    &FALSE_SOURCE,
    &WRONG_ANSWER,
    &DAMAGED_STORE,
];
