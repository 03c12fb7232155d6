use clap::CommandFactory;

use super::*;
use crate::target::Target;

fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
    Cli::try_parse_from([&["wharf"], args].concat())
}

fn command(args: &[&str]) -> Option<Command> {
    parse(args).map(|cli| cli.command).ok()
}

#[test]
fn the_command_tree_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn every_help_teaches_with_an_example() {
    fn walk(command: &clap::Command, path: &str, bare: &mut Vec<String>) {
        let path = format!("{path} {}", command.get_name());
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        if !command.is_hide_set() && !help.contains("Example") {
            bare.push(path.clone());
        }
        if command.get_subcommands().next().is_none() && !command.is_hide_set() && !help.contains(path.trim()) {
            bare.push(format!("{path}: no example of itself"));
        }
        for sub in command.get_subcommands() {
            walk(sub, &path, bare);
        }
    }
    let mut bare = Vec::new();
    walk(&Cli::command(), "", &mut bare);
    assert_eq!(bare, Vec::<String>::new());
}

#[test]
fn every_example_parses() {
    fn walk(command: &clap::Command, out: &mut Vec<String>) {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let examples = help.split_once("Example").map_or("", |(_, rest)| rest);
        out.extend(examples.lines().map(str::trim).filter(|l| l.starts_with("wharf ")).map(str::to_owned));
        command.get_subcommands().for_each(|sub| walk(sub, out));
    }
    let mut examples = Vec::new();
    walk(&Cli::command(), &mut examples);
    assert!(examples.len() > 40, "only {} examples found", examples.len());
    for example in examples {
        // Two blanks separate a remark; pipes and redirections belong to the shell.
        let line = example.split("  ").next().unwrap_or_default();
        let line = line.split(['|', '>', ';']).next().unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().filter(|w| !w.ends_with("...")).collect();
        let parsed = Cli::try_parse_from(&words);
        assert!(parsed.is_ok() || words.last() == Some(&"--container-id"), "{example}: {:?}", parsed.err());
    }
}

#[test]
fn every_command_of_these_pages_parses() {
    let commands_of = |page: &'static str| -> Vec<&str> {
        let lines = page.lines().filter_map(|line| line.strip_prefix("   "));
        lines.map(|line| line.trim_start().trim_start_matches("$ ")).filter(|l| l.starts_with("wharf ")).collect()
    };
    let pages = [include_str!("../../../docs/policy.md"), include_str!("../../../docs/l7.md")].map(commands_of);
    assert!(pages[0].len() > 20 && pages[1].len() > 6, "only {} and {} commands found", pages[0].len(), pages[1].len());
    let sandboxes =
        include_str!("../../../docs/sandboxes.md").lines().filter(|line| line.starts_with("wharf sandbox "));
    let commands = [pages.concat(), sandboxes.collect()].concat();
    assert!(commands.len() > 33, "only {} commands found", commands.len());
    for command in commands {
        let line = command.split(['#', '|']).next().unwrap_or_default();
        let parsed = Cli::try_parse_from(line.split_whitespace());
        assert!(parsed.is_ok(), "{command}: {:?}", parsed.err());
    }
}

#[test]
fn global_options_stand_anywhere() {
    for args in [["-o", "json", "endpoint", "list"], ["endpoint", "list", "-o", "json"]] {
        assert!(matches!(parse(&args), Ok(cli) if cli.global.output == Format::Json), "{args:?}");
    }
    assert!(matches!(parse(&["status", "--socket", "/x.sock"]), Ok(cli) if cli.global.socket.as_os_str() == "/x.sock"));
}

#[test]
fn endpoints_are_named_in_many_ways() {
    for text in ["7", "10.88.0.7", "pod-name:a/b", "wh00070000002a", "web-1"] {
        let got = command(&["endpoint", "get", text]);
        let as_wanted = matches!(&got, Some(Command::Endpoint(EndpointCommand::Get { id: Some(id), .. })) if Ok(id) == text.parse::<Target>().as_ref());
        assert!(as_wanted, "{text}: {got:?}");
    }
}

#[test]
fn every_list_can_be_followed() {
    fn walk(command: &clap::Command, path: &str, bare: &mut Vec<String>) {
        let path = format!("{path} {}", command.get_name());
        // Sandboxes are files unknown to the agent.
        let is_list = command.get_name() == "list" && !path.contains(" sandbox ") && !path.contains(" events ");
        if is_list && !command.get_arguments().any(|a| a.get_short() == Some('w') && a.get_long() == Some("watch")) {
            bare.push(path.clone());
        }
        command.get_subcommands().for_each(|sub| walk(sub, &path, bare));
    }
    let mut bare = Vec::new();
    walk(&Cli::command(), "", &mut bare);
    assert_eq!(bare, Vec::<String>::new(), "lists without --watch");
    for (line, watches) in [
        (&["status", "-w"] as &[&str], true),
        (&["policy", "get", "-w"], true),
        (&["port", "list", "-n", "shop", "-l", "app=web", "-w"], true),
        (&["policy", "list", "-n", "shop"], false),
    ] {
        assert_eq!(command(line).map(|command| command.watches()), Some(watches), "{line:?}");
    }
}

#[test]
fn filters_take_lists() {
    let line = ["monitor", "--type", "drop,agent", "--reason", "malformed", "--from", "fd00::1", "-n", "3"];
    let parsed = command(&line);
    let as_wanted = matches!(
        &parsed,
        Some(Command::Monitor(args))
            if args.filter.kinds == [EventKind::Drop, EventKind::Agent]
                && args.filter.reasons == ["malformed"]
                && args.filter.from == "fd00::1".parse().ok()
                && args.count == Some(3)
                && args.time.is_none()
    );
    assert!(as_wanted, "{parsed:?}");
}

#[test]
fn wrong_command_lines_are_refused() {
    for args in [
        &["frobnicate"] as &[&str],
        &["endpoint"],
        &["endpoint", "get", "a b"],
        &["endpoint", "list", "--state", "fine"],
        &["endpoint", "regenerate", "7", "--level", "all"],
        &["endpoint", "delete"],
        &["endpoint", "delete", "7", "--container-id", "abc"],
        &["endpoint", "delete", "--container-id", "abc", "--epoch", "1"],
        &["endpoint", "delete", "7", "--epoch", "-1"],
        &["monitor", "-n", "0"],
        &["monitor", "--from", "10.0.0"],
        &["monitor", "--type", "capture"],
        &["monitor", "--reason", "malformed,nonsense"],
        &["bpf", "events", "list", "--reason", "nonsense"],
        &["bpf", "map", "get", "a/../b"],
        &["bpf", "ct", "list", "--limit", "0"],
        &["bpf", "ct", "list", "--limit", "10001"],
        &["bpf", "ct", "list", "--port", "65536"],
        &["bpf", "ct", "list", "--address", "10.0.0.1/33"],
        &["bpf", "ct", "list", "--protocol", "256"],
        &["bpf", "ct", "list", "--state", "open"],
        &["bpf", "ct", "list", "--all"],
        &["bpf", "ct", "flush"],
        &["bpf", "ct", "flush", "--all", "--port", "1"],
        &["bpf", "ct", "flush", "--limit", "1", "--port", "1"],
        &["policy"],
        &["policy", "validate"],
        &["policy", "import"],
        &["policy", "delete"],
        &["policy", "delete", "NetworkPolicy"],
        &["policy", "delete", "Policy", "db"],
        &["policy", "delete", "NetworkPolicy", "db", "--all"],
        &["policy", "delete", "--all", "-n", "shop"],
        &["policy", "explain", "--from", "7"],
        &["policy", "explain", "--from", "7", "--to", "9", "--protocol", "gre"],
        &["policy", "explain", "--from", "7", "--to", "9", "--port", "65536"],
        &["policy", "wait", "seven"],
        &["policy", "wait", "--timeout", "0s"],
        &["namespace", "set", "shop"],
        &["namespace", "set", "shop", "team"],
        &["bpf", "policy", "get"],
        &["config", "set"],
        &["config", "set", "ipv4-pool=10.0.0.0/8"],
        &["status", "--brief", "--verbose"],
        &["status", "--brief", "--watch"],
        &["status", "--brief", "--ready"],
        &["status", "-o", "xml"],
        &["endpoint", "describe"],
        &["endpoint", "list", "-l", "app in web"],
        &["policy", "describe"],
        &["policy", "import", "x.yaml", "-w"],
        &["candidates", ""],
        &["man", "/tmp"],
        &["completion", "tcsh"],
        &["sandbox", "create"],
        &["sandbox", "create", "a/b"],
        &["sandbox", "create", "web", "--label", "=x"],
        &["sandbox", "create", "web", "--publish", "80"],
        &["sandbox", "create", "web", "--mac", "01:00:00:00:00:01"],
        &["sandbox", "create", "web", "--network", "../x"],
        &["sandbox", "run", "web"],
        &["sandbox", "run", "--rm", "--detach", "web", "--", "true"],
        &["sandbox", "run", "--log", "x", "web", "--", "true"],
        &["sandbox", "stop"],
        &["sandbox", "rm", "web", "--grace", "soon"],
    ] {
        let refused = parse(args).err().map(|error| error.use_stderr());
        assert_eq!(refused, Some(true), "{args:?}");
    }
}
