//! The rows of a kind: accepted, refused, in force.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    Changed, Count, Key, Limits, Refusal,
    claims::{Claim, Claims, Conflict, Standing},
    rows::{FeedRow, MAX_KEY, clip},
};

/// Bytes of a cause.
const MAX_CAUSE: usize = 1_024;
/// Bytes of a cause beyond [`Limits::bytes`].
const MAX_CAUSE_BEYOND: usize = 64;
/// Refusals of a kind without an earlier row.
const MAX_REFUSED: usize = 16_384;

#[derive(Debug, Clone)]
struct Refused {
    name: String,
    why: String,
    /// Put in this snapshot or later.
    confirmed: bool,
}

#[derive(Debug, Clone)]
struct Entry<R> {
    row: Option<Arc<R>>,
    /// The end of the snapshot keeps the entry.
    confirmed: bool,
    /// Newer than `row`.
    refused: Option<Box<Refused>>,
}

impl<R: FeedRow> Entry<R> {
    fn is_confirmed_row(&self) -> bool {
        self.confirmed && self.row.is_some()
    }

    fn standing(&self) -> Standing {
        match (self.confirmed, &self.refused) {
            (true, None) => Standing::Confirmed,
            (true, Some(_)) => Standing::Stale,
            (false, _) => Standing::Unconfirmed,
        }
    }

    fn size(&self) -> usize {
        let refused = self.refused.as_ref().map_or(0, |refused| refused.name.len() + refused.why.len());
        self.row.as_ref().map_or(0, |row| row.size()) + refused
    }

    fn claimed(&self) -> usize {
        self.row.as_ref().map_or(0, |row| row.claims().len())
    }

    fn claims(&self, key: &Arc<str>) -> Vec<Claim> {
        let claim = |net| Claim { net, standing: self.standing(), key: Arc::clone(key) };
        self.row.iter().flat_map(|row| row.claims()).map(claim).collect()
    }

    fn unconfirm(&mut self) {
        self.confirmed = false;
        if let Some(refused) = &mut self.refused {
            refused.confirmed = false;
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Table<R> {
    limit: usize,
    most_bytes: usize,
    most_claims: usize,
    entries: BTreeMap<Arc<str>, Entry<R>>,
    in_force: BTreeMap<Arc<str>, Arc<R>>,
    claims: Claims,
    /// Entries with a refusal, or with a row that is not wholly in force.
    listed: BTreeSet<Arc<str>>,
    /// Rows in force at the last [`Table::take`], by changed key.
    before: BTreeMap<Arc<str>, Option<Arc<R>>>,
    confirmed: usize,
    without_row: usize,
    bytes: usize,
    claimed: usize,
}

pub(super) trait Rows {
    /// Removes a row and its refusal: now, or at the end of the snapshot.
    fn delete(&mut self, key: &str, at_once: bool);

    /// Begins a snapshot: rows stay in force, unconfirmed.
    fn unconfirm(&mut self);

    /// Ends a snapshot: removes unconfirmed rows and refusals.
    fn sweep(&mut self);

    fn count(&self) -> Count;

    fn refused(&self) -> Box<dyn Iterator<Item = Refusal> + '_>;
}

impl<R: FeedRow> Table<R> {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            limit: limits.rows(R::KIND),
            most_bytes: limits.bytes,
            most_claims: limits.claims(R::KIND),
            entries: BTreeMap::new(),
            in_force: BTreeMap::new(),
            claims: Claims::default(),
            listed: BTreeSet::new(),
            before: BTreeMap::new(),
            confirmed: 0,
            without_row: 0,
            bytes: 0,
            claimed: 0,
        }
    }

    /// Puts the valid rows in force, unconfirmed.
    pub(super) fn restore(&mut self, rows: Vec<Arc<R>>, limits: &Limits) {
        for row in rows {
            let has_place = self.entries.len() < self.most_rows() && self.is_beyond(0, 0, &row).is_none();
            if has_place && row.check(limits).is_ok() {
                let key = row.shared_key();
                let entry = Entry { row: Some(row.normalized()), confirmed: false, refused: None };
                self.bytes += entry.size();
                self.claimed += entry.claimed();
                if let Some(old) = self.entries.insert(key, entry) {
                    self.bytes -= old.size();
                    self.claimed -= old.claimed();
                }
            }
        }
        // In bulk, without a look at the neighbours of each claim.
        self.claims = self.entries.iter().flat_map(|(key, entry)| entry.claims(key)).collect();
        for key in self.entries.keys().cloned().collect::<Vec<_>>() {
            self.resolve(&key);
        }
    }

    /// Accepts a row, or keeps its refusal. `unreadable`: the caller's cause.
    pub(super) fn put(&mut self, mut row: R, unreadable: Option<String>, limits: &Limits) -> Result<(), Refusal> {
        let text = clip(row.key(), MAX_KEY);
        let old = self.entries.get_key_value(text.as_str());
        let (key, old) = match old {
            Some((key, entry)) => (Arc::clone(key), Some(entry.clone())),
            None => (Arc::from(text.as_str()), None),
        };
        let is_known = old.is_some();
        let is_counted = old.as_ref().is_some_and(Entry::is_confirmed_row);
        let old_size = old.as_ref().map_or(0, Entry::size);
        let old_row = old.and_then(|old| old.row);
        let has_place = old_row.is_some() || self.entries.len() - self.without_row < self.most_rows();
        let fits = is_counted || (self.confirmed < self.limit && has_place);
        let mut checked = unreadable
            .map_or_else(|| row.check(limits), |why| Err(clip(&why, MAX_CAUSE).replace(char::is_control, " ")));
        if checked.is_ok() && !fits {
            checked = Err(format!("{} rows of this kind are the limit", self.limit));
        }
        let old_claims = old_row.as_ref().map_or(0, |row| row.claims().len());
        if checked.is_ok()
            && let Some(why) = self.is_beyond(old_size, old_claims, &row)
        {
            checked = Err(why);
        }
        let Err(why) = checked else {
            row.share_key(&key);
            let row = Arc::new(row).normalized();
            let row = old_row.filter(|old| *old == row).unwrap_or(row);
            self.replace(&key, Some(Entry { row: Some(row), confirmed: true, refused: None }));
            return Ok(());
        };
        let name = row.shown();
        if is_known || self.without_row < self.most_refused() {
            // A row beyond the limit ends with the snapshot, but its refusal stays.
            let confirmed = fits || old_row.is_none();
            let most = if self.bytes < self.most_bytes { MAX_CAUSE } else { MAX_CAUSE_BEYOND };
            let refused = Some(Box::new(Refused { name: name.clone(), why: clip(&why, most), confirmed: true }));
            self.replace(&key, Some(Entry { row: old_row, confirmed, refused }));
        }
        let stale = self.in_force.contains_key(&key);
        Err(Refusal { key: Key { kind: R::KIND, key: text }, name, why, stale, conflict: false })
    }

    /// Changes of the rows in force since the last call; `None`: removed.
    pub(super) fn take(&mut self) -> Changed<R> {
        let changed = std::mem::take(&mut self.before).into_keys();
        changed.map(|key| (Arc::clone(&key), self.in_force.get(&key).cloned())).collect()
    }

    pub(super) fn in_force(&self) -> impl Iterator<Item = &Arc<R>> {
        self.in_force.values()
    }

    pub(super) fn get(&self, key: &str) -> Option<&Arc<R>> {
        self.in_force.get(key)
    }

    /// Listed keys without a row in force.
    pub(super) fn refused_alone(&self) -> impl Iterator<Item = &Arc<str>> {
        self.listed.iter().filter(|key| !self.in_force.contains_key(*key))
    }

    /// The row with the best claim to this CIDR; it may be in conflict.
    pub(super) fn claimant(&self, net: IpNet) -> Option<&Arc<R>> {
        self.get(&self.claims.first(net)?.key)
    }

    /// Twice the limit, for a snapshot that replaces all.
    fn most_rows(&self) -> usize {
        self.limit.saturating_mul(2)
    }

    /// Why the row does not fit in place of another.
    fn is_beyond(&self, old_size: usize, old_claims: usize, row: &R) -> Option<String> {
        let Self { bytes, most_bytes, claimed, most_claims, .. } = self;
        if bytes - old_size + row.size() > *most_bytes {
            return Some(format!("the rows of this kind have {most_bytes} bytes, which is the limit"));
        }
        let is_beyond = claimed - old_claims + row.claims().len() > *most_claims;
        is_beyond.then(|| format!("the rows of this kind have {most_claims} addresses, which is the limit"))
    }

    fn most_refused(&self) -> usize {
        self.limit.min(MAX_REFUSED)
    }

    /// Replaces an entry, and resolves the rows that share its claims.
    fn replace(&mut self, key: &Arc<str>, new: Option<Entry<R>>) {
        let mut old_claims = Vec::new();
        if let Some(old) = self.entries.remove(key) {
            self.confirmed -= usize::from(old.is_confirmed_row());
            self.without_row -= usize::from(old.row.is_none());
            self.bytes -= old.size();
            old_claims = old.claims(key);
        }
        let mut new_claims = Vec::new();
        if let Some(new) = new {
            self.confirmed += usize::from(new.is_confirmed_row());
            self.without_row += usize::from(new.row.is_none());
            self.bytes += new.size();
            new_claims = new.claims(key);
            self.entries.insert(Arc::clone(key), new);
        }
        self.claimed = self.claimed + new_claims.len() - old_claims.len();
        let mut touched = BTreeSet::from([Arc::clone(key)]);
        if old_claims != new_claims {
            for claim in &old_claims {
                self.claims.remove(claim, &mut touched);
            }
            for claim in new_claims {
                self.claims.insert(claim, &mut touched);
            }
        }
        for key in touched {
            self.resolve(&key);
        }
    }

    /// Puts an entry's owned parts in force.
    fn resolve(&mut self, key: &Arc<str>) {
        let mut now = None;
        let mut is_listed = false;
        if let Some(entry) = self.entries.get(key) {
            is_listed = entry.refused.is_some();
            if let Some(row) = &entry.row {
                let owns = |net: &IpNet| self.claims.blocker(*net, entry.standing(), key).is_none();
                let is_whole = row.claims().iter().all(owns);
                now = if is_whole { Some(Arc::clone(row)) } else { row.reduced(&owns).map(Arc::new) };
                is_listed |= !is_whole;
            }
        }
        if is_listed {
            self.listed.insert(Arc::clone(key));
        } else {
            self.listed.remove(key);
        }
        let before = match &now {
            Some(row) => self.in_force.insert(Arc::clone(key), Arc::clone(row)),
            None => self.in_force.remove(key),
        };
        if before != now {
            let is_as_taken = *self.before.entry(Arc::clone(key)).or_insert(before) == now;
            if is_as_taken {
                self.before.remove(key);
            }
        }
    }

    fn refusal(&self, key: &str) -> Option<Refusal> {
        let entry = self.entries.get(key)?;
        let (name, why, conflict): (_, String, _) = match (&entry.refused, &entry.row) {
            (Some(refused), _) => (refused.name.clone(), refused.why.clone(), false),
            (None, Some(row)) if entry.confirmed => (row.shown(), clip(&self.conflicts(key, row), MAX_CAUSE), true),
            _ => return None,
        };
        let stale = !conflict && self.in_force.contains_key(key);
        Some(Refusal { key: Key { kind: R::KIND, key: key.to_owned() }, name, why, stale, conflict })
    }

    fn conflicts(&self, key: &str, row: &R) -> String {
        let text = |Conflict { net, other, owner, .. }: Conflict| {
            if other == net {
                format!("{} is claimed by {} {owner}, too", shown(net), R::KIND)
            } else {
                format!("{} overlaps {} of {} {owner}", shown(net), shown(other), R::KIND)
            }
        };
        self.conflicts_of(key, row).map(text).collect::<Vec<String>>().join("; ")
    }

    fn conflicts_of(&self, key: &str, row: &R) -> impl Iterator<Item = Conflict> {
        row.claims().into_iter().filter_map(move |net| {
            let other = self.claims.blocker(net, Standing::Confirmed, key)?;
            let owner = self.entries.get(&other.key)?.row.as_ref()?.shown();
            Some(Conflict { row: row.shown(), net, owner, other: other.net })
        })
    }

    /// Claims to this address that another row prevents.
    pub(super) fn conflicts_at(&self, ip: IpAddr) -> impl Iterator<Item = Conflict> {
        let listed = self.listed.iter().filter_map(|key| Some((key, self.entries.get(key)?.row.as_ref()?)));
        listed.flat_map(|(key, row)| self.conflicts_of(key, row)).filter(move |conflict| conflict.net.contains(&ip))
    }
}

impl<R: FeedRow> Rows for Table<R> {
    fn delete(&mut self, key: &str, at_once: bool) {
        let Some((key, entry)) = self.entries.get_key_value(clip(key, MAX_KEY).as_str()) else { return };
        let (key, mut entry) = (Arc::clone(key), entry.clone());
        entry.unconfirm();
        self.replace(&key, (!at_once).then_some(entry));
    }

    /// Drops claims that are not in force: with one standing for all rows, they would block claims in force.
    fn unconfirm(&mut self) {
        let Self { entries, in_force, claims, listed, .. } = self;
        listed.clear();
        entries.retain(|key, entry| {
            entry.row = in_force.get(key).cloned();
            entry.unconfirm();
            if entry.refused.is_some() {
                listed.insert(Arc::clone(key));
            }
            entry.row.is_some() || entry.refused.is_some()
        });
        *claims = entries.iter().flat_map(|(key, entry)| entry.claims(key)).collect();
        self.confirmed = 0;
        self.without_row = self.entries.values().filter(|entry| entry.row.is_none()).count();
        self.bytes = self.entries.values().map(Entry::size).sum();
        self.claimed = self.entries.values().map(Entry::claimed).sum();
    }

    fn sweep(&mut self) {
        let unconfirmed = self.entries.iter().filter(|(_, entry)| !entry.confirmed);
        let ended = unconfirmed.map(|(key, entry)| {
            let refused = entry.refused.clone().filter(|refused| refused.confirmed);
            (Arc::clone(key), refused)
        });
        let (gone, refused): (Vec<_>, Vec<_>) = ended.partition(|(_, refused)| refused.is_none());
        for (key, refused) in gone.into_iter().chain(refused) {
            let refused = refused.filter(|_| self.without_row < self.most_refused());
            self.replace(&key, refused.map(|refused| Entry { row: None, confirmed: true, refused: Some(refused) }));
        }
    }

    fn count(&self) -> Count {
        let mut count = Count { in_force: self.in_force.len(), ..Count::default() };
        for (key, entry) in self.listed.iter().filter_map(|key| self.entries.get_key_value(key)) {
            let is_refused = entry.refused.is_some();
            count.refused += usize::from(is_refused);
            count.stale += usize::from(is_refused && self.in_force.contains_key(key));
            count.conflicts += usize::from(!is_refused && entry.confirmed);
        }
        count
    }

    fn refused(&self) -> Box<dyn Iterator<Item = Refusal> + '_> {
        Box::new(self.listed.iter().filter_map(move |key| self.refusal(key)))
    }
}

fn shown(net: IpNet) -> String {
    if net.prefix_len() == net.max_prefix_len() { net.addr().to_string() } else { net.to_string() }
}
