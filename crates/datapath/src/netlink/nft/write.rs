//! The messages that write the table.

use rtnetlink::packet_core::{NLM_F_APPEND, NLM_F_CREATE};

use super::{
    MARK, TABLE,
    expr::{self, data},
    socket::Message,
    table::{Chain, Element, Key, Set, Table},
    wire::{Attributes, LIST_ELEM, chain, elem, message, rule, set, table},
};

/// `NFTNL_UDATA_TABLE_COMMENT` of libnftnl's `udata.h`: kind, length, text.
const COMMENT: u8 = 0;
/// Per message, whose attributes must fit 64 KiB.
const ELEMENTS: usize = 256;

pub(super) fn comment(text: &str) -> Vec<u8> {
    let length = u8::try_from(text.len() + 1).unwrap_or(u8::MAX);
    [&[COMMENT, length], text.as_bytes(), &[0]].concat()
}

pub(super) fn delete_table() -> Message {
    let attributes = Attributes::default().text(table::NAME, TABLE);
    Message { kind: message::DEL_TABLE, flags: 0, attributes }
}

/// The table must not exist. Sets and elements precede the rules that use them.
pub(super) fn create(desired: &Table) -> Vec<Message> {
    let attributes = Attributes::default()
        .text(table::NAME, TABLE)
        .number(table::FLAGS, desired.flags)
        .bytes(table::USERDATA, &comment(MARK));
    let mut messages = vec![Message { kind: message::NEW_TABLE, flags: NLM_F_CREATE, attributes }];
    for (id, (name, set)) in (1..).zip(&desired.sets) {
        messages.push(new_set(name, id, set));
        let elements: Vec<_> = set.elements.iter().collect();
        for some in elements.chunks(ELEMENTS) {
            let list = some.iter().map(|(key, value)| element(key, value));
            messages.push(new_elements(message::NEW_SET_ELEM, NLM_F_CREATE, name, list));
        }
    }
    for (name, chain) in &desired.chains {
        messages.push(new_chain(name, chain));
    }
    for (name, chain) in &desired.chains {
        messages.extend(chain.rules.iter().map(|rule| {
            let attributes = Attributes::default()
                .text(rule::TABLE, TABLE)
                .text(rule::CHAIN, name)
                .nest(rule::EXPRESSIONS, &expr::encode(rule));
            Message { kind: message::NEW_RULE, flags: NLM_F_CREATE | NLM_F_APPEND, attributes }
        }));
    }
    messages
}

fn new_chain(name: &str, chain: &Chain) -> Message {
    let hook = Attributes::default()
        .number(chain::HOOK_NUM, chain.hook)
        .number(chain::HOOK_PRIORITY, chain.priority.cast_unsigned());
    let attributes = Attributes::default()
        .text(chain::TABLE, TABLE)
        .text(chain::NAME, name)
        .nest(chain::HOOK, &hook)
        .number(chain::POLICY, chain.policy)
        .text(chain::TYPE, &chain.kind);
    Message { kind: message::NEW_CHAIN, flags: NLM_F_CREATE, attributes }
}

fn new_set(name: &str, id: u32, set: &Set) -> Message {
    let mut attributes = Attributes::default()
        .text(set::TABLE, TABLE)
        .text(set::NAME, name)
        .number(set::FLAGS, set.flags)
        .number(set::KEY_TYPE, set.key_type)
        .number(set::KEY_LEN, set.key_len)
        .number(set::ID, id);
    if set.data_len != 0 {
        attributes = attributes.number(set::DATA_TYPE, set.data_type).number(set::DATA_LEN, set.data_len);
    }
    Message { kind: message::NEW_SET, flags: NLM_F_CREATE, attributes }
}

fn element(key: &Key, value: &[u8]) -> Attributes {
    let mut attributes = Attributes::default().nest(elem::KEY, &data(&key.bytes));
    if !value.is_empty() {
        attributes = attributes.nest(elem::DATA, &data(value));
    }
    if key.end { attributes.number(elem::FLAGS, elem::F_INTERVAL_END) } else { attributes }
}

fn new_elements(kind: u16, flags: u16, set: &str, elements: impl IntoIterator<Item = Attributes>) -> Message {
    let list = elements.into_iter().fold(Attributes::default(), |list, one| list.nest(LIST_ELEM, &one));
    let attributes =
        Attributes::default().text(elem::LIST_TABLE, TABLE).text(elem::LIST_SET, set).nest(elem::LIST_ELEMENTS, &list);
    Message { kind, flags, attributes }
}

/// One per message, so that a refusal identifies it.
pub(super) fn of_element(kind: u16, flags: u16, one: &Element) -> Message {
    let key = Key { bytes: one.key.clone(), end: false };
    let value: &[u8] = if kind == message::NEW_SET_ELEM { &one.data } else { &[] };
    new_elements(kind, flags, one.set, [element(&key, value)])
}
