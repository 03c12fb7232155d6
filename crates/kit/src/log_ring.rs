//! The last log lines, for `wharf debuginfo`.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use wharf_api::AgentLog;

use crate::sync::lock;

const MAX_LINES: usize = 2_000;
const MAX_BYTES: usize = 512 * 1024;
/// Bytes; longer lines are truncated.
const MAX_LINE: usize = 8 * 1024;

/// Clones share the lines.
#[derive(Debug, Clone, Default)]
pub struct LogRing {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    lines: VecDeque<String>,
    bytes: usize,
    left_out: u64,
}

impl LogRing {
    /// Adds an escaped line, stripped of colours and newline.
    pub fn push(&self, line: &str) {
        let mut line = without_colours(line.trim_end_matches('\n'));
        if line.len() > MAX_LINE {
            let end = (0..=MAX_LINE).rev().find(|at| line.is_char_boundary(*at)).unwrap_or(0);
            line.truncate(end);
        }
        let mut inner = lock(&self.inner);
        inner.bytes += line.len();
        inner.lines.push_back(line);
        while inner.lines.len() > MAX_LINES || inner.bytes > MAX_BYTES {
            let Some(oldest) = inner.lines.pop_front() else { break };
            inner.bytes -= oldest.len();
            inner.left_out += 1;
        }
    }

    /// Kept lines, oldest first.
    #[must_use]
    pub fn tail(&self) -> AgentLog {
        let inner = lock(&self.inner);
        AgentLog { lines: inner.lines.iter().cloned().collect(), left_out: inner.left_out }
    }
}

/// Strips ECMA-48 SGR (`ESC [ ... m`).
fn without_colours(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        out.push_str(before);
        match after.split_once('m') {
            Some((code, behind)) if code.bytes().all(|b| b.is_ascii_digit() || b == b';') => rest = behind,
            _ => {
                out.push_str("\\u{1b}[");
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_lines_go_first_by_number_and_by_size() {
        let ring = LogRing::default();
        for n in 0..MAX_LINES + 5 {
            ring.push(&format!("line {n}\n"));
        }
        let tail = ring.tail();
        assert_eq!((tail.lines.len(), tail.left_out), (MAX_LINES, 5));
        assert_eq!(tail.lines[0], "line 5");
        let ring = LogRing::default();
        for _ in 0..100 {
            ring.push(&"ä".repeat(MAX_LINE));
        }
        let tail = ring.tail();
        assert!(tail.lines.iter().map(String::len).sum::<usize>() <= MAX_BYTES);
        assert!(tail.lines.iter().all(|l| l.len() <= MAX_LINE) && tail.lines.len() == 64, "{}", tail.lines.len());
    }

    #[test]
    fn colours_are_left_out_and_nothing_else() {
        let ring = LogRing::default();
        ring.push("\u{1b}[32m INFO\u{1b}[0m serving \u{1b}[1;31mred\u{1b}[0m\n");
        ring.push("\u{1b}[2J cut \u{1b}[");
        assert_eq!(ring.tail().lines, [" INFO serving red", "\\u{1b}[2J cut \\u{1b}["]);
    }
}
