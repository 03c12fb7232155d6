//! Each command's request to the agent, and what its answer means.

use std::time::{Duration, Instant};

use wharf_api::{
    AgentStatus, DeleteQuery, DeleteResult, EndpointCreate, ErrorCode, GcAttachment, GcRequest, Health,
    client::{Client, ClientError},
};

use crate::{
    args::ContainerArgs,
    check::{self, PrevResult},
    fault::{Code, Fault},
    log::Level,
    netconf::NetConf,
    request::{Ask, Command, Target},
    result, retry,
};

/// Time for a command that changes something. Runtimes give a sandbox two minutes and more.
const CHANGE_LIMIT: Duration = Duration::from_secs(60);
/// Time for a command that only looks.
const LOOK_LIMIT: Duration = Duration::from_secs(10);
/// How much longer than its deadline the agent has to answer that it passed, and has undone what it did.
const GRACE: Duration = Duration::from_secs(5);
/// At most this many failed steps are told.
const MAX_TOLD: usize = 5;
/// Components of the agent without which endpoints that exist are limited.
const CARRIES_TRAFFIC: [&str; 2] = ["datapath", "proxy"];

/// Runs the command; what it returns goes to stdout.
pub(crate) fn run(ask: &Ask) -> Result<Option<String>, Fault> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Fault::new(Code::TryAgain, format!("starting: {e}")))?;
    let agent = Agent { client: Client::new(&ask.conf.socket), conf: &ask.conf };
    runtime.block_on(async {
        match &ask.command {
            Command::Add { target, netns, args } => agent.add(target, netns, args).await.map(Some),
            Command::Del { target } => agent.del(target).await.map(|()| None),
            Command::Check { target, prev } => agent.check(target, prev).await.map(|()| None),
            Command::Gc { valid } => agent.gc(valid).await.map(|()| None),
            Command::Status => agent.status().await.map(|()| None),
        }
    })
}

struct Agent<'a> {
    client: Client,
    conf: &'a NetConf,
}

impl Agent<'_> {
    async fn add(&self, target: &Target, netns: &str, args: &ContainerArgs) -> Result<String, Fault> {
        let subject = self.subject("ADD", target);
        let mut create = EndpointCreate {
            container_id: target.container_id.clone(),
            ifname: target.ifname.clone(),
            network: self.conf.name.clone(),
            netns: netns.to_owned(),
            pool: args.pool.clone(),
            mtu: self.conf.mtu,
            mac: args.mac.clone(),
            ips: args.ips.clone(),
            labels: args.labels.clone(),
            pod_name: args.pod_name.clone(),
            pod_namespace: args.pod_namespace.clone(),
            deadline_ms: None,
        };
        let id = id(target);
        let answer = retry::until(Instant::now() + CHANGE_LIMIT, self.conf.log, async |left| {
            create.deadline_ms = u64::try_from(left.as_millis()).ok();
            self.within(left).put_endpoint(&id, &create).await
        })
        .await;
        let endpoint = answer.map_err(|e| explained(&subject, args, &e))?;
        self.conf.log.say(Level::Info, format_args!("{subject}: endpoint {}", endpoint.id));
        result::added(self.conf, netns, &endpoint)
            .map_err(|e| Fault::new(Code::Io, format!("{subject}: writing the result: {e}")))
    }

    async fn del(&self, target: &Target) -> Result<(), Fault> {
        let subject = self.subject("DEL", target);
        let id = id(target);
        let answer = retry::until(Instant::now() + CHANGE_LIMIT, self.conf.log, async |left| {
            self.within(left).delete_endpoint(&id, &DeleteQuery::default()).await
        })
        .await;
        match answer {
            Ok(done) => finished(&subject, &done),
            // Never added, or deleted before: both are what DEL is for.
            Err(e) if e.is_not_found() => {
                self.conf.log.say(Level::Info, format_args!("{subject}: not known to the agent"));
                Ok(())
            }
            Err(e) => Err(Fault::of_client(&subject, &e)),
        }
    }

    async fn check(&self, target: &Target, prev: &PrevResult) -> Result<(), Fault> {
        let subject = self.subject("CHECK", target);
        let failed = |e: ClientError| match &e {
            e if e.is_not_found() => {
                Fault::new(Code::UnknownContainer, format!("{subject}: the agent knows no such endpoint"))
            }
            e => Fault::of_client(&subject, e),
        };
        let id = id(target);
        let deadline = Instant::now() + LOOK_LIMIT;
        let endpoint = retry::until(deadline, self.conf.log, async |left| self.within(left).endpoint(&id).await).await;
        let endpoint = endpoint.map_err(failed)?;
        let health =
            retry::until(deadline, self.conf.log, async |left| self.within(left).endpoint_health(&id).await).await;
        check::verdict(&subject, &target.ifname, prev, &endpoint, &health.map_err(failed)?)
    }

    async fn gc(&self, valid: &[GcAttachment]) -> Result<(), Fault> {
        let subject = format!("GC of network {}", self.conf.name);
        let request = GcRequest { network: self.conf.name.clone(), valid: valid.to_vec() };
        let answer = retry::until(Instant::now() + CHANGE_LIMIT, self.conf.log, async |left| {
            self.within(left).gc(&request).await
        })
        .await;
        let done = answer.map_err(|e| Fault::of_client(&subject, &e))?;
        self.conf.log.say(Level::Info, format_args!("{subject}: deleted endpoints {:?}", done.deleted));
        finished(&subject, &done)
    }

    async fn status(&self) -> Result<(), Fault> {
        // Not asked again: "not now" is the answer that STATUS is there to give.
        match self.within(LOOK_LIMIT).status().await {
            Ok(status) => readiness(&status, self.conf.log),
            Err(e) => Err(Fault { code: Code::NotAvailable, ..Fault::of_client("STATUS", &e) }),
        }
    }

    fn within(&self, left: Duration) -> Client {
        self.client.clone().with_timeout(left.saturating_add(GRACE))
    }

    fn subject(&self, command: &str, target: &Target) -> String {
        format!("{command} {}/{} on network {}", target.container_id, target.ifname, self.conf.name)
    }
}

/// An interface's name is unique in its container, so container and interface name the attachment whatever its network.
fn id(target: &Target) -> String {
    format!("cni-attachment-id:{}:{}", target.container_id, target.ifname)
}

/// Names the variable at fault, which code 4 asks for.
fn explained(subject: &str, args: &ContainerArgs, error: &ClientError) -> Fault {
    let fault = Fault::of_client(subject, error);
    let origin = match error.code() {
        Some(ErrorCode::InvalidNetns) => "CNI_NETNS",
        Some(ErrorCode::Exists) if args.ips.is_empty() => "CNI_CONTAINERID and CNI_IFNAME",
        // The address asked for may be what is taken.
        Some(ErrorCode::Exists) => "CNI_CONTAINERID and CNI_IFNAME, or the addresses asked for",
        _ => return fault,
    };
    let msg = format!("{} (from {origin})", fault.msg);
    Fault { msg, ..fault }
}

fn finished(subject: &str, done: &DeleteResult) -> Result<(), Fault> {
    if done.errors.is_empty() {
        return Ok(());
    }
    let told: Vec<String> = (done.errors.iter().take(MAX_TOLD))
        .map(|e| format!("{} of endpoint {}: {}", e.step, e.endpoint, e.message))
        .collect();
    let rest = done.errors.len().saturating_sub(told.len());
    let more = if rest == 0 { String::new() } else { format!("; and {rest} more") };
    let count = done.errors.len();
    let steps = if count == 1 { "1 step" } else { &format!("{count} steps") };
    Err(Fault::new(Code::TryAgain, format!("{subject}: {steps} failed, the rest is done: {}{more}", told.join("; ")))
        .with_details("what failed is tried again by the next one"))
}

/// STATUS: 51 when existing endpoints are limited, 50 when ADD would fail, else nothing.
fn readiness(status: &AgentStatus, log: Level) -> Result<(), Fault> {
    let unwell: Vec<String> = (status.components.iter())
        .filter(|c| c.health >= Health::Degraded)
        .map(|c| format!("{}: {}", c.name, c.message))
        .collect();
    let reasons = if unwell.is_empty() { "it is starting or stopping".into() } else { unwell.join("; ") };
    let limited =
        status.components.iter().any(|c| c.health >= Health::Degraded && CARRIES_TRAFFIC.contains(&c.name.as_str()));
    if limited {
        return Err(Fault::new(Code::Limited, format!("STATUS: existing endpoints may be limited: {reasons}")));
    }
    if !status.serving || status.components.iter().any(|c| c.health == Health::Failing) {
        return Err(Fault::new(Code::NotAvailable, format!("STATUS: the agent takes no new endpoints: {reasons}")));
    }
    if !unwell.is_empty() {
        log.say(Level::Warn, format_args!("STATUS: {reasons}"));
    }
    Ok(())
}
