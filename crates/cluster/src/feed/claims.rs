//! Claims of rows to addresses (CIDRs of full length) and CIDRs.
//!
//! A row owns a claim unless another row of the same or a better standing has an overlapping one.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter::successors,
    sync::Arc,
};

use ipnet::IpNet;

/// How current a row is, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Standing {
    /// Put since the snapshot began.
    Confirmed,
    /// An update since the snapshot began was refused.
    Stale,
    /// Not put since the snapshot began, or deleted.
    Unconfirmed,
    /// Above every claim's standing; only in bounds of ranges.
    Bound,
}

/// A CIDR sorts directly before the CIDRs in it, and the best claim to a CIDR first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim {
    /// Without host bits.
    pub(super) net: IpNet,
    pub(super) standing: Standing,
    pub(super) key: Arc<str>,
}

impl Claim {
    fn bound(net: IpNet, standing: Standing) -> Self {
        Self { net, standing, key: Arc::default() }
    }
}

/// A claim that another row's overlapping claim prevents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Name of the row, as in [`Refusal::name`](super::Refusal::name).
    pub row: String,
    pub net: IpNet,
    /// Name of the other row.
    pub owner: String,
    /// Its claim.
    pub other: IpNet,
}

/// The claims of a kind. A row's CIDRs do not overlap.
#[derive(Debug, Clone, Default)]
pub(super) struct Claims {
    claims: BTreeSet<Claim>,
    /// Counts by family and prefix length.
    lengths: BTreeMap<(bool, u8), usize>,
}

impl FromIterator<Claim> for Claims {
    fn from_iter<I: IntoIterator<Item = Claim>>(claims: I) -> Self {
        let claims: BTreeSet<Claim> = claims.into_iter().collect();
        let mut lengths = BTreeMap::new();
        for claim in &claims {
            *lengths.entry(length_of(claim.net)).or_default() += 1;
        }
        Self { claims, lengths }
    }
}

impl Claims {
    /// Adds rows that may lose a claim to `touched`.
    pub(super) fn insert(&mut self, claim: Claim, touched: &mut BTreeSet<Arc<str>>) {
        self.touch(&claim, touched);
        let length = length_of(claim.net);
        if self.claims.insert(claim) {
            *self.lengths.entry(length).or_default() += 1;
        }
    }

    /// Adds rows that may win a claim to `touched`.
    pub(super) fn remove(&mut self, claim: &Claim, touched: &mut BTreeSet<Arc<str>>) {
        let length = length_of(claim.net);
        if self.claims.remove(claim)
            && let Some(count) = self.lengths.get_mut(&length)
        {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.lengths.remove(&length);
            }
        }
        self.touch(claim, touched);
    }

    /// The best claim to exactly this CIDR, which only its row can own.
    pub(super) fn first(&self, net: IpNet) -> Option<&Claim> {
        self.claims_to(net).next()
    }

    /// A claim that prevents the row from owning the CIDR.
    pub(super) fn blocker(&self, net: IpNet, standing: Standing, key: &str) -> Option<&Claim> {
        // Another row's best claim is first or second.
        let best = |net| self.claims_to(net).take(2).find(|claim| &*claim.key != key);
        self.overlapping(net).filter_map(|first| best(first.net)).find(|claim| claim.standing <= standing)
    }

    fn touch(&self, claim: &Claim, touched: &mut BTreeSet<Arc<str>>) {
        let is_as_good = |other: &&Claim| other.standing <= claim.standing;
        // Two equal claims of at least this standing block the same rows already. This bounds the cost of many equal
        // claims.
        if self.claims_to(claim.net).take_while(is_as_good).nth(1).is_none() {
            touched.extend(self.overlapping(claim.net).map(|first| Arc::clone(&first.key)));
        }
    }

    /// Best first.
    fn claims_to(&self, net: IpNet) -> impl Iterator<Item = &Claim> {
        let claims = self.claims.range(Claim::bound(net, Standing::Confirmed)..);
        claims.take_while(move |claim| claim.net == net)
    }

    /// The best claim to each CIDR that contains, equals or is in `net`.
    fn overlapping(&self, net: IpNet) -> impl Iterator<Item = &Claim> {
        let (family, length) = length_of(net);
        let shorter = self.lengths.range((family, 0)..(family, length));
        let around = shorter.filter_map(move |(&(_, length), _)| {
            let around = IpNet::new(net.addr(), length).ok()?;
            self.first(around.trunc())
        });
        let next = move |net: IpNet, from: Standing| self.claims.range(Claim::bound(net, from)..).next();
        let inside = successors(next(net, Standing::Confirmed), move |claim| next(claim.net, Standing::Bound));
        around.chain(inside.take_while(move |claim| net.contains(&claim.net)))
    }
}

fn length_of(net: IpNet) -> (bool, u8) {
    (net.addr().is_ipv4(), net.prefix_len())
}
