//! Retries while the agent is busy or absent.

use std::{
    hash::{BuildHasher, RandomState},
    time::{Duration, Instant},
};

use wharf_api::client::ClientError;

use crate::log::Level;

const MIN_WAIT: Duration = Duration::from_millis(20);
/// Leaves several attempts in a minute.
const MAX_WAIT: Duration = Duration::from_secs(5);
const LONG_WAIT: Duration = Duration::from_secs(1);
/// Without jitter; short, to find a returned agent soon.
const MAX_ABSENT_WAIT: Duration = Duration::from_millis(130);
/// Too many requests, service unavailable.
pub(crate) const NOT_NOW: [u16; 2] = [429, 503];

/// For an absent agent; a restart takes one or two seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Absence {
    /// Zero means none.
    pub(crate) patience: Duration,
    /// The agent is absent and a retry is safe.
    pub(crate) shows: fn(&ClientError) -> bool,
}

impl Absence {
    pub(crate) const FINAL: Self = Self { patience: Duration::ZERO, shows: |_| false };
}

/// Retries `ask`, which gets the remaining time, while the agent is busy or absent.
pub(crate) async fn until<T>(
    deadline: Instant,
    absence: Absence,
    log: Level,
    mut ask: impl AsyncFnMut(Duration) -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    let mut tries: u32 = 0;
    let mut absent = Streak::default();
    loop {
        let error = match ask(deadline.saturating_duration_since(Instant::now())).await {
            Err(error) => error,
            answer => return answer,
        };
        let now = Instant::now();
        let left = deadline.saturating_duration_since(now);
        let (wait, left) = if (absence.shows)(&error) {
            let (since, tries) = absent.again(now);
            if tries == 0 && !absence.patience.is_zero() {
                let patience = absence.patience.as_millis();
                log.say(Level::Info, format_args!("{error}; waiting up to {patience} ms for it"));
            }
            let patience = absence.patience.saturating_sub(now.saturating_duration_since(since));
            (Some(spread(doubled(tries).min(MAX_ABSENT_WAIT), jitter())), patience.min(left))
        } else {
            absent = Streak::default();
            let before = tries;
            tries = before.saturating_add(1);
            let wait = wait_after(&error, before, jitter()).filter(|wait| *wait < left);
            if let Some(wait) = wait {
                let level = if wait >= LONG_WAIT { Level::Warn } else { Level::Info };
                log.say(level, format_args!("{error}; asking again in {} ms", wait.as_millis()));
            }
            (wait, left)
        };
        let Some(wait) = wait.filter(|wait| *wait < left) else { return Err(error) };
        tokio::time::sleep(wait).await;
        // A sleep may be late.
        if Instant::now() >= deadline {
            return Err(error);
        }
    }
}

#[derive(Default)]
struct Streak {
    began: Option<Instant>,
    length: u32,
}

impl Streak {
    fn again(&mut self, now: Instant) -> (Instant, u32) {
        let before = self.length;
        self.length = before.saturating_add(1);
        (*self.began.get_or_insert(now), before)
    }
}

/// The longer of the agent's retry delay and an exponential backoff with jitter (shims must not retry together); `None`
/// when a retry is useless.
fn wait_after(error: &ClientError, tries: u32, jitter: u8) -> Option<Duration> {
    let ClientError::Api { status, .. } = error else { return None };
    if !NOT_NOW.contains(status) {
        return None;
    }
    Some(spread(error.retry_after()?.max(doubled(tries)).min(MAX_WAIT), jitter))
}

fn doubled(tries: u32) -> Duration {
    MIN_WAIT.saturating_mul(2_u32.saturating_pow(tries))
}

fn spread(wait: Duration, jitter: u8) -> Duration {
    wait.saturating_add(wait.saturating_mul(u32::from(jitter)) / 512)
}

/// The kernel seeds `RandomState`.
fn jitter() -> u8 {
    let [byte, ..] = RandomState::new().hash_one(0_u8).to_le_bytes();
    byte
}

#[cfg(test)]
mod tests {
    use wharf_api::{ApiError, ErrorCode};

    use super::*;

    fn error(status: u16, retry_after_ms: Option<u64>) -> ClientError {
        let error = ApiError {
            code: ErrorCode::Overloaded,
            message: "full".into(),
            hint: None,
            retry_after_ms,
            cni_code: None,
            op: None,
        };
        ClientError::Api { operation: "PUT /".into(), status, error }
    }

    #[test]
    fn waits_grow_hold_the_agents_wish_and_stay_bounded() {
        let wait = |tries, ms, jitter| wait_after(&error(429, Some(ms)), tries, jitter).unwrap().as_millis();
        assert_eq!(wait(0, 0, 0), 20);
        assert_eq!(wait(3, 0, 0), 160);
        assert_eq!(wait(0, 1000, 0), 1000);
        assert_eq!(wait(u32::MAX, u64::MAX, 0), 5000);
        assert!((6000..7500).contains(&wait(0, 5000, 200)));
    }

    #[test]
    fn only_not_now_is_asked_again() {
        assert!(wait_after(&error(503, Some(1)), 0, 0).is_some());
        assert!(wait_after(&error(429, None), 0, 0).is_none());
        assert!(wait_after(&error(409, Some(1)), 0, 0).is_none());
        let closed = ClientError::Closed { operation: "PUT /".into(), reason: "gone".into() };
        assert!(
            wait_after(&closed, 0, 0).is_none(),
            "what the agent did is not known, so asking again is the runtime's"
        );
    }

    #[test]
    fn the_deadline_ends_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut tries = 0;
        let deadline = Instant::now() + Duration::from_secs(1);
        let answer: Result<(), _> = runtime.block_on(until(deadline, Absence::FINAL, Level::Error, async |left| {
            assert!(!left.is_zero(), "asked without time to answer");
            tries += 1;
            Err(error(429, Some(10)))
        }));
        assert!(answer.is_err_and(|e| e.code() == Some(ErrorCode::Overloaded)), "the agent's own answer is told");
        assert!((2..=6).contains(&tries), "{tries} tries");
    }

    fn absent() -> ClientError {
        ClientError::Connect { socket: "/s".into(), cause: std::io::ErrorKind::NotFound.into() }
    }

    fn calls(patience: Duration, answers: &[fn() -> Result<(), ClientError>]) -> (Result<(), ClientError>, usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let absence = Absence { patience, shows: |e| matches!(e, ClientError::Connect { .. }) };
        let mut made = 0;
        let answer =
            runtime.block_on(until(Instant::now() + Duration::from_secs(600), absence, Level::Error, async |_| {
                made += 1;
                answers[(made - 1).min(answers.len() - 1)]()
            }));
        (answer, made)
    }

    #[test]
    fn an_absent_agent_is_waited_for_as_long_as_patience_lasts() {
        let (answer, made) = calls(Duration::from_secs(600), &[|| Err(absent()), || Err(absent()), || Ok(())]);
        assert!(answer.is_ok() && made == 3, "{answer:?} after {made}");
        let (answer, made) = calls(Duration::ZERO, &[|| Err(absent())]);
        assert!(matches!(answer, Err(ClientError::Connect { .. })) && made == 1, "{answer:?} after {made}");
        // Waits at least 20, 40, 80 and 130 ms.
        let (answer, made) = calls(Duration::from_millis(300), &[|| Err(absent())]);
        assert!(answer.is_err() && (2..=5).contains(&made), "{made}");
    }

    #[test]
    fn an_agent_that_was_there_in_between_is_waited_for_anew() {
        let answers: [fn() -> Result<(), ClientError>; 4] =
            [|| Err(absent()), || Err(error(429, Some(1))), || Err(absent()), || Ok(())];
        let (answer, made) = calls(Duration::from_secs(600), &answers);
        assert!(answer.is_ok() && made == 4, "{answer:?} after {made}");
        let mut streak = Streak::default();
        let start = Instant::now();
        assert_eq!(streak.again(start), (start, 0));
        assert_eq!(streak.again(start + Duration::from_secs(1)), (start, 1));
    }

    #[test]
    fn waits_for_an_absent_agent_stay_within_their_bounds() {
        for (tries, jitter) in [(0, 0), (0, 255), (9, 0), (u32::MAX, 255)] {
            let wait = spread(doubled(tries).min(MAX_ABSENT_WAIT), jitter);
            assert!((MIN_WAIT..=Duration::from_millis(200)).contains(&wait), "{wait:?}");
        }
    }
}
