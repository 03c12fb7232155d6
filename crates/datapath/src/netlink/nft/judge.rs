//! The effect of foreign forward chains on container packets ([`super::packets`]). A chain refuses packets if no rule
//! may accept one, and accepts them if no rule may refuse most of them; otherwise it is unclear.

use std::{collections::BTreeMap, rc::Rc};

use super::{
    expr::{Expression, Rule},
    packets::{ANY, Byte, Packets, Sure, between, equal, not},
    read,
    wire::{self, Attributes, attributes, elem, find, message, number, text},
};

const MAX_DEPTH: usize = 16;
/// Evaluated per chain: jumps multiply.
const MAX_RULES: usize = 20_000;
/// Cost about as much as one rule.
const ELEMENTS_OF_A_RULE: usize = 64;
/// `NFT_SET_INTERVAL`; unsupported: `NFT_SET_CONCAT`, `NFT_SET_OBJECT`.
const F_INTERVAL: u32 = wire::set::F_INTERVAL;
const F_OTHER: u32 = 0x80 | 0x40;
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Accept,
    Refuse,
    Return,
    Jump(String),
    Goto(String),
    /// Not understood, or another program decides.
    Unclear,
}

/// `NFTA_DATA_VERDICT`; `None` for `continue`.
fn verdict(data: &[u8]) -> Option<Verdict> {
    let data = attributes(data)?;
    let verdict = attributes(find(&data, 2)?)?;
    let chain = || text(&verdict, 2).unwrap_or_default();
    match number(&verdict, 1)?.cast_signed() {
        0 => Some(Verdict::Refuse),
        1 => Some(Verdict::Accept),
        -1 => None,
        -3 => Some(Verdict::Jump(chain())),
        -4 => Some(Verdict::Goto(chain())),
        -5 => Some(Verdict::Return),
        _ => Some(Verdict::Unclear),
    }
}

struct Set {
    flags: u32,
    key_len: usize,
    /// Keys, or interval starts, with values.
    elements: Vec<(Vec<u8>, Vec<u8>)>,
    /// Interval ends (exclusive), sorted.
    ends: Vec<Vec<u8>>,
}

impl Set {
    /// Elements that may match, or the certain one.
    fn find(&self, key: &[Byte]) -> Vec<(Sure, &[u8])> {
        let mut found = Vec::new();
        for (one, data) in &self.elements {
            let test = if self.flags & F_INTERVAL == 0 {
                equal(key, one)
            } else {
                let end = self.ends.get(self.ends.partition_point(|end| end <= one));
                between(key, one, &end.map_or_else(|| vec![0xff; one.len()], |end| before(end)))
            };
            found.extend(test.map(|sure| (sure, data.as_slice())));
        }
        if let Some(all) = found.iter().find(|(sure, _)| *sure == Sure::All) {
            return vec![*all];
        }
        found
    }
}

/// Big-endian.
fn before(number: &[u8]) -> Vec<u8> {
    let mut number = number.to_vec();
    for byte in number.iter_mut().rev() {
        let borrows = *byte == 0;
        *byte = byte.wrapping_sub(1);
        if !borrows {
            break;
        }
    }
    number
}

/// `None` on failure.
pub(super) type Ask<'a> = &'a mut dyn FnMut(u16, &Attributes) -> Option<Vec<Vec<u8>>>;

pub(super) struct Ruleset<'a> {
    table: String,
    ask: Ask<'a>,
    chains: BTreeMap<String, Option<Rc<Vec<Rule>>>>,
    sets: BTreeMap<String, Option<Rc<Set>>>,
}

impl<'a> Ruleset<'a> {
    pub(super) const fn new(table: String, ask: Ask<'a>) -> Self {
        Self { table, ask, chains: BTreeMap::new(), sets: BTreeMap::new() }
    }

    fn rules(&mut self, chain: &str) -> Option<Rc<Vec<Rule>>> {
        if let Some(known) = self.chains.get(chain) {
            return known.clone();
        }
        let filter = Attributes::default().text(wire::rule::TABLE, &self.table).text(wire::rule::CHAIN, chain);
        let messages = (self.ask)(message::GET_RULE, &filter);
        let rules =
            messages.and_then(|all| all.iter().map(|m| read::rule_of_anybody(m)).collect::<Option<_>>()).map(Rc::new);
        self.chains.insert(chain.to_owned(), rules.clone());
        rules
    }

    fn set(&mut self, name: &str) -> Option<Rc<Set>> {
        if let Some(known) = self.sets.get(name) {
            return known.clone();
        }
        let set = self.read_set(name).map(Rc::new);
        self.sets.insert(name.to_owned(), set.clone());
        set
    }

    fn read_set(&mut self, name: &str) -> Option<Set> {
        let sets = (self.ask)(message::GET_SET, &Attributes::default().text(wire::set::TABLE, &self.table))?;
        let head = sets
            .iter()
            .filter_map(|m| read::of_anybody(m))
            .find(|all| text(all, wire::set::NAME).as_deref() == Some(name))?;
        let list = Attributes::default().text(elem::LIST_TABLE, &self.table).text(elem::LIST_SET, name);
        let (mut elements, mut ends) = (Vec::new(), Vec::new());
        for message in (self.ask)(message::GET_SET_ELEM, &list)? {
            for (key, data) in read::elements_of_anybody(&message)? {
                if key.end { ends.push(key.bytes) } else { elements.push((key.bytes, data)) }
            }
        }
        ends.sort_unstable();
        let key_len = usize::try_from(number(&head, wire::set::KEY_LEN)?).ok()?;
        Some(Set { flags: number(&head, wire::set::FLAGS).unwrap_or_default(), key_len, elements, ends })
    }

    pub(super) fn judge(&mut self, packets: &Packets<'_>, chain: &str, drops: bool) -> Judgement {
        let mut walk = Walk { packets, ruleset: self, left: MAX_RULES, may_accept: false, may_refuse: false };
        let refuses = match walk.chain(chain, 0) {
            End::Accept => false,
            End::Refuse => true,
            End::Return => drops,
        };
        match refuses {
            true if !walk.may_accept => Judgement::Refuses,
            false if !walk.may_refuse => Judgement::Accepts,
            _ => Judgement::Unclear,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Judgement {
    Accepts,
    Refuses,
    Unclear,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Accept,
    Refuse,
    Return,
}

struct Walk<'r, 'a> {
    packets: &'r Packets<'r>,
    ruleset: &'r mut Ruleset<'a>,
    left: usize,
    may_accept: bool,
    may_refuse: bool,
}

impl Walk<'_, '_> {
    fn unclear(&mut self) -> End {
        (self.may_accept, self.may_refuse) = (true, true);
        End::Return
    }

    fn chain(&mut self, name: &str, depth: usize) -> End {
        let Some(rules) = self.ruleset.rules(name).filter(|_| depth < MAX_DEPTH) else { return self.unclear() };
        // Later rules do not see all packets.
        let mut left = false;
        for rule in rules.iter() {
            let Some(rest) = self.left.checked_sub(1) else { return self.unclear() };
            self.left = rest;
            for (sure, verdict) in self.rule(rule) {
                let leaves = matches!(verdict, Verdict::Return | Verdict::Goto(_));
                let end = match verdict {
                    Verdict::Accept => End::Accept,
                    Verdict::Refuse => End::Refuse,
                    Verdict::Return => End::Return,
                    Verdict::Jump(to) | Verdict::Goto(to) => self.chain(&to, depth + 1),
                    Verdict::Unclear => self.unclear(),
                };
                match (end, sure) {
                    (End::Return, _) if !leaves => {}
                    (End::Return, Sure::All) => return End::Return,
                    (End::Return, _) => left = true,
                    (end, Sure::All) if !left => return end,
                    (End::Accept, _) => self.may_accept = true,
                    (End::Refuse, Sure::Some) => {}
                    (End::Refuse, _) => self.may_refuse = true,
                }
                if sure == Sure::All && end != End::Return {
                    return End::Return;
                }
            }
        }
        End::Return
    }

    fn rule(&mut self, rule: &Rule) -> Vec<(Sure, Verdict)> {
        let mut registers = Registers([None; 64]);
        let mut sure = Sure::All;
        for expression in rule {
            match self.step(expression, &mut registers) {
                Step::On(Some(test)) => sure = sure.max(test),
                Step::On(None) => return Vec::new(),
                Step::Ends(verdicts) => {
                    return verdicts.into_iter().map(|(test, verdict)| (sure.max(test), verdict)).collect();
                }
            }
        }
        Vec::new()
    }

    fn step(&mut self, e: &Expression, registers: &mut Registers) -> Step {
        let ends = |verdict| Step::Ends(vec![(Sure::All, verdict)]);
        let all = Step::On(Some(Sure::All));
        let n = |kind| e.number(kind).unwrap_or_default();
        let data = |kind| Some(find(&attributes(e.value(kind)?)?, elem::DATA_VALUE)?.to_vec());
        match e.name() {
            "counter" | "log" | "notrack" | "last" => all,
            "limit" => Step::On(Some(Sure::Some)),
            "reject" => ends(Verdict::Refuse),
            "immediate" if n(1) == 0 => match verdict(e.value(2).unwrap_or_default()) {
                Some(verdict) => ends(verdict),
                None => all,
            },
            // Without a destination register they write to the packet.
            "meta" | "ct" | "payload" if n(1) == 0 => all,
            "meta" => registers.load(n(1), self.packets.meta(n(2))),
            "ct" => registers.load(n(1), self.packets.connection(n(2))),
            "payload" => {
                let (offset, length) = (n(3) as usize, (n(4) as usize).min(64));
                let bytes = match n(2) {
                    1 => self.packets.header(offset, length),
                    2 => Some(vec![ANY; length]),
                    _ => None,
                };
                registers.load(n(1), bytes.unwrap_or_else(|| vec![None; length]))
            }
            "bitwise" => {
                let (mask, xor) = (data(4).unwrap_or_default(), data(5).unwrap_or_default());
                let plain = n(6) == 0 && mask.len() == xor.len();
                let bytes = registers.read(n(1), if plain { mask.len() } else { 0 });
                let masked = |((byte, mask), xor): ((&Byte, u8), u8)| match byte {
                    Some((is, known)) => Some(((is & mask) ^ xor, known | !mask)),
                    None if mask == 0 => Some((xor, 0xff)),
                    None => None,
                };
                let result = bytes.iter().zip(mask).zip(xor).map(masked).collect::<Vec<_>>();
                registers.load(n(2), if plain { result } else { vec![None; 16] })
            }
            "cmp" => {
                let value = data(3).unwrap_or_default();
                let bytes = registers.read(n(1), value.len());
                let (lowest, highest) = (vec![0; value.len()], vec![0xff; value.len()]);
                Step::On(match n(2) {
                    _ if value.is_empty() => Some(Sure::Unclear),
                    0 => equal(&bytes, &value),
                    1 => not(equal(&bytes, &value)),
                    2 => not(between(&bytes, &value, &highest)),
                    3 => between(&bytes, &lowest, &value),
                    4 => not(between(&bytes, &lowest, &value)),
                    5 => between(&bytes, &value, &highest),
                    _ => Some(Sure::Unclear),
                })
            }
            "lookup" => self.lookup(e, registers),
            "match" => Step::On(self.packets.xt(e)),
            "target" => match e.text(1).as_str() {
                "REJECT" | "DROP" => ends(Verdict::Refuse),
                "LOG" | "NFLOG" | "MARK" | "CONNMARK" | "TCPMSS" | "TRACE" | "CLASSIFY" | "DSCP" | "TOS" => all,
                _ => ends(Verdict::Unclear),
            },
            "queue" | "synproxy" | "tproxy" | "fwd" => ends(Verdict::Unclear),
            // It may write to any register.
            _ => {
                *registers = Registers([None; 64]);
                Step::On(Some(Sure::Unclear))
            }
        }
    }

    fn lookup(&mut self, e: &Expression, registers: &mut Registers) -> Step {
        let inverted = e.number(5).unwrap_or_default() & 1 != 0;
        let set = self.ruleset.set(&e.text(1)).filter(|set| set.flags & F_OTHER == 0);
        let to = e.number(3);
        let Some(set) = set else {
            return if to == Some(0) {
                Step::Ends(vec![(Sure::Unclear, Verdict::Unclear)])
            } else {
                Step::On(Some(Sure::Unclear))
            };
        };
        self.left = self.left.saturating_sub(set.elements.len() / ELEMENTS_OF_A_RULE);
        let found = set.find(&registers.read(e.number(2).unwrap_or_default(), set.key_len));
        if to == Some(0) {
            let verdicts = found.iter().filter_map(|(sure, data)| Some((*sure, verdict(data)?)));
            return Step::Ends(verdicts.collect());
        }
        if let Some(to) = to {
            registers.load(to, vec![None; 16]);
        }
        let test = found.iter().map(|(sure, _)| *sure).min();
        Step::On(if inverted { not(test) } else { test })
    }
}

enum Step {
    /// `None`: for no packet.
    On(Option<Sure>),
    Ends(Vec<(Sure, Verdict)>),
}

struct Registers([Byte; 64]);

impl Registers {
    /// Byte offset (`enum nft_registers`).
    fn place(register: u32) -> Option<usize> {
        match register {
            1..=4 => usize::try_from((register - 1) * 16).ok(),
            8..=23 => usize::try_from((register - 8) * 4).ok(),
            _ => None,
        }
    }

    fn load(&mut self, register: u32, mut value: Vec<Byte>) -> Step {
        // The kernel pads the last word with zeros.
        value.resize(value.len().next_multiple_of(4), Some((0, 0xff)));
        let places = Self::place(register).and_then(|at| self.0.get_mut(at..));
        for (place, byte) in places.into_iter().flatten().zip(value) {
            *place = byte;
        }
        Step::On(Some(Sure::All))
    }

    fn read(&self, register: u32, length: usize) -> Vec<Byte> {
        let at = Self::place(register).unwrap_or(self.0.len());
        (0..length.min(self.0.len())).map(|n| self.0.get(at + n).copied().flatten()).collect()
    }
}
