use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use imbl::OrdMap;

use super::{L4, PortClass, PortPrefix};
use crate::model::PortRange;

pub(super) type PortList = BTreeSet<(L4, PortRange)>;

/// Prefixes, and the classes of each list. Ports in the same lists share a class.
pub(super) fn classes(lists: &[Arc<PortList>]) -> (OrdMap<PortPrefix, PortClass>, Vec<Vec<PortClass>>) {
    /// Change of a list's number of ranges.
    type Steps = Vec<(usize, i32)>;
    let mut steps: BTreeMap<L4, BTreeMap<u32, Steps>> = BTreeMap::new();
    for (list, ranges) in lists.iter().enumerate() {
        for (l4, range) in ranges.iter().filter(|(_, range)| range.first <= range.last) {
            let at = steps.entry(*l4).or_default();
            at.entry(range.first.into()).or_default().push((list, 1));
            at.entry(u32::from(range.last) + 1).or_default().push((list, -1));
        }
    }

    let mut numbers: BTreeMap<Vec<usize>, PortClass> = BTreeMap::new();
    let mut prefixes = OrdMap::new();
    for (l4, at) in steps {
        let mut containing: BTreeMap<usize, i32> = BTreeMap::new();
        let mut open: (u32, Vec<usize>) = (0, Vec::new());
        for (port, changes) in at {
            for (list, change) in changes {
                *containing.entry(list).or_default() += change;
            }
            containing.retain(|_, ranges| *ranges > 0);
            let lists: Vec<usize> = containing.keys().copied().collect();
            if lists == open.1 {
                continue;
            }
            let (first, before) = std::mem::replace(&mut open, (port, lists));
            if !before.is_empty() {
                let next = u32::try_from(numbers.len()).unwrap_or(u32::MAX).saturating_add(1);
                let class = *numbers.entry(before).or_insert(PortClass(next));
                prefixes.extend(split(l4, first, port).map(|prefix| (prefix, class)));
            }
        }
    }

    let mut of_list = vec![Vec::new(); lists.len()];
    for (containing, class) in numbers {
        for list in containing {
            if let Some(classes) = of_list.get_mut(list) {
                classes.push(class);
            }
        }
    }
    (prefixes, of_list)
}

/// Fewest prefixes of `first..end`, at most 30.
fn split(l4: L4, mut first: u32, end: u32) -> impl Iterator<Item = PortPrefix> {
    std::iter::from_fn(move || {
        let left = end.checked_sub(first).filter(|left| *left > 0)?;
        let bits = first.trailing_zeros().min(left.ilog2()).min(16);
        let prefix = PortPrefix { l4, first: u16::try_from(first).ok()?, length: u8::try_from(16 - bits).ok()? };
        first += 1 << bits;
        Some(prefix)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefixes(first: u32, last: u32) -> Vec<(u16, u8)> {
        split(L4::Tcp, first, last + 1).map(|p| (p.first, p.length)).collect()
    }

    #[test]
    fn a_range_becomes_the_fewest_prefixes() {
        assert_eq!(prefixes(0, 65535), [(0, 0)]);
        assert_eq!(prefixes(80, 80), [(80, 16)]);
        assert_eq!(prefixes(0, 255), [(0, 8)]);
        assert_eq!(prefixes(79, 82), [(79, 16), (80, 15), (82, 16)]);
        assert_eq!(prefixes(65535, 65535), [(65535, 16)]);
        assert_eq!(prefixes(1, 65534).len(), 30);
    }

    #[test]
    fn ports_share_a_class_across_protocols_where_the_same_lists_contain_them() {
        let range = |l4, first, last| (l4, PortRange { first, last });
        let dns = Arc::new(PortList::from([range(L4::Tcp, 53, 53), range(L4::Udp, 53, 53)]));
        let low = Arc::new(PortList::from([range(L4::Tcp, 0, 40), range(L4::Tcp, 41, 1023)]));
        let (rows, of_list) = classes(&[dns, low]);
        let class = |l4, port: u16| {
            let own = rows.iter().filter(|(prefix, _)| prefix.contains(l4, port));
            own.map(|(_, class)| class.0).collect::<Vec<_>>()
        };
        let (tcp53, udp53, tcp0) = (class(L4::Tcp, 53), class(L4::Udp, 53), class(L4::Tcp, 0));
        assert_eq!((tcp53.len(), udp53.len(), tcp0.len()), (1, 1, 1));
        assert_eq!((class(L4::Tcp, 1023), class(L4::Tcp, 54)), (tcp0.clone(), tcp0.clone()));
        assert!(tcp53 != udp53 && udp53 != tcp0 && tcp53 != tcp0);
        assert!(class(L4::Udp, 54).is_empty());
        assert_eq!(of_list.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    }

    #[test]
    fn touching_ranges_of_one_list_are_one() {
        let range = |first, last| (L4::Tcp, PortRange { first, last });
        let (rows, _) = classes(&[Arc::new(PortList::from([range(0, 99), range(100, 65535), range(7, 200)]))]);
        assert_eq!(rows.keys().map(|p| (p.first, p.length)).collect::<Vec<_>>(), [(0, 0)]);
    }
}
