//! Bandwidth limits of an endpoint.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};
/// Bits: 4 GiB, as in the CNI reference plugin.
const MAX_BURST: u64 = 8 << 32;
/// Placeholder bursts, bits: the largest 32-bit numbers (kubelet, containerd) and 4 GiB (CRI-O). CNI requires a burst
/// with a rate; these would not limit for minutes.
const NO_WISH: [u64; 3] = [i32::MAX as u64, u32::MAX as u64, u32::MAX as u64 * 8];
/// Milliseconds at the rate. TCP retransmits after up to 200 ms; the traffic until then must fit.
const DEFAULT_BURST_MS: u64 = 250;
/// Bits: two packets of 64 KiB, a container's largest.
const LEAST_DEFAULT_BURST: u64 = 2 * 64 * 1024 * 8;

/// Limit of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Limit {
    /// Bits per second.
    pub rate: NonZeroU64,
    /// Bits after a pause.
    pub burst: NonZeroU64,
}

/// Why a limit is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// A burst without a rate.
    #[error("a burst without a rate limits nothing; give the rate, or leave the burst out")]
    NoRate,
    /// The burst is too large.
    #[error("a burst of {0} bits is more than 4 GiB")]
    Burst(u64),
}

impl Limit {
    /// Limit from a rate and a burst, bits; 0 means none. The rate replaces a missing or placeholder burst.
    ///
    /// # Errors
    /// [`LimitError`].
    pub fn of(rate: u64, burst: u64) -> Result<Option<Self>, LimitError> {
        let wish = NonZeroU64::new(burst).filter(|burst| !NO_WISH.contains(&burst.get()));
        match (NonZeroU64::new(rate), wish) {
            (_, Some(burst)) if burst.get() > MAX_BURST => Err(LimitError::Burst(burst.get())),
            (Some(rate), Some(burst)) => Ok(Some(Self { rate, burst })),
            (Some(rate), None) => {
                let burst = rate.get() / 1_000 * DEFAULT_BURST_MS;
                let burst = NonZeroU64::new(burst.clamp(LEAST_DEFAULT_BURST, MAX_BURST)).unwrap_or(NonZeroU64::MIN);
                Ok(Some(Self { rate, burst }))
            }
            (None, None) if burst == 0 => Ok(None),
            (None, _) => Err(LimitError::NoRate),
        }
    }

    /// Nanoseconds to fill the burst, at least 1: a bucket of 0 would pass nothing.
    #[must_use]
    pub fn burst_ns(self) -> u64 {
        let ns = u128::from(self.burst.get()) * 1_000_000_000 / u128::from(self.rate.get());
        u64::try_from(ns).unwrap_or(u64::MAX).max(1)
    }
}

/// Limits of an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Toward the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<Limit>,
    /// From the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Limit>,
}

impl Bandwidth {
    /// True without limits.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MBIT: u64 = 1_000_000;

    fn limit(rate: u64, burst: u64) -> Option<(u64, u64)> {
        Limit::of(rate, burst).expect("a limit").map(|l| (l.rate.get(), l.burst.get()))
    }

    #[test]
    fn a_limit_is_what_was_asked_for_or_follows_from_the_rate() {
        assert_eq!(limit(0, 0), None);
        assert_eq!(limit(8 * MBIT, MBIT), Some((8 * MBIT, MBIT)));
        assert_eq!(limit(1, 1), Some((1, 1)));
        let by_default = limit(100 * MBIT, 0);
        assert_eq!(by_default, Some((100 * MBIT, 25 * MBIT)));
        for no_wish in [2_147_483_647, 4_294_967_295, 34_359_738_360] {
            assert_eq!(limit(100 * MBIT, no_wish), by_default, "{no_wish}");
        }
        assert_eq!(limit(1_000, 0), Some((1_000, LEAST_DEFAULT_BURST)));
        assert_eq!(limit(u64::MAX, 0), Some((u64::MAX, MAX_BURST)));
        assert_eq!(limit(1, MAX_BURST), Some((1, MAX_BURST)));
    }

    #[test]
    fn what_limits_nothing_or_too_late_is_refused() {
        assert_eq!(Limit::of(0, 1), Err(LimitError::NoRate));
        assert_eq!(Limit::of(0, 2_147_483_647), Err(LimitError::NoRate));
        assert_eq!(Limit::of(1, MAX_BURST + 1), Err(LimitError::Burst(MAX_BURST + 1)));
        assert_eq!(Limit::of(0, u64::MAX), Err(LimitError::Burst(u64::MAX)));
    }

    #[test]
    fn the_time_of_a_burst_neither_overflows_nor_is_lost() {
        let ns = |rate, burst| Limit::of(rate, burst).expect("valid").map(Limit::burst_ns);
        assert_eq!(ns(8 * MBIT, 2 * MBIT), Some(250_000_000));
        assert_eq!(ns(1, MAX_BURST), Some(u64::MAX));
        assert_eq!(ns(u64::MAX, 1), Some(1));
    }
}
