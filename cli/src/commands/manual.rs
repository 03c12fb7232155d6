//! Manual pages from the clap definition.

use std::{fs, io, path::Path};

use clap::CommandFactory;
use clap_mangen::{
    Man,
    roff::{Roff, bold, italic, roman},
};

use crate::{
    args::Cli,
    error::{CliError, Exit},
};

/// Date of the text.
const DATE: &str = "2026-11-23";

const ENVIRONMENT: &[(&str, &str)] = &[
    ("WHARF_SOCKET", "The agent's unix socket; the option --socket takes precedence."),
    ("NO_COLOR", "When set, --color auto means never."),
];

const FILES: &[(&str, &str)] = &[
    ("/run/wharf/wharf.sock", "The agent's socket: root, or a member of the group wharf, may use it."),
    ("/run/wharf/admin.sock", "The agent's second socket, for a look at an agent whose API does not answer."),
];

pub(super) fn man(dir: &Path) -> Result<Exit, CliError> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let exit_status = help_section(&command, "Exit status:");
    pages(&command, &[], &exit_status, dir)
        .map_err(|e| CliError::refused(format!("write manual pages into {}: {e}", dir.display())))?;
    Ok(Exit::Ok)
}

/// `above`: names of parent pages.
fn pages(command: &clap::Command, above: &[String], exit_status: &str, dir: &Path) -> io::Result<()> {
    let man = Man::new(command.clone()).manual("Wharf").date(DATE).source(concat!("wharf ", env!("CARGO_PKG_VERSION")));
    fs::write(dir.join(man.get_filename()), page(&man, command, above, exit_status)?)?;
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let above: Vec<String> = above.iter().cloned().chain([name.to_owned()]).collect();
    command.get_subcommands().filter(|sub| !sub.is_hide_set()).try_for_each(|sub| pages(sub, &above, exit_status, dir))
}

/// Section order of man-pages(7); `after_help` has `Exit status:` and `Examples:`.
fn page(man: &Man, command: &clap::Command, above: &[String], exit_status: &str) -> io::Result<String> {
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    let preamble = Roff::new().render();
    let mut parts = String::from_utf8_lossy(&text).into_owned();
    let mut add = |render: &dyn Fn(&mut dyn io::Write) -> io::Result<()>| {
        let mut text = Vec::new();
        render(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        // Each part repeats the preamble.
        parts.push_str(text.strip_prefix(&preamble).unwrap_or(&text));
        io::Result::Ok(())
    };
    add(&|to| man.render_name_section(to))?;
    add(&|to| {
        let mut synopsis = Vec::new();
        man.render_synopsis_section(&mut synopsis)?;
        to.write_all(with_dashes(&String::from_utf8_lossy(&synopsis), command).as_bytes())
    })?;
    add(&|to| man.render_description_section(to))?;
    add(&|to| man.render_options_section(to))?;
    if command.get_subcommands().any(|sub| !sub.is_hide_set()) {
        add(&|to| man.render_subcommands_section(to))?;
    }
    let mut rest = Roff::new();
    let own = help_section(command, "Exit status:");
    as_written(&mut rest, "EXIT STATUS", if own.is_empty() { exit_status } else { &own });
    list(&mut rest, "ENVIRONMENT", ENVIRONMENT);
    list(&mut rest, "FILES", FILES);
    as_written(&mut rest, "NOTES", &help_section(command, ""));
    let examples = [help_section(command, "Examples:"), help_section(command, "Example:")].concat();
    as_written(&mut rest, "EXAMPLES", &examples);
    rest.control("SH", ["SEE ALSO"]);
    for name in above {
        rest.text([bold(name), roman("(1),")]);
    }
    rest.text([bold("wharf-agent"), roman("(8),")]);
    rest.text([bold("wharf-cni"), roman("(8)")]);
    add(&|to| rest.to_writer(to))?;
    // The generator writes empty lines as two breaks.
    Ok(parts.replace("\n.br\n\n.br\n", "\n.sp\n"))
}

/// Inserts the missing `--` before arguments that must follow it.
fn with_dashes(synopsis: &str, command: &clap::Command) -> String {
    let mut synopsis = synopsis.to_owned();
    for argument in command.get_positionals().filter(|argument| argument.is_last_set()) {
        let names = argument.get_value_names().unwrap_or_default();
        let names: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
        let shown = Roff::new().text([italic(names.join(" "))]).to_roff();
        // After the bracket of the argument.
        let at = synopsis.rfind(shown.trim_end()).and_then(|at| synopsis.get(..at)?.char_indices().next_back());
        if let Some((at, _)) = at {
            synopsis.insert_str(at, "\\-\\- ");
        }
    }
    synopsis
}

/// Empty heading: lines before the first heading.
fn help_section(command: &clap::Command, heading: &str) -> String {
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let mut lines = String::new();
    let mut current = "";
    for line in text.lines() {
        match line {
            "Exit status:" | "Examples:" | "Example:" => {
                current = line;
                continue;
            }
            // Unindented lines end a section.
            _ if !line.is_empty() && !line.starts_with(' ') => current = "",
            _ => {}
        }
        if current == heading {
            lines.push_str(line);
            lines.push('\n');
        }
    }
    lines.trim_end().trim_start_matches('\n').to_owned()
}

/// Without line changes.
fn as_written(to: &mut Roff, heading: &str, text: &str) {
    if text.is_empty() {
        return;
    }
    to.control("SH", [heading]);
    to.control("nf", []);
    for line in text.lines() {
        to.text([roman(line)]);
    }
    to.control("fi", []);
}

fn list(to: &mut Roff, heading: &str, rows: &[(&str, &str)]) {
    to.control("SH", [heading]);
    for (term, meaning) in rows {
        to.control("TP", []);
        to.text([bold(*term)]);
        to.text([roman(*meaning)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_with_the_usual_sections() {
        fn walk(command: &clap::Command, name: &str, directory: &Path, bare: &mut Vec<String>) -> usize {
            let page = std::fs::read_to_string(directory.join(format!("{name}.1"))).unwrap_or_default();
            let sections =
                ["NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "ENVIRONMENT", "FILES", "EXAMPLES", "SEE ALSO"];
            let mut rest = page.as_str();
            for section in sections {
                let quoted = [format!(".SH {section}\n"), format!(".SH \"{section}\"\n")];
                match quoted.iter().find_map(|heading| rest.split_once(heading.as_str())) {
                    Some((_, after)) => rest = after,
                    None => bare.push(format!("{name}: {section}")),
                }
            }
            if page.contains("EXTRA") {
                bare.push(format!("{name}: a heading EXTRA"));
            }
            let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
            1 + shown.map(|sub| walk(sub, &format!("{name}-{}", sub.get_name()), directory, bare)).sum::<usize>()
        }
        let directory = tempfile::tempdir().expect("make directory");
        man(directory.path()).expect("writes");
        let mut bare = Vec::new();
        let pages = walk(&Cli::command(), "wharf", directory.path(), &mut bare);
        assert_eq!(bare, Vec::<String>::new(), "pages that are missing, or lack a section");
        assert!(pages > 30, "only {pages} commands were found");
    }

    #[test]
    fn a_synopsis_has_the_dashes_before_a_command() {
        let directory = tempfile::tempdir().expect("make directory");
        man(directory.path()).expect("writes");
        let page = |name: &str| std::fs::read_to_string(directory.path().join(name)).expect("a page");
        let synopsis =
            |name: &str| page(name).split_once(".SH SYNOPSIS").map(|(_, rest)| rest.lines().nth(1).map(str::to_owned));
        let run = synopsis("wharf-sandbox-run.1").flatten().expect("a synopsis");
        assert!(run.contains(r"\-\- <\fICOMMAND\fR>"), "{run}");
        assert!(!synopsis("wharf-sandbox-rm.1").flatten().expect("a synopsis").contains(r"\-\- "));
    }

    #[test]
    fn help_is_told_apart_by_its_headings() {
        let command = clap::Command::new("c").after_help("An ID is:\n  7  a number\n\nExample:\n  c 7\n\nNeeds root.");
        assert_eq!(help_section(&command, "Example:"), "  c 7");
        assert_eq!(help_section(&command, ""), "An ID is:\n  7  a number\n\nNeeds root.");
        assert_eq!(help_section(&command, "Exit status:"), "");
    }
}
