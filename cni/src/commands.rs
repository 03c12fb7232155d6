//! Requests to the agent.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    time::{Duration, Instant},
};

use wharf_api::{
    ApiError, DeleteQuery, DeleteResult, EndpointCreate, EndpointMode, ErrorCode, GcAttachment, GcRequest,
    client::{Client, ClientError},
};

use crate::{
    args::ContainerArgs,
    away,
    chain::Chain,
    check::{self, PrevResult, kernel::Seen},
    fault::{Code, Fault, first_of, is_absent},
    ipam::Ipam,
    leased::Leased,
    log::Level,
    netconf::{Dns, NetConf},
    report::Run,
    request::{Ask, Command, Target},
    result,
    retry::{self, Absence, NOT_NOW},
    status,
    turn::Turn,
};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Runtimes allow at least two minutes.
    pub(crate) change: Duration,
    pub(crate) look: Duration,
    /// For the agent's report of ADD's timeout and rollback.
    pub(crate) grace: Duration,
    /// Absent agent; the runtime retries after CNI error 11.
    pub(crate) add_absent: Duration,
    /// Absent agent, before a deletion record is written.
    pub(crate) del_absent: Duration,
    /// Absent agent, if the kernel differs from ADD's result.
    pub(crate) check_absent: Duration,
    /// One answer; the agent's steps have lower limits.
    pub(crate) del_answer: Duration,
    /// Changes by an IPAM plugin, which may query a server.
    pub(crate) ipam: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            change: Duration::from_secs(60),
            look: Duration::from_secs(10),
            grace: Duration::from_secs(5),
            add_absent: Duration::from_secs(1),
            del_absent: Duration::from_secs(2),
            check_absent: Duration::from_secs(2),
            del_answer: wharf_handover::DELETE_ANSWER,
            ipam: Duration::from_secs(30),
        }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) stdout: Option<String>,
    pub(crate) deferred: bool,
    pub(crate) found_nothing: bool,
}

pub(crate) fn run(ask: &Ask, limits: &Limits, told: Option<&Run>) -> Result<Done, Fault> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Fault::new(Code::TryAgain, format!("starting: {e}")))?;
    let client = Client::new(&ask.conf.socket);
    let (runtime_name, ipam) = (ask.runtime.as_deref(), ask.ipam.as_ref());
    let agent = Agent { client, conf: &ask.conf, runtime: runtime_name, ipam, limits, told };
    let started = Instant::now();
    let outcome = runtime.block_on(async {
        match &ask.command {
            Command::Add { target, netns, args, chain } => {
                let result = agent.add(target, netns, args, chain.as_ref()).await;
                result.map(|result| Done { stdout: Some(result), ..Done::default() })
            }
            Command::Del { target } => agent.del(target).await,
            Command::Check { target, netns, prev } => {
                agent.check(target, netns, prev.as_ref()).await.map(|()| Done::default())
            }
            Command::Gc { valid } => agent.gc(valid).await.map(|()| Done::default()),
            Command::Status => agent.status().await.map(|()| Done::default()),
        }
    });
    let took = started.elapsed().as_micros();
    ask.conf.log.say(Level::Debug, format_args!("asking the agent at {:?} took {took} µs", ask.conf.socket));
    outcome
}

const OTHER_MOUNTS: &str = "the plugin finds a namespace at this path and the agent does not: the agent runs in a mount \
    namespace of its own; start it in the runtime's (a unit without PrivateTmp=, ProtectSystem= and the like; a container \
    with /run and /var/run mounted with propagation)";

#[derive(Clone, Copy)]
enum Addresses<'a> {
    Agent,
    Ipam(&'a Ipam, &'a Leased),
    Chain(&'a Chain),
}

struct Agent<'a> {
    client: Client,
    conf: &'a NetConf,
    runtime: Option<&'a str>,
    /// `None` when the agent leases the addresses.
    ipam: Option<&'a Ipam>,
    limits: &'a Limits,
    told: Option<&'a Run>,
}

impl Agent<'_> {
    /// The IPAM plugin runs first: the agent needs the addresses. A later failure releases the lease; after a kill, the
    /// DEL that follows every ADD does.
    async fn add(
        &self,
        target: &Target,
        netns: &str,
        args: &ContainerArgs,
        chain: Option<&Chain>,
    ) -> Result<String, Fault> {
        let subject = self.subject("ADD", target);
        if let Some(chain) = chain {
            return self.create(&subject, target, netns, args, Addresses::Chain(chain)).await;
        }
        let Some(ipam) = self.ipam else {
            return self.create(&subject, target, netns, args, Addresses::Agent).await;
        };
        let _turn = Turn::take(self.conf, &subject, target, self.limits.ipam).await?;
        self.must_be_new(&subject, target).await?;
        let leased = ipam.add(&subject, self.limits.ipam).await?;
        let created = match as_asked(&subject, ipam, args, &leased) {
            Ok(()) => self.create(&subject, target, netns, args, Addresses::Ipam(ipam, &leased)).await,
            Err(fault) => Err(fault),
        };
        match created {
            Err(fault) if away::is_owed(self.conf, target) => {
                self.tell_kept(ipam);
                Err(fault)
            }
            Err(fault) => Err(ipam.undo(&subject, fault, self.limits.ipam).await),
            created => created,
        }
    }

    /// Protects an existing attachment's lease from an undo, and detects an absent agent before a lease.
    async fn must_be_new(&self, subject: &str, target: &Target) -> Result<(), Fault> {
        let id = id(target);
        let absence = Absence { patience: self.limits.add_absent, shows: is_absent };
        let deadline = Instant::now() + self.limits.look;
        // Not counted as the ADD's end.
        let ask = async |left| self.client.clone().with_timeout(left).endpoint(&id).await;
        let there = retry::until(deadline, absence, self.conf.log, ask);
        match there.await {
            Ok(there) => {
                let msg = format!(
                    "{subject}: endpoint {} has this interface already (from CNI_CONTAINERID and CNI_IFNAME)",
                    there.id
                );
                Err(Fault::environment(msg).with_details("delete that one first"))
            }
            Err(e) if e.is_not_found() => Ok(()),
            Err(e) => Err(Fault { counted: false, ..Fault::of_client(subject, &e) }),
        }
    }

    async fn create(
        &self,
        subject: &str,
        target: &Target,
        netns: &str,
        args: &ContainerArgs,
        addresses: Addresses<'_>,
    ) -> Result<String, Fault> {
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
            // In the command's header: an older agent would refuse an unknown field.
            runtime: None,
            deadline_ms: None,
            ports: args.ports.clone(),
            masquerade: self.conf.ip_masq,
            bandwidth: args.bandwidth,
            source_prefixes: args.source_prefixes.clone(),
            ipam: None,
            gateways: Vec::new(),
            routes: args.routes.clone(),
            chained: false,
        };
        let mut dns = args.dns.clone();
        match addresses {
            Addresses::Agent => {}
            Addresses::Ipam(ipam, leased) => {
                create.ipam = Some(ipam.plugin.clone());
                create.ips.clone_from(&leased.ips);
                create.gateways.clone_from(&leased.gateways);
                create.routes = create.routes.or_else(|| leased.routes.clone());
                dns = dns.or(leased.dns.clone());
            }
            Addresses::Chain(chain) => {
                self.told.inspect(|run| run.set_chained());
                create.chained = true;
                create.ips.clone_from(&chain.ips);
            }
        }
        let id = id(target);
        // No retry after a disconnect: the agent may have begun.
        let absence = Absence { patience: self.limits.add_absent, shows: is_absent };
        wharf_crash::point("shim/add/before-ask");
        let mut ask = async |left: Duration| {
            create.deadline_ms = u64::try_from(left.as_millis()).ok();
            let agent = self.within(left.saturating_add(self.limits.grace));
            agent.put_endpoint(&id, &create).await
        };
        let answer = if args.no_wait {
            ask(self.limits.change).await
        } else {
            retry::until(Instant::now() + self.limits.change, absence, self.conf.log, ask).await
        };
        wharf_crash::point("shim/add/after-answer");
        let endpoint = answer.map_err(|e| explained(subject, netns, &create, &e))?;
        self.conf.log.say(Level::Info, format_args!("{subject}: endpoint {}", endpoint.id));
        if let Addresses::Chain(chain) = addresses {
            return Ok(chain.result(self.conf.version));
        }
        if let Some(delegated) = &endpoint.delegated {
            dns = dns.or(Dns::from(&delegated.dns));
        }
        result::added(self.conf.version, &dns, netns, &endpoint)
            .map_err(|e| Fault::new(Code::Io, format!("{subject}: writing the result: {e}")))
    }

    /// The IPAM plugin runs after the agent or the queue. The lease stays until the next DEL or GC while the interface
    /// may have the address: after an error that a retry may resolve, or if a delegated service has not accepted the
    /// deletion. A queued deletion releases it: no other DEL follows, and the agent reuses the address only afterwards.
    async fn del(&self, target: &Target) -> Result<Done, Fault> {
        let subject = self.subject("DEL", target);
        let _turn = match self.ipam {
            Some(_) => Turn::take(self.conf, &subject, target, self.limits.ipam).await?,
            None => None,
        };
        let done = match self.delete(&subject, target).await {
            Ok(_) if self.ipam.is_some() && away::is_owed(self.conf, target) => {
                let msg =
                    format!("{subject}: the service has not taken it yet, and may have the container's addresses");
                Err(Fault::new(Code::TryAgain, msg)
                    .with_details("it is recorded, and their lease is given back by a DEL after that"))
            }
            done => done,
        };
        self.then_ipam(done, async |ipam, limit| ipam.ask(&subject, "DEL", limit).await).await
    }

    async fn then_ipam<T>(
        &self,
        done: Result<T, Fault>,
        ask: impl AsyncFnOnce(&Ipam, Duration) -> Result<(), Fault>,
    ) -> Result<T, Fault> {
        let Some(ipam) = self.ipam else { return done };
        match done {
            Err(fault) if fault.code == Code::TryAgain => {
                self.tell_kept(ipam);
                Err(fault)
            }
            Ok(done) => ask(ipam, self.limits.ipam).await.map(|()| done),
            Err(fault) => match ask(ipam, self.limits.ipam).await {
                Ok(()) => Err(fault),
                Err(other) => Err(fault.and(other)),
            },
        }
    }

    fn tell_kept(&self, ipam: &Ipam) {
        let plugin = &ipam.plugin;
        let text = format_args!("IPAM plugin {plugin} was not asked to release addresses: they may be in use");
        self.conf.log.say(Level::Warn, text);
    }

    async fn delete(&self, subject: &str, target: &Target) -> Result<Done, Fault> {
        let id = id(target);
        // Another network may have the interface.
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
                if done.deferred {
                    self.conf.log.say(Level::Info, format_args!("{subject}: the agent recorded it, to be done later"));
                } else {
                    self.conf.log.say(Level::Info, format_args!("{subject}: deleted endpoints {:?}", done.deleted));
                }
                finished(subject, &done).map(|()| Done::default())
            }
            Err(e) if e.is_not_found() => {
                self.conf.log.say(Level::Info, format_args!("{subject}: not known to the agent"));
                Ok(Done { found_nothing: true, ..Done::default() })
            }
            Err(e) if is_absent(&e) || went_away(&e) || self.is_stuck(&e) => {
                away::delete(subject, self.conf, target, &e).await
            }
            Err(e) => Err(Fault::of_client(subject, &e)),
        }
    }

    fn is_stuck(&self, error: &ClientError) -> bool {
        matches!(error, ClientError::Timeout { after, .. } if *after >= self.limits.del_answer)
    }

    /// Checks the kernel first: a starting runtime checks containers in sequence, so only a difference is worth a wait
    /// for the agent.
    async fn check(&self, target: &Target, netns: &str, prev: Option<&PrevResult>) -> Result<(), Fault> {
        let subject = self.subject("CHECK", target);
        let deadline = Instant::now() + self.limits.look;
        let mut answer = self.ask_check(&subject, target, netns, prev, deadline, Absence::FINAL).await;
        if let Err(why) = &answer
            && is_unanswered(why)
        {
            let mut seen = self.look(&subject, target, netns, prev, why).await;
            if seen.is_err() {
                let absence = Absence { patience: self.limits.check_absent, shows: |e| is_absent(e) || went_away(e) };
                answer = self.ask_check(&subject, target, netns, prev, deadline, absence).await;
                if let Err(why) = &answer
                    && is_unanswered(why)
                {
                    seen = self.look(&subject, target, netns, prev, why).await;
                }
            }
            if answer.as_ref().err().is_some_and(is_unanswered) {
                answer = Ok(seen);
            }
        }
        answer.unwrap_or_else(|e| {
            Err(match &e {
                ClientError::Api { error: ApiError { cni_code: None, .. }, .. } if e.is_not_found() => {
                    Fault::new(Code::UnknownContainer, format!("{subject}: the agent knows no such attachment"))
                }
                e => Fault::of_client(&subject, e),
            })
        })?;
        match self.ipam {
            Some(ipam) => ipam.ask(&subject, "CHECK", self.limits.look).await,
            None => Ok(()),
        }
    }

    async fn ask_check(
        &self,
        subject: &str,
        target: &Target,
        netns: &str,
        prev: Option<&PrevResult>,
        deadline: Instant,
        absence: Absence,
    ) -> Result<Result<(), Fault>, ClientError> {
        let (id, log) = (id(target), self.conf.log);
        let endpoint = retry::until(deadline, absence, log, async |left| self.within(left).endpoint(&id).await).await?;
        if endpoint.mode == EndpointMode::Chained {
            self.told.inspect(|run| run.set_chained());
        }
        let Some(prev) = prev else { return Ok(Err(check::without_result(subject, &self.conf.name, &endpoint))) };
        if let Err(fault) = check::same_namespace(subject, netns, &endpoint) {
            return Ok(Err(fault));
        }
        let health = retry::until(deadline, absence, log, async |left| self.within(left).endpoint_health(&id).await);
        Ok(check::verdict(subject, &self.conf.name, target, prev, &endpoint, &health.await?))
    }

    async fn look(
        &self,
        subject: &str,
        target: &Target,
        netns: &str,
        prev: Option<&PrevResult>,
        why: &ClientError,
    ) -> Result<(), Fault> {
        let is_delegated = away::is_delegated(self.conf);
        let has_said = matches!(why, ClientError::Api { .. });
        let Some(prev) = prev.filter(|_| !(is_delegated && has_said)) else {
            return Err(Fault::of_client(subject, why));
        };
        match check::kernel::look(subject, self.conf, target, netns, prev, !is_delegated).await {
            Seen::Well => {
                let text = format_args!("{subject}: {why}; the kernel has what prevResult says");
                self.conf.log.say(Level::Info, text);
                Ok(())
            }
            Seen::Fault(fault) => Err(fault.with_details(format!("seen without the agent: {why}"))),
            Seen::Failed(error) => {
                let fault = Fault::of_client(subject, why);
                Err(Fault { msg: format!("{}; {error}", fault.msg), ..fault })
            }
        }
    }

    /// As in DEL.
    async fn gc(&self, valid: &[GcAttachment]) -> Result<(), Fault> {
        let subject = format!("GC of network {}", self.conf.name);
        let done = self.collect(&subject, valid).await;
        self.then_ipam(done, async |ipam, limit| ipam.gc(&subject, limit).await).await
    }

    async fn collect(&self, subject: &str, valid: &[GcAttachment]) -> Result<(), Fault> {
        let request = GcRequest {
            network: self.conf.name.clone(),
            valid: valid.to_vec(),
            runtime: self.runtime.map(str::to_owned),
        };
        let answer = retry::until(Instant::now() + self.limits.change, Absence::FINAL, self.conf.log, async |left| {
            self.within(left).gc(&request).await
        })
        .await;
        let done = answer.map_err(|e| Fault::of_client(subject, &e))?;
        self.conf.log.say(Level::Info, format_args!("{subject}: deleted endpoints {:?}", done.deleted));
        for kept in &done.kept {
            let text = format_args!("{subject}: kept endpoint {}, which {} added", kept.endpoint, kept.runtime);
            self.conf.log.say(Level::Info, text);
        }
        finished(subject, &done)
    }

    async fn status(&self) -> Result<(), Fault> {
        let subject = format!("STATUS of network {}", self.conf.name);
        // No retry: STATUS reports "not now".
        match self.within(self.limits.look).status().await {
            Ok(status) => status::verdict(&subject, self.conf, self.ipam.is_some(), &status)?,
            Err(e) => return Err(Fault { code: Code::NotAvailable, ..Fault::of_client(&subject, &e) }),
        }
        match self.ipam {
            Some(ipam) => ipam.status(&subject, self.limits.look).await,
            None => Ok(()),
        }
    }

    fn within(&self, limit: Duration) -> Client {
        let client = self.client.clone().with_timeout(limit);
        match self.told.and_then(Run::header) {
            Some(header) => client.with_command(&header),
            None => client,
        }
    }

    fn subject(&self, command: &str, target: &Target) -> String {
        format!("{command} {}/{} on network {}", target.container_id, target.ifname, self.conf.name)
    }
}

fn as_asked(subject: &str, ipam: &Ipam, args: &ContainerArgs, leased: &Leased) -> Result<(), Fault> {
    match args.ips.iter().find(|ip| !leased.ips.contains(ip)) {
        Some(ip) => {
            let msg =
                format!("{subject}: the address {ip} is asked for, and IPAM plugin {} did not lease it", ipam.plugin);
            Err(Fault::config(msg).with_details("ask for it in a way that the IPAM plugin reads"))
        }
        None => Ok(()),
    }
}

/// Interface names are unique in a container.
fn id(target: &Target) -> String {
    format!("cni-attachment-id:{}:{}", target.container_id, target.ifname)
}

/// A repeated DEL is safe.
fn went_away(error: &ClientError) -> bool {
    matches!(error, ClientError::Closed { .. })
}

fn is_unanswered(error: &ClientError) -> bool {
    let is_late = match error {
        ClientError::Timeout { .. } => true,
        ClientError::Api { status, .. } => NOT_NOW.contains(status),
        _ => false,
    };
    is_late || is_absent(error) || went_away(error)
}

/// Code 4 names the variable.
fn explained(subject: &str, netns: &str, asked: &EndpointCreate, error: &ClientError) -> Fault {
    let mut fault = Fault::of_client(subject, error);
    let origin = match error.code() {
        Some(ErrorCode::InvalidNetns) => "CNI_NETNS",
        Some(ErrorCode::Exists) if !asked.ports.is_empty() => {
            "CNI_CONTAINERID and CNI_IFNAME, or the addresses or ports asked for"
        }
        Some(ErrorCode::Exists) if asked.ips.is_empty() => "CNI_CONTAINERID and CNI_IFNAME",
        Some(ErrorCode::Exists) => "CNI_CONTAINERID and CNI_IFNAME, or the addresses asked for",
        _ => return fault,
    };
    fault.msg = format!("{} (from {origin})", fault.msg);
    if error.code() == Some(ErrorCode::InvalidNetns) && is_container_namespace(netns) {
        fault.details = OTHER_MOUNTS.to_owned();
    }
    fault
}

fn is_container_namespace(path: &str) -> bool {
    let own = fs::metadata("/proc/self/ns/net");
    let there = fs::metadata(path);
    // All namespace files share a device.
    matches!((own, there), (Ok(own), Ok(there)) if own.dev() == there.dev() && own.ino() != there.ino())
}

fn finished(subject: &str, done: &DeleteResult) -> Result<(), Fault> {
    if done.errors.is_empty() {
        return Ok(());
    }
    let failed: Vec<String> =
        done.errors.iter().map(|e| format!("{} of endpoint {}: {}", e.step, e.endpoint, e.message)).collect();
    let steps = if failed.len() == 1 { "1 step" } else { &format!("{} steps", failed.len()) };
    let fault =
        Fault::new(Code::TryAgain, format!("{subject}: {steps} failed, the rest is done: {}", first_of(&failed)));
    Err(Fault { counted: true, ..fault.with_details("the next DEL or GC tries again what failed") })
}

#[cfg(test)]
#[path = "commands_tests.rs"]
mod tests;
