//! Scrape formats: OpenMetrics 1.0 on request, otherwise Prometheus 0.0.4.

const OPENMETRICS: &str = "application/openmetrics-text";

/// Text format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For `curl`, `promtool check metrics` and older scrapers.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// By `Accept` header.
    #[must_use]
    pub fn accepted(accept: Option<&str>) -> Self {
        if accept.is_some_and(|types| types.contains(OPENMETRICS)) { Self::OpenMetrics } else { Self::Prometheus }
    }

    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    pub(super) fn of(self, openmetrics: String) -> String {
        match self {
            Self::OpenMetrics => openmetrics,
            Self::Prometheus => prometheus(&openmetrics),
        }
    }
}

/// Adds `_total` to a counter's HELP and TYPE, and drops UNIT and EOF. The encoder writes HELP right before TYPE.
fn prometheus(openmetrics: &str) -> String {
    let mut text = String::with_capacity(openmetrics.len());
    let mut help = None;
    let mut push = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    for line in openmetrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ').map(|(_, words)| words);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some(words) = help.take() {
                push(&format!("# HELP {name}{suffix} {words}"));
            }
            push(&format!("# TYPE {name}{suffix} {kind}"));
        } else if !line.starts_with("# UNIT ") && line != "# EOF" {
            push(line);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_named_in_full_and_the_rest_stays() {
        let openmetrics = "# HELP w_bytes Bytes sent.\n# TYPE w_bytes counter\n# UNIT w_bytes bytes\nw_bytes_total 5\n\
                           # HELP w_up 1 while up.\n# TYPE w_up gauge\nw_up{a=\"# EOF\"} 1\n# EOF\n";
        assert_eq!(
            prometheus(openmetrics),
            "# HELP w_bytes_total Bytes sent.\n# TYPE w_bytes_total counter\nw_bytes_total 5\n\
             # HELP w_up 1 while up.\n# TYPE w_up gauge\nw_up{a=\"# EOF\"} 1\n"
        );
    }

    #[test]
    fn openmetrics_is_for_who_asks_for_it() {
        // Prometheus 2 and curl.
        let scraper = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(Format::accepted(Some(scraper)), Format::OpenMetrics);
        assert_eq!(Format::accepted(Some("*/*")), Format::Prometheus);
        assert_eq!(Format::accepted(None), Format::Prometheus);
    }
}
