//! Each command's request to the agent, and what its answer means.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    time::{Duration, Instant},
};

use wharf_api::{
    DeleteQuery, DeleteResult, EndpointCreate, ErrorCode, GcAttachment, GcRequest,
    client::{Client, ClientError},
};

use crate::{
    args::ContainerArgs,
    away,
    chain::Chain,
    check::{self, PrevResult},
    fault::{Code, Fault, first_of, is_absent},
    log::Level,
    netconf::NetConf,
    request::{Ask, Command, Target},
    result,
    retry::{self, Absence},
    status,
};

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// A command that changes something. Runtimes give a sandbox two minutes and more.
    pub(crate) change: Duration,
    /// A command that only looks.
    pub(crate) look: Duration,
    /// How much longer than ADD's deadline the agent has to answer that it passed, and that all is undone.
    pub(crate) grace: Duration,
    /// How long ADD waits for an agent that is not there. A runtime that is told "later" comes back by itself.
    pub(crate) add_absent: Duration,
    /// The same of DEL, which has another way when this is over.
    pub(crate) del_absent: Duration,
    /// How long DEL waits for one answer of an agent that is there. The agent's steps are bounded below it.
    pub(crate) del_answer: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            change: Duration::from_secs(60),
            look: Duration::from_secs(10),
            grace: Duration::from_secs(5),
            add_absent: Duration::from_secs(1),
            del_absent: Duration::from_secs(2),
            del_answer: wharf_handover::DELETE_ANSWER,
        }
    }
}

/// Runs the command; what it returns goes to stdout.
pub(crate) fn run(ask: &Ask, limits: &Limits) -> Result<Option<String>, Fault> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Fault::new(Code::TryAgain, format!("starting: {e}")))?;
    let agent = Agent { client: Client::new(&ask.conf.socket), conf: &ask.conf, limits };
    let started = Instant::now();
    let outcome = runtime.block_on(async {
        match &ask.command {
            Command::Add { target, netns, args, chain } => {
                agent.add(target, netns, args, chain.as_ref()).await.map(Some)
            }
            Command::Del { target } => agent.del(target).await.map(|()| None),
            Command::Check { target, netns, prev } => agent.check(target, netns, prev.as_ref()).await.map(|()| None),
            Command::Gc { valid } => agent.gc(valid).await.map(|()| None),
            Command::Status => agent.status().await.map(|()| None),
        }
    });
    let took = started.elapsed().as_micros();
    ask.conf.log.say(Level::Debug, format_args!("asking the agent at {:?} took {took} µs", ask.conf.socket));
    outcome
}

/// What to do when the agent does not find the namespace that this process finds.
const OTHER_MOUNTS: &str = "the plugin finds a namespace at this path and the agent does not: the agent runs in a mount \
    namespace of its own; start it in the runtime's (a unit without PrivateTmp=, ProtectSystem= and the like; a container \
    with /run and /var/run mounted with propagation)";

struct Agent<'a> {
    client: Client,
    conf: &'a NetConf,
    limits: &'a Limits,
}

impl Agent<'_> {
    async fn add(
        &self,
        target: &Target,
        netns: &str,
        args: &ContainerArgs,
        chain: Option<&Chain>,
    ) -> Result<String, Fault> {
        let subject = self.subject("ADD", target);
        let mut create = EndpointCreate {
            container_id: target.container_id.clone(),
            ifname: target.ifname.clone(),
            network: self.conf.name.clone(),
            netns: netns.to_owned(),
            pool: args.pool.clone(),
            mtu: self.conf.mtu,
            // Asked of the plugin that made the interface.
            mac: args.mac.clone().filter(|_| chain.is_none()),
            ips: chain.map_or_else(|| args.ips.clone(), |chain| chain.ips.clone()),
            labels: args.labels.clone(),
            pod_name: args.pod_name.clone(),
            pod_namespace: args.pod_namespace.clone(),
            deadline_ms: None,
            ports: args.ports.clone(),
            masquerade: self.conf.ip_masq,
            bandwidth: args.bandwidth,
            chained: chain.is_some(),
        };
        let id = id(target);
        // Only while it is certain that nothing was begun: what an agent did that went away meanwhile is not known.
        let absence = Absence { patience: self.limits.add_absent, shows: is_absent };
        wharf_crash::point("shim/add/before-ask");
        let answer = retry::until(Instant::now() + self.limits.change, absence, self.conf.log, async |left| {
            create.deadline_ms = u64::try_from(left.as_millis()).ok();
            self.within(left.saturating_add(self.limits.grace)).put_endpoint(&id, &create).await
        })
        .await;
        wharf_crash::point("shim/add/after-answer");
        let endpoint = answer.map_err(|e| explained(&subject, netns, args, &e))?;
        self.conf.log.say(Level::Info, format_args!("{subject}: endpoint {}", endpoint.id));
        if let Some(chain) = chain {
            return Ok(chain.result(self.conf.version));
        }
        result::added(self.conf.version, &args.dns, netns, &endpoint)
            .map_err(|e| Fault::new(Code::Io, format!("{subject}: writing the result: {e}")))
    }

    async fn del(&self, target: &Target) -> Result<(), Fault> {
        let subject = self.subject("DEL", target);
        let id = id(target);
        // The interface may be another network's: an ADD that was refused for that is followed by a DEL all the same.
        let query = DeleteQuery { network: Some(self.conf.name.clone()), ..DeleteQuery::default() };
        let absence = Absence { patience: self.limits.del_absent, shows: |e| is_absent(e) || went_away(e) };
        wharf_crash::point("shim/del/before-ask");
        let answer = retry::until(Instant::now() + self.limits.change, absence, self.conf.log, async |left| {
            self.within(left.min(self.limits.del_answer)).delete_endpoint(&id, &query).await
        })
        .await;
        wharf_crash::point("shim/del/after-answer");
        match answer {
            Ok(done) => {
                self.conf.log.say(Level::Info, format_args!("{subject}: deleted endpoints {:?}", done.deleted));
                finished(&subject, &done)
            }
            // Never added, or deleted before: both are what DEL is for.
            Err(e) if e.is_not_found() => {
                self.conf.log.say(Level::Info, format_args!("{subject}: not known to the agent"));
                Ok(())
            }
            Err(e) if is_absent(&e) || went_away(&e) || self.is_stuck(&e) => {
                away::delete(&subject, self.conf, target, &e).await
            }
            Err(e) => Err(Fault::of_client(&subject, &e)),
        }
    }

    /// The agent had DEL's whole time for an answer and gave none. A shorter wait, at the end of a minute in which it
    /// said "not now", tells nothing of the kind.
    fn is_stuck(&self, error: &ClientError) -> bool {
        matches!(error, ClientError::Timeout { after, .. } if *after >= self.limits.del_answer)
    }

    async fn check(&self, target: &Target, netns: &str, prev: Option<&PrevResult>) -> Result<(), Fault> {
        let subject = self.subject("CHECK", target);
        let failed = |e: ClientError| match &e {
            e if e.is_not_found() => {
                Fault::new(Code::UnknownContainer, format!("{subject}: the agent knows no such attachment"))
            }
            e => Fault::of_client(&subject, e),
        };
        let id = id(target);
        let deadline = Instant::now() + self.limits.look;
        let log = self.conf.log;
        let endpoint = retry::until(deadline, Absence::FINAL, log, async |left| self.within(left).endpoint(&id).await);
        let endpoint = endpoint.await.map_err(failed)?;
        let Some(prev) = prev else { return Err(check::without_result(&subject, &self.conf.name, &endpoint)) };
        check::same_namespace(&subject, netns, &endpoint)?;
        let health =
            retry::until(deadline, Absence::FINAL, log, async |left| self.within(left).endpoint_health(&id).await)
                .await;
        check::verdict(&subject, &self.conf.name, target, prev, &endpoint, &health.map_err(failed)?)
    }

    async fn gc(&self, valid: &[GcAttachment]) -> Result<(), Fault> {
        let subject = format!("GC of network {}", self.conf.name);
        let request = GcRequest { network: self.conf.name.clone(), valid: valid.to_vec() };
        let answer = retry::until(Instant::now() + self.limits.change, Absence::FINAL, self.conf.log, async |left| {
            self.within(left).gc(&request).await
        })
        .await;
        let done = answer.map_err(|e| Fault::of_client(&subject, &e))?;
        self.conf.log.say(Level::Info, format_args!("{subject}: deleted endpoints {:?}", done.deleted));
        finished(&subject, &done)
    }

    async fn status(&self) -> Result<(), Fault> {
        let subject = format!("STATUS of network {}", self.conf.name);
        // Not asked again: "not now" is the answer that STATUS is there to give.
        match self.within(self.limits.look).status().await {
            Ok(status) => status::verdict(&subject, self.conf, &status),
            Err(e) => Err(Fault { code: Code::NotAvailable, ..Fault::of_client(&subject, &e) }),
        }
    }

    fn within(&self, limit: Duration) -> Client {
        self.client.clone().with_timeout(limit)
    }

    fn subject(&self, command: &str, target: &Target) -> String {
        format!("{command} {}/{} on network {}", target.container_id, target.ifname, self.conf.name)
    }
}

/// An interface's name is unique in its container, so container and interface name the attachment whatever its network.
fn id(target: &Target) -> String {
    format!("cni-attachment-id:{}:{}", target.container_id, target.ifname)
}

/// The agent took the request and ended before it answered. DEL may be asked again all the same: it names what is to be
/// gone, and gone twice is gone.
fn went_away(error: &ClientError) -> bool {
    matches!(error, ClientError::Closed { .. })
}

/// Names the variable at fault, which code 4 asks for.
fn explained(subject: &str, netns: &str, args: &ContainerArgs, error: &ClientError) -> Fault {
    let mut fault = Fault::of_client(subject, error);
    let origin = match error.code() {
        Some(ErrorCode::InvalidNetns) => "CNI_NETNS",
        Some(ErrorCode::Exists) if !args.ports.is_empty() => {
            "CNI_CONTAINERID and CNI_IFNAME, or the addresses or ports asked for"
        }
        Some(ErrorCode::Exists) if args.ips.is_empty() => "CNI_CONTAINERID and CNI_IFNAME",
        // The address asked for may be what is taken.
        Some(ErrorCode::Exists) => "CNI_CONTAINERID and CNI_IFNAME, or the addresses asked for",
        _ => return fault,
    };
    fault.msg = format!("{} (from {origin})", fault.msg);
    if error.code() == Some(ErrorCode::InvalidNetns) && is_container_namespace(netns) {
        fault.details = OTHER_MOUNTS.to_owned();
    }
    fault
}

/// Whether this process finds a namespace at the path, and not the node's own.
fn is_container_namespace(path: &str) -> bool {
    let own = fs::metadata("/proc/self/ns/net");
    let there = fs::metadata(path);
    // Every namespace is a file of one device.
    matches!((own, there), (Ok(own), Ok(there)) if own.dev() == there.dev() && own.ino() != there.ino())
}

fn finished(subject: &str, done: &DeleteResult) -> Result<(), Fault> {
    if done.errors.is_empty() {
        return Ok(());
    }
    let failed: Vec<String> =
        done.errors.iter().map(|e| format!("{} of endpoint {}: {}", e.step, e.endpoint, e.message)).collect();
    let steps = if failed.len() == 1 { "1 step" } else { &format!("{} steps", failed.len()) };
    Err(Fault::new(Code::TryAgain, format!("{subject}: {steps} failed, the rest is done: {}", first_of(&failed)))
        .with_details("the next DEL or GC tries again what failed"))
}

#[cfg(test)]
#[path = "commands_tests.rs"]
mod tests;
