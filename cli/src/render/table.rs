//! Tables without borders, as in kubectl.

use comfy_table::{Attribute, CellAlignment, Color, ColumnConstraint, ContentArrangement, Table, Width, presets};

use super::{Style, Tone, text};

#[derive(Debug, Clone)]
pub(super) struct Cell {
    text: String,
    tone: Tone,
    right: bool,
    /// Not broken across lines, for search and copy.
    whole: bool,
}

/// Limits text that a container chooses.
const MAX_CELL: usize = 200;

/// Longest unbroken text; an IPv6 address has 39 characters.
const MAX_TOKEN: usize = 40;

const GAP: u16 = 2;

const READABLE: usize = 24;

/// Breakable text from outside.
pub(super) fn cell(text: impl AsRef<str>) -> Cell {
    Cell { text: text::cut(text.as_ref(), MAX_CELL), tone: Tone::Plain, right: false, whole: false }
}

/// A name, address or word from outside, unbroken.
pub(super) fn token(text: impl AsRef<str>) -> Cell {
    Cell { text: text::cut(text.as_ref(), MAX_TOKEN), tone: Tone::Plain, right: false, whole: true }
}

/// At most `max` texts from outside, one per line.
pub(super) fn lines<S: AsRef<str>>(texts: &[S], max: usize) -> Cell {
    let mut shown: Vec<String> = texts.iter().take(max).map(|t| text::cut(t.as_ref(), 64)).collect();
    if texts.len() > max {
        shown.push(format!("(+{} more)", texts.len() - max));
    }
    Cell { text: shown.join("\n"), tone: Tone::Plain, right: false, whole: false }
}

pub(super) fn number(n: impl ToString) -> Cell {
    Cell { text: n.to_string(), tone: Tone::Plain, right: true, whole: true }
}

pub(super) fn maybe<T: ToString>(value: Option<T>) -> Cell {
    token(value.map_or_else(|| "-".to_owned(), |v| v.to_string()))
}

impl Cell {
    pub(super) fn tone(mut self, tone: Tone) -> Self {
        self.tone = tone;
        self
    }

    pub(super) fn whole(mut self) -> Self {
        self.whole = true;
        self
    }

    /// Unbroken, in screen columns.
    pub(super) fn width(&self) -> usize {
        self.text.lines().map(|l| l.chars().count()).max().unwrap_or(0)
    }

    fn longest_word(&self) -> usize {
        self.text.split_whitespace().map(|word| word.chars().count()).max().unwrap_or(0)
    }
}

/// Shows the header also without rows.
pub(super) fn table(style: &Style, header: &[&str], rows: Vec<Vec<Cell>>) -> String {
    lay_out(style, header, true, columns(header, &rows), rows)
}

/// A table that grows by rows.
#[derive(Debug)]
pub(super) struct Growing {
    widths: Vec<u16>,
    begun: bool,
}

impl Growing {
    pub(super) fn new(least: Vec<u16>) -> Self {
        Self { widths: least, begun: false }
    }

    /// The first call adds the header.
    pub(super) fn rows(&mut self, style: &Style, header: &[&str], rows: Vec<Vec<Cell>>) -> String {
        let mut columns = columns(header, &rows);
        for (column, width) in columns.iter_mut().zip(&self.widths) {
            column.least = column.least.max(*width);
            if column.whole {
                column.narrowest = column.least;
            }
        }
        self.widths = columns.iter().map(|c| c.least).collect();
        let first = !std::mem::replace(&mut self.begun, true);
        lay_out(style, header, first, columns, rows)
    }
}

fn lay_out(
    style: &Style,
    header: &[&str],
    with_header: bool,
    mut columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
) -> String {
    // If minimum widths do not fit, the terminal wraps lines.
    let least = squeeze(&mut columns, style.width);
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(style.width.max(least));
    if style.color {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    if with_header {
        table.set_header(header.iter().zip(&columns).map(|(name, column)| {
            let cell = comfy_table::Cell::new(name).add_attribute(Attribute::Bold);
            if column.right { cell.set_alignment(CellAlignment::Right) } else { cell }
        }));
    }
    for row in rows {
        table.add_row(row.into_iter().map(render));
    }
    for (column, known) in table.column_iter_mut().zip(&columns) {
        column.set_padding((0, GAP));
        let least = Width::Fixed(known.least.saturating_add(GAP));
        column.set_constraint(if known.whole {
            ColumnConstraint::Absolute(least)
        } else {
            ColumnConstraint::LowerBoundary(least)
        });
    }
    table.lines().map(|l| l.trim_end().to_owned() + "\n").collect()
}

/// Narrows the widest columns first until the table fits or every column is minimal. Returns the width.
fn squeeze(columns: &mut [Column], width: u16) -> u16 {
    loop {
        let least = columns.iter().map(|c| c.least.saturating_add(GAP)).fold(0, u16::saturating_add);
        // The last column's gap is not printed.
        let excess = least.saturating_sub(GAP).saturating_sub(width);
        let widest = columns.iter_mut().filter(|c| c.least > c.narrowest).max_by_key(|c| c.least);
        let Some(column) = widest.filter(|_| excess > 0) else { return least };
        column.least = column.least.saturating_sub(excess).max(column.narrowest);
    }
}

pub(super) fn natural_width(header: &[&str], rows: &[Vec<Cell>]) -> usize {
    columns(header, rows).iter().map(|c| c.widest + usize::from(GAP)).sum::<usize>().saturating_sub(GAP.into())
}

/// Widths without the gap, in screen columns.
struct Column {
    right: bool,
    whole: bool,
    /// Unbroken.
    widest: usize,
    /// Without broken words.
    least: u16,
    /// Minimum with broken words.
    narrowest: u16,
}

fn columns(header: &[&str], rows: &[Vec<Cell>]) -> Vec<Column> {
    let column = |(i, name): (usize, &&str)| {
        let cells = || rows.iter().filter_map(move |row| row.get(i));
        let whole = cells().all(|c| c.whole);
        let widest = cells().map(Cell::width).fold(name.len(), usize::max);
        let word = cells().map(Cell::longest_word).fold(name.len(), usize::max);
        let narrowest = if whole { widest } else { widest.min(READABLE).max(name.len()) };
        let least = if whole { widest } else { narrowest.max(word.min(MAX_TOKEN)) };
        Column {
            right: cells().next().is_some_and(|c| c.right),
            whole,
            widest,
            least: u16::try_from(least).unwrap_or(u16::MAX),
            narrowest: u16::try_from(narrowest).unwrap_or(u16::MAX),
        }
    };
    header.iter().enumerate().map(column).collect()
}

fn render(cell: Cell) -> comfy_table::Cell {
    let out = comfy_table::Cell::new(cell.text);
    let out = if cell.right { out.set_alignment(CellAlignment::Right) } else { out };
    match cell.tone {
        Tone::Plain => out,
        Tone::Good => out.fg(Color::DarkGreen),
        Tone::Warn => out.fg(Color::DarkYellow),
        Tone::Bad => out.fg(Color::DarkRed),
        Tone::Dim => out.add_attribute(Attribute::Dim),
        Tone::Bold => out.add_attribute(Attribute::Bold),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: [&str; 3] = ["a-word-of-more-than-twenty-four-letters", "and", "another-word-of-thirty-letters"];

    fn row(cells: usize) -> Vec<Cell> {
        (0..cells).map(|_| cell(WORDS.join(" "))).collect()
    }

    #[test]
    fn no_word_is_broken() {
        let header = ["A-HEADER-OF-MORE-THAN-24-LETTERS", "SHORT"];
        let text = table(&Style::plain(), &header, vec![row(2), row(2)]);
        let printed: Vec<&str> = text.split_whitespace().collect();
        for (word, times) in WORDS.iter().map(|word| (*word, 4)).chain(header.map(|word| (word, 1))) {
            assert_eq!(printed.iter().filter(|w| **w == word).count(), times, "{word}\n{text}");
        }
    }

    #[test]
    fn words_are_broken_where_the_table_would_not_fit_the_screen() {
        let style = Style::plain();
        let header = ["A-HEADER-OF-MORE-THAN-24-LETTERS", "TOKEN", "OTHER"];
        let whole = "fd57:4a7f:0e8f:0000:0000:0000:0000:0002";
        let text = table(&style, &header, vec![vec![cell(WORDS.join(" ")), token(whole), cell(WORDS.join(" "))]]);
        for line in text.lines() {
            assert!(line.chars().count() <= usize::from(style.width), "{line:?} of\n{text}");
        }
        let printed: Vec<&str> = text.split_whitespace().collect();
        for word in header.iter().chain([&whole]) {
            assert!(printed.contains(word), "{word}\n{text}");
        }
        let letters: String = printed.concat();
        for part in ["a-word-of-more-than-twen", "another-word-of-thirty-l"] {
            assert!(letters.contains(part), "{part}\n{text}");
        }
    }
}
