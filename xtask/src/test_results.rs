//! Counts of test runners.

use std::{fs, io, ops::AddAssign, path::Path};

use anyhow::{Context, Result, bail};

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

pub(crate) fn forget_junit(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

pub(crate) fn read_junit(path: &Path) -> Result<Tally> {
    let report = fs::read_to_string(path).with_context(|| {
        format!("read {}, nextest's report: it ended before any test ran; its output above says why", path.display())
    })?;
    parse_junit(&report).with_context(|| format!("read {}", path.display()))
}

fn parse_junit(report: &str) -> Result<Tally> {
    let root = report
        .split_once("<testsuites ")
        .and_then(|(_, rest)| rest.split_once('>'))
        .map(|(root, _)| root)
        .context("it has no <testsuites> element")?;
    let count = |name: &str| -> Result<u64> {
        let (_, rest) =
            root.split_once(&format!(" {name}=\"")).with_context(|| format!("it has no count of {name}"))?;
        let digits = rest.split('"').next().unwrap_or_default();
        digits.parse().with_context(|| format!("its count of {name} is `{digits}`"))
    };
    let (all, failures, errors) = (count("tests")?, count("failures")?, count("errors")?);
    let failed = failures + errors;
    let Some(passed) = all.checked_sub(failed) else { bail!("it counts {failed} failures of {all} tests") };
    Ok(Tally { passed, failed, ignored: 0 })
}

/// `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; ...`.
pub(crate) fn parse_libtest(line: &str) -> Option<Tally> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut tally = Tally::default();
    for count in counts.split(';') {
        let mut words = count.split_whitespace();
        let number = words.next()?;
        match words.next() {
            Some("passed") => tally.passed = number.parse().ok()?,
            Some("failed") => tally.failed = number.parse().ok()?,
            Some("ignored") => tally.ignored = number.parse().ok()?,
            _ => {}
        }
    }
    Some(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn junit_counts_are_read_from_the_root() -> Result<()> {
        let report = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="7" failures="2" errors="1" uuid="x" time="1.2">
    <testsuite name="a" tests="1" disabled="0" errors="0" failures="0">"#;
        assert_eq!(parse_junit(report)?, Tally { passed: 4, failed: 3, ignored: 0 });
        assert!(parse_junit("<testsuites tests=\"1\" failures=\"2\" errors=\"0\">").is_err());
        assert!(parse_junit("<html>").is_err());
        assert!(parse_junit(r#"<testsuites name="x" tests="many" failures="0" errors="0">"#).is_err());
        Ok(())
    }

    #[test]
    fn libtest_lines_are_read_and_others_are_not() {
        let line = "test result: FAILED. 5 passed; 2 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.00s";
        assert_eq!(parse_libtest(line), Some(Tally { passed: 5, failed: 2, ignored: 1 }));
        assert_eq!(parse_libtest("test a::b ... ok"), None);
        assert_eq!(parse_libtest("test result: ok. x passed; 0 failed"), None);
    }

    #[test]
    fn a_report_that_is_not_there_is_an_error() {
        assert!(forget_junit(Path::new("/nowhere/junit.xml")).is_ok());
        assert!(read_junit(Path::new("/nowhere/junit.xml")).is_err());
    }
}
