//! Plays a history on an agent, and holds what came of each step against the model.

mod check;
mod policy;

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};
use tokio::task::JoinHandle;
use wharf_agent::{
    addresses::resting,
    endpoint::{collect, deletions},
    node::{
        edit::Edit,
        endpoint::{Command, Handle},
        error::CommandError,
        queue::Cause,
    },
    reconcile::Reconcile,
};
use wharf_api::{ApiError, ErrorCode, GcAttachment};
use wharf_core::{
    identity::Label,
    ids::Attachment,
    ipam::{IpamError, LeaseRequest, Leased, Wanted},
    kernel::KernelErrorKind as Kind,
    plan::DeleteOptions,
    state::Level,
    store::{Change, Lease, LeaseOwner, Snapshot},
};
use wharf_datapath::fake::Operation as Op;
use wharf_handover::queue::{Deletion, EndpointRef, VERSION};
use wharf_kit::sync::lock;

use crate::{
    expected::{Health, Model, Queued, address, attached, container},
    history::{ADDRESSES, CREATE, Histories, Likely, Meant, Step, Trouble, Who},
    support::{Agent, Machine, life::Life, netns_path},
};

use policy::Documents;

/// Longer than any history takes: addresses wake because a step says so.
const REST_MS: u64 = 3_600_000;
/// What an address that is asked for by name and rests after another is refused with.
const RESTS: &str = "is in quarantine";

/// The machine, the agent that runs on it, and what is expected of both.
pub(crate) struct Play {
    machine: Machine,
    life: Option<Life>,
    model: Model,
    /// What policy wants.
    wanted: Documents,
    /// Containers whose namespace is there.
    namespaces: BTreeSet<u8>,
    reconcile: Reconcile,
}

/// What came of an operation.
enum Outcome<T> {
    Answered(T),
    /// Its caller went away before there was an answer.
    Unheard,
    /// The agent was killed, and another has started.
    Killed,
}

impl StateMachineTest for Play {
    type SystemUnderTest = Self;
    type Reference = Histories;

    fn init_test(_: &Likely) -> Self {
        let mut machine = Machine::in_memory().with_cidrs(&["10.88.0.0/29", "fd88::/64"]);
        machine.config.ip_rest_ms = REST_MS;
        let life = machine.start().expect("agent starts");
        Self {
            machine,
            life: Some(life),
            model: Model::default(),
            wanted: Documents::default(),
            namespaces: BTreeSet::new(),
            reconcile: Reconcile::default(),
        }
    }

    fn apply(mut play: Self, _: &<Histories as ReferenceStateMachine>::State, step: Step) -> Self {
        let leaves_rows = step.leaves_rows_to_the_controller();
        play.play(step);
        if leaves_rows {
            play.ensure_policy();
        }
        play.check();
        play
    }

    /// Whatever was before, in the end everything can be taken away.
    fn teardown(mut play: Self, _: Likely) {
        play.machine.disk.mend();
        play.model.disk_full = false;
        play.restart(None);
        play.check();
        for who in play.model.endpoints.keys().copied().collect::<Vec<_>>() {
            let network = play.network_of(who);
            play.del(who, network, false, Trouble::None);
        }
        // Records out of service go with their container, or when the operator says so.
        play.repair();
        play.restart(None);
        play.check();
        assert!(play.machine.kernel.is_clean(), "something is left in the kernel");
        let left = play.snapshot();
        assert_eq!(
            left,
            Snapshot { leases: left.leases.clone(), resting: left.resting.clone(), ..Snapshot::default() }
        );
        assert!(left.leases.iter().all(|l| matches!(l.owner, LeaseOwner::Caller { .. })), "{:?}", left.leases);
        play.life.take().expect("an agent runs").kill();
    }
}

impl Play {
    fn life(&self) -> &Life {
        self.life.as_ref().expect("an agent runs")
    }

    fn agent(&self) -> Agent {
        self.life().agent.clone()
    }

    fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.life().run(work)
    }

    fn snapshot(&self) -> Snapshot {
        self.run(self.life().agent.snapshot())
    }

    fn network_of(&self, who: Who) -> u8 {
        let there = &self.model.endpoints[&who].attachment;
        (0..).find(|n| attached(who, *n) == *there).expect("one of the networks")
    }

    fn play(&mut self, step: Step) {
        match step {
            Step::Add { who, network, exact, trouble } => self.add(who, network, exact, trouble),
            Step::Del { who, network, keep, trouble } => self.del(who, network, keep, trouble),
            Step::Gc { network, valid } => self.gc(network, &valid),
            Step::Lease { exact } => self.lease(exact.map(address)),
            Step::Release { address: n } => self.release(address(n)),
            Step::Regenerate { who, level, trouble } => self.regenerate(who, level, trouble),
            Step::Relabel { who, label, trouble } => self.relabel(who, label, trouble),
            Step::Policy { change, amid } => self.policy(change, amid),
            Step::LoseNamespace { container } => self.lose_namespace(container),
            Step::Queue { who, network, meant, other_boot, told } => {
                self.queue(who, network, meant, other_boot);
                if told {
                    self.drain();
                }
            }
            Step::Drain => self.drain(),
            Step::TimePasses => self.time_passes(),
            Step::Listen { address: n, on: true } => {
                self.machine.proxy.listens(address(n));
                self.model.listeners.insert(address(n));
            }
            Step::Listen { address: n, on: false } => {
                self.machine.proxy.closes(address(n));
                self.model.listeners.remove(&address(n));
            }
            Step::DiskFull => {
                self.machine.disk.fill();
                self.model.disk_full = true;
            }
            Step::DiskMended => {
                self.machine.disk.mend();
                self.model.disk_full = false;
            }
            Step::Repair => self.repair(),
            Step::LeakAudit => self.leak_audit(),
            Step::Restart => {
                // A stop that finds the disk full stops all the same; the next start needs it.
                self.life.take().expect("an agent runs").stop();
                self.start(None);
            }
            Step::Crash { refuses } => self.restart(refuses),
            Step::CrashTwice { at } => {
                self.life.take().expect("an agent runs").kill();
                let hold = self.machine.kernel.hold(at);
                self.machine.start_and_kill_at(&hold).expect("agent starts");
                hold.release();
                self.start(None);
            }
        }
    }

    /// Kills the agent and starts another, at whose start the kernel refuses one kind of call.
    fn restart(&mut self, refuses: Option<Op>) {
        self.life.take().expect("an agent runs").kill();
        self.start(refuses);
    }

    fn start(&mut self, refuses: Option<Op>) {
        // What the queue asks for would be refused as well, and that is another story.
        let refuses = refuses.filter(|_| self.model.queue.is_empty());
        if let Some(op) = refuses {
            self.machine.kernel.fail_always(op, Kind::Exhausted);
        }
        self.begin();
        if let Some(op) = refuses {
            self.machine.kernel.mend(op);
        }
        let left = self.model.is_murky() && refuses.is_some();
        // An endpoint can go without being detached: its link goes.
        self.model.start(refuses.is_some_and(|op| op != Op::RemoveAttached));
        self.model.left_by_start = left;
        let aside: BTreeSet<_> = self.snapshot().out_of_service.iter().map(|q| q.id).collect();
        for who in self.model.endpoints.keys().copied().collect::<Vec<_>>() {
            let Some(there) = self.model.endpoints.get(&who) else { continue };
            assert_eq!(there.failed >= 3, aside.contains(&there.id), "out of service at the third start: {there:?}");
            if there.failed >= 3 {
                self.model.aside.extend(self.model.endpoints.remove(&who).map(|e| (who, e)));
            }
        }
    }

    /// Starts an agent, and no more.
    fn begin(&mut self) {
        self.life = Some(self.machine.start().expect("agent starts"));
        self.reconcile = Reconcile::default();
    }

    /// Runs an operation and lets the trouble happen to it.
    fn disturb<T: Send + 'static>(
        &mut self,
        trouble: Trouble,
        begin: impl FnOnce(&Agent) -> JoinHandle<T>,
    ) -> Outcome<T> {
        let (agent, kernel) = (self.agent(), self.machine.kernel.clone());
        let answer = |result: Result<T, tokio::task::JoinError>| Outcome::Answered(result.expect("task"));
        match trouble {
            Trouble::None => answer(self.run(async { begin(&agent).await })),
            Trouble::Refused { at, kind, undo } => {
                kernel.fail_always(at, kind);
                if let Some(op) = undo {
                    kernel.fail_always(op, Kind::Other);
                }
                // A create is undone when it is answered, a rebuild is tried again afterwards.
                let result = self.run(async { begin(&agent).await });
                [Some(at), undo].into_iter().flatten().for_each(|op| kernel.mend(op));
                answer(result)
            }
            Trouble::KilledAt(at) | Trouble::CallerGone(at) => {
                let hold = kernel.hold(at);
                let answered = self.run(async {
                    let mut task = begin(&agent);
                    tokio::select! {
                        biased;
                        result = &mut task => Some(result),
                        () = hold.reached() => {
                            task.abort();
                            None
                        }
                    }
                });
                drop(agent);
                if answered.is_none() && matches!(trouble, Trouble::KilledAt(_)) {
                    self.life.take().expect("an agent runs").kill();
                    hold.release();
                    self.begin();
                    return Outcome::Killed;
                }
                hold.release();
                answered.map_or(Outcome::Unheard, answer)
            }
            Trouble::KilledAtWrite { after, torn } => {
                let disk = self.machine.disk.clone();
                disk.hold_after(after);
                let answered = self.run(async {
                    let mut task = begin(&agent);
                    tokio::select! {
                        biased;
                        result = &mut task => Some(result),
                        () = disk.reached() => None,
                    }
                });
                drop(agent);
                if let Some(result) = answered {
                    disk.release();
                    return answer(result);
                }
                let life = self.life.take().expect("an agent runs");
                if torn {
                    life.kill_and_tear()
                } else {
                    life.kill()
                }
                self.begin();
                Outcome::Killed
            }
        }
    }

    /// The one of these that is the case.
    fn one_of(&mut self, candidates: Vec<Model>) {
        self.run(self.settled());
        let mut why = Vec::new();
        for candidate in candidates {
            match self.compare(&candidate) {
                Ok(()) => {
                    self.model = candidate;
                    return;
                }
                Err(difference) => why.push(difference),
            }
        }
        panic!("all of it or nothing, but neither is the case:\n{}", why.join("\n"));
    }

    fn add(&mut self, who: Who, network: u8, exact: Option<u8>, trouble: Trouble) {
        if !matches!(trouble, Trouble::None) && !self.model.queue.is_empty() {
            self.drain();
        }
        let agent = self.agent();
        let path = netns_path(&container(who.container));
        if self.namespaces.insert(who.container) {
            agent.kernel.add_netns(path);
        }
        // Made by the clock of the agent's runtime, which this test moves.
        let mut spec = self.run(async { Agent::spec(&container(who.container), &format!("eth{}", who.interface)) });
        spec.attachment = attached(who, network);
        spec.ips = exact.map(address).into_iter().collect();
        // A delete that waits for this attachment goes first, and takes along all that wait.
        let settles = self.model.queue.contains_key(&(who, network));
        if settles {
            self.model.drain();
        }
        let in_use = exact.map(address).is_some_and(|ip| self.model.callers.contains_key(&ip) && self.model.speaks(ip));
        let may = if settles && self.model.queue.contains_key(&(who, network)) {
            Err(ErrorCode::Busy)
        } else if self.model.endpoints.contains_key(&who) || in_use {
            Err(ErrorCode::Exists)
        } else if self.model.disk_full {
            Err(ErrorCode::Store)
        } else if exact.map(address).is_some_and(|ip| self.model.is_kept_for_another(ip, &attached(who, network))) {
            Err(ErrorCode::Exists)
        } else {
            Ok(())
        };
        let before: BTreeSet<IpAddr> = lock(&agent.life.network.addresses.ipam).leases().iter().map(|l| l.ip).collect();
        let (mut rests, mut held) = (self.resting(), before.clone());
        if settles {
            // What deletes that go first give back begins to rest.
            let leases = self.model.leases();
            held.retain(|ip| leases.contains_key(ip));
            rests.extend(before.difference(&held));
        }
        let available = self.is_available(exact.map(address), &held, &rests);
        let last_owner = exact.and_then(|n| self.last_owner(address(n)));
        drop(agent);
        let outcome = self.disturb(trouble, |agent: &Agent| agent.spawn_create(spec));
        let before = self.model.clone();
        match outcome {
            Outcome::Answered(Ok(endpoint)) => {
                assert_eq!(may, Ok(()), "a create that must be refused succeeded");
                assert!(available, "there was no address for it");
                let refused = matches!(trouble, Trouble::Refused { at, .. } if CREATE.contains(&at));
                assert!(!refused, "a create succeeded whose step was refused");
                let record = self.agent().handle(endpoint.id).shared.read(|v| v.record.clone());
                self.model.add(who, &record);
                let given: Vec<IpAddr> = record.addresses().collect();
                if let Some(ip) = exact.map(address) {
                    assert!(given.contains(&ip), "asked for {ip}, got {given:?}");
                    let own =
                        last_owner.as_ref().is_none_or(|o| o.starts_with(&format!("{} ", attached(who, network))));
                    assert!(own, "{ip} did not rest after {last_owner:?}");
                }
                self.assert_rested(exact.map(address), &given, &held, &rests);
            }
            Outcome::Answered(Err(error)) => self.assert_refused((who, network), &error, may, available, trouble),
            // Nobody knows of it, so it is taken back.
            Outcome::Unheard => {}
            Outcome::Killed => {
                let stored = self.snapshot().endpoints.into_iter().find(|r| {
                    r.attachment == attached(who, network)
                        && before.endpoints.get(&who).is_none_or(|there| there.epoch != r.epoch)
                });
                let mut candidates = vec![before.clone()];
                // Durable is what was committed, and the commit is the last step.
                if let (Some(record), Trouble::KilledAtWrite { .. }) = (stored, trouble) {
                    let mut after = before;
                    after.add(who, &record);
                    candidates.push(after);
                }
                candidates.iter_mut().for_each(|m| m.start(false));
                self.one_of(candidates);
            }
        }
    }

    /// A create that was refused must have had a reason.
    fn assert_refused(
        &mut self,
        (who, network): (Who, u8),
        error: &ApiError,
        may: Result<(), ErrorCode>,
        available: bool,
        trouble: Trouble,
    ) {
        if error.message.contains(RESTS) {
            // Its time is not over, and it was another's.
            assert_eq!((may, error.code), (Ok(()), ErrorCode::Busy), "{}", error.message);
            return;
        }
        let asked = error.message.contains("the test asked for this failure");
        let of_aside = self.model.aside.iter().any(|(of, _)| *of == who);
        match (may, trouble) {
            (Err(code), _) if !asked => assert_eq!(error.code, code, "{}", error.message),
            (_, Trouble::Refused { at, undo, .. }) if asked => {
                let takes_part = CREATE.contains(&at) || at == Op::ChangePolicy;
                assert!(takes_part || may.is_err(), "{at:?}: {}", error.message);
                if undo.is_some() && error.message.contains("; and undoing it: ") {
                    self.model.left.insert((who, network));
                }
            }
            // What is left of the one before may be in its way.
            _ if self.model.is_murky() || of_aside => {}
            _ => assert!(!available, "refused without a reason: {}", error.message),
        }
    }

    /// Can this address, or any, be had?
    fn is_available(&self, exact: Option<IpAddr>, held: &BTreeSet<IpAddr>, rests: &BTreeSet<IpAddr>) -> bool {
        // A rest ends in the store first.
        let wakes = |ip: &IpAddr| !rests.contains(ip) || !(self.model.listeners.contains(ip) || self.model.disk_full);
        match exact {
            Some(ip) if self.model.callers.contains_key(&ip) => !self.model.speaks(ip),
            Some(ip) => !held.contains(&ip) && wakes(&ip),
            None => (0..ADDRESSES).map(address).any(|ip| !held.contains(&ip) && wakes(&ip)),
        }
    }

    /// What was given out had rested, or nothing else was free; and nothing speaks for it.
    fn assert_rested(
        &self,
        exact: Option<IpAddr>,
        given: &[IpAddr],
        held: &BTreeSet<IpAddr>,
        rests: &BTreeSet<IpAddr>,
    ) {
        for ip in given.iter().filter(|ip| rests.contains(ip)) {
            assert!(!self.model.listeners.contains(ip), "{ip} was given out while the proxy listens on it");
            let fresh = (0..ADDRESSES).map(address).find(|a| !held.contains(a) && !rests.contains(a));
            assert!(exact == Some(*ip) || fresh.is_none(), "{ip} was woken while {fresh:?} was free");
        }
    }

    fn last_owner(&self, ip: IpAddr) -> Option<String> {
        let resting = lock(&self.life().agent.life.network.addresses.ipam).resting();
        resting.into_iter().find(|r| r.rest.ip == ip).map(|r| r.rest.last_owner)
    }

    fn resting(&self) -> BTreeSet<IpAddr> {
        lock(&self.life().agent.life.network.addresses.ipam).resting().iter().map(|r| r.rest.ip).collect()
    }

    fn del(&mut self, who: Who, network: u8, keep: bool, trouble: Trouble) {
        let a = attached(who, network);
        let meant = self.model.endpoints.get(&who).is_some_and(|e| e.attachment == a);
        let outcome = self.disturb(trouble, |agent: &Agent| {
            let agent = agent.clone();
            tokio::spawn(async move { agent.del(&a, DeleteOptions { no_ip_release: keep }).await })
        });
        let mut gone = self.model.clone();
        gone.delete(who, network, keep);
        if meant && !self.model.disk_full {
            gone.served(who, network);
        }
        match (outcome, trouble) {
            // A delete is answered before the kernel's release of the link.
            (Outcome::Answered(result), Trouble::Refused { at, undo, .. })
                if !result.errors.is_empty() || (meant && [Some(at), undo].contains(&Some(Op::ReleaseLink))) =>
            {
                let refuses = |op| [Some(at), undo].contains(&Some(op));
                gone.left.clone_from(&self.model.left);
                // It went all the same when it could.
                let mut half = self.model.clone();
                half.half_deleted(who, (!self.model.disk_full).then_some(keep), refuses(Op::RemoveLink));
                self.one_of(if meant { vec![half, gone] } else { vec![gone, self.model.clone()] });
                let stays = self.model.endpoints.get(&who).is_some_and(|_| meant);
                let named = result.errors.iter().any(|e| e.message.contains("asked for this") || self.model.disk_full);
                assert!(!stays || named || refuses(Op::ReleaseLink), "{:?}", result.errors);
            }
            (Outcome::Answered(result), _) => {
                assert!(
                    result.errors.is_empty() || self.model.disk_full || self.model.is_murky(),
                    "{:?}",
                    result.errors
                );
                self.model = gone;
            }
            // A delete goes on without its caller.
            (Outcome::Unheard, _) => {
                // What is left of a create that failed is not an endpoint's delete: it waits for the next.
                gone.left.clone_from(&self.model.left);
                self.one_of(vec![gone]);
            }
            (Outcome::Killed, Trouble::KilledAt(_)) if meant && !self.model.disk_full => {
                // The intent was durable before the kernel was called.
                gone.start(false);
                self.one_of(vec![gone]);
            }
            (Outcome::Killed, _) => {
                let mut released = self.model.clone();
                released.delete(who, network, false);
                let mut candidates = vec![self.model.clone(), gone, released];
                let full = self.model.disk_full;
                if full && meant {
                    // Its delete got as far as the kernel, or all the way to the disk when that had space again.
                    for keep in [keep, false] {
                        let mut m = self.model.clone();
                        m.remove(who, keep);
                        candidates.push(m);
                    }
                }
                // What was queued for it may have been served.
                for m in candidates.clone() {
                    candidates.push(Model {
                        queue: m.queue.into_iter().filter(|(k, _)| *k != (who, network)).collect(),
                        ..m
                    });
                }
                candidates.iter_mut().for_each(|m| m.start(false));
                self.one_of(candidates);
            }
        }
    }

    fn gc(&mut self, network: u8, valid: &[Who]) {
        let agent = self.agent();
        let listed: BTreeSet<GcAttachment> = valid
            .iter()
            .map(|who| attached(*who, network))
            .map(|a| GcAttachment { container_id: a.container_id.to_string(), ifname: a.ifname.to_string() })
            .collect();
        let of = attached(Who { container: 0, interface: 0 }, network).network;
        let result = self.run(collect::collect(&agent.life, &of, &listed, None));
        assert!(result.errors.is_empty() || self.model.disk_full || self.model.is_murky(), "{:?}", result.errors);
        let stale: Vec<Who> = self.model.endpoints.keys().copied().filter(|who| !valid.contains(who)).collect();
        for who in stale.into_iter().filter(|who| self.network_of(*who) == network).collect::<Vec<_>>() {
            self.model.delete(who, network, false);
            if !self.model.disk_full {
                self.model.served(who, network);
            }
        }
        if !self.model.disk_full {
            let taken: BTreeSet<Who> = self.model.endpoints.keys().copied().collect();
            let stays = |who: &Who, a: &Attachment| a.network != of || valid.contains(who) || taken.contains(who);
            self.model.aside.retain(|(who, e)| stays(who, &e.attachment));
            self.model.left.retain(|(who, n)| stays(who, &attached(*who, *n)));
        }
    }

    fn lease(&mut self, exact: Option<IpAddr>) {
        let agent = self.agent();
        let rests = self.resting();
        let held: BTreeSet<IpAddr> = lock(&agent.life.network.addresses.ipam).leases().iter().map(|l| l.ip).collect();
        let owner = LeaseOwner::Caller { name: "job".into() };
        let ipv4 = match exact {
            Some(IpAddr::V4(ip)) => Wanted::Exact(ip),
            _ => Wanted::Any,
        };
        let request = LeaseRequest { pool: None, ipv4, ipv6: Wanted::None };
        let (leased, stored): (Result<Leased, IpamError>, bool) = self.run(async {
            let leased = resting::lease(&agent.life.network.addresses, &request, &owner).await;
            let ip = leased.as_ref().ok().and_then(|l| l.ipv4).map(IpAddr::V4);
            let lease: Option<Lease> = ip.and_then(|ip| lock(&agent.life.network.addresses.ipam).get(ip).cloned());
            let Some(lease) = lease else { return (leased, false) };
            let changes = vec![Change::PutLease(lease.clone()), Change::RemoveRest(lease.ip)];
            let stored = agent.life.store.commit(changes).await.is_ok();
            if !stored {
                resting::in_memory(&agent.life.network.addresses, &[lease]);
            }
            (leased, stored)
        });
        let free = match exact {
            Some(ip) => !held.contains(&ip) && self.is_available(exact, &held, &rests),
            None => self.is_available(None, &held, &rests),
        };
        match leased {
            Ok(leased) => {
                let ip = IpAddr::V4(leased.ipv4.expect("an IPv4 address was asked for"));
                assert!(free, "{ip} was given out, and none was free");
                assert_ne!(stored, self.model.disk_full);
                self.assert_rested(exact, &[ip], &held, &rests);
                if stored {
                    assert_eq!(self.model.callers.insert(ip, "job".into()), None, "{ip} has two owners");
                }
            }
            Err(error) => {
                let rests = error.to_string().contains(RESTS);
                assert!(!free || rests || self.model.is_murky(), "refused without a reason: {error}");
            }
        }
    }

    fn release(&mut self, ip: IpAddr) {
        if !self.model.callers.contains_key(&ip) || self.model.speaks(ip) {
            return;
        }
        let agent = self.agent();
        let lease = lock(&agent.life.network.addresses.ipam).get(ip).cloned().expect("it is leased");
        let released = self.run(resting::release(&agent.life.network.addresses, &[lease], Vec::new()));
        assert_eq!(released.is_ok(), !self.model.disk_full);
        if released.is_ok() {
            self.model.callers.remove(&ip);
        }
    }

    /// Asks the task of an endpoint for something, and spawns the wait for its answer.
    fn ask(
        &mut self,
        who: Who,
        trouble: Trouble,
        command: impl FnOnce(wharf_agent::node::endpoint::Done) -> Command + Send + 'static,
    ) -> Outcome<Result<(), CommandError>> {
        let handle = self.agent().handle(self.model.endpoints[&who].id.get());
        self.disturb(trouble, move |_: &Agent| {
            let (done, answer) = tokio::sync::oneshot::channel();
            tokio::spawn(async move {
                handle.mailbox.send(command(done)).await.expect("the endpoint is there");
                drop(handle);
                answer.await.expect("answered")
            })
        })
    }

    fn regenerate(&mut self, who: Who, level: Level, trouble: Trouble) {
        let Some(there) = self.model.endpoints.get(&who).cloned() else { return };
        let policy = [Op::EnsureConfig, Op::EnsureReachable];
        let outcome = self.ask(who, trouble, move |done| Command::Regenerate(level, done));
        match outcome {
            Outcome::Answered(result) => {
                let refused = matches!(trouble, Trouble::Refused { at, .. }
                    if level == Level::Datapath || policy.contains(&at));
                match there.health {
                    Health::Well => assert_eq!(result.is_err(), refused, "{result:?}"),
                    Health::Going { .. } => assert!(result.is_err(), "an endpoint that goes was rebuilt"),
                    Health::CutOff => {}
                }
            }
            Outcome::Unheard => {}
            Outcome::Killed => {
                let mut after = self.model.clone();
                after.start(false);
                self.one_of(vec![after]);
            }
        }
    }

    fn relabel(&mut self, who: Who, label: u8, trouble: Trouble) {
        let Some(there) = self.model.endpoints.get(&who).cloned() else { return };
        let labels: BTreeSet<Label> = [format!("k8s:app=l{label}").parse().expect("label")].into();
        let wanted = labels.clone();
        let outcome = self.ask(who, trouble, move |done| Command::Edit(Box::new(Edit::labels(wanted)), done));
        let mut after = self.model.clone();
        if !matches!(there.health, Health::Going { .. })
            && !self.model.disk_full
            && let Some(there) = after.endpoints.get_mut(&who)
        {
            there.labels = labels.clone();
        }
        match outcome {
            Outcome::Answered(result) => {
                let refused = matches!(trouble, Trouble::Refused { at, .. }
                    if [Op::EnsureConfig, Op::EnsureReachable].contains(&at));
                match there.health {
                    Health::Well => assert_eq!(result.is_err(), refused || self.model.disk_full, "{result:?}"),
                    Health::Going { .. } => assert!(result.is_err(), "an endpoint that goes took labels"),
                    Health::CutOff => {}
                }
                self.model = after;
            }
            Outcome::Unheard => self.one_of(vec![after]),
            Outcome::Killed => {
                // Where the disk was full it has space again by now.
                let mut late = self.model.clone();
                if let Some(there) = late.endpoints.get_mut(&who) {
                    there.labels = labels;
                }
                let mut candidates = vec![self.model.clone(), after, late];
                candidates.iter_mut().for_each(|m| m.start(false));
                self.one_of(candidates);
            }
        }
    }

    fn lose_namespace(&mut self, n: u8) {
        self.machine.kernel.remove_netns(&netns_path(&container(n)));
        self.namespaces.remove(&n);
        for (_, there) in self.model.endpoints.iter_mut().filter(|(who, _)| who.container == n) {
            there.health = match there.health {
                Health::Well | Health::CutOff => Health::CutOff,
                Health::Going { intent, .. } => Health::Going { intent, linked: false },
            };
        }
    }

    fn queue(&mut self, who: Who, network: u8, meant: Meant, other_boot: bool) {
        let agent = self.agent();
        let a = attached(who, network);
        let there = self.model.endpoints.get(&who).filter(|e| e.attachment == a);
        let endpoint = match meant {
            Meant::Any => None,
            Meant::ThisOne => there.map(|e| EndpointRef { id: e.id.get(), epoch: e.epoch.0 }),
            Meant::AnEarlierOne => Some(EndpointRef { id: 1, epoch: 1 }),
        };
        let boot_id = if other_boot { "another boot".to_owned() } else { self.machine.boot_id.clone() };
        let deletion = Deletion {
            version: VERSION,
            network: a.network.to_string(),
            container_id: a.container_id.to_string(),
            ifname: a.ifname.to_string(),
            endpoint,
            boot_id,
            written_unix_ms: wharf_kit::clock::unix_ms(),
            canary: None,
        };
        agent.life.endpoints.deletions.queue.put(&deletion).expect("written");
        let epoch = endpoint.map(|e| wharf_core::ids::Epoch(e.epoch));
        self.model.queue.insert((who, network), Queued { epoch, other_boot });
    }

    fn drain(&mut self) {
        let agent = self.agent();
        let left = self.run(deletions::drain(&agent.life, Cause::Event)).expect("drained");
        self.model.drain();
        assert_eq!(left, self.model.queue.len(), "records that wait on");
    }

    fn time_passes(&mut self) {
        let agent = self.agent();
        lock(&agent.life.network.addresses.ipam).set_rest(0);
        let woken = self.run(resting::wake(&agent.life.network.addresses));
        lock(&agent.life.network.addresses.ipam).set_rest(REST_MS);
        if self.model.disk_full {
            return;
        }
        woken.expect("checked");
        for ip in self.resting() {
            assert!(
                self.model.listeners.contains(&ip) || self.model.is_murky(),
                "{ip} rests on though nothing speaks for it"
            );
        }
    }

    fn repair(&mut self) {
        if self.model.disk_full {
            return;
        }
        self.run(self.life().agent.findings(true));
        self.model.aside.clear();
        self.model.left.clear();
    }

    fn leak_audit(&mut self) {
        if self.model.disk_full {
            return;
        }
        let agent = self.agent();
        let mut reconcile = std::mem::take(&mut self.reconcile);
        for _ in 0..2 {
            self.run(reconcile.run(&agent.life, &agent.node.audit_findings)).expect("the leak audit runs");
        }
        self.reconcile = reconcile;
        self.model.left.clear();
    }

    /// Waits until nothing is under way. What waits for its backoff need not wait long: nothing here depends on time.
    async fn settled(&self) {
        let agent = &self.life().agent;
        let waits = || {
            let list = agent.life.endpoints.registry.list();
            let owed = list
                .iter()
                .filter(|h| crate::support::is_changing(h))
                .filter(|h| !self.model.endpoints.values().any(|e| e.id == h.id && e.health == Health::CutOff));
            owed.count() > 0
        };
        let works = || {
            !agent.life.endpoints.admission.gate.is_idle()
                || !agent.life.tasks.operations.is_empty()
                || agent.life.tasks.endpoints.len() != agent.life.endpoints.registry.len()
                || !agent.life.endpoints.jobs.in_flight().is_empty()
        };
        let begun = std::time::Instant::now();
        loop {
            if begun.elapsed() >= Duration::from_secs(60) {
                let of =
                    |h: &Handle| h.shared.read(|v| (v.record.attachment.to_string(), v.fsm.state, v.status.clone()));
                let states: Vec<_> = agent.life.endpoints.registry.list().iter().map(of).collect();
                let (idle, flight) =
                    (agent.life.endpoints.admission.gate.is_idle(), agent.life.endpoints.jobs.in_flight());
                let (tasks, own) = (agent.life.tasks.operations.len(), agent.life.tasks.endpoints.len());
                panic!(
                    "nothing comes to an end: gate idle {idle}, in flight {flight:?}, {tasks} and {own} tasks, {states:?}"
                );
            }
            if !works() && !waits() {
                return;
            }
            if !works() {
                // Only backoffs are left, and the kernel of these tests needs no time.
                tokio::time::pause();
                tokio::time::advance(Duration::from_secs(60)).await;
                for _ in 0..50 {
                    tokio::task::yield_now().await;
                }
                tokio::time::resume();
            }
            tokio::task::yield_now().await;
        }
    }
}
