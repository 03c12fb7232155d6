//! `wharf-agent man DIR` and `wharf-agent completion SHELL`, for packaging; not in the help.

use std::{
    ffi::OsString,
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
};

use anyhow::{Context, bail};
use clap::{CommandFactory, ValueEnum as _};
use clap_complete::Shell;
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};

use crate::{cleanup, config::Flags};

const NAME: &str = env!("CARGO_PKG_NAME");

const DATE: &str = "2026-11-22";

const FILES: &[(&str, &str)] = &[
    ("/etc/wharf/agent.toml", "Settings, when --config names it, as the systemd unit does."),
    ("/run/wharf/wharf.sock", "The REST API: mode 0660, group wharf where that group exists."),
    ("/run/wharf/admin.sock", "The same API, read-only, from a thread of its own, for an agent that hangs."),
    ("/run/wharf/state.redb", "The store: endpoints, leases, intents. It belongs to one boot."),
    ("/run/wharf/deletions/", "Deletion records of plugins that found no agent."),
    ("/var/lib/wharf/cluster.json", "The last good text of the cluster file."),
    ("/var/lib/wharf/feed.json", "The rows of the cluster feed."),
    ("/var/lib/wharf/pools.json", "Pools of the last start, from this node's row."),
    ("/var/lib/wharf/paths.json", "Refused direct paths to other nodes."),
    ("/var/lib/wharf/health.json", "The health endpoint's addresses, which survive a reboot."),
    ("/sys/fs/bpf/wharf/", "Pinned programs, maps and links."),
];

const SERVICE_VARIABLES: &str = "NOTIFY_SOCKET, WATCHDOG_USEC";

/// Runs if the arguments name a page.
pub fn asked(mut arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let written = match arguments.next()?.to_str()? {
        "man" => man(arguments.next()),
        "completion" => completion(arguments.next()),
        _ => return None,
    };
    Some(match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{NAME}: {error:#}");
            ExitCode::FAILURE
        }
    })
}

fn command() -> clap::Command {
    Flags::command().name(NAME).bin_name(NAME)
}

fn man(directory: Option<OsString>) -> anyhow::Result<()> {
    let directory = directory.context("write the manual page: name a directory, as in `wharf-agent man DIR`")?;
    let file = Path::new(&directory).join(format!("{NAME}.8"));
    let page = page().with_context(|| format!("make {}", file.display()))?;
    std::fs::write(&file, page).with_context(|| format!("write {}", file.display()))
}

/// In the order of man-pages(7).
fn page() -> io::Result<String> {
    let command = command();
    let man = Man::new(command.clone()).section("8").manual("Wharf").date(DATE);
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    let preamble = Roff::new().render();
    let mut page = String::from_utf8_lossy(&text).into_owned();
    let mut add = |render: &dyn Fn(&mut dyn io::Write) -> io::Result<()>| {
        let mut text = Vec::new();
        render(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        page.push_str(text.strip_prefix(&preamble).unwrap_or(&text));
        io::Result::Ok(())
    };
    add(&|to| man.render_name_section(to))?;
    add(&|to| man.render_synopsis_section(to))?;
    add(&|to| man.render_description_section(to))?;
    add(&|to| man.render_options_section(to))?;

    let mut rest = Roff::new();
    as_written(&mut rest, "EXIT STATUS", &help_section(&command, "Exit status:"));
    let variables: Vec<(String, String)> = command
        .get_arguments()
        .filter_map(|a| Some((a.get_env()?.to_str()?.to_owned(), format!("Same as --{}.", a.get_long()?))))
        .chain([(SERVICE_VARIABLES.to_owned(), "Set by systemd: readiness and the watchdog.".to_owned())])
        .collect();
    list(&mut rest, "ENVIRONMENT", variables.iter().map(|(name, meaning)| (name.as_str(), meaning.as_str())));
    list(&mut rest, "FILES", FILES.iter().copied());
    as_written(&mut rest, "NOTES", &help_section(&command, ""));
    as_written(&mut rest, "EXAMPLES", &help_section(&command, "Examples:"));
    rest.control("SH", ["SEE ALSO"]);
    rest.text([bold("wharf"), roman("(1),")]);
    rest.text([bold("wharf-cni"), roman("(8)")]);
    add(&|to| rest.to_writer(to))?;
    Ok(page.replace("\n.br\n\n.br\n", "\n.sp\n"))
}

/// An empty heading selects the first part.
fn help_section(command: &clap::Command, heading: &str) -> String {
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (mut found, mut current) = (Vec::new(), "");
    for line in text.lines() {
        if matches!(line, "Exit status:" | "Examples:") {
            current = line;
            continue;
        }
        if !line.is_empty() && !line.starts_with(' ') {
            current = "";
        }
        found.extend((current == heading).then_some(line));
    }
    found.join("\n").trim_matches('\n').to_owned()
}

fn as_written(to: &mut Roff, heading: &str, text: &str) {
    to.control("SH", [heading]);
    to.control("nf", []);
    for line in text.lines() {
        to.text([roman(line)]);
    }
    to.control("fi", []);
}

fn list<'a>(to: &mut Roff, heading: &str, rows: impl Iterator<Item = (&'a str, &'a str)>) {
    to.control("SH", [heading]);
    for (term, meaning) in rows {
        to.control("TP", []);
        to.text([bold(term)]);
        to.text([roman(meaning)]);
    }
}

fn completion(shell: Option<OsString>) -> anyhow::Result<()> {
    let Some(shell) = shell.as_ref().and_then(|s| s.to_str()).and_then(|s| Shell::from_str(s, false).ok()) else {
        let known: Vec<String> = Shell::value_variants().iter().map(ToString::to_string).collect();
        bail!("write completions: name a shell, one of {}", known.join(", "));
    };
    // The generator panics if a writer fails.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command().subcommand(cleanup::command()), NAME, &mut script);
    std::io::stdout().write_all(&script).context("write completions")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_usual_sections_and_names_every_setting() {
        let directory = tempfile::tempdir().expect("make directory");
        man(Some(directory.path().into())).expect("writes");
        let page = std::fs::read_to_string(directory.path().join("wharf-agent.8")).expect("the page");
        let page = page.replace('\\', "");
        let headings: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix(".SH ")).collect();
        let usual = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "\"EXIT STATUS\"", "ENVIRONMENT", "FILES", "NOTES"];
        assert_eq!(headings, [usual.as_slice(), &["EXAMPLES", "\"SEE ALSO\""]].concat());
        assert!(page.contains("wharf-agent --config /etc/wharf/agent.toml"), "{page}");
        for argument in Flags::command().get_arguments().filter(|a| !a.is_hide_set()) {
            let flag = format!("--{}", argument.get_long().expect("every argument is a flag"));
            assert!(page.contains(&flag), "{flag} is not in the page");
        }
    }

    #[test]
    fn the_help_names_pages_by_their_titles() {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let pages = std::fs::read_dir(directory).expect("the pages").map(|page| page.expect("a page").path());
        let texts = pages.filter_map(|page| std::fs::read_to_string(page).ok());
        let titles: Vec<String> = texts.filter_map(|text| Some(text.lines().next()?.replace(['#', '`'], ""))).collect();
        let help = Flags::command().render_long_help().to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(!help.contains("docs/"), "packages have no docs directory");
        let named: Vec<&str> = help.split("page \"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert!(named.len() > 8, "{named:?}");
        for name in named {
            assert!(titles.iter().any(|title| title.trim() == name), "no page has the title {name}: {titles:?}");
        }
    }

    #[test]
    fn the_configuration_page_has_each_setting_with_its_variable_and_default() {
        let page = include_str!("../../docs/configuration.md");
        let told: Vec<&str> = page.lines().filter(|line| line.starts_with("| `--")).collect();
        let mut made = 0;
        for argument in Flags::command().get_arguments().filter(|a| !a.is_hide_set()) {
            let (Some(flag), Some(variable)) = (argument.get_long(), argument.get_env().and_then(|v| v.to_str()))
            else {
                continue;
            };
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            let default =
                help.split_once("[default: ").and_then(|(_, rest)| rest.split_once(']')).map(|(text, _)| text);
            let default = match default {
                Some(words) if words.contains(' ') => format!(" {words} "),
                Some(value) => format!(" `{value}` "),
                None => " ".to_owned(),
            };
            let row = format!("| `--{flag}` | `{variable}` |{default}| ");
            assert!(
                told.iter().any(|line| line.starts_with(&row)),
                "docs/configuration.md has no row that begins {row}"
            );
            made += 1;
        }
        assert_eq!(told.len(), made, "docs/configuration.md has a setting that does not exist");
    }

    #[test]
    fn the_sample_configuration_has_each_setting_with_its_default() {
        let sample = include_str!("../../dist/agent.toml");
        let keys = sample.lines().take_while(|line| *line != "#[[pool]]").filter_map(|line| line.strip_prefix('#'));
        let keys: Vec<&str> = keys.filter(|line| !line.starts_with(' ') && line.contains(" = ")).collect();
        for argument in Flags::command().get_arguments() {
            let flag = argument.get_long().unwrap_or_default();
            if argument.get_env().is_none() || ["config", "debug-programs"].contains(&flag) {
                continue;
            }
            let Some(line) = keys.iter().find(|line| line.split(" = ").next() == Some(flag)) else {
                panic!("dist/agent.toml lacks {flag}");
            };
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            if let Some((value, _)) = help.split_once("[default: ").and_then(|(_, rest)| rest.split_once(']'))
                && !value.contains(' ')
            {
                assert!(line.contains(value), "dist/agent.toml says {line}, the default is {value}");
            }
        }
    }

    #[test]
    fn the_api_page_lists_every_operation_and_error_code() {
        let page = include_str!("../../docs/api.md");
        let document: serde_json::Value =
            serde_json::from_str(include_str!("../../crates/api/openapi.json")).expect("openapi.json");
        let paths = document["paths"].as_object().expect("paths");
        let mut made: Vec<String> = Vec::new();
        for (path, operations) in paths {
            let methods = operations.as_object().expect("operations").keys();
            made.extend(methods.map(|method| format!("{} {path}", method.to_uppercase())));
        }
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let mut told: Vec<&str> = rows.filter(|row| row.contains(" /")).collect();
        made.sort_unstable();
        told.sort_unstable();
        assert_eq!(told, made);
        let codes = document["components"]["schemas"]["ErrorCode"]["enum"].as_array().expect("codes");
        for code in codes {
            let code = format!("`{}`", code.as_str().expect("a code"));
            assert!(page.contains(&code), "docs/api.md lacks {code}");
        }
    }

    #[test]
    fn only_its_own_words_are_taken() {
        let asks = |words: &[&str]| asked(words.iter().map(OsString::from)).is_some();
        assert!(!asks(&[]) && !asks(&["--mtu", "1500"]) && !asks(&["manual"]));
        assert!(asks(&["completion", "no-such-shell"]) && asks(&["man"]));
    }
}
