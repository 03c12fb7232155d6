//! `rules` and `serverNames` in `toPorts` of cilium.io/v2.

use std::collections::BTreeSet;

use regex_syntax::{
    ast::{self, ClassSetItem, Flag, FlagsItemKind, GroupKind, HexLiteralKind, Literal, LiteralKind, RepetitionKind},
    hir::{Class, Dot, Hir, HirKind, Look, translate::TranslatorBuilder},
};

use super::{
    cilium_names,
    field::{Field, Object, Read, Reader, quoted},
};
use crate::{
    model::Direction,
    names::{MAX_NAME, is_label},
    requests::{HeaderRule, HttpRule, Pattern, Requests, ServerName},
};

/// Bytes; a proxy compiles each expression.
const MAX_PATTERN: usize = 1_000;
/// Of nested repetitions: RE2's limit.
const MAX_REPEATS: u64 = 1_000;
/// Estimated instructions after expansion. RE2's default of 8 MiB holds 87,000.
const MAX_PROGRAM: u64 = 50_000;
/// `None` accepts all requests.
pub(super) fn read(reader: &mut Reader, item: &Object<'_>, direction: Direction) -> Read<Option<Requests>> {
    let names = item.get("serverNames").map(|field| server_names(reader, &field)).transpose();
    let rules = item.get("rules").map(|field| match names {
        Ok(None) => rules(reader, &field, direction),
        _ => beside_names(reader, item, &field),
    });
    let (names, rules) = (names?, rules.transpose()?);
    Ok(match names {
        None => rules,
        Some(server_names) => Some(Requests { server_names, ..rules.unwrap_or_default() }),
    })
}

/// Next to `serverNames`: only `failOpen`.
fn beside_names(reader: &mut Reader, item: &Object<'_>, field: &Field<'_>) -> Read<Requests> {
    const REMEDY: &str = "write an item for each: requests inside TLS are not seen";
    let object = reader.object(field, &["http", "dns", "failOpen"], &[])?;
    if object.get("http").or(object.get("dns")).is_some() {
        return Err(reader.refuse_key(item, "rules", "is there with serverNames", REMEDY));
    }
    let open = object.get("failOpen").map_or(Ok(false), |field| reader.boolean(&field));
    Ok(Requests { fails_open: open?, ..Requests::default() })
}

fn rules(reader: &mut Reader, field: &Field<'_>, direction: Direction) -> Read<Requests> {
    const KINDS: &str = "remove it: HTTP requests, TLS server names and names of DNS can be told apart, nothing else";
    const ASKS: (&str, &str) = ("dns", "write it into egress: queries are judged where they come from");
    const HTTP: &str = "write the requests that may pass; {} is every one";
    const DNS: &str = "write the names that may be asked for; matchPattern: \"*\" is every one";
    let other = ["kafka", "l7proto", "l7"].map(|key| (key, KINDS));
    let object = match direction {
        Direction::Ingress => reader.object(field, &["http", "failOpen"], &[&other[..], &[ASKS]].concat())?,
        Direction::Egress => reader.object(field, &["http", "dns", "failOpen"], &other)?,
    };
    let open = object.get("failOpen").map_or(Ok(false), |field| reader.boolean(&field));
    let dns = object.get("dns").filter(|_| direction == Direction::Egress);
    let requests = match (object.get("http"), dns) {
        (Some(_), Some(_)) => {
            return Err(reader.refuse(object.field(), "has http and dns", "write an item of toPorts for each of them"));
        }
        (None, Some(field)) => {
            let names = reader.some(&field, DNS, cilium_names::read)?;
            Requests { names: names.into_iter().collect(), ..Requests::default() }
        }
        _ => {
            let http = reader.required(&object, "http", HTTP).and_then(|field| reader.some(&field, HTTP, request))?;
            Requests { http: http.into_iter().collect(), ..Requests::default() }
        }
    };
    Ok(Requests { fails_open: open?, ..requests })
}

fn request(reader: &mut Reader, field: &Field<'_>) -> Read<HttpRule> {
    let object = reader.object(field, &["method", "path", "host", "headers", "headerMatches"], &[])?;
    let mut matched = |key| object.get(key).map_or(Ok(None), |field| pattern(reader, &field));
    let (method, path, host) = (matched("method"), matched("path"), matched("host"));
    let headers = object.get("headers").map_or(Ok(Vec::new()), |field| reader.each(&field, header));
    let matches = object.get("headerMatches").map_or(Ok(Vec::new()), |field| reader.each(&field, header_match));
    let headers = headers?.into_iter().chain(matches?).collect();
    Ok(HttpRule { method: method?, path: path?, host: host?, headers })
}

/// `None` for an empty expression: matches everything.
fn pattern(reader: &mut Reader, field: &Field<'_>) -> Read<Option<Pattern>> {
    const REMEDY: &str = "write a regular expression of RE2, for the whole text";
    let text = reader.text(field)?;
    if text.is_empty() {
        return Ok(None);
    }
    if text.len() > MAX_PATTERN {
        let reason = format!("has {} bytes", text.len());
        return Err(reader.refuse(field, reason, format!("write at most {MAX_PATTERN}")));
    }
    let parsed = ast::parse::Parser::new().parse(text);
    let parsed = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return Err(reader.refuse(field, format!("is {}: {}", quoted(text), error.kind()), REMEDY)),
    };
    if let Err(what) = ast::visit(&parsed, Foreign(text)) {
        return Err(reader.refuse(field, format!("is {}, which has {what}", quoted(text)), REMEDY));
    }
    // RE2 of the proxy matches bytes.
    match TranslatorBuilder::new().unicode(false).utf8(false).build().translate(text, &parsed) {
        Ok(hir) if repeats(&hir) > MAX_REPEATS => Err(reader.refuse(
            field,
            format!("is {}, which repeats a part more than {MAX_REPEATS} times", quoted(text)),
            REMEDY,
        )),
        Ok(hir) if program(&hir) > MAX_PROGRAM => {
            let reason = format!("is {}, whose repetitions are too large together", quoted(text));
            Err(reader.refuse(field, reason, "repeat less, or write several rules"))
        }
        Ok(hir) => Ok(Some(plain(&hir).unwrap_or_else(|| Pattern::Regex(text.to_owned())))),
        Err(error) => Err(reader.refuse(field, format!("is {}: {}", quoted(text), error.kind()), REMEDY)),
    }
}

struct Foreign<'a>(&'a str);

impl Foreign<'_> {
    fn repetition(&self, repetition: &ast::Repetition) -> Result<(), &'static str> {
        if matches!(*repetition.ast, ast::Ast::Repetition(_)) {
            return Err("a repetition of a repetition without a group");
        }
        let span = &repetition.op.span;
        let counts = self.0.get(span.start.offset..span.end.offset).unwrap_or_default();
        let counts = counts.trim_end_matches('?').trim_start_matches('{').trim_end_matches('}');
        let mut numbers = counts.split(',').enumerate();
        let plain = |(at, number): (usize, &str)| {
            number.bytes().all(|b| b.is_ascii_digit())
                && (number.len() == 1 || !number.starts_with('0'))
                && (at > 0 || !number.is_empty())
        };
        if !matches!(repetition.op.kind, RepetitionKind::Range(_)) || numbers.all(plain) {
            return Ok(());
        }
        Err("blanks, a leading zero or no first number in a repetition, which RE2 takes for text")
    }
}

/// RE2 reads a byte above 7f as half a UTF-8 character.
fn literal(literal: &Literal) -> Result<(), &'static str> {
    match literal.kind {
        LiteralKind::HexFixed(HexLiteralKind::X) | LiteralKind::HexBrace(HexLiteralKind::X) if literal.c.is_ascii() => {
            Ok(())
        }
        LiteralKind::HexFixed(_) | LiteralKind::HexBrace(_) => Err("\\u, \\U, or \\x above 7f"),
        _ => Ok(()),
    }
}

impl ast::Visitor for Foreign<'_> {
    type Output = ();
    type Err = &'static str;

    fn finish(self) -> Result<(), Self::Err> {
        Ok(())
    }

    fn visit_pre(&mut self, node: &ast::Ast) -> Result<(), Self::Err> {
        let flags = match node {
            ast::Ast::Flags(set) => &set.flags,
            ast::Ast::Group(group) => match &group.kind {
                GroupKind::NonCapturing(flags) => flags,
                GroupKind::CaptureName { name, .. }
                    if !name.name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') =>
                {
                    return Err("a group whose name has other characters than letters, digits and _");
                }
                _ => return Ok(()),
            },
            ast::Ast::Repetition(repetition) => return self.repetition(repetition),
            ast::Ast::Literal(of) => return literal(of),
            ast::Ast::Assertion(assertion) => {
                return match assertion.kind {
                    ast::AssertionKind::StartLine
                    | ast::AssertionKind::EndLine
                    | ast::AssertionKind::StartText
                    | ast::AssertionKind::EndText
                    | ast::AssertionKind::WordBoundary
                    | ast::AssertionKind::NotWordBoundary => Ok(()),
                    _ => Err("a boundary of half a word"),
                };
            }
            _ => return Ok(()),
        };
        let known = |kind: &FlagsItemKind| match kind {
            FlagsItemKind::Negation => true,
            FlagsItemKind::Flag(flag) => {
                matches!(flag, Flag::CaseInsensitive | Flag::DotMatchesNewLine | Flag::SwapGreed)
            }
        };
        if flags.items.iter().all(|item| known(&item.kind)) { Ok(()) } else { Err("a flag other than i, s and U") }
    }

    fn visit_class_set_item_pre(&mut self, item: &ClassSetItem) -> Result<(), Self::Err> {
        match item {
            ClassSetItem::Bracketed(_) => Err("a class within a class"),
            ClassSetItem::Literal(of) => literal(of),
            ClassSetItem::Range(range) => literal(&range.start).and_then(|()| literal(&range.end)),
            _ => Ok(()),
        }
    }

    fn visit_class_set_binary_op_pre(&mut self, _: &ast::ClassSetBinaryOp) -> Result<(), Self::Err> {
        Err("a class made of two by &&, -- or ~~")
    }
}

fn repeats(hir: &Hir) -> u64 {
    match hir.kind() {
        HirKind::Repetition(repetition) => {
            let own = repetition.max.unwrap_or(repetition.min).max(1);
            u64::from(own).saturating_mul(repeats(&repetition.sub))
        }
        HirKind::Capture(capture) => repeats(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().map(repeats).max().unwrap_or(1),
        _ => 1,
    }
}

fn program(hir: &Hir) -> u64 {
    const OF_SEVERAL_BYTES: u64 = 12;
    match hir.kind() {
        HirKind::Repetition(repetition) => {
            let copies = repetition.max.unwrap_or_else(|| repetition.min.saturating_add(1)).max(1);
            u64::from(copies).saturating_mul(program(&repetition.sub).saturating_add(1))
        }
        HirKind::Capture(capture) => program(&capture.sub).saturating_add(2),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => {
            parts.iter().map(program).fold(parts.len() as u64, u64::saturating_add)
        }
        HirKind::Literal(literal) => literal.0.len() as u64,
        HirKind::Class(Class::Bytes(class)) => class.ranges().len() as u64 + OF_SEVERAL_BYTES,
        HirKind::Class(Class::Unicode(class)) => class.ranges().len() as u64 * OF_SEVERAL_BYTES,
        HirKind::Empty | HirKind::Look(_) => 1,
    }
}

/// Fixed text or prefix: cheaper than an expression.
fn plain(hir: &Hir) -> Option<Pattern> {
    let parts = match hir.kind() {
        HirKind::Concat(parts) => parts.as_slice(),
        _ => std::slice::from_ref(hir),
    };
    let parts = match parts {
        [first, rest @ ..] if *first.kind() == HirKind::Look(Look::Start) => rest,
        parts => parts,
    };
    let parts = match parts {
        [rest @ .., last] if *last.kind() == HirKind::Look(Look::End) => rest,
        parts => parts,
    };
    let text = |hir: &Hir| match hir.kind() {
        HirKind::Literal(literal) => String::from_utf8(literal.0.to_vec()).ok(),
        _ => None,
    };
    match parts {
        [own] => text(own).map(Pattern::Exact),
        [own, rest] if is_anything(rest) => text(own).map(Pattern::Prefix),
        _ => None,
    }
}

/// `.*`; texts contain no line feed.
fn is_anything(hir: &Hir) -> bool {
    match hir.kind() {
        HirKind::Repetition(repetition) => {
            let dots = [Hir::dot(Dot::AnyByteExceptLF), Hir::dot(Dot::AnyByte)];
            (repetition.min, repetition.max) == (0, None) && dots.contains(&*repetition.sub)
        }
        _ => false,
    }
}

fn header(reader: &mut Reader, field: &Field<'_>) -> Read<HeaderRule> {
    let text = reader.text(field)?;
    let (name, value) = match text.split_once(':') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    };
    checked(reader, field, name, value)
}

fn header_match(reader: &mut Reader, field: &Field<'_>) -> Read<HeaderRule> {
    const PLAIN: &str = "remove it: a request that does not match is refused, and values are written here";
    let object = reader.object(field, &["name", "value"], &[("mismatch", PLAIN), ("secret", PLAIN)])?;
    let name = reader.required(&object, "name", "write the header's name").and_then(|field| reader.text(&field));
    let value = object.get("value").map(|field| reader.text(&field)).transpose();
    let (name, value) = (name?, value?);
    checked(reader, object.field(), name, value)
}

/// The name is a token (RFC 9110, section 5.6.2).
fn checked(reader: &mut Reader, field: &Field<'_>, name: &str, value: Option<&str>) -> Read<HeaderRule> {
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if name.is_empty() || !name.bytes().all(token) {
        let remedy = "write the name of a header, or its name, a colon and its value";
        return Err(reader.refuse(field, format!("names {}", quoted(name)), remedy));
    }
    let value = value.map(str::trim);
    if let Some(value) = value.filter(|value| value.is_empty() || value.chars().any(char::is_control)) {
        let remedy = "write a value without control characters, or the name alone for any value";
        return Err(reader.refuse(field, format!("has the value {}", quoted(value)), remedy));
    }
    let rule = HeaderRule { name: name.to_ascii_lowercase(), value: value.map(str::to_owned) };
    if is_never_seen(&rule) {
        let remedy = "name a header that is the server's; those of a single hop and x-envoy-... end at the proxy";
        return Err(reader.refuse(
            field,
            format!("names {}, which no request has when it is judged", quoted(name)),
            remedy,
        ));
    }
    Ok(rule)
}

/// Envoy removes these before routing: hop-by-hop headers (RFC 9110, section 7.6.1) except `Upgrade: websocket`, its
/// own, and the proxy's copy of a client value.
fn is_never_seen(rule: &HeaderRule) -> bool {
    match rule.name.as_str() {
        "connection" | "keep-alive" | "proxy-connection" | "transfer-encoding" | "x-wharf-forwarded-proto" => true,
        "upgrade" => rule.value.as_deref().is_some_and(|value| !value.eq_ignore_ascii_case("websocket")),
        name => name.starts_with("x-envoy-"),
    }
}

fn server_names(reader: &mut Reader, field: &Field<'_>) -> Read<BTreeSet<ServerName>> {
    let names = reader.some(field, "write the names that may pass, or remove it", |reader, field| {
        let text = reader.text(field)?.to_ascii_lowercase();
        let under = text.strip_prefix("**.");
        let name = under.unwrap_or(&text);
        if name.len() > MAX_NAME || !name.split('.').all(is_label) {
            let remedy = "write a name of DNS, or **. and a name for every name below it";
            return Err(reader.refuse(field, format!("is {}", quoted(&text)), remedy));
        }
        let name = name.to_owned();
        Ok(if under.is_some() { ServerName::Under(name) } else { ServerName::Exact(name) })
    })?;
    Ok(names.into_iter().collect())
}
