//! Splits the body of a watch into lines.

use bytes::{Bytes, BytesMut};

/// Lines of bounded length.
#[derive(Debug)]
pub(super) struct Lines {
    text: BytesMut,
    /// Leading bytes of `text` without a line feed.
    searched: usize,
    most: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooLong;

impl Lines {
    /// `most`: bytes of a line.
    #[must_use]
    pub(super) fn new(most: usize) -> Self {
        Self { text: BytesMut::new(), searched: 0, most }
    }

    pub(super) fn push(&mut self, part: &[u8]) {
        self.text.extend_from_slice(part);
    }

    /// The next line without its line feed; skips empty lines. `None` until more of the stream is pushed.
    ///
    /// # Errors
    /// The line is too long.
    pub(super) fn line(&mut self) -> Result<Option<Bytes>, TooLong> {
        loop {
            let rest = self.text.get(self.searched..).unwrap_or_default();
            let Some(at) = rest.iter().position(|byte| *byte == b'\n') else {
                self.searched = self.text.len();
                return if self.searched > self.most { Err(TooLong) } else { Ok(None) };
            };
            let mut line = self.text.split_to(self.searched + at + 1);
            self.searched = 0;
            line.truncate(line.len() - 1);
            if line.len() > self.most {
                return Err(TooLong);
            }
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Ok(Some(line.freeze()));
            }
        }
    }

    /// The stream ends within a line.
    #[must_use]
    pub(super) fn is_cut(&self) -> bool {
        !self.text.iter().all(u8::is_ascii_whitespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_in_any_division_of_the_stream() {
        let stream = b"{\"a\":1}\n\n {\"b\":2}\r\n{\"c\"";
        for size in 1..stream.len() {
            let (mut lines, mut found) = (Lines::new(20), Vec::new());
            for part in stream.chunks(size) {
                lines.push(part);
                while let Some(line) = lines.line().expect("short lines") {
                    found.push(String::from_utf8(line.to_vec()).expect("text"));
                }
            }
            assert_eq!(found, ["{\"a\":1}", " {\"b\":2}\r"], "parts of {size} bytes");
            assert!(lines.is_cut());
        }
    }

    #[test]
    fn a_long_line_is_an_error_with_and_without_its_end() {
        for text in ["123456\n", "123456"] {
            let mut lines = Lines::new(5);
            lines.push(text.as_bytes());
            assert_eq!(lines.line(), Err(TooLong));
        }
    }
}
