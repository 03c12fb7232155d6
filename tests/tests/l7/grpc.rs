//! gRPC by rules about requests: unary calls and streams, with the statuses that trailers carry.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use tokio::{runtime, time::timeout};
use tokio_stream::StreamExt as _;
use tonic::{Code, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus, health_client::HealthClient,
};
use wharf_tests::{NodeConfig, grpc::HealthService, scenario, wait};

use crate::{PORT, Scene, await_realized, ingress, pods::import};

fn of(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

fn serves(answer: &HealthCheckResponse) -> bool {
    answer.status() == ServingStatus::Serving
}

#[test]
fn calls_pass_by_their_paths_and_statuses_are_those_of_the_server() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let port = PORT + 1;
        let service = HealthService::start(scene.db.space()?, port)?;
        let rule = |http: &str| ingress("db", http).replace("'80'", &format!("'{port}'"));
        let check = "{method: POST, path: /grpc.health.v1.Health/Check}";
        for address in scene.db.end.both()? {
            service.report("db", true);
            import(node, &rule(&format!("[{check}]")))?;
            await_realized(node)?;
            let to = SocketAddr::new(address, port);
            scene.web.space()?.run(|| -> Result<()> {
                // Its threads are of the container's namespace, as this one is.
                let client = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
                let channel = Channel::from_shared(format!("http://{to}"))?;
                let channel = client.block_on(channel.connect()).context("connect")?;
                let mut health = HealthClient::new(channel);
                let answer = client.block_on(health.check(of("db"))).context("an allowed call")?.into_inner();
                ensure!(serves(&answer), "{answer:?}");
                let unknown = client.block_on(health.check(of("nobody"))).err().context("the server knows nobody")?;
                ensure!(unknown.code() == Code::NotFound, "the server's own status: {unknown:?}");
                let denied =
                    client.block_on(health.watch(of("db"))).err().context("a call that no rule names passed")?;
                ensure!(denied.code() == Code::PermissionDenied, "{denied:?}");

                import(node, &rule(&format!("[{check}, {{path: /grpc.health.v1.Health/Watch}}]")))?;
                await_realized(node)?;
                let mut stream =
                    client.block_on(health.watch(of("db"))).context("a call that the rules allow now")?.into_inner();
                let mut next = || {
                    let next = client.block_on(async { timeout(wait::PATIENCE, stream.next()).await });
                    next.context("wait for a message of the stream")?
                        .context("the stream ended")?
                        .context("the stream failed")
                };
                ensure!(serves(&next()?), "the first message");
                service.report("db", false);
                ensure!(!serves(&next()?), "the second");
                Ok(())
            })??;
        }
        drop(service);
        scene.end(node)
    })
}
