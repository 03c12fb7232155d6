//! What the scenarios share: commands as an operator types them, and waiting for what they say.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    process::{Finished, command_in, run},
    wait,
};

use crate::phrases::OVER;

/// Widest line of a command whose output is no terminal.
const COLUMNS: usize = 100;

/// Longest that a screen is waited for: a store is called failing for 30 s after its last failure.
const LIMIT: Duration = Duration::from_secs(120);

/// A node as in life, but nothing looks at it by itself but the leak audit, and that one sooner.
pub(crate) fn config() -> NodeConfig {
    NodeConfig::default().flags(&["--audit-interval-ms", "5000", "--selfcheck-interval-ms", "0"])
}

/// Two containers.
pub(crate) fn two(node: &Node) -> Result<[(Sandbox, Attached); 2]> {
    let (a, b) = (node.sandbox("web-3f9c51aa")?, node.sandbox("db-77e0c2d1")?);
    let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
    Ok([(a, ea), (b, eb)])
}

/// What a command showed.
#[derive(Debug)]
pub(crate) struct Screen {
    code: i32,
    text: String,
    whole: String,
}

impl Screen {
    fn of(arguments: &[&str], finished: &Finished) -> Result<Self> {
        let Finished { status, stdout, stderr, .. } = finished;
        let code = status.code().context("it was killed")?;
        let whole = format!("$ wharf {}\n{stdout}{stderr}[exit {code}]\n", arguments.join(" "));
        // An event of the monitor is a line, however long.
        let is_wide = |l: &&str| arguments.first() != Some(&"monitor") && l.chars().count() > COLUMNS;
        let wide: Vec<&str> = stdout.lines().filter(is_wide).collect();
        ensure!(wide.is_empty(), "wider than {COLUMNS} columns:\n{}\nin\n{whole}", wide.join("\n"));
        Ok(Self { code, text: flat(&format!("{stdout} {stderr}")), whole })
    }

    /// All of these are on it. Where lines break does not count: it depends on the words.
    pub(crate) fn must_say(&self, phrases: &[&str]) -> Result<()> {
        let missing: Vec<&&str> = phrases.iter().filter(|p| !self.says(p)).collect();
        ensure!(missing.is_empty(), "{missing:?} is not in\n{}", self.whole);
        Ok(())
    }

    /// This is on it.
    pub(crate) fn says(&self, phrase: &str) -> bool {
        self.text.contains(&flat(phrase))
    }

    /// All of these are on it.
    pub(crate) fn says_all(&self, phrases: &[&str]) -> bool {
        phrases.iter().all(|p| self.says(p))
    }

    /// True when it ended with this code and says all of these.
    pub(crate) fn is(&self, code: i32, phrases: &[&str]) -> bool {
        self.code == code && self.says_all(phrases)
    }

    /// It ended with this code.
    pub(crate) fn must_exit(&self, code: i32) -> Result<()> {
        ensure!(self.code == code, "expected exit {code}, not {} of\n{}", self.code, self.whole);
        Ok(())
    }

    /// It ended with this code and says all of these.
    pub(crate) fn must(&self, code: i32, phrases: &[&str]) -> Result<()> {
        self.must_say(phrases)?;
        self.must_exit(code)
    }

    /// Shown where a scenario fails, or with `--no-capture`: that is where docs/operations.md has its samples from.
    fn print(self) -> Self {
        println!("{}", self.whole);
        self
    }
}

/// Words with one blank between them.
pub(crate) fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Runs `wharf`; what it shows fits the columns.
pub(crate) fn wharf(node: &Node, arguments: &[&str]) -> Result<Screen> {
    Ok(Screen::of(arguments, &node.wharf(arguments)?)?.print())
}

/// Runs commands of the page with names and numbers in the place of their capital words; each must succeed.
pub(crate) fn remedy(node: &Node, commands: &[&str], words: &[(&str, &str)]) -> Result<()> {
    for command in commands {
        let filled =
            command.split(' ').map(|word| words.iter().fold(word.to_owned(), |w, (name, is)| w.replace(name, is)));
        let filled: Vec<String> = filled.collect();
        let (program, arguments) = filled.split_first().context("an empty command")?;
        if program == "wharf" {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            wharf(node, &arguments)?.must_exit(0)?;
            continue;
        }
        let mut there = command_in(node.space(), program)?;
        there.args(arguments);
        run(there, b"", Duration::from_secs(10))?.ok().with_context(|| filled.join(" "))?;
    }
    Ok(())
}

/// Commands in the text of a section's remedy, without those of its samples.
pub(crate) fn commands_of(section: &str) -> Vec<String> {
    const PROGRAMS: [&str; 8] = ["wharf", "ip", "tc", "rm", "rmdir", "systemctl", "journalctl", "df"];
    let remedy = section.find("**Remedy").map_or("", |at| &section[at..]);
    let text: Vec<&str> = remedy.lines().filter(|l| !l.starts_with("    ")).collect();
    let text = flat(&text.join(" "));
    let is_command = |quoted: &&str| quoted.split_once(' ').is_some_and(|(program, _)| PROGRAMS.contains(&program));
    text.split('`').skip(1).step_by(2).filter(is_command).map(str::to_owned).collect()
}

/// Runs `wharf` again and again until the screen is as it should be.
pub(crate) fn await_screen(node: &Node, arguments: &[&str], fits: impl Fn(&Screen) -> bool) -> Result<Screen> {
    let call = format!("`wharf {}` to show what it should", arguments.join(" "));
    let mut last = None;
    let found = wait::until_within(LIMIT, &call, || {
        let screen = Screen::of(arguments, &node.wharf(arguments)?)?;
        if fits(&screen) {
            return Ok(Some(screen));
        }
        last = Some(screen.whole);
        Ok(None)
    });
    Ok(found.with_context(|| format!("last shown:\n{}", last.unwrap_or_default()))?.print())
}

/// `wharf status` until it ends with a code and says all of these.
pub(crate) fn await_status(node: &Node, code: i32, phrases: &[&str]) -> Result<Screen> {
    await_screen(node, &["status"], |s| s.is(code, phrases))
}

/// Nothing is amiss: what every remedy ends with.
pub(crate) fn all_is_well(node: &Node) -> Result<()> {
    let [status, audit] = OVER;
    await_screen(node, &["audit"], |s| s.code == 0 && s.says(audit))?;
    await_status(node, 0, &[status])?;
    Ok(())
}

/// An endpoint's number, as it is typed.
pub(crate) fn id(node: &Node, endpoint: &Attached) -> Result<String> {
    Ok(node.endpoint(endpoint)?.id.to_string())
}
