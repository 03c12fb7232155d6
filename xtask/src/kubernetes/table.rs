//! The results.

use std::time::Duration;

use crate::progress::spell;

#[derive(Debug)]
pub(crate) enum Verdict {
    Passed(String),
    Failed(String),
    NotRun(String),
}

#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) check: String,
    pub(crate) verdict: Verdict,
    pub(crate) took: Duration,
}

impl Row {
    pub(crate) fn failed(&self) -> bool {
        matches!(self.verdict, Verdict::Failed(_))
    }

    pub(crate) fn cells(&self) -> [String; 4] {
        let (word, note) = match &self.verdict {
            Verdict::Passed(note) => ("passed", note),
            Verdict::Failed(note) => ("FAILED", note),
            Verdict::NotRun(note) => ("not run", note),
        };
        let note = note.lines().next().unwrap_or_default();
        [self.check.clone(), word.to_owned(), spell(self.took), note.chars().take(160).collect()]
    }
}

pub(crate) fn render(rows: &[Row]) -> String {
    let mut lines = vec![["check", "result", "time", "notes"].map(str::to_owned)];
    lines.extend(rows.iter().map(Row::cells));
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(String::len).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2), 0];
    let render = |line: &[String; 4]| {
        let cells: Vec<_> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    lines.iter().map(render).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_the_first_line_of_its_note() {
        let row = |check: &str, verdict| Row { check: check.to_owned(), verdict, took: Duration::from_millis(1500) };
        let rows =
            [row("pods", Verdict::Passed("8 pods".to_owned())), row("policy", Verdict::Failed("a\nb".to_owned()))];
        assert_eq!(
            render(&rows),
            "check   result  time   notes\npods    passed  1.5 s  8 pods\npolicy  FAILED  1.5 s  a"
        );
        assert!(!rows[0].failed() && rows[1].failed());
    }
}
