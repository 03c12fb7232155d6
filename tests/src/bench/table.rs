//! The findings as text.

use std::fmt::Write as _;

use super::findings::{Better, Findings, Group, Mark};

/// Everything, ready to print.
#[must_use]
pub fn render(findings: &Findings) -> String {
    let mut text = String::new();
    for group in &findings.groups {
        text += &render_group(group);
        text.push('\n');
    }
    text += &render_marks(&findings.marks);
    text
}

/// One table.
#[must_use]
pub fn render_group(group: &Group) -> String {
    let way = match group.better {
        Better::Lower => "less is better",
        Better::Higher => "more is better",
    };
    let ratio = group.baseline.as_ref().map(|name| format!("to {name}"));
    let mut header: Vec<String> =
        vec!["".into(), "median".into(), "quartiles".into(), "min".into(), "max".into(), "n".into()];
    header.extend(ratio);
    let mut rows = vec![header];
    for series in &group.series {
        let s = &series.summary;
        let single = s.samples == 1;
        let range = if single { String::new() } else { format!("{} - {}", number(s.q1), number(s.q3)) };
        let extreme = |value: f64| if single { String::new() } else { number(value) };
        let mut row =
            vec![series.name.clone(), number(s.median), range, extreme(s.min), extreme(s.max), s.samples.to_string()];
        if group.baseline.is_some() {
            row.push(series.ratio.map_or_else(String::new, |r| format!("{r:.2}x")));
        }
        rows.push(row);
    }
    let mut text = format!("{} ({}, {way})\n", group.title, group.unit);
    text += &align(&rows);
    for note in &group.notes {
        writeln!(text, "  {note}").ok(); // writing to a String does not fail
    }
    text
}

/// The marks, each with its target.
#[must_use]
pub fn render_marks(marks: &[Mark]) -> String {
    if marks.is_empty() {
        return String::new();
    }
    let mut rows = vec![["", "mark", "measured", "limit", ""].map(str::to_owned).to_vec()];
    for mark in marks {
        let sign = match mark.better {
            Better::Lower => "at most",
            Better::Higher => "at least",
        };
        let verdict = if mark.met { "met" } else { "MISSED" };
        rows.push(vec![
            verdict.to_owned(),
            mark.target.clone(),
            format!("{} {}", number(mark.measured), mark.unit),
            format!("{sign} {} {}", number(mark.limit), mark.unit),
            String::new(),
        ]);
    }
    format!("Marks\n{}", align_left(&rows, 2))
}

/// Three significant digits or whole numbers: more would pretend to know.
#[must_use]
pub fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 100.0 || value == 0.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

fn align(rows: &[Vec<String>]) -> String {
    align_left(rows, 1)
}

/// Columns as wide as their widest cell; the first `left` flush left, the others flush right.
fn align_left(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |row: &Vec<String>, column: usize| row.get(column).map_or(0, |c| c.chars().count());
    let widths: Vec<usize> =
        (0..columns).map(|column| rows.iter().map(|row| cell(row, column)).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::from(" ");
        for ((column, cell), width) in row.iter().enumerate().zip(&widths) {
            line += &if column < left { format!(" {cell:<width$} ") } else { format!(" {cell:>width$} ") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_tells_median_spread_and_ratio() {
        let mut group = Group::new("ADD", "ms", Better::Lower);
        group.add("wharf", vec![2.0, 3.0, 4.0]).unwrap();
        group.add("ptp", vec![10.0, 12.0, 14.0]).unwrap();
        group.compare_to("ptp").unwrap();
        group.note("IPv4 only");
        let text = render_group(&group);
        assert_eq!(
            text,
            "ADD (ms, less is better)\n\
             \x20        median    quartiles   min   max  n  to ptp\n\
             \x20 wharf    3.00  2.50 - 3.50  2.00  4.00  3   0.25x\n\
             \x20 ptp      12.0  11.0 - 13.0  10.0  14.0  3   1.00x\n\
             \x20 IPv4 only\n"
        );
    }

    #[test]
    fn a_missed_mark_stands_out() {
        let marks = [
            Mark::judge("DEL no slower than ptp", "ms", Better::Lower, 30.0, 25.0),
            Mark::judge("request/response", "x", Better::Higher, 0.97, 0.95),
        ];
        let text = render_marks(&marks);
        assert!(text.contains("MISSED  DEL no slower than ptp"), "{text}");
        assert!(text.contains("met     request/response"), "{text}");
        assert!(text.contains("at most 25.0 ms") && text.contains("at least 0.95 x"), "{text}");
    }
}
