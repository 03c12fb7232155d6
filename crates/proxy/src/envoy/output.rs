//! Copies Envoy's output into the agent's log.

use std::{os::fd::OwnedFd, time::Duration};

use tokio::{io::AsyncReadExt, net::unix::pipe, time::Instant};

const LINES: u32 = 50;
const SECOND: Duration = Duration::from_secs(1);
/// Maximum bytes of a line.
const LENGTH: usize = 2048;

/// Logs until the writers close; returns the last line.
pub(super) async fn log(output: OwnedFd, pid: u32) -> Option<String> {
    let mut output = match pipe::Receiver::from_owned_fd(output) {
        Ok(output) => output,
        Err(error) => {
            tracing::warn!(%error, pid, "cannot read what Envoy prints");
            return None;
        }
    };
    let (mut buffer, mut line, mut gate) = ([0; 4096], Vec::new(), Gate::new());
    let mut last = None;
    while let Ok(length @ 1..) = output.read(&mut buffer).await {
        for byte in buffer.iter().take(length) {
            if *byte != b'\n' {
                if line.len() < LENGTH {
                    line.push(*byte);
                }
                continue;
            }
            let text = String::from_utf8_lossy(&line).trim().to_owned();
            line.clear();
            if text.is_empty() {
                continue;
            }
            if gate.opens(Instant::now()) {
                tracing::warn!(pid, "Envoy: {text}");
            }
            last = Some(text);
        }
    }
    last
}

#[derive(Debug)]
struct Gate {
    since: Instant,
    passed: u32,
    held: u64,
}

impl Gate {
    fn new() -> Self {
        Self { since: Instant::now(), passed: 0, held: 0 }
    }

    fn opens(&mut self, now: Instant) -> bool {
        if now.duration_since(self.since) >= SECOND {
            if self.held > 0 {
                tracing::warn!(lines = self.held, "Envoy printed more than is logged");
            }
            *self = Self { since: now, passed: 0, held: 0 };
        }
        if self.passed < LINES {
            self.passed += 1;
            return true;
        }
        self.held = self.held.saturating_add(1);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_so_many_lines() {
        let mut gate = Gate::new();
        let now = gate.since;
        let passed = (0..1000).filter(|_| gate.opens(now)).count();
        assert_eq!(passed, 50);
        assert!(gate.opens(now + SECOND), "the next second");
        assert_eq!(gate.held, 0);
    }
}
