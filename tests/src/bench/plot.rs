//! The findings as one SVG: a panel for each group, a bar to the median, a line from the first to the third quartile.
//!
//! Written by hand: bars and text are all it needs, and a drawing crate would be the bench's largest dependency.

use std::fmt::Write as _;

use super::{
    findings::{Better, Findings, Group},
    table::number,
};

const WIDTH: f64 = 860.0;
const LABELS: f64 = 300.0;
const BARS: f64 = 430.0;
const BAR: f64 = 16.0;
const LINE: f64 = 24.0;
const HEAD: f64 = 44.0;
const GAP: f64 = 18.0;

/// Series whose name begins with this are drawn in the colour of the product.
const OURS: &str = "wharf";

/// The whole plot.
#[must_use]
pub fn render(findings: &Findings) -> String {
    let mut body = String::new();
    let mut y = 56.0;
    for group in &findings.groups {
        let (panel, height) = panel(group, y);
        body += &panel;
        y += height + GAP;
    }
    let machine = &findings.machine;
    let subtitle = escape(&format!(
        "Linux {}, {} CPUs ({}), load {:.1} at the start{}",
        machine.kernel,
        machine.cpus,
        machine.cpu,
        machine.load,
        if findings.quick { ", quick run: the numbers mean little" } else { "" }
    ));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{y}\" viewBox=\"0 0 {WIDTH} {y}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"16\" y=\"26\" font-size=\"18\" font-weight=\"bold\">Wharf, side by side</text>\n\
         <text x=\"16\" y=\"44\" fill=\"#666666\">{subtitle}</text>\n{body}</svg>\n"
    )
}

/// A panel and its height.
fn panel(group: &Group, top: f64) -> (String, f64) {
    let way = match group.better {
        Better::Lower => "shorter is better",
        Better::Higher => "longer is better",
    };
    let mut text = String::new();
    let widest = group.series.iter().map(|s| s.summary.q3).fold(0.0, f64::max);
    let scale = if widest > 0.0 { BARS / widest } else { 0.0 };
    // Writing to a String does not fail.
    writeln!(
        text,
        "<text x=\"16\" y=\"{}\" font-size=\"14\" font-weight=\"bold\">{}</text><text x=\"{}\" y=\"{}\" \
         text-anchor=\"end\" fill=\"#666666\">{}, {way}</text>",
        top + 24.0,
        escape(&group.title),
        WIDTH - 16.0,
        top + 24.0,
        escape(group.unit)
    )
    .ok();
    let mut y = top + HEAD - 8.0;
    for series in &group.series {
        let s = &series.summary;
        let colour = if series.name.starts_with(OURS) { "#1f6f8b" } else { "#b8bfc6" };
        let (length, middle) = (s.median.max(0.0) * scale, y + BAR / 2.0);
        writeln!(
            text,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text><rect x=\"{LABELS}\" y=\"{y}\" width=\"{length:.1}\" \
             height=\"{BAR}\" fill=\"{colour}\"/>",
            LABELS - 8.0,
            y + BAR - 4.0,
            escape(&series.name)
        )
        .ok();
        if s.samples > 1 {
            let (from, to) = (LABELS + s.q1.max(0.0) * scale, LABELS + s.q3.max(0.0) * scale);
            writeln!(
                text,
                "<line x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"#222222\" \
                 stroke-width=\"2\"/>"
            )
            .ok();
        }
        let ratio = series.ratio.map_or_else(String::new, |r| format!(" ({r:.2}x)"));
        let end = LABELS + length.max(if s.samples > 1 { s.q3.max(0.0) * scale } else { 0.0 }) + 6.0;
        writeln!(text, "<text x=\"{end:.1}\" y=\"{}\">{}{ratio}</text>", y + BAR - 4.0, number(s.median)).ok();
        y += LINE;
    }
    (text, y - top)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::{super::machine::Machine, *};

    #[test]
    fn every_series_has_a_bar_and_names_are_escaped() {
        let machine = Machine {
            kernel: "6.0".into(),
            cpu: "a <fast> one".into(),
            cpus: 2,
            load: 0.0,
            unix_time: 0,
            optimised: true,
        };
        let mut findings = Findings::new(machine, false);
        let mut group = Group::new("a & b", "ms", Better::Lower);
        group.add("wharf", vec![1.0, 2.0]).unwrap();
        group.add("ptp", vec![4.0]).unwrap();
        findings.groups.push(group);
        let svg = render(&findings);
        assert_eq!(svg.matches("<rect").count(), 3, "the background and two bars");
        assert_eq!(svg.matches("<line").count(), 1, "one sample has no quartiles");
        assert!(svg.contains("a &amp; b") && svg.contains("a &lt;fast&gt; one"));
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }
}
