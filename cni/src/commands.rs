//! Each command's request to the agent, and what its answer means.

use std::time::{Duration, Instant};

use wharf_api::{
    DeleteQuery, DeleteResult, EndpointCreate, ErrorCode, GcAttachment, GcRequest,
    client::{Client, ClientError},
};

use crate::{
    args::ContainerArgs,
    check::{self, PrevResult},
    fault::{Code, Fault, first_of},
    log::Level,
    netconf::NetConf,
    request::{Ask, Command, Target},
    result, retry, status,
};

/// Time for a command that changes something. Runtimes give a sandbox two minutes and more.
const CHANGE_LIMIT: Duration = Duration::from_secs(60);
/// Time for a command that only looks.
const LOOK_LIMIT: Duration = Duration::from_secs(10);
/// How much longer than ADD's deadline the agent has to answer that it passed, and that all is undone.
const GRACE: Duration = Duration::from_secs(5);

/// Runs the command; what it returns goes to stdout.
pub(crate) fn run(ask: &Ask) -> Result<Option<String>, Fault> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Fault::new(Code::TryAgain, format!("starting: {e}")))?;
    let agent = Agent { client: Client::new(&ask.conf.socket), conf: &ask.conf };
    let started = Instant::now();
    let outcome = runtime.block_on(async {
        match &ask.command {
            Command::Add { target, netns, args } => agent.add(target, netns, args).await.map(Some),
            Command::Del { target } => agent.del(target).await.map(|()| None),
            Command::Check { target, prev } => agent.check(target, prev).await.map(|()| None),
            Command::Gc { valid } => agent.gc(valid).await.map(|()| None),
            Command::Status => agent.status().await.map(|()| None),
        }
    });
    let took = started.elapsed().as_micros();
    ask.conf.log.say(Level::Debug, format_args!("asking the agent at {:?} took {took} µs", ask.conf.socket));
    outcome
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
            self.within(left.saturating_add(GRACE)).put_endpoint(&id, &create).await
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
        // The interface may be another network's: an ADD that was refused for that is followed by a DEL all the same.
        let query = DeleteQuery { network: Some(self.conf.name.clone()), ..DeleteQuery::default() };
        let answer = retry::until(Instant::now() + CHANGE_LIMIT, self.conf.log, async |left| {
            self.within(left).delete_endpoint(&id, &query).await
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
        check::verdict(&subject, &self.conf.name, target, prev, &endpoint, &health.map_err(failed)?)
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
        let subject = format!("STATUS of network {}", self.conf.name);
        // Not asked again: "not now" is the answer that STATUS is there to give.
        match self.within(LOOK_LIMIT).status().await {
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
    let failed: Vec<String> =
        done.errors.iter().map(|e| format!("{} of endpoint {}: {}", e.step, e.endpoint, e.message)).collect();
    let steps = if failed.len() == 1 { "1 step" } else { &format!("{} steps", failed.len()) };
    Err(Fault::new(Code::TryAgain, format!("{subject}: {steps} failed, the rest is done: {}", first_of(&failed)))
        .with_details("the next DEL or GC tries again what failed"))
}
