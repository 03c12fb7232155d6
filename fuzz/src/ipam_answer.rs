//! Answers of an IPAM plugin to ADD.

use serde_json::Value;
use wharf_cni::leased::Leased;

/// Maximum bytes of a refusal: keys and texts cut to 80 characters, each escaped.
const MAX_WORDS: usize = 4096;

/// Reads an answer in two spellings.
pub fn run(bytes: &[u8]) {
    let read = Leased::parse(bytes);
    match &read {
        Ok(leased) => {
            let families: Vec<bool> = leased.ips().iter().map(|ip| ip.is_ipv4()).collect();
            assert!(matches!(families.as_slice(), [_] | [true, false] | [false, true]), "{leased:?}");
            for gateway in leased.gateways() {
                assert!(families.contains(&gateway.is_ipv4()), "a gateway of a family without an address: {leased:?}");
            }
            assert!(leased.gateways().len() <= families.len(), "{leased:?}");
        }
        Err(fault) => {
            let words = fault.to_string();
            assert!((1..=MAX_WORDS).contains(&words.len()), "{words}");
            assert!(words.contains("answer"), "no subject: {words}");
        }
    }
    if let Ok(value) = serde_json::from_slice::<Value>(bytes) {
        let spelt = serde_json::to_vec_pretty(&value).expect("a JSON value is JSON");
        assert_eq!(format!("{read:?}"), format!("{:?}", Leased::parse(&spelt)), "the spelling makes a difference");
    }
}
