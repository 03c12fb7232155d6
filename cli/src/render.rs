//! Renders API objects and policies as text, without I/O.
//!
//! Text from outside must pass through [`text::safe`] or [`text::cut`]: labels must not control the terminal.

pub(crate) mod audit;
pub(crate) mod bpf;
pub(crate) mod cluster;
pub(crate) mod config;
pub(crate) mod describe;
pub(crate) mod endpoint;
pub(crate) mod explain;
pub(crate) mod flow;
pub(crate) mod health;
pub(crate) mod ipam;
pub(crate) mod monitor;
pub(crate) mod namespace;
pub(crate) mod policy;
pub(crate) mod port;
pub(crate) mod proxy;
pub(crate) mod sandbox;
mod screen;
pub(crate) mod status;
mod table;
pub(crate) mod text;

#[cfg(test)]
pub(crate) mod sample;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Style {
    pub(crate) width: u16,
    pub(crate) color: bool,
    pub(crate) now_unix_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Warn,
    Bad,
    Dim,
    Bold,
}

impl Style {
    pub(crate) fn paint(&self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Plain => return text.to_owned(),
            Tone::Good => "32",
            Tone::Warn => "33",
            Tone::Bad => "31",
            Tone::Dim => "2",
            Tone::Bold => "1",
        };
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// 100 columns, no colour, fixed time.
    #[cfg(test)]
    pub(crate) fn plain() -> Self {
        Self { width: 100, color: false, now_unix_ms: sample::NOW }
    }
}
