use proptest::prelude::*;
use serde_json::json;

use super::*;

fn ip(last: u16) -> IpAddr {
    let [high, low] = last.to_be_bytes();
    IpAddr::from([192, 0, high, low])
}

const A: Member = member(1);

const fn member(id: u16) -> Member {
    Member { id, epoch: 7 }
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
    assert_eq!(cache.learn(A, "a", given, 1000), changed(&["a"]));
    let week = 7 * 24 * 3_600_000;
    assert_eq!(ends(&cache, "a"), [(ip(1), 61_000), (ip(2), 16_000), (ip(3), week + 1000)]);
    assert_eq!((cache.over(15_999).count(), cache.over(16_000).collect::<Vec<_>>()), (0, vec![ip(2)]));
    assert_eq!(cache.learn(A, "a", [(ip(1), secs(30))], 2000), changed(&[]));
    assert_eq!(cache.learn(A, "a", [(ip(2), secs(90))], 2000), changed(&[]));
    assert_eq!(ends(&cache, "a"), [(ip(1), 61_000), (ip(2), 92_000), (ip(3), week + 1000)]);
    assert_eq!(Cache::default().learn(A, "a", [], 0), changed(&[]));
}

#[test]
fn the_end_of_an_address_waits_for_its_connections() {
    let mut cache = Cache::default();
    cache.learn(A, "a", [(ip(1), secs(60)), (ip(2), secs(60))], 0);
    cache.learn(A, "b", [(ip(1), secs(90))], 0);
    let nothing = |_| Some(false);
    assert_eq!(cache.expire(59_999, nothing), changed(&[]));
    assert_eq!(cache.expire(60_000, |address| Some(address == ip(1))), changed(&["a"]));
    assert_eq!(ends(&cache, "a"), [(ip(1), 75_000)]);
    assert_eq!(cache.expire(75_000, |_| None), changed(&[]), "nobody has looked");
    assert_eq!(ends(&cache, "a"), [(ip(1), 75_000)]);
    assert_eq!(cache.expire(75_000, nothing), changed(&["a"]));
    assert_eq!(cache.expire(u64::MAX, nothing), changed(&["b"]));
    assert!(cache == Cache::default() && cache.is_empty());
}

#[test]
fn an_address_that_two_members_were_told_lasts_as_long_as_one_of_them_claims_it() {
    let mut cache = Cache::default();
    cache.learn(A, "a", [(ip(1), secs(60))], 0);
    assert_eq!(cache.learn(member(2), "a", [(ip(1), secs(90))], 0), changed(&[]));
    assert_eq!((cache.len(), ends(&cache, "a")), (1, vec![(ip(1), 90_000)]));
    assert_eq!(cache.expire(60_000, |_| None), changed(&[]));
    assert_eq!((cache.claims.len(), ends(&cache, "a")), (1, vec![(ip(1), 90_000)]));
    assert_eq!(cache.expire(90_000, |_| Some(false)), changed(&["a"]));
}

#[test]
fn a_member_claims_at_most_a_hundred_addresses_of_a_name_and_a_thousand_of_all() {
    let mut cache = Cache::default();
    cache.learn(member(2), "a", [(ip(7), secs(20)), (ip(60), secs(20))], 0);
    cache.learn(A, "a", (0..150).map(|n| (ip(n), secs(100 + u64::from(n)))), 0);
    let own = |cache: &Cache| cache.of_member(A).map(|claim| claim.address).collect::<Vec<_>>();
    assert_eq!((own(&cache).len(), own(&cache)[0]), (100, ip(50)), "those that end last");
    assert_eq!(ends(&cache, "a").len(), 101);
    assert_eq!(cache.learn(A, "a", [(ip(999), secs(20))], 0), changed(&["a"]), "a new one has its place");
    assert_eq!((own(&cache).len(), own(&cache)[..2].to_vec()), (100, vec![ip(999), ip(51)]));
    for n in 1..20_u16 {
        cache.learn(A, &format!("n{n}"), (0..100).map(|i| (ip(n * 100 + i), secs(1000))), 0);
    }
    assert_eq!((own(&cache).len(), ends(&cache, "n19").len()), (MAX_OF_MEMBER, 100));
    assert_eq!(ends(&cache, "a"), [(ip(7), 20_000), (ip(60), 20_000)], "the other member's stay");
}

#[test]
fn where_there_is_no_room_the_member_that_has_most_makes_it() {
    let mut cache = Cache::default();
    cache.learn(member(100), "small", [(ip(1), secs(15))], 0);
    for of in 0..10 {
        for n in 0..10_u16 {
            cache.learn(member(of), &format!("m{of}-{n}"), (0..100).map(|i| (ip(n * 100 + i), secs(1000))), 0);
        }
    }
    assert_eq!(cache.len(), MAX_ADDRESSES);
    assert_eq!(cache.of_member(member(8)).count(), MAX_OF_MEMBER - 1, "the last of the heaviest");
    assert_eq!(cache.learn(member(101), "new", [(ip(1), secs(15))], 0), changed(&["m9-0", "new"]));
    assert_eq!((ends(&cache, "small").len(), ends(&cache, "new").len(), cache.len()), (1, 1, MAX_ADDRESSES));
    let mut cache = Cache::default();
    for of in 0..600 {
        cache.learn(member(of), "popular", (0..100).map(|n| (ip(n), secs(1000))), 0);
    }
    assert_eq!(
        (cache.len(), cache.claims.len(), cache.by_end.len(), cache.by_member.len()),
        (100, 50_000, 50_000, 50_000)
    );
}

#[test]
fn what_is_known_outlives_the_agent_and_damage_is_told() {
    let mut cache = Cache::default();
    cache.learn(A, "a.example", [(ip(1), secs(60)), ("2001:db8::1".parse().expect("an address"), secs(60))], 1000);
    let value = cache.to_json().expect("JSON");
    assert_eq!(
        value,
        json!({"version": 2, "names": {"a.example": [[1, 7, {"192.0.0.1": 61_000, "2001:db8::1": 61_000}]]}})
    );
    assert_eq!(Cache::from_json(value, 99_000).expect("a cache"), cache);

    let from = |value| Cache::from_json(value, 0);
    let far = from(json!({"version": 2, "names": {"a": [[1, 1, {"192.0.0.1": u64::MAX}]]}})).expect("a cache");
    assert_eq!(ends(&far, "a"), [(ip(1), 7 * 24 * 3_600_000)], "a clock that went back");
    assert!(matches!(from(json!({"version": 3, "more": 1})), Err(SnapshotError::Version(3))));
    assert!(matches!(from(json!({"names": {}})), Err(SnapshotError::Malformed(_))));
    assert!(matches!(
        from(json!({"version": 2, "names": {"a": [[1, 1, {"x": 1}]]}})),
        Err(SnapshotError::Malformed(_))
    ));
    assert!(matches!(from(json!({"version": 2, "names": {"": []}})), Err(SnapshotError::Name)));
    let many: BTreeMap<_, _> = (0..200).map(|n| (ip(n), n)).collect();
    assert_eq!(from(json!({"version": 2, "names": {"a": [[1, 1, many]]}})).expect("a cache").len(), MAX_OF_NAME);
}

#[derive(Debug, Default)]
struct Model(Vec<(Member, String, IpAddr, u64)>);

impl Model {
    fn addresses(&self, name: &str) -> BTreeMap<IpAddr, u64> {
        let mut all = BTreeMap::new();
        for (_, _, address, end) in self.0.iter().filter(|(_, of, ..)| of == name) {
            let known = all.entry(*address).or_insert(*end);
            *known = *end.max(known);
        }
        all
    }

    fn learn(&mut self, member: Member, name: &str, addresses: &[(IpAddr, Duration)], now: u64) -> Changed {
        let before = self.addresses(name);
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
        for (end, address) in &fresh {
            match self.0.iter_mut().find(|(of, on, known, _)| (*of, on.as_str(), *known) == (member, name, *address)) {
                Some((.., known)) => *known = *end.max(known),
                None => self.0.push((member, name.to_owned(), *address, *end)),
            }
        }
        loop {
            let own = || self.0.iter().filter(|(of, on, ..)| *of == member && on == name);
            if own().count() <= MAX_OF_NAME {
                break;
            }
            let earlier = own().filter(|(_, _, address, _)| !fresh.iter().any(|(_, of)| of == address));
            let first = earlier.min_by_key(|(_, _, address, end)| (*end, *address)).cloned();
            self.0.retain(|known| Some(known) != first.as_ref());
        }
        let after = self.addresses(name);
        if before.keys().eq(after.keys()) { Changed::new() } else { [name.into()].into() }
    }

    fn expire(&mut self, now: u64, in_use: impl Fn(IpAddr) -> Option<bool>) -> Changed {
        let mut changed = Changed::new();
        self.0.sort_by(|(a, b, c, d), (e, f, g, h)| (d, b, c, a).cmp(&(h, f, g, e)));
        let mut at = 0;
        while let Some((_, name, address, _)) = self.0.get(at).cloned().filter(|(.., end)| *end <= now) {
            let is_last = self.0.iter().filter(|(_, of, known, _)| *of == name && *known == address).count() == 1;
            match (is_last, in_use(address)) {
                (true, None) => {}
                (true, Some(true)) => self.0[at].3 = now + 15_000,
                _ => {
                    self.0.remove(at);
                    changed.extend(is_last.then(|| Arc::from(name)));
                    continue;
                }
            }
            at += 1;
        }
        changed
    }

    fn sorted(&self) -> Vec<(&str, IpAddr, u64)> {
        let names: BTreeSet<&str> = self.0.iter().map(|(_, name, ..)| name.as_str()).collect();
        let of = |name| self.addresses(name).into_iter().map(move |(address, end)| (name, address, end));
        names.into_iter().flat_map(of).collect()
    }
}

#[derive(Debug, Clone)]
enum Act {
    /// Member, name, first address, count, seconds.
    Learn(u16, u8, u16, u16, u64),
    /// Milliseconds; of so many addresses, one is in use, one unknown.
    Expire(u64, u16),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..3_u16, 0..4_u8, 0..200_u16, 0..130_u16, 0..300_u64).prop_map(|(m, a, b, c, d)| Act::Learn(m, a, b, c, d)),
        1 => (0..100_000_u64, 2..5_u16).prop_map(|(passed, every)| Act::Expire(passed, every)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn does_what_a_list_would_do(acts in prop::collection::vec(act(), 0..24)) {
        let (mut cache, mut model, mut now) = (Cache::default(), Model::default(), 1_000_000);
        for act in acts {
            match act {
                Act::Learn(of, name, first, count, ttl) => {
                    let name = format!("n{name}");
                    let given: Vec<_> =
                        (first..first + count).map(|n| (ip(n % 190), secs(ttl + u64::from(n % 7)))).collect();
                    let changed = cache.learn(member(of), &name, given.clone(), now);
                    prop_assert_eq!(changed, model.learn(member(of), &name, &given, now));
                }
                Act::Expire(passed, every) => {
                    now += passed;
                    let in_use = |address| match address {
                        IpAddr::V4(ip) if u16::from(ip.octets()[3]) % every == 1 => None,
                        IpAddr::V4(ip) => Some(u16::from(ip.octets()[3]).is_multiple_of(every)),
                        IpAddr::V6(_) => None,
                    };
                    prop_assert_eq!(cache.expire(now, in_use), model.expire(now, in_use));
                }
            }
            prop_assert_eq!(cache.iter().collect::<Vec<_>>(), model.sorted());
            prop_assert_eq!(cache.len(), model.sorted().len());
            let mut claims = model.0.clone();
            claims.sort_unstable_by(|(a, b, c, _), (d, e, f, _)| (b, c, a).cmp(&(e, f, d)));
            let own = cache.claims.iter().map(|(claim, end)| (claim.member, claim.name.to_string(), claim.address, *end));
            prop_assert_eq!(own.collect::<Vec<_>>(), claims);
            let again = Cache::from_json(cache.to_json().expect("JSON"), now).expect("a cache");
            prop_assert_eq!(&again, &cache);
        }
    }
}
