//! Web servers whose requests are judged: what must be true of the rules, the proxy and the way to it.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use wharf_api::{EndpointState, ProxyView};
use wharf_tests::{
    Attached, Node, Sandbox,
    process::ip,
    space::Space,
    wait,
    web::{WebClient, WebServer},
};

use crate::{
    pods::{Pod, forget, import},
    rules,
};

/// The servers' port.
const PORT: u16 = 80;
/// How long an answer is waited for that may not come.
const SOON: Duration = Duration::from_millis(300);
/// What the rules let pass, after their change as well, and never.
const PATHS: [&str; 3] = ["/public", "/more", "/secret"];
/// The name of the policy.
pub(crate) const NAME: &str = "requests";

/// Rules about requests to the database and to `x`; after the change another path passes, too.
pub(crate) fn policy(changed: bool) -> String {
    let more = if changed { format!(", {{method: GET, path: {}}}", PATHS[1]) } else { String::new() };
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: {NAME}}}\nspec:\n  \
         endpointSelector: {{matchExpressions: [{{key: app, operator: In, values: [db, x]}}]}}\n  ingress:\n  \
         - toPorts:\n    - ports: [{{port: '{PORT}', protocol: TCP}}]\n      \
         rules: {{http: [{{method: GET, path: {}}}{more}]}}\n  \
         - fromEntities: [host]\n",
        PATHS[0]
    )
}

/// A client, the database that it asks, and a server in `x`.
pub(crate) struct Redirected {
    web: Pod,
    db: Pod,
    servers: [WebServer; 2],
    intruder: Intruder,
    /// A connection to `x` that the proxy has.
    held: Option<WebClient>,
}

impl Redirected {
    /// `x`: the container that operations are about, not attached yet.
    pub(crate) fn new(node: &Node, x: &Sandbox) -> Result<Self> {
        let (web, db) = (Pod::container(node, "web", "web")?, Pod::container(node, "db", "db")?);
        let servers = [WebServer::start(db.space()?, PORT)?, WebServer::start(x.space()?, PORT)?];
        let intruder = Intruder::start(web.space()?, SocketAddr::new(db.end.v4()?.into(), PORT))?;
        Ok(Self { web, db, servers, intruder, held: None })
    }

    /// Its endpoints.
    pub(crate) fn ends(&self) -> [&Attached; 2] {
        [&self.web.end, &self.db.end]
    }

    /// The rules are in force, or none; nothing of the operation before is left.
    pub(crate) fn reset(&mut self, node: &Node, judged: bool) -> Result<()> {
        self.held = None;
        self.intruder.may_enter();
        if !judged {
            forget(node)?;
            return left(node);
        }
        import(node, &policy(false))?;
        self.follow(node)
    }

    /// The proxy takes a connection to `x`.
    pub(crate) fn hold(&mut self, x: &Attached) -> Result<()> {
        let to = SocketAddr::new(x.v4()?.into(), PORT);
        // Envoy's threads have a listener some milliseconds after it is acknowledged, and close what comes before.
        self.held = Some(wait::until("a connection to x", || {
            let mut client = WebClient::connect(self.web.space()?, to)?;
            Ok((client.ask("GET", PATHS[0], "x", "").ok() == Some(200)).then_some(client))
        })?);
        Ok(())
    }

    /// What is denied may be asked for from now on, because the rules may be gone.
    pub(crate) fn loosen(&self) {
        self.intruder.may_enter();
    }

    /// Nobody has entered who may not.
    pub(crate) fn holds(&self) -> Result<()> {
        self.intruder.await_more()?;
        let entered = self.intruder.entered.load(Ordering::Relaxed);
        ensure!(entered == 0, "{entered} requests that no rule allows were answered with 200");
        Ok(())
    }

    /// Requests are answered as what is wanted says, and the proxy has just that.
    pub(crate) fn follow(&self, node: &Node) -> Result<()> {
        let list = wait::until("what is wanted is in force", || {
            let list = node.ask(async |client| client.policies().await)?;
            Ok((list.realized == list.revision && list.problem.is_none()).then_some(list))
        })?;
        let judged = list.policies.iter().any(|policy| policy.name == NAME);
        let proxy = wait::until("the proxy has just what is wanted", || {
            let proxy = node.ask(async |client| client.proxy().await)?;
            let told: BTreeSet<u16> = proxy.listeners.iter().flat_map(|l| l.endpoints.iter().copied()).collect();
            let fits = proxy.outstanding.is_empty() && proxy.listeners.len() == usize::from(judged);
            Ok((fits && told == members(node, judged)?).then_some(proxy))
        })?;
        self.answers(&self.db.end, judged.then_some(&proxy))?;
        // Neither rows nor rule sets that nobody uses.
        rules::observe(node)?;
        if judged {
            self.intruder.must_not_enter();
        }
        self.holds()
    }

    /// The container that was retried serves under the rules.
    pub(crate) fn serves(&self, node: &Node, x: &Attached) -> Result<()> {
        let proxy = node.ask(async |client| client.proxy().await)?;
        self.answers(x, Some(&proxy).filter(|proxy| !proxy.listeners.is_empty()))
    }

    /// `proxy`: what it has, if requests are judged.
    fn answers(&self, server: &Attached, proxy: Option<&ProxyView>) -> Result<()> {
        let more = |proxy: &ProxyView| proxy.listeners.iter().flat_map(|l| &l.passes).any(|p| p.contains(PATHS[1]));
        let wanted = match proxy {
            None => [200, 200, 200],
            Some(proxy) if more(proxy) => [200, 200, 403],
            Some(_) => [200, 403, 403],
        };
        for address in server.both()? {
            let to = SocketAddr::new(address, PORT);
            for (path, wanted) in PATHS.into_iter().zip(wanted) {
                wait::until(&format!("{wanted} for {path} of {}", server.container), || {
                    let seen = status(self.web.space()?, to, path);
                    ensure!(wanted == 200 || seen != Some(200), "{path} of {} was answered with 200", server.container);
                    Ok((seen == Some(wanted)).then_some(()))
                })?;
            }
        }
        Ok(())
    }

    /// Takes all of it away.
    pub(crate) fn end(mut self, node: &Node) -> Result<()> {
        self.reset(node, false)?;
        let Self { web, db, servers, intruder, .. } = self;
        intruder.stop()?;
        drop(servers);
        [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
    }
}

/// Whose requests are to be judged.
fn members(node: &Node, judged: bool) -> Result<BTreeSet<u16>> {
    let mut endpoints = node.endpoints()?;
    endpoints.retain(|e| {
        judged && ["db", "x"].contains(&e.container_id.as_str()) && e.state != EndpointState::Disconnecting
    });
    Ok(endpoints.into_iter().map(|e| e.id).collect())
}

/// Where nothing is judged, there is no way to the proxy, once it had time to end its connections.
pub(crate) fn left(node: &Node) -> Result<()> {
    if !node.ask(async |client| client.proxy().await)?.listeners.is_empty() {
        return Ok(());
    }
    wait::until_equal("the way to the proxy", &Vec::new(), || {
        let mut there = Vec::new();
        for family in ["-4", "-6"] {
            let rules = ip(node.space(), &format!("{family} rule show"))?;
            there.extend(rules.lines().filter(|rule| rule.starts_with("87:")).map(str::to_owned));
        }
        there.extend(node.found_amiss()?);
        Ok(there)
    })
}

/// The status of an answer that comes soon.
fn status(from: &Space, to: SocketAddr, path: &str) -> Option<u16> {
    let mut stream = from.run(|| TcpStream::connect_timeout(&to, SOON)).ok()?.ok()?;
    stream.set_read_timeout(Some(SOON)).ok()?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: db\r\n\r\n").as_bytes()).ok()?;
    // `HTTP/1.1 200 `
    let mut head = [0; 13];
    stream.read_exact(&mut head).ok()?;
    std::str::from_utf8(&head).ok()?.split(' ').nth(1)?.parse().ok()
}

/// Asks for what no rule allows, again and again.
struct Intruder {
    stop: Arc<AtomicBool>,
    forbidden: Arc<AtomicBool>,
    tries: Arc<AtomicU64>,
    entered: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Intruder {
    fn start(from: &Space, to: SocketAddr) -> Result<Self> {
        let [stop, forbidden] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let [tries, entered] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        let from = from.try_clone()?;
        let thread = thread::spawn({
            let (stop, forbidden, tries, entered) =
                (Arc::clone(&stop), Arc::clone(&forbidden), Arc::clone(&tries), Arc::clone(&entered));
            move || {
                while !stop.load(Ordering::SeqCst) {
                    // Forbidden from before the request until after its answer.
                    let before = forbidden.load(Ordering::SeqCst);
                    let entered_now = status(&from, to, PATHS[2]) == Some(200);
                    if before && entered_now && forbidden.load(Ordering::SeqCst) {
                        entered.fetch_add(1, Ordering::Relaxed);
                    }
                    tries.fetch_add(1, Ordering::Relaxed);
                    // A few hundred a second; the processor stays free for what is tested.
                    thread::sleep(Duration::from_millis(2));
                }
            }
        });
        Ok(Self { stop, forbidden, tries, entered, thread })
    }

    fn must_not_enter(&self) {
        self.forbidden.store(true, Ordering::SeqCst);
    }

    fn may_enter(&self) {
        self.forbidden.store(false, Ordering::SeqCst);
    }

    fn await_more(&self) -> Result<()> {
        let goal = self.tries.load(Ordering::Relaxed) + 3;
        wait::until("more tries", || Ok((self.tries.load(Ordering::Relaxed) >= goal).then_some(())))
    }

    fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::SeqCst);
        if self.thread.join().is_err() {
            bail!("the intruder panicked");
        }
        Ok(())
    }
}
