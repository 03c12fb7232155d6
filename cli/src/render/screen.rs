//! Screens of `Key:  value` lines, as in `cilium status`.

use super::{Style, Tone, text};

const KEY_WIDTH: usize = 20;

pub(super) struct Screen<'a> {
    style: &'a Style,
    text: String,
}

impl<'a> Screen<'a> {
    pub(super) fn new(style: &'a Style) -> Self {
        Self { style, text: String::new() }
    }

    pub(super) fn line(&mut self, key: &str, value: &str) {
        self.toned(key, Tone::Plain, "", value);
    }

    pub(super) fn toned(&mut self, key: &str, tone: Tone, head: &str, value: &str) {
        let head = text::safe(head);
        let value = text::safe(value);
        let whole = match (head.is_empty(), value.is_empty()) {
            (true, _) => value,
            (_, true) => head.clone(),
            _ => format!("{head}  {value}"),
        };
        let label = if key.is_empty() { String::new() } else { format!("{}:", text::safe(key)) };
        // A long key moves the value to a new line if needed.
        let (long, width) = (label.chars().count(), usize::from(self.style.width));
        let label = if long >= KEY_WIDTH && long + 1 + whole.chars().count() > width {
            self.push(&label);
            String::new()
        } else {
            label
        };
        let label = format!("{label:<width$}", width = KEY_WIDTH - 1);
        let room = usize::from(self.style.width).saturating_sub(KEY_WIDTH).max(20);
        for (i, part) in wrap(&whole, room).into_iter().enumerate() {
            if i == 0 {
                let painted = match part.strip_prefix(head.as_str()) {
                    Some(rest) if !head.is_empty() => self.style.paint(tone, &head) + rest,
                    _ => part,
                };
                self.push(&format!("{label} {painted}"));
            } else {
                self.push(&format!("{:KEY_WIDTH$}{part}", ""));
            }
        }
    }

    pub(super) fn heading(&mut self, words: &str) {
        let painted = self.style.paint(Tone::Bold, words);
        self.push(&painted);
    }

    pub(super) fn gap(&mut self) {
        self.text.push('\n');
    }

    pub(super) fn item(&mut self, tone: Tone, words: &str) {
        let room = usize::from(self.style.width).saturating_sub(4).max(20);
        for (i, part) in wrap(&text::safe(words), room).into_iter().enumerate() {
            let bullet = if i == 0 { "  - " } else { "    " };
            let painted = self.style.paint(tone, &part);
            self.push(&format!("{bullet}{painted}"));
        }
    }

    pub(super) fn below_item(&mut self, words: &str) {
        let room = usize::from(self.style.width).saturating_sub(6).max(20);
        for part in wrap(&text::safe(words), room) {
            self.push(&format!("      {part}"));
        }
    }

    pub(super) fn block(&mut self, rendered: &str) {
        self.text.push_str(rendered);
    }

    pub(super) fn finish(self) -> String {
        self.text
    }

    fn push(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }
}

/// Wraps at blanks into at least one line; splits long words, but never commands in backticks. A command longer than a
/// line gets a separate line without backticks, for copying.
pub(super) fn wrap(text: &str, room: usize) -> Vec<String> {
    let mut out = Vec::new();
    let mut line = String::new();
    let mut used = 0;
    for word in words(text) {
        let length = word.trim_end_matches(' ').chars().count();
        if length > room
            && let Some((before, (command, after))) =
                word.split_once('`').and_then(|(b, w)| Some((b, w.split_once('`')?)))
        {
            out.extend([line + before, command.to_owned()].into_iter().filter(|line| !line.is_empty()));
            // Punctuation after a command on a separate line.
            line = after.trim_start_matches([' ', ',', ';', '.']).to_owned();
            used = line.chars().count();
            continue;
        }
        if used > 0 && used + length > room {
            out.push(std::mem::take(&mut line));
            used = 0;
        }
        for c in word.chars() {
            if used >= room && c != ' ' {
                out.push(std::mem::take(&mut line));
                used = 0;
            }
            line.push(c);
            used += 1;
        }
    }
    if !line.is_empty() || out.is_empty() {
        out.push(line);
    }
    out.iter().map(|l| l.trim_end().to_owned()).collect()
}

/// Words with trailing blanks; text between backticks is one word.
fn words(text: &str) -> Vec<&str> {
    let mut rest = text;
    let mut words = Vec::new();
    while !rest.is_empty() {
        let blank = |text: &str| text.find(' ').map_or(text.len(), |at| at + 1);
        let mut end = blank(rest);
        if let Some(open) = rest.find('`').filter(|open| *open < end)
            && let Some(close) = rest.get(open + 1..).and_then(|inside| inside.find('`'))
        {
            let behind = open + close + 2;
            end = behind + blank(rest.get(behind..).unwrap_or_default());
        }
        let (word, next) = rest.split_at(end);
        words.push(word);
        rest = next;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapping() {
        assert_eq!(wrap("", 5), [""]);
        assert_eq!(wrap("ab cd ef", 5), ["ab cd", "ef"]);
        assert_eq!(wrap("OK  all of it", 8), ["OK  all", "of it"]);
        assert_eq!(wrap("abcdefghijk l", 4), ["abcd", "efgh", "ijk", "l"]);
    }

    #[test]
    fn a_command_is_never_broken() {
        assert_eq!(wrap("do `a b`, now", 6), ["do", "`a b`,", "now"]);
        assert_eq!(wrap("do this: `nft 'a; b'`; then on", 9), ["do this:", "nft 'a; b'", "then on"]);
        assert_eq!(wrap("`aa bb cc dd`", 9), ["aa bb cc dd"]);
        assert_eq!(wrap("(`aa bb cc dd`) `aa bb cc ee`. e", 9), ["(", "aa bb cc dd", ")", "aa bb cc ee", "e"]);
        assert_eq!(wrap("a ` alone is none", 9), ["a ` alone", "is none"]);
    }
}
