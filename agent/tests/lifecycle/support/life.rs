//! A life that a test begins and ends where it likes.

use std::{sync::Arc, thread::JoinHandle};

use tokio::runtime::Runtime;
use wharf_agent::{
    endpoint::deletions,
    node::{Node, queue::Cause},
    restore,
};
use wharf_datapath::fake::{Hold, Operation};
use wharf_kit::sync::lock;
use wharf_store::{Opened, Store, StoreError};

use super::{Agent, Disk, Machine, Slow};

/// An agent at work. Dropping it is no end that a test should rely on: [`Life::kill`] and [`Life::stop`] are.
pub(crate) struct Life {
    runtime: Runtime,
    pub(crate) agent: Agent,
    disk: Disk,
    writer: JoinHandle<()>,
}

impl Machine {
    /// Starts an agent, which brings back what was there.
    pub(crate) fn start(&self) -> Result<Life, StoreError> {
        let opened = self.open()?;
        let (runtime, node, opening) = self.prepare(opened);
        runtime.block_on(bring_back(&node, &opening));
        Ok(self.living(runtime, node, opening))
    }

    /// Starts an agent and kills it where its start reaches the hold; true when it came so far. Otherwise it has
    /// started, and is killed then.
    pub(crate) fn start_and_kill_at(&self, hold: &Hold) -> Result<bool, StoreError> {
        let opened = self.open()?;
        let (runtime, node, opening) = self.prepare(opened);
        let reached = runtime.block_on(async {
            tokio::select! {
                biased;
                () = hold.reached() => true,
                () = bring_back(&node, &opening) => false,
            }
        });
        self.living(runtime, node, opening).kill();
        Ok(reached)
    }

    /// Starts an agent, does something to the disk when its start comes to a kernel operation, and lives on.
    pub(crate) fn start_with<T>(
        &self,
        at: Operation,
        befalls: impl FnOnce(&Disk),
        life: impl AsyncFnOnce(Agent) -> T,
    ) -> T {
        let (runtime, node, opening) = self.prepare(self.open().expect("store opens"));
        let hold = self.kernel.hold(at);
        runtime.block_on(async {
            let start = bring_back(&node, &opening);
            tokio::pin!(start);
            tokio::select! {
                biased;
                () = hold.reached() => {}
                () = &mut start => panic!("the start never came to {at:?}"),
            }
            befalls(&self.disk);
            hold.release();
            start.await;
        });
        let running = self.living(runtime, node, opening);
        let result = running.run(life(running.agent.clone()));
        running.kill();
        result
    }

    fn open(&self) -> Result<Opened, StoreError> {
        let disk = self.disk.clone();
        Store::open_with(&self.store_path(), &self.boot_id, move |path| disk.open(path))
    }

    fn prepare(&self, opened: Opened) -> (Runtime, Arc<Node>, Opening) {
        self.kernel.clear_call_log();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        let ipam = self.config.ipam().expect("pools");
        let Opened { store, snapshot, set_aside, lost, writer } = opened;
        let identities = Arc::<Slow>::default();
        let (proxy, giver) = (Arc::clone(&self.proxy), Arc::clone(&identities));
        let node = Node::new(self.config.clone(), Arc::new(self.kernel.clone()), store, ipam, proxy, giver, None);
        (runtime, node, Opening { snapshot, set_aside, lost, writer, identities })
    }

    fn living(&self, runtime: Runtime, node: Arc<Node>, opening: Opening) -> Life {
        let agent = Agent {
            life: Arc::clone(&node.life),
            node,
            kernel: self.kernel.clone(),
            disk: self.disk.clone(),
            proxy: Arc::clone(&self.proxy),
            identities: opening.identities,
            set_aside: opening.set_aside,
        };
        Life { runtime, agent, disk: self.disk.clone(), writer: opening.writer }
    }
}

struct Opening {
    snapshot: wharf_core::store::Snapshot,
    set_aside: Option<String>,
    lost: bool,
    writer: JoinHandle<()>,
    identities: Arc<Slow>,
}

/// What the agent does before it serves, in its order.
async fn bring_back(node: &Arc<Node>, opening: &Opening) {
    let life = &node.life;
    life.policy.load().await.expect("policies");
    if life.network.cluster.file().is_some() {
        life.network.load_cluster(life.store.boot_id()).await.expect("nodes of the cluster");
        life.network.set_cluster().await.expect("networks of other nodes");
    }
    life.network.ensure_node().await.expect("node part");
    lock(&life.network.addresses.ipam).set_rest(life.config.ip_rest_ms);
    restore::restore(life, opening.snapshot.clone(), opening.lost).await.expect("restore");
    if let Err(why) = life.policy.start().await {
        tracing::error!("{why}");
    }
    deletions::drain(life, Cause::Start).await.expect("drain");
}

impl Life {
    /// Runs something beside the agent's tasks.
    pub(crate) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Ends it as SIGKILL does: every task ends where it stands. What was handed to the store is still written.
    pub(crate) fn kill(self) {
        let Self { runtime, agent, disk, writer } = self;
        drop(agent);
        drop(runtime);
        disk.mend();
        writer.join().expect("the store's thread ends");
    }

    /// The same, with what the store was writing cut off where it was held.
    pub(crate) fn kill_and_tear(self) {
        let Self { runtime, agent, disk, writer } = self;
        drop(agent);
        drop(runtime);
        disk.fill();
        disk.release();
        writer.join().expect("the store's thread ends");
        disk.mend();
    }

    /// Ends it as SIGTERM does: what runs ends first.
    pub(crate) fn stop(self) {
        self.run(async {
            let life = &self.agent.life;
            life.tasks.stop.cancel();
            life.tasks.operations.close();
            life.tasks.operations.wait().await;
            life.tasks.halt.cancel();
            life.tasks.endpoints.close();
            life.tasks.endpoints.wait().await;
            wharf_agent::endpoint::prepared::drain(&life.endpoints).await;
        });
        self.kill();
    }
}
