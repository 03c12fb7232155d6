//! Aliases of links: arbitrary, and made of an attachment's names.

use arbitrary::{Arbitrary as _, Unstructured};
use wharf_names::mark::{MAX_MARK, Mark};

/// Reads the input as an alias, and as parts of a mark.
pub fn run(data: &[u8]) {
    if let Ok(alias) = std::str::from_utf8(data) {
        read(alias);
    }
    let mut parts = Unstructured::new(data);
    if let Ok((id, epoch, network, container_id, ifname)) = <(u16, u64, &str, &str, &str)>::arbitrary(&mut parts) {
        write(id, epoch, network, container_id, ifname);
    }
}

fn read(alias: &str) {
    let Some(mark) = Mark::parse(alias) else { return };
    assert_eq!(mark.to_string(), alias, "an alias has two spellings");
    assert!(alias.len() <= MAX_MARK, "the kernel takes no alias of {} bytes", alias.len());
    if let Some((network, container_id, ifname)) = mark.attachment() {
        assert!(mark.is_of(network, container_id, ifname), "a mark is not of the attachment that it names");
    }
}

fn write(id: u16, epoch: u64, network: &str, container_id: &str, ifname: &str) {
    let mark = Mark::new(id, epoch, network, container_id, ifname);
    let alias = mark.to_string();
    assert!(alias.len() <= MAX_MARK, "a mark of {} bytes", alias.len());
    assert_eq!(Mark::parse(&alias).as_ref(), Some(&mark), "a mark is not read back");
    assert!(mark.is_of(network, container_id, ifname), "a mark is not of its own attachment");
    // Valid names have no `/`, so marks are shared only if cut.
    if [network, container_id, ifname].iter().all(|name| !name.contains('/')) {
        assert!(mark.attachment().is_none_or(|parts| parts == (network, container_id, ifname)), "{alias}");
    }
    read(&alias);
}
