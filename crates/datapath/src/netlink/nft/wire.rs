//! Attributes of nf_tables messages: numbers are big endian, text ends with NUL, nests carry no `NLA_F_NESTED`.

use rtnetlink::packet_core::NlasIterator;

use super::super::batch::HEADER_LEN;

/// `NFNL_SUBSYS_NFTABLES` of `linux/netfilter/nfnetlink.h`.
pub(super) const SUBSYSTEM: u16 = 10;
pub(super) const BATCH_BEGIN: u16 = 16;
pub(super) const BATCH_END: u16 = 17;
pub(super) const BATCH_GENID: u16 = 1;
/// `NFPROTO_*` of `linux/netfilter.h`.
pub(super) const INET: u8 = 1;
pub(super) const IPV4: u8 = 2;
pub(super) const IPV6: u8 = 10;
/// `struct nfgenmsg`: family, version, resource id (big endian).
pub(super) const GENERIC_LEN: usize = 4;
pub(super) const LIST_ELEM: u16 = 1;

/// `enum nf_tables_msg_types` of `linux/netfilter/nf_tables.h`.
pub(super) mod message {
    pub(crate) const NEW_TABLE: u16 = 0;
    pub(crate) const GET_TABLE: u16 = 1;
    pub(crate) const DEL_TABLE: u16 = 2;
    pub(crate) const NEW_CHAIN: u16 = 3;
    pub(crate) const GET_CHAIN: u16 = 4;
    pub(crate) const NEW_RULE: u16 = 6;
    pub(crate) const GET_RULE: u16 = 7;
    pub(crate) const NEW_SET: u16 = 9;
    pub(crate) const GET_SET: u16 = 10;
    pub(crate) const NEW_SET_ELEM: u16 = 12;
    pub(crate) const GET_SET_ELEM: u16 = 13;
    pub(crate) const DEL_SET_ELEM: u16 = 14;
    pub(crate) const GET_GEN: u16 = 16;
}

/// `enum nft_table_attributes`.
pub(super) mod table {
    pub(crate) const NAME: u16 = 1;
    pub(crate) const FLAGS: u16 = 2;
    pub(crate) const USE: u16 = 3;
    pub(crate) const USERDATA: u16 = 6;
    pub(crate) const F_DORMANT: u32 = 1;
}

/// `enum nft_chain_attributes`, `enum nft_hook_attributes`.
pub(super) mod chain {
    pub(crate) const TABLE: u16 = 1;
    pub(crate) const NAME: u16 = 3;
    pub(crate) const HOOK: u16 = 4;
    pub(crate) const POLICY: u16 = 5;
    pub(crate) const TYPE: u16 = 7;
    pub(crate) const HOOK_NUM: u16 = 1;
    pub(crate) const HOOK_PRIORITY: u16 = 2;
}

/// `enum nft_rule_attributes`, `enum nft_expr_attributes`.
pub(super) mod rule {
    pub(crate) const TABLE: u16 = 1;
    pub(crate) const CHAIN: u16 = 2;
    pub(crate) const EXPRESSIONS: u16 = 4;
    pub(crate) const EXPR_NAME: u16 = 1;
    pub(crate) const EXPR_DATA: u16 = 2;
}

/// `enum nft_set_attributes`, `enum nft_set_flags`.
pub(super) mod set {
    pub(crate) const TABLE: u16 = 1;
    pub(crate) const NAME: u16 = 2;
    pub(crate) const FLAGS: u16 = 3;
    pub(crate) const KEY_TYPE: u16 = 4;
    pub(crate) const KEY_LEN: u16 = 5;
    pub(crate) const DATA_TYPE: u16 = 6;
    pub(crate) const DATA_LEN: u16 = 7;
    pub(crate) const ID: u16 = 10;
    pub(crate) const F_INTERVAL: u32 = 4;
    pub(crate) const F_MAP: u32 = 8;
}

/// `enum nft_set_elem_list_attributes`, `enum nft_set_elem_attributes`, `enum nft_set_elem_flags`.
pub(super) mod elem {
    pub(crate) const LIST_TABLE: u16 = 1;
    pub(crate) const LIST_SET: u16 = 2;
    pub(crate) const LIST_ELEMENTS: u16 = 3;
    pub(crate) const KEY: u16 = 1;
    pub(crate) const DATA: u16 = 2;
    pub(crate) const FLAGS: u16 = 3;
    pub(crate) const F_INTERVAL_END: u32 = 1;
    pub(crate) const DATA_VALUE: u16 = 1;
}

pub(super) const FAMILIES: [(u8, &str); 3] = [(2, "ip"), (10, "ip6"), (INET, "inet")];
pub(super) const HOOK_FORWARD: u32 = 2;
pub(super) const POLICY_DROP: u32 = 0;

pub(super) const GEN_ID: u16 = 1;

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Attributes(pub(super) Vec<u8>);

impl Attributes {
    pub(super) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn number(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub(super) fn text(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat())
    }

    pub(super) fn nest(self, kind: u16, inner: &Self) -> Self {
        self.bytes(kind, &inner.0)
    }
}

/// Without flags in kinds. `None` where truncated.
pub(super) fn attributes(bytes: &[u8]) -> Option<Vec<(u16, Vec<u8>)>> {
    NlasIterator::new(bytes).map(|a| a.ok().map(|a| (a.kind(), a.value().to_vec()))).collect()
}

/// `None` where truncated, or of another family than inet.
pub(super) fn of_message(message: &[u8]) -> Option<Vec<(u16, Vec<u8>)>> {
    (*message.get(HEADER_LEN)? == INET).then_some(())?;
    attributes(message.get(HEADER_LEN + GENERIC_LEN..)?)
}

pub(super) fn find(all: &[(u16, Vec<u8>)], kind: u16) -> Option<&[u8]> {
    all.iter().find(|(k, _)| *k == kind).map(|(_, value)| value.as_slice())
}

/// Big endian; `None` where missing or of another length.
pub(super) fn number(all: &[(u16, Vec<u8>)], kind: u16) -> Option<u32> {
    find(all, kind)?.try_into().ok().map(u32::from_be_bytes)
}

/// `None` where missing or not UTF-8.
pub(super) fn text(all: &[(u16, Vec<u8>)], kind: u16) -> Option<String> {
    let value = find(all, kind)?;
    String::from_utf8(value.strip_suffix(&[0]).unwrap_or(value).to_vec()).ok()
}
