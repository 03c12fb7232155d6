//! `wharf candidates`: what the scripts of `wharf completion` ask for, because only the agent knows it.

use std::time::Duration;

use clap::CommandFactory as _;
use wharf_api::{Endpoint, EndpointFilter, client::ClientError};

use super::Context;
use crate::{
    args::{Cli, Setting},
    error::{CliError, Exit},
    expected::{Expected, expected},
    output::write_text,
    render::endpoint::short_ids,
};

/// A shell waits for the answer: it is better without one than slow.
const PATIENCE: Duration = Duration::from_secs(1);

/// A candidate and what it stands for.
type Candidate = (String, String);

/// Prints the candidates for the last of the words, a line each: the word, a tabulator, what it stands for. Prints nothing
/// where the agent does not know more than the script, or does not answer.
pub(super) async fn run(cx: &Context, words: &[String]) -> Result<Exit, CliError> {
    let Some(wanted) = expected(&Cli::command(), words) else { return Ok(Exit::Ok) };
    let (begun, prefix) = begun(words);
    let client = match socket(words) {
        Some(socket) => wharf_api::client::Client::new(socket),
        None => cx.client.clone(),
    };
    // Nothing can be told to a shell in the middle of a word, an error neither.
    let all = ask(&client.with_timeout(PATIENCE), wanted, !begun.is_empty()).await.unwrap_or_default();
    let fits = all.into_iter().filter(|(word, _)| word.starts_with(&begun) && *word != begun && is_plain(word));
    let lines = fits.map(|(word, what)| {
        let what: String = what.chars().filter(|c| !c.is_control()).collect();
        format!("{}\t{what}\n", word.strip_prefix(prefix.as_str()).unwrap_or(&word))
    });
    write_text(&lines.collect::<String>())?;
    Ok(Exit::Ok)
}

/// The beginning of the word that is to be completed, and the part of it that is not the shell's to replace: bash takes
/// `=` for a word of its own.
fn begun(words: &[String]) -> (String, String) {
    match words {
        [.., key, equals] if equals == "=" => (format!("{key}="), format!("{key}=")),
        [.., key, equals, value] if equals == "=" => (format!("{key}={value}"), format!("{key}=")),
        [.., last] => (last.clone(), String::new()),
        [] => Default::default(),
    }
}

/// The agent's socket, when the words name it.
fn socket(words: &[String]) -> Option<&str> {
    let named = |pair: &[String]| match pair {
        [option, value] if option == "--socket" => Some(value.clone()),
        _ => None,
    };
    let apart = words.windows(2).position(|pair| named(pair).is_some()).and_then(|at| words.get(at + 1));
    apart.map(String::as_str).or_else(|| words.iter().find_map(|w| w.strip_prefix("--socket=")))
}

/// Everything that could stand there; names of endpoints beside their numbers when a word is `begun`.
async fn ask(client: &wharf_api::client::Client, wanted: Expected, begun: bool) -> Result<Vec<Candidate>, ClientError> {
    Ok(match wanted {
        Expected::Endpoint => names(&client.endpoints(&EndpointFilter::default()).await?, begun),
        Expected::Map => client.maps().await?.into_iter().map(|m| (m.name, m.kind)).collect(),
        Expected::SettingName => client.config().await?.effective.into_iter().collect(),
        Expected::Setting => Setting::EXAMPLES.iter().map(|text| ((*text).to_owned(), String::new())).collect(),
    })
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

/// Nothing in it means anything to a shell.
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
        assert_eq!(socket(&words("--socket /x endpoint get ")), Some("/x"));
        assert_eq!(socket(&words("endpoint --socket=/y get ")), Some("/y"));
        assert_eq!(socket(&words("endpoint get ")), None);
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
