//! Asking again when the agent says that it is too busy.

use std::{
    hash::{BuildHasher, RandomState},
    time::{Duration, Instant},
};

use wharf_api::client::ClientError;

use crate::log::Level;

/// Shortest wait before asking again.
const MIN_WAIT: Duration = Duration::from_millis(20);
/// Longest wait, also when the agent asks for more: within a deadline of a minute that still leaves several tries.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Statuses that mean "not now": too many requests, service unavailable.
const NOT_NOW: [u16; 2] = [429, 503];

/// Calls `ask` with the time that is left until it answers otherwise than "not now", or the next wait would pass the
/// deadline.
pub(crate) async fn until<T>(
    deadline: Instant,
    log: Level,
    mut ask: impl AsyncFnMut(Duration) -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    let mut tries = 0;
    loop {
        let error = match ask(deadline.saturating_duration_since(Instant::now())).await {
            Err(error) => error,
            answer => return answer,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(wait) = wait_after(&error, tries, jitter()).filter(|wait| *wait < left) else {
            return Err(error);
        };
        log.say(Level::Info, format_args!("{error}; asking again in {} ms", wait.as_millis()));
        tokio::time::sleep(wait).await;
        // On a busy machine a sleep may last too long. The agent's answer then says more than a call without time would.
        if Instant::now() >= deadline {
            return Err(error);
        }
        tries = tries.saturating_add(1);
    }
}

/// How long to wait before asking again; none when asking again is no use. The agent's own wish, and at least a wait
/// that doubles, so that a crowd of shims thins out; up to half of it more by `jitter` (0 to 255), so that they do not
/// come back together.
fn wait_after(error: &ClientError, tries: u32, jitter: u8) -> Option<Duration> {
    let ClientError::Api { status, .. } = error else { return None };
    if !NOT_NOW.contains(status) {
        return None;
    }
    let asked = error.retry_after()?;
    let doubled = MIN_WAIT.saturating_mul(2_u32.saturating_pow(tries));
    let wait = asked.max(doubled).min(MAX_WAIT);
    Some(wait.saturating_add(wait.saturating_mul(u32::from(jitter)) / 512))
}

/// A random byte. The standard library seeds its hash maps from the kernel, which is random enough for this.
fn jitter() -> u8 {
    let [byte, ..] = RandomState::new().hash_one(0_u8).to_le_bytes();
    byte
}

#[cfg(test)]
mod tests {
    use wharf_api::{ApiError, ErrorCode};

    use super::*;

    fn error(status: u16, retry_after_ms: Option<u64>) -> ClientError {
        let error = ApiError { code: ErrorCode::Overloaded, message: "full".into(), hint: None, retry_after_ms };
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
        let answer: Result<(), _> = runtime.block_on(until(deadline, Level::Error, async |left| {
            assert!(!left.is_zero(), "asked without time to answer");
            tries += 1;
            Err(error(429, Some(10)))
        }));
        assert!(answer.is_err_and(|e| e.code() == Some(ErrorCode::Overloaded)), "the agent's own answer is told");
        // Waits double from 20 ms on, so a second holds six tries.
        assert!((2..=6).contains(&tries), "{tries} tries");
    }
}
