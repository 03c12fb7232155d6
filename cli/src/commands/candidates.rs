//! `wharf candidates`: completion from the agent.

use std::{collections::BTreeSet, time::Duration};

use clap::{CommandFactory as _, Parser as _, ValueEnum as _};
use wharf_api::{
    Endpoint, EndpointFilter, PolicyInfo,
    client::{Client, ClientError},
};
use wharf_sandbox::Sandboxes;

use super::Context;
use crate::{
    args::{Cli, Command, PolicyKind, Setting},
    error::{CliError, Exit},
    expected::{Expected, expected},
    namespace::namespace_of,
    output::write_text,
    render::endpoint::short_ids,
};

/// A shell prefers no candidates to slow candidates.
const PATIENCE: Duration = Duration::from_secs(1);

type Candidate = (String, String);

/// Prints candidates for the last word: word, tab, description. Exits 1 where no name is expected; the script then
/// offers static words.
pub(super) async fn run(cx: &Context, words: &[String]) -> Result<Exit, CliError> {
    let Some(wanted) = expected(&Cli::command(), words) else { return Ok(Exit::Unwell) };
    let (begun, prefix) = begun(words);
    let client = match value_of(words, "--socket") {
        Some(socket) => Client::new(socket),
        None => cx.client.clone(),
    };
    // A shell cannot show errors within a word.
    let all = ask(&client.with_timeout(PATIENCE), wanted, words, !begun.is_empty()).await.unwrap_or_default();
    let fits = all.into_iter().filter(|(word, _)| word.starts_with(&begun) && *word != begun && is_plain(word));
    let lines = fits.map(|(word, what)| {
        let what: String = what.chars().filter(|c| !c.is_control()).collect();
        format!("{}\t{what}\n", word.strip_prefix(prefix.as_str()).unwrap_or(&word))
    });
    write_text(&lines.collect::<String>())?;
    Ok(Exit::Ok)
}

/// The partial word, and the prefix that the shell keeps: bash splits at `=`.
fn begun(words: &[String]) -> (String, String) {
    match words {
        [.., key, equals] if equals == "=" => (format!("{key}="), format!("{key}=")),
        [.., key, equals, value] if equals == "=" => (format!("{key}={value}"), format!("{key}=")),
        [.., last] => (last.clone(), String::new()),
        [] => Default::default(),
    }
}

fn value_of<'a>(words: &'a [String], option: &str) -> Option<&'a str> {
    let apart = words.iter().position(|word| word == option).and_then(|at| words.get(at + 1));
    let joined = || words.iter().find_map(|word| word.strip_prefix(option)?.strip_prefix('='));
    apart.map(String::as_str).or_else(joined)
}

/// Offers endpoint names only for a partial word (`begun`).
async fn ask(client: &Client, wanted: Expected, words: &[String], begun: bool) -> Result<Vec<Candidate>, ClientError> {
    Ok(match wanted {
        Expected::Endpoint => names(&client.endpoints(&EndpointFilter::default()).await?, begun),
        Expected::PolicyName => policy_names(&client.policies().await?.policies, words),
        Expected::QualifiedPolicyName => {
            let qualified = |policy: PolicyInfo| {
                let name = policy.namespace.map_or_else(String::new, |namespace| namespace + "/") + &policy.name;
                (name, policy.kind)
            };
            client.policies().await?.policies.into_iter().map(qualified).collect()
        }
        Expected::Namespace => {
            let labelled = client.namespaces().await?;
            let endpoints = client.endpoints(&EndpointFilter::default()).await?;
            let policies = client.policies().await?.policies;
            let all = labelled.into_iter().map(|namespace| namespace.name);
            let all = all.chain(endpoints.iter().map(|e| namespace_of(e).to_owned()));
            let all = all.chain(policies.into_iter().filter_map(|policy| policy.namespace));
            let all: BTreeSet<String> = all.collect();
            all.into_iter().map(|name| (name, String::new())).collect()
        }
        Expected::Sandbox => sandboxes(words),
        Expected::Map => client.maps().await?.into_iter().map(|m| (m.name, m.kind)).collect(),
        Expected::SettingName => client.config().await?.effective.into_iter().collect(),
        Expected::Setting => Setting::EXAMPLES.iter().map(|text| ((*text).to_owned(), String::new())).collect(),
    })
}

/// Filters by kind and namespace in the words.
fn policy_names(policies: &[PolicyInfo], words: &[String]) -> Vec<Candidate> {
    let kind = words.iter().find_map(|word| PolicyKind::from_str(word, true).ok()).map(PolicyKind::as_str);
    let namespace = value_of(words, "--namespace").or_else(|| value_of(words, "-n"));
    let fits = |policy: &&PolicyInfo| {
        kind.is_none_or(|kind| kind == policy.kind)
            && namespace.is_none_or(|namespace| policy.namespace.as_deref() == Some(namespace))
    };
    let named = |policy: &PolicyInfo| {
        let place = policy.namespace.as_ref().map_or_else(String::new, |name| format!("namespace {name}"));
        (policy.name.clone(), place)
    };
    policies.iter().filter(fits).map(named).collect()
}

/// Reads the command line's state directory, if permitted.
fn sandboxes(words: &[String]) -> Vec<Candidate> {
    let line = ["wharf", "sandbox", "list"].into_iter();
    let directory = value_of(words, "--state-dir").into_iter().flat_map(|directory| ["--state-dir", directory]);
    let Ok(Cli { command: Command::Sandbox(args), .. }) = Cli::try_parse_from(line.chain(directory)) else {
        return Vec::new();
    };
    let all = Sandboxes::new(args.places.dirs(), |_| ()).list().unwrap_or_default();
    all.into_iter().map(|s| (s.name.as_str().to_owned(), s.networks.join(" "))).collect()
}

fn names(endpoints: &[Endpoint], begun: bool) -> Vec<Candidate> {
    let mut all = Vec::new();
    for (e, container) in endpoints.iter().zip(short_ids(endpoints)) {
        let pod = e.pod_name.clone().unwrap_or_default();
        let address = e.ipv4.map(|ip| ip.to_string()).or(e.ipv6.map(|ip| ip.to_string())).unwrap_or_default();
        let what = [pod.as_str(), container.as_str(), e.ifname.as_str(), address.as_str()];
        let what = what.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ");
        all.push((e.id.to_string(), what.clone()));
        if begun {
            let others = [container, pod, address, e.host_ifname.clone()];
            all.extend(others.into_iter().filter(|name| !name.is_empty()).map(|name| (name, what.clone())));
        }
    }
    all.sort();
    all.dedup();
    all
}

/// True without characters special to a shell.
fn is_plain(word: &str) -> bool {
    word.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/' | '=' | ':'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn what_is_begun() {
        let of = |line| begun(&words(line));
        assert_eq!(of("config set log-l"), ("log-l".to_owned(), String::new()));
        assert_eq!(of("config set log-format=j"), ("log-format=j".to_owned(), String::new()));
        assert_eq!(of("config set log-format ="), ("log-format=".to_owned(), "log-format=".to_owned()), "bash");
        assert_eq!(of("config set log-format = j"), ("log-format=j".to_owned(), "log-format=".to_owned()), "bash");
    }

    #[test]
    fn the_socket_of_the_line_is_asked() {
        let socket = |line| value_of(&words(line), "--socket").map(str::to_owned);
        assert_eq!(socket("--socket /x endpoint get ").as_deref(), Some("/x"));
        assert_eq!(socket("endpoint --socket=/y get ").as_deref(), Some("/y"));
        assert_eq!(socket("endpoint get "), None);
    }

    #[test]
    fn sandboxes_of_the_state_directory_of_the_line() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("web.json"), "{}").unwrap();
        let line = format!("sandbox rm --state-dir {} ", directory.path().display());
        let names: Vec<String> = sandboxes(&words(&line)).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["web"]);
        assert_eq!(sandboxes(&words("sandbox rm --state-dir /nonexistent/x ")), []);
    }

    #[test]
    fn numbers_first_and_names_once_a_word_is_begun() {
        let all = [sample::endpoint()];
        assert_eq!(names(&all, false), [("7".to_owned(), "web-1 3f9c51aa01b2d eth0 10.88.0.7".to_owned())]);
        let words: Vec<String> = names(&all, true).into_iter().map(|(word, _)| word).collect();
        assert_eq!(words, ["10.88.0.7", "3f9c51aa01b2d", "7", "web-1", "wh0007a1b2"]);
    }

    #[test]
    fn a_name_that_a_shell_would_act_on_is_left_out() {
        for hostile in ["$(reboot)", "a;b", "a b", "`x`", "a\tb", "\u{202e}"] {
            assert!(!is_plain(hostile), "{hostile:?}");
        }
        assert!(is_plain("7/CONFIG") && is_plain("log-format=json"));
    }
}
