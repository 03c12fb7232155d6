//! Connections of a listener that goes on, and that are another's to judge after a change.

use anyhow::{Context as _, Result, ensure};
use wharf_tests::{Node, NodeConfig, scenario, wait, web::WebClient};

use crate::{
    PORT, Scene, await_realized,
    pods::{Pod, import},
};

/// What clients with each label may ask `db` for.
fn ingress(of: &[(&str, &str)]) -> String {
    let rule = |(app, http): &(&str, &str)| {
        format!(
            "  - fromEndpoints: [{{matchLabels: {{app: {app}}}}}]\n    toPorts:\n    - ports: [{{port: '{PORT}', protocol: \
             TCP}}]\n      rules: {{http: {http}}}\n"
        )
    };
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: moved}}\nspec:\n  \
         endpointSelector: {{matchLabels: {{app: db}}}}\n  ingress:\n{}",
        of.iter().map(rule).collect::<String>()
    )
}

const PUBLIC: &str = "[{path: /public}]";
const BOTH: &str = "[{path: /public}, {path: /admin}]";

/// Kept connections of `web`, by both families, through the listener for `BOTH`.
fn admins(scene: &Scene) -> Result<Vec<WebClient>> {
    let connect = |to| {
        let mut client = WebClient::connect(scene.web.space()?, to)?;
        ensure!(client.ask("GET", "/admin", "db", "")? == 200, "before the change");
        Ok(client)
    };
    scene.servers()?.into_iter().map(connect).collect()
}

/// The connections of before end or judge by the rules of now.
fn nothing_passes(scene: &Scene, clients: Vec<WebClient>) -> Result<()> {
    let before = scene.server.served().len();
    for mut client in clients {
        let status = client.ask_if_open("GET", "/admin", "db", "").unwrap_or(None);
        ensure!(status != Some(200), "a connection of before has the rights of before");
    }
    let passed = scene.server.served().len() - before;
    ensure!(passed == 0, "{passed} requests reached the server");
    ensure!(scene.get("/admin")? == 403 && scene.get("/public")? == 200, "new connections");
    Ok(())
}

fn with_others(body: impl FnOnce(&mut Node, &Scene, &Pod) -> Result<()>) -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        // They keep both listeners where they are.
        let (other, third) = (Pod::container(node, "other", "other")?, Pod::container(node, "third", "third")?);
        import(node, &ingress(&[("web", BOTH), ("other", BOTH), ("third", PUBLIC)]))?;
        await_realized(node)?;
        body(node, &scene, &other)?;
        [other, third].iter().try_for_each(|pod| node.detach(&pod.end))?;
        scene.end(node)
    })
}

#[test]
fn a_right_that_a_policy_takes_away_ends_with_it_on_open_connections() -> Result<()> {
    with_others(|node, scene, other| {
        let clients = admins(scene)?;
        import(node, &ingress(&[("web", PUBLIC), ("other", BOTH), ("third", PUBLIC)]))?;
        await_realized(node)?;
        nothing_passes(scene, clients)?;
        let [to, _] = scene.servers()?;
        let mut client = WebClient::connect(other.space()?, to)?;
        ensure!(client.ask("GET", "/admin", "db", "")? == 200, "the other client keeps its right");
        // A change of other rules leaves its connection alone.
        import(node, &ingress(&[("web", PUBLIC), ("other", BOTH), ("third", "[{path: /third}]")]))?;
        await_realized(node)?;
        ensure!(client.ask("GET", "/admin", "db", "")? == 200, "on the same connection");
        Ok(())
    })
}

#[test]
fn a_right_that_other_labels_take_away_ends_with_them_on_open_connections() -> Result<()> {
    with_others(|node, scene, _| {
        let clients = admins(scene)?;
        let id = node.endpoint(&scene.web.end)?.id.to_string();
        node.wharf(&["endpoint", "labels", &id, "--set", "cni:app=third"])?;
        nothing_passes(scene, clients)
    })
}

#[test]
fn an_agent_that_is_killed_when_rows_have_changed_leaves_it_to_the_next_one() -> Result<()> {
    with_others(|node, scene, _| {
        node.stop_agent()?;
        ensure!(node.start_armed_agent()?, "an agent with crash points");
        await_realized(node)?;
        let clients = admins(scene)?;
        wharf_tests::crash::wish(node.dirs(), "policy/realized")?;
        let text = ingress(&[("web", PUBLIC), ("other", BOTH), ("third", PUBLIC)]);
        ensure!(import(node, &text).is_err(), "the agent lives");
        node.await_crash()?;
        wharf_tests::crash::forget_wish(node.dirs())?;
        node.start_agent()?;
        await_realized(node)?;
        wait::until("connections of before to end", || Ok(scene.get("/admin").ok().filter(|status| *status == 403)))
            .context("new connections")?;
        nothing_passes(scene, clients)
    })
}
