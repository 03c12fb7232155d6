use proptest::prelude::*;
use serde_json::json;

use super::*;

fn ip(last: u16) -> IpAddr {
    let [high, low] = last.to_be_bytes();
    IpAddr::from([192, 0, high, low])
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn changed(names: &[&str]) -> Changed {
    names.iter().map(|name| Arc::from(*name)).collect()
}

fn ends(cache: &Cache, name: &str) -> Vec<(IpAddr, u64)> {
    cache.addresses_of(name).collect()
}

#[test]
fn addresses_live_as_long_as_the_answer_says_within_bounds() {
    let mut cache = Cache::default();
    let given = [(ip(1), secs(60)), (ip(2), secs(1)), (ip(3), Duration::MAX)];
    assert_eq!(cache.learn("a", given, 1000), changed(&["a"]));
    let week = 7 * 24 * 3_600_000;
    assert_eq!(ends(&cache, "a"), [(ip(1), 61_000), (ip(2), 16_000), (ip(3), week + 1000)]);
    assert_eq!((cache.over(15_999).count(), cache.over(16_000).collect::<Vec<_>>()), (0, vec![ip(2)]));
    // A shorter answer takes nothing away, a longer one adds.
    assert_eq!(cache.learn("a", [(ip(1), secs(30))], 2000), changed(&[]));
    assert_eq!(cache.learn("a", [(ip(2), secs(90))], 2000), changed(&[]));
    assert_eq!(ends(&cache, "a"), [(ip(1), 61_000), (ip(2), 92_000), (ip(3), week + 1000)]);
    assert_eq!(Cache::default().learn("a", [], 0), changed(&[]));
}

#[test]
fn the_end_of_an_address_waits_for_its_connections() {
    let mut cache = Cache::default();
    cache.learn("a", [(ip(1), secs(60)), (ip(2), secs(60))], 0);
    cache.learn("b", [(ip(1), secs(90))], 0);
    assert_eq!(cache.names_of(ip(1)).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(cache.expire(59_999, |_| false), changed(&[]));
    assert_eq!(cache.expire(60_000, |address| address == ip(1)), changed(&["a"]));
    assert_eq!(ends(&cache, "a"), [(ip(1), 75_000)]);
    assert_eq!(cache.expire(75_000, |_| false), changed(&["a"]));
    assert_eq!(cache.names_of(ip(1)).collect::<Vec<_>>(), ["b"]);
    assert_eq!(cache.expire(u64::MAX, |_| false), changed(&["b"]));
    assert!(cache.is_empty() && cache.names.is_empty() && cache.addresses.is_empty());
}

#[test]
fn a_name_has_at_most_a_hundred_addresses_and_all_names_ten_thousand() {
    let mut cache = Cache::default();
    cache.learn("a", (0..150).map(|n| (ip(n), secs(100 + u64::from(n)))), 0);
    assert_eq!(ends(&cache, "a").first(), Some(&(ip(50), 150_000)), "those that end last");
    assert_eq!(cache.learn("a", [(ip(999), secs(20))], 0), changed(&["a"]), "a new one has its place");
    assert_eq!(ends(&cache, "a").first(), Some(&(ip(51), 151_000)));
    assert_eq!(cache.len(), 100);
    for n in 1..100_u16 {
        cache.learn(&format!("n{n}"), (0..100).map(|i| (ip(n * 100 + i), secs(1000))), 0);
    }
    assert_eq!(cache.len(), MAX_ADDRESSES);
    assert_eq!(cache.learn("z", [(ip(1), secs(16)), (ip(2), secs(16))], 0), changed(&["a", "z"]));
    assert_eq!(cache.len(), MAX_ADDRESSES);
    assert_eq!(ends(&cache, "a").first(), Some(&(ip(52), 152_000)), "999 ended first, then 51");
}

#[test]
fn what_is_known_outlives_the_agent_and_damage_is_told() {
    let mut cache = Cache::default();
    cache.learn("a.example", [(ip(1), secs(60)), ("2001:db8::1".parse().expect("an address"), secs(60))], 1000);
    let value = cache.to_json().expect("JSON");
    assert_eq!(value, json!({"version": 1, "names": {"a.example": {"192.0.0.1": 61_000, "2001:db8::1": 61_000}}}));
    assert_eq!(Cache::from_json(value, 99_000).expect("a cache"), cache);

    let from = |value| Cache::from_json(value, 0);
    let far = from(json!({"version": 1, "names": {"a": {"192.0.0.1": u64::MAX}}})).expect("a cache");
    assert_eq!(ends(&far, "a"), [(ip(1), 7 * 24 * 3_600_000)], "a clock that went back");
    assert!(matches!(from(json!({"version": 2, "more": 1})), Err(SnapshotError::Version(2))));
    assert!(matches!(from(json!({"names": {}})), Err(SnapshotError::Malformed(_))));
    assert!(matches!(from(json!({"version": 1, "names": {"a": {"x": 1}}})), Err(SnapshotError::Malformed(_))));
    assert!(matches!(from(json!({"version": 1, "names": {"": {}}})), Err(SnapshotError::Name)));
    let many: BTreeMap<_, _> = (0..200).map(|n| (ip(n), n)).collect();
    assert_eq!(from(json!({"version": 1, "names": {"a": many}})).expect("a cache").len(), MAX_OF_NAME);
}

/// The same by a list.
#[derive(Debug, Default)]
struct Model(Vec<(String, IpAddr, u64)>);

impl Model {
    fn learn(&mut self, name: &str, addresses: &[(IpAddr, Duration)], now: u64) -> Changed {
        let mut fresh: Vec<(u64, IpAddr)> = Vec::new();
        for (address, ttl) in addresses {
            let end = now + u64::try_from((*ttl).clamp(SHORTEST, LONGEST).as_millis()).expect("small");
            match fresh.iter_mut().find(|(_, known)| known == address) {
                Some((known, _)) => *known = end.max(*known),
                None => fresh.push((end, *address)),
            }
        }
        fresh.sort_unstable();
        let fresh = fresh.split_off(fresh.len().saturating_sub(MAX_OF_NAME));
        let mut changed = Changed::new();
        for (end, address) in &fresh {
            match self.0.iter_mut().find(|(of, known, _)| of == name && known == address) {
                Some((.., known)) => *known = *end.max(known),
                None => {
                    self.0.push((name.to_owned(), *address, *end));
                    changed.insert(name.into());
                }
            }
        }
        loop {
            let of_name = self.0.iter().filter(|(of, ..)| of == name).count();
            let old =
                |(of, address, _): &&(String, IpAddr, u64)| of != name || !fresh.iter().any(|(_, a)| a == address);
            let candidates = self.0.iter().filter(old);
            let first = if of_name > MAX_OF_NAME {
                candidates.filter(|(of, ..)| of == name).min_by_key(|(_, address, end)| (*end, *address)).cloned()
            } else if self.0.len() > MAX_ADDRESSES {
                candidates.min_by_key(|(of, address, end)| (*end, of.clone(), *address)).cloned()
            } else {
                None
            };
            let Some(first) = first else { return changed };
            self.0.retain(|known| *known != first);
            changed.insert(first.0.as_str().into());
        }
    }

    fn expire(&mut self, now: u64, in_use: impl Fn(IpAddr) -> bool) -> Changed {
        let mut changed = Changed::new();
        for (name, address, end) in std::mem::take(&mut self.0) {
            if end > now {
                self.0.push((name, address, end));
            } else if in_use(address) {
                self.0.push((name, address, now + 15_000));
            } else {
                changed.insert(name.as_str().into());
            }
        }
        changed
    }

    fn sorted(&self) -> Vec<(&str, IpAddr, u64)> {
        let mut all: Vec<_> = self.0.iter().map(|(name, address, end)| (name.as_str(), *address, *end)).collect();
        all.sort_unstable();
        all
    }
}

#[derive(Debug, Clone)]
enum Act {
    /// Name, first address, number of addresses, seconds.
    Learn(u8, u16, u16, u64),
    /// Milliseconds that pass; addresses of which one in this many is in use.
    Expire(u64, u16),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..4_u8, 0..200_u16, 0..130_u16, 0..300_u64).prop_map(|(a, b, c, d)| Act::Learn(a, b, c, d)),
        1 => (0..100_000_u64, 1..5_u16).prop_map(|(passed, every)| Act::Expire(passed, every)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn does_what_a_list_would_do(acts in prop::collection::vec(act(), 0..24)) {
        let (mut cache, mut model, mut now) = (Cache::default(), Model::default(), 1_000_000);
        for act in acts {
            match act {
                Act::Learn(name, first, count, ttl) => {
                    let name = format!("n{name}");
                    // Different lives, and some addresses twice.
                    let given: Vec<_> =
                        (first..first + count).map(|n| (ip(n % 190), secs(ttl + u64::from(n % 7)))).collect();
                    prop_assert_eq!(cache.learn(&name, given.clone(), now), model.learn(&name, &given, now));
                }
                Act::Expire(passed, every) => {
                    now += passed;
                    let in_use = |address| matches!(address, IpAddr::V4(ip) if u16::from(ip.octets()[3]) % every == 0);
                    prop_assert_eq!(cache.expire(now, in_use), model.expire(now, in_use));
                }
            }
            prop_assert_eq!(cache.iter().collect::<Vec<_>>(), model.sorted());
            prop_assert_eq!(cache.len(), model.0.len());
            for (name, address, _) in cache.iter() {
                prop_assert!(cache.names_of(address).any(|of| of == name));
            }
            let again = Cache::from_json(cache.to_json().expect("JSON"), now).expect("a cache");
            prop_assert_eq!(&again, &cache);
        }
    }
}
