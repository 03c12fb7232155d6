//! The log filter: a level, or `target=level` pairs.

use tracing_subscriber::{
    EnvFilter,
    filter::{LevelFilter, ParseError},
    reload,
};

use super::operation::TARGET;

/// Bytes and parts.
const MAX_BYTES: usize = 1024;
const MAX_PARTS: usize = 32;

const FORM: &str = "it is error, warn, info, debug, trace or off, or target=level pairs with commas between";

/// Why a filter is rejected.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// Beyond a limit.
    #[error("{0:?}: more than {MAX_BYTES} bytes or {MAX_PARTS} parts; {FORM}")]
    TooLong(String),
    /// A part without a level.
    #[error("{0:?}: {1:?} is no level; {FORM}")]
    Level(String, String),
    /// A part without a target.
    #[error("{0:?}: {1:?} is no target; {FORM}")]
    Target(String, String),
    /// Refused by the parser.
    #[error("{0:?}: {1}; {FORM}")]
    Parser(String, #[source] ParseError),
    /// Not reloadable.
    #[error("{0:?}: {1}")]
    Reload(String, #[source] reload::Error),
}

/// A lone word must be a level: the parser would take misspelt ones for targets.
pub(super) fn parse(filter: &str) -> Result<EnvFilter, FilterError> {
    let beginning = |text: &str, most| text.chars().take(most).collect::<String>();
    let shown = || beginning(filter, 80);
    if filter.len() > MAX_BYTES || filter.split(',').count() > MAX_PARTS {
        return Err(FilterError::TooLong(shown()));
    }
    for part in filter.split(',') {
        let (target, level) = match part.split_once('=') {
            Some((target, level)) => (Some(target), level),
            None => (None, part),
        };
        // The parser also accepts numbers.
        if level.is_empty() || level.parse::<LevelFilter>().is_err() || !level.chars().all(|c| c.is_ascii_alphabetic())
        {
            return Err(FilterError::Level(shown(), beginning(level, 40)));
        }
        if let Some(target) = target
            && (target.is_empty() || !target.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '-')))
        {
            return Err(FilterError::Target(shown(), beginning(target, 40)));
        }
    }
    // Remaining lines must name their operation.
    let spans = format!("{filter},{TARGET}=error");
    EnvFilter::try_new(spans).map_err(|e| FilterError::Parser(shown(), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_pairs_are_taken() {
        for good in
            ["info", "off", "TRACE", "wharf_agent=debug", "wharf_datapath::netlink=trace,info", "warn,hyper=off"]
        {
            assert!(parse(good).is_ok(), "{good}");
        }
    }

    #[test]
    fn what_is_no_level_is_refused_and_told_what_is() {
        let long = format!("info,{}", "a".repeat(2_000));
        let many = vec!["info"; 33].join(",");
        for bad in
            ["", "zzz", "5", "info,", ",info", "=info", "a=", "a=zzz", "a b=info", "[x]=info", "a\n=info", &long, &many]
        {
            let why = parse(bad).err().unwrap_or_else(|| panic!("{bad:?} is taken")).to_string();
            assert!(why.contains("error, warn, info, debug, trace or off") && why.len() < 400, "{why}");
        }
    }
}
