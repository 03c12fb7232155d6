//! Short texts: safe strings, times, sizes.

use std::fmt::Write as _;

/// Escapes characters that act on a terminal or hide text: control characters (C0, DEL, C1), bidirectional overrides,
/// zero-width and line-separating characters.
pub(crate) fn safe(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if acts(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

/// [`safe`] text of at most `max` characters, cut with `…`.
pub(crate) fn cut(text: &str, max: usize) -> String {
    let out = safe(text);
    match out.char_indices().nth(max) {
        None => out,
        Some(_) => out.chars().take(max.saturating_sub(1)).chain(['…']).collect(),
    }
}

/// Like [`cut`], but cuts the middle: pod names differ at the end.
pub(crate) fn cut_middle(text: &str, max: usize) -> String {
    let out = safe(text);
    let length = out.chars().count();
    if length <= max {
        return out;
    }
    let head = max / 2;
    let tail = max.saturating_sub(head + 1);
    out.chars().take(head).chain(['…']).chain(out.chars().skip(length.saturating_sub(tail))).collect()
}

fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// True without characters that [`safe`] escapes, except line breaks.
pub(crate) fn is_safe(text: &str) -> bool {
    !text.chars().any(|c| c != '\n' && acts(c))
}

/// Escapes the characters of [`safe`]; they occur only in strings, where `\u` is equivalent.
pub(crate) fn escape_in_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if c != '\n' && acts(c) {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push(c);
        }
    }
    out
}

/// Zero means never.
pub(crate) fn ago(now_unix_ms: u64, then_unix_ms: u64) -> String {
    if then_unix_ms == 0 {
        return "never".to_owned();
    }
    let age = now_unix_ms.saturating_sub(then_unix_ms);
    if age < 1_000 { "just now".to_owned() } else { format!("{} ago", span(age)) }
}

/// `12s`, `5m12s`; `-` for an unknown time.
pub(crate) fn age(now_unix_ms: u64, then_unix_ms: u64) -> String {
    if then_unix_ms == 0 { "-".to_owned() } else { span(now_unix_ms.saturating_sub(then_unix_ms)) }
}

/// The two largest units.
pub(crate) fn span(ms: u64) -> String {
    let s = ms / 1_000;
    let two = |a: u64, unit_a: char, b: u64, unit_b: char| {
        if b == 0 { format!("{a}{unit_a}") } else { format!("{a}{unit_a}{b}{unit_b}") }
    };
    match s {
        0..60 => format!("{s}s"),
        60..3_600 => two(s / 60, 'm', s % 60, 's'),
        3_600..86_400 => two(s / 3_600, 'h', s % 3_600 / 60, 'm'),
        _ => two(s / 86_400, 'd', s % 86_400 / 3_600, 'h'),
    }
}

/// `1.5 MiB`.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1_024 {
        return format!("{n} B");
    }
    let mut scale: u64 = 1_024;
    for (i, unit) in UNITS.iter().enumerate() {
        let last = i + 1 == UNITS.len();
        if last || n / scale < 1_024 {
            let whole = n / scale;
            let tenth = u128::from(n % scale) * 10 / u128::from(scale);
            return if whole < 100 { format!("{whole}.{tenth} {unit}") } else { format!("{whole} {unit}") };
        }
        scale *= 1_024;
    }
    format!("{n} B")
}

/// With SI prefix: `8 M`, `1.5 G`, `640 `.
pub(crate) fn decimal(n: u64) -> String {
    let prefixes = [(1_000_000_000_000, "T"), (1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    match prefixes.into_iter().find(|(unit, _)| n >= *unit) {
        Some((unit, prefix)) => {
            let hundredths = n % unit / (unit / 100);
            let places = format!(".{hundredths:02}");
            format!("{}{} {prefix}", n / unit, places.trim_end_matches('0').trim_end_matches('.'))
        }
        None => format!("{n} "),
    }
}

/// `4.7%`; `-` for zero `whole`. At least `0.1%` above zero; `100.0%` only when full.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    let mut tenths = u128::from(part) * 1_000 / u128::from(whole);
    if part > 0 && tenths == 0 {
        tenths = 1;
    }
    format!("{}.{}%", tenths / 10, tenths % 10)
}

/// `12/254 (4.7%)`, or `12/2^64` for an IPv6 pool.
pub(crate) fn fill(used: u64, total: u64) -> String {
    const VAST: u64 = 1 << 48;
    match total {
        u64::MAX => format!("{used}/2^64"),
        VAST.. => format!("{used}/2^{}", total.ilog2()),
        _ => format!("{used}/{total} ({})", percent(used, total)),
    }
}

/// `1 endpoint`, `2 endpoints`.
pub(crate) fn count(n: u64, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") }
}

/// UTC: `2026-10-01T12:00:00.123Z`.
pub(crate) fn timestamp(unix_ms: u64) -> String {
    let (year, month, day) = civil(unix_ms / 86_400_000);
    format!("{year:04}-{month:02}-{day:02}T{}Z", time_of_day(unix_ms))
}

/// UTC, with milliseconds.
pub(crate) fn time_of_day(unix_ms: u64) -> String {
    let ms = unix_ms % 86_400_000;
    format!("{:02}:{:02}:{:02}.{:03}", ms / 3_600_000, ms / 60_000 % 60, ms / 1_000 % 60, ms % 1_000)
}

/// Gregorian date of a day since 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64) {
    // Days from 0000-03-01: the leap day ends the year; 146,097 days are 400 years.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimal_numbers_are_short() {
        for (n, told) in [(0, "0 "), (999, "999 "), (1_000, "1 k"), (1_500_000, "1.5 M"), (8_050_000_000, "8.05 G")] {
            assert_eq!(decimal(n), told);
        }
        assert_eq!(decimal(u64::MAX), "18446744.07 T");
    }

    #[test]
    fn nothing_that_acts_gets_through() {
        assert_eq!(safe("web-1"), "web-1");
        assert_eq!(safe("größe 日本 🦀"), "größe 日本 🦀");
        assert_eq!(safe("\x1b[2J\u{9b}1m\x07\x7f\r\n\t\0"), "\\u{1b}[2J\\u{9b}1m\\u{7}\\u{7f}\\r\\n\\t\\u{0}");
        assert_eq!(
            safe("a\u{202e}b\u{2066}c\u{200b}d\u{feff}e\u{2028}f"),
            "a\\u{202e}b\\u{2066}c\\u{200b}d\\u{feff}e\\u{2028}f"
        );
        for c in (0..0xa0).filter_map(char::from_u32).filter(|c| c.is_control()) {
            assert!(!safe(&c.to_string()).contains(c), "{c:?}");
        }
    }

    #[test]
    fn cutting() {
        assert_eq!(cut("1234567890123", 13), "1234567890123");
        assert_eq!(cut("12345678901234", 13), "123456789012…");
        assert_eq!(cut("", 13), "");
        assert_eq!(cut("日本日本", 3), "日本…");
        assert_eq!(cut("\x1b\x1b\x1b", 7), "\\u{1b}…");
        assert_eq!(cut_middle("coredns-abcde", 13), "coredns-abcde");
        assert_eq!(cut_middle("coredns-abcdef", 8), "core…def");
        assert_eq!(cut_middle("日本日本日", 3), "日…日");
    }

    #[test]
    fn times() {
        assert_eq!(ago(5_000, 0), "never");
        assert_eq!(ago(5_000, 9_000), "just now", "a clock that went back is no negative age");
        assert_eq!(ago(17_000, 5_000), "12s ago");
        assert_eq!(age(5_000, 0), "-");
        assert_eq!(span(59_999), "59s");
        assert_eq!(span(60_000), "1m");
        assert_eq!(span(312_000), "5m12s");
        assert_eq!(span(11_520_000), "3h12m");
        assert_eq!(span(90_000_000), "1d1h");
        assert_eq!(span(u64::MAX), "213503982334d14h");
    }

    #[test]
    fn dates() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(timestamp(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(timestamp(1_790_856_000_123), "2026-10-01T12:00:00.123Z");
        assert_eq!(timestamp(4_107_542_399_999), "2100-02-28T23:59:59.999Z");
        assert_eq!(timestamp(4_107_542_400_000), "2100-03-01T00:00:00.000Z");
        assert!(timestamp(u64::MAX).ends_with('Z'));
    }

    #[test]
    fn amounts() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1_023), "1023 B");
        assert_eq!(bytes(1_536), "1.5 KiB");
        assert_eq!(bytes(200 << 20), "200 MiB");
        assert_eq!(bytes(u64::MAX), "15.9 EiB");
        assert_eq!(percent(0, 0), "-");
        assert_eq!(percent(0, 9), "0.0%");
        assert_eq!(percent(1, 1_000_000), "0.1%");
        assert_eq!(percent(999_999, 1_000_000), "99.9%");
        assert_eq!(percent(u64::MAX, u64::MAX), "100.0%");
        assert_eq!(fill(12, 254), "12/254 (4.7%)");
        assert_eq!(fill(3, u64::MAX), "3/2^64");
        assert_eq!(fill(3, (1 << 48) + 1), "3/2^48");
        assert_eq!(fill(0, 0), "0/0 (-)");
        assert_eq!(count(1, "endpoint"), "1 endpoint");
        assert_eq!(count(0, "endpoint"), "0 endpoints");
    }
}
