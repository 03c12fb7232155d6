//! Rule expressions. Attribute numbers: `linux/netfilter/nf_tables.h`, in the enum named after each expression.

use std::collections::{BTreeMap, BTreeSet};

use super::wire::{Attributes, attributes, elem, find, rule, text};

#[derive(Debug, Clone)]
pub(super) struct Expression {
    name: String,
    attributes: BTreeMap<u16, Vec<u8>>,
}

pub(super) type Rule = Vec<Expression>;

/// A missing attribute equals zero: newer kernels add attributes.
impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        let kinds: BTreeSet<_> = self.attributes.keys().chain(other.attributes.keys()).collect();
        self.name == other.name
            && kinds.into_iter().all(|kind| match (self.attributes.get(kind), other.attributes.get(kind)) {
                (Some(one), None) | (None, Some(one)) => one.iter().all(|byte| *byte == 0),
                (ours, theirs) => ours == theirs,
            })
    }
}

impl Eq for Expression {}

/// Number of the 32-bit word `word` of 16, as dumped: 16-byte registers are 1 to 4, words between are 8 and up (`enum
/// nft_registers`).
pub(super) const fn register(word: u32) -> u32 {
    if word.is_multiple_of(4) { word / 4 + 1 } else { word + 8 }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Field {
    Source,
    Destination,
}

/// `enum nft_socket_keys`.
#[derive(Debug, Clone, Copy)]
pub(super) enum SocketKey {
    /// Accepts packets to foreign addresses.
    Transparent = 0,
    /// `SO_MARK`, in host byte order.
    Mark = 1,
    /// Listens at any address. The rule ends for a connection under establishment.
    Wildcard = 2,
}

const RTN_LOCAL: u32 = 2;
/// `enum nft_meta_keys`.
const META_MARK: u32 = 3;
const META_IIFNAME: u32 = 6;
const META_OIFNAME: u32 = 7;
/// `IFNAMSIZ` of `linux/if.h`.
const NAME_BYTES: usize = 16;
/// `enum nft_ct_keys`.
const CT_STATE: u32 = 0;
const CT_STATUS: u32 = 2;
const CT_ZONE: u32 = 17;
const STATE_INVALID: u32 = 1;
const IPS_DST_NAT: u32 = 0x20;
const CMP_EQ: u32 = 0;
const CMP_NEQ: u32 = 1;
/// `NF_NAT_RANGE_*` of `linux/netfilter/nf_nat.h`.
const MAP_IPS: u32 = 1;
const PROTO_SPECIFIED: u32 = 2;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`: any free port. Otherwise two processors can choose the same port, and a packet is
/// lost (1 to 6 of 28,000 flows to one destination).
const RANDOM_FULLY: u32 = 0x10;

impl Expression {
    fn new(name: &str, attributes: impl IntoIterator<Item = (u16, Vec<u8>)>) -> Self {
        Self { name: name.to_owned(), attributes: attributes.into_iter().collect() }
    }

    fn of_numbers<const N: usize>(name: &str, numbers: [(u16, u32); N]) -> Self {
        Self::new(name, numbers.map(|(kind, number)| (kind, number.to_be_bytes().to_vec())))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn value(&self, kind: u16) -> Option<&[u8]> {
        self.attributes.get(&kind).map(Vec::as_slice)
    }

    pub(super) fn number(&self, kind: u16) -> Option<u32> {
        self.value(kind)?.try_into().ok().map(u32::from_be_bytes)
    }

    /// Empty where missing or not UTF-8.
    pub(super) fn text(&self, kind: u16) -> String {
        let value = self.value(kind).unwrap_or_default();
        String::from_utf8(value.strip_suffix(&[0]).unwrap_or(value).to_vec()).unwrap_or_default()
    }

    fn with(mut self, kind: u16, value: Vec<u8>) -> Self {
        self.attributes.insert(kind, value);
        self
    }

    pub(super) fn family(word: u32) -> Self {
        Self::of_numbers("meta", [(1, register(word)), (2, 15)])
    }

    pub(super) fn transport(word: u32) -> Self {
        Self::of_numbers("meta", [(1, register(word)), (2, 16)])
    }

    pub(super) fn marked(bit: u32) -> [Self; 3] {
        Self::has_bit(Self::mark(0), bit)
    }

    pub(super) fn mark(word: u32) -> Self {
        Self::of_numbers("meta", [(1, register(word)), (2, META_MARK)])
    }

    pub(super) fn set_mark(word: u32) -> Self {
        Self::of_numbers("meta", [(2, META_MARK), (3, register(word))])
    }

    /// `(word & mask) ^ added`, in host byte order.
    pub(super) fn masked(word: u32, mask: u32, added: u32) -> Self {
        Self::of_numbers("bitwise", [(1, register(word)), (2, register(word)), (3, 4)])
            .with(4, data(&mask.to_ne_bytes()).0)
            .with(5, data(&added.to_ne_bytes()).0)
    }

    pub(super) fn shift_right(word: u32, bits: u32) -> Self {
        const RIGHT: u32 = 2;
        Self::of_numbers("bitwise", [(1, register(word)), (2, register(word)), (3, 4), (6, RIGHT)])
            .with(7, data(&bits.to_ne_bytes()).0)
    }

    /// One byte, or the mark. The rule ends without a receiving socket.
    pub(super) fn socket(word: u32, key: SocketKey) -> Self {
        Self::of_numbers("socket", [(1, key as u32), (2, register(word))])
    }

    /// The rule ends without a listener at the registers' address and port.
    pub(super) fn to_socket(family: u8, address: u32, port: u32) -> Self {
        Self::of_numbers("tproxy", [(1, family.into()), (2, register(address)), (3, register(port))])
    }

    pub(super) fn untrack() -> Self {
        Self::of_numbers("notrack", [])
    }

    pub(super) fn leaves_by_none_of(prefix: &str) -> [Self; 2] {
        let name = Self::of_numbers("meta", [(1, register(0)), (2, META_OIFNAME)]);
        [name, Self::compare(0, CMP_NEQ, prefix.as_bytes())]
    }

    pub(super) fn arrives_by_none_of(prefix: &str) -> [Self; 2] {
        let name = Self::of_numbers("meta", [(1, register(0)), (2, META_IIFNAME)]);
        [name, Self::compare(0, CMP_NEQ, prefix.as_bytes())]
    }

    /// The source's route leaves by a link with the prefix. Only before routing: Linux has it elsewhere since 5.18.
    pub(super) fn source_is_behind(prefix: &str) -> [Self; 2] {
        const LINK_NAME: u32 = 2;
        [Self::fib(LINK_NAME, Field::Source), Self::compare(0, CMP_EQ, prefix.as_bytes())]
    }

    pub(super) fn arrives_by(name: &str) -> [Self; 2] {
        let mut padded = name.as_bytes().to_vec();
        padded.resize(NAME_BYTES, 0);
        [Self::of_numbers("meta", [(1, register(0)), (2, META_IIFNAME)]), Self::compare(0, CMP_EQ, &padded)]
    }

    fn connection(word: u32, key: u32) -> Self {
        Self::of_numbers("ct", [(1, register(word)), (2, key)])
    }

    /// For the original direction, from the register (16 bits, host byte order).
    pub(super) fn set_zone(word: u32) -> Self {
        const DIRECTION_ORIGINAL: u8 = 0;
        Self::of_numbers("ct", [(2, CT_ZONE), (4, register(word))]).with(3, vec![DIRECTION_ORIGINAL])
    }

    /// Base 1 is the IP header, 2 the transport header.
    fn payload(word: u32, base: u32, offset: u32, length: u32) -> Self {
        Self::of_numbers("payload", [(1, register(word)), (2, base), (3, offset), (4, length)])
    }

    pub(super) fn address(word: u32, v4: bool, field: Field) -> Self {
        let (offset, length) = if v4 { (12, 4) } else { (8, 16) };
        let after = if matches!(field, Field::Destination) { length } else { 0 };
        Self::payload(word, 1, offset + after, length)
    }

    pub(super) fn first_byte4(word: u32, field: Field) -> Self {
        Self::payload(word, 1, if matches!(field, Field::Source) { 12 } else { 16 }, 1)
    }

    /// TCP, UDP and SCTP: two bytes padded to the word.
    pub(super) fn destination_port(word: u32) -> Self {
        Self::payload(word, 2, 2, 2)
    }

    fn compare(word: u32, operator: u32, value: &[u8]) -> Self {
        Self::of_numbers("cmp", [(1, register(word)), (2, operator)]).with(3, data(value).0)
    }

    pub(super) fn is(word: u32, value: &[u8]) -> Self {
        Self::compare(word, CMP_EQ, value)
    }

    pub(super) fn not_to_the_node() -> [Self; 2] {
        Self::address_type(Field::Destination, CMP_NEQ)
    }

    pub(super) fn to_the_node() -> [Self; 2] {
        Self::address_type(Field::Destination, CMP_EQ)
    }

    pub(super) fn from_the_node() -> [Self; 2] {
        Self::address_type(Field::Source, CMP_EQ)
    }

    fn address_type(field: Field, operator: u32) -> [Self; 2] {
        const TYPE: u32 = 3;
        [Self::fib(TYPE, field), Self::compare(0, operator, &RTN_LOCAL.to_ne_bytes())]
    }

    /// `result`: `enum nft_fib_result`.
    fn fib(result: u32, field: Field) -> Self {
        // `NFTA_FIB_F_SADDR`, `NFTA_FIB_F_DADDR`.
        let flag = if matches!(field, Field::Source) { 1 } else { 2 };
        Self::of_numbers("fib", [(1, register(0)), (2, result), (3, flag)])
    }

    pub(super) fn translated() -> [Self; 3] {
        Self::has_bit(Self::connection(0, CT_STATUS), IPS_DST_NAT)
    }

    pub(super) fn invalid() -> [Self; 3] {
        Self::has_bit(Self::connection(0, CT_STATE), STATE_INVALID)
    }

    fn has_bit(loaded: Self, bit: u32) -> [Self; 3] {
        [loaded, Self::masked(0, bit, 0), Self::compare(0, CMP_NEQ, &[0; 4])]
    }

    pub(super) fn within(word: u32, set: &str) -> Self {
        Self::new("lookup", [(1, name(set)), (2, register(word).to_be_bytes().to_vec())])
    }

    pub(super) fn outside(word: u32, set: &str) -> Self {
        const F_INV: u32 = 1;
        Self::within(word, set).with(5, F_INV.to_be_bytes().to_vec())
    }

    pub(super) fn map(word: u32, set: &str, to: u32) -> Self {
        Self::within(word, set).with(3, register(to).to_be_bytes().to_vec())
    }

    pub(super) fn translate_destination(family: u8, address: u32, port: u32) -> Self {
        let (address, port) = (register(address), register(port));
        let registers = [(3, address), (4, address), (5, port), (6, port), (7, MAP_IPS | PROTO_SPECIFIED)];
        Self::of_numbers("nat", [(1, 1), (2, family.into())]).and(registers)
    }

    pub(super) fn translate_source(family: u8, address: u32) -> Self {
        let address = register(address);
        Self::of_numbers("nat", [(1, 0), (2, family.into())]).and([
            (3, address),
            (4, address),
            (7, MAP_IPS | RANDOM_FULLY),
        ])
    }

    fn and<const N: usize>(mut self, numbers: [(u16, u32); N]) -> Self {
        self.attributes.extend(numbers.map(|(kind, number)| (kind, number.to_be_bytes().to_vec())));
        self
    }

    pub(super) fn masquerade() -> Self {
        Self::of_numbers("masq", [(1, RANDOM_FULLY)])
    }

    pub(super) fn load(word: u32, value: &[u8]) -> Self {
        Self::of_numbers("immediate", [(1, register(word))]).with(2, data(value).0)
    }

    pub(super) fn give_back() -> Self {
        const RETURN: i32 = -5;
        Self::verdict(RETURN)
    }

    pub(super) fn drop() -> Self {
        const DROP: i32 = 0;
        Self::verdict(DROP)
    }

    fn verdict(code: i32) -> Self {
        const VERDICT_REGISTER: u32 = 0;
        let verdict = Attributes::default().number(1, code.cast_unsigned());
        Self::of_numbers("immediate", [(1, VERDICT_REGISTER)]).with(2, Attributes::default().nest(2, &verdict).0)
    }
}

pub(super) fn data(value: &[u8]) -> Attributes {
    Attributes::default().bytes(elem::DATA_VALUE, value)
}

fn name(text: &str) -> Vec<u8> {
    [text.as_bytes(), &[0]].concat()
}

pub(super) fn encode(rule: &Rule) -> Attributes {
    rule.iter().fold(Attributes::default(), |list, expression| {
        let inner =
            expression.attributes.iter().fold(Attributes::default(), |all, (kind, value)| all.bytes(*kind, value));
        let one = Attributes::default().text(rule::EXPR_NAME, &expression.name).nest(rule::EXPR_DATA, &inner);
        list.nest(super::wire::LIST_ELEM, &one)
    })
}

pub(super) fn decode(bytes: &[u8]) -> Option<Rule> {
    let one = |(_, value): (u16, Vec<u8>)| {
        let parts = attributes(&value)?;
        let inner = attributes(find(&parts, rule::EXPR_DATA).unwrap_or_default())?;
        Some(Expression::new(&text(&parts, rule::EXPR_NAME)?, inner))
    };
    attributes(bytes)?.into_iter().map(one).collect()
}
