//! A scripted API server and a fake agent.

pub mod agent;
pub mod objects;
pub mod patch;
pub mod rbac;
pub mod server;
pub mod streams;
pub mod tls;

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use wharf_kube::{api::Api, metrics::Metrics, producer::Names, run};

pub use self::objects::NODE;
use self::{agent::Agent, server::Server};

/// All tasks of the program, against a scripted server and a fake agent; they end when it is dropped.
pub struct Bench {
    pub server: Server,
    pub agent: Agent,
    pub metrics: Arc<Metrics>,
    _tasks: JoinSet<Result<()>>,
}

impl Bench {
    pub fn start(server: Server, agent: Agent) -> Self {
        let api = Api::new(Box::new(server.clone()));
        Self::start_api(server, agent, api)
    }

    /// With another way to the server.
    pub fn start_api(server: Server, agent: Agent, api: Api) -> Self {
        let connect = agent.connect();
        let (metrics, api) = (Arc::new(Metrics::default()), Arc::new(api));
        let names = Names { cluster: "cluster".into(), node: NODE.into() };
        let mut tasks = JoinSet::new();
        run::start(&mut tasks, &api, names, connect, &metrics);
        Self { server, agent, metrics, _tasks: tasks }
    }

    /// Replaces the program by another process of it.
    pub fn restart(self) -> Self {
        let Self { server, agent, .. } = self;
        Self::start(server, agent)
    }

    /// Waits until the agent has exactly the rows of the objects; panics after `limit`.
    pub async fn settle(&self, limit: Duration) {
        let until = Instant::now() + limit;
        loop {
            // The program changes an object itself: its node.
            let (expected, found) = (objects::expected(&self.server.objects()), self.agent.rows());
            if found == expected && self.agent.is_complete() {
                assert_eq!(self.server.forbidden(), Vec::<String>::new(), "rbac.yaml");
                return;
            }
            if Instant::now() >= until {
                let missing: Vec<_> = expected.iter().filter(|row| !found.contains(row)).collect();
                let extra: Vec<_> = found.iter().filter(|row| !expected.contains(row)).collect();
                panic!(
                    "after {limit:?}: missing {missing:#?}, extra {extra:#?}, complete: {}, requests: {:#?}",
                    self.agent.is_complete(),
                    self.server.last_requests()
                );
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Waits for a condition; panics after `limit`.
pub async fn until(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        sleep(Duration::from_millis(50)).await;
    }
}
