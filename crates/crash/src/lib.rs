//! Crash points, where tests kill Wharf between two side effects.
//!
//! A [`point`] separates two acts that outlive the process (a kernel object, a pin, a file, a commit). It acts only in
//! programs of the crash tests, which call [`arm`]; other programs do not link its code.
//!
//! - `WHARF_CRASH_POINT=NAME[:N]`: SIGKILL at the Nth pass (default 1) of the point.
//! - `WHARF_CRASH_FILE=FILE`: the same, read from the file at every point. The count starts when the text changes; an
//!   empty or missing file has no effect.
//! - `WHARF_CRASH_TRACE=FILE`: appends a line with the name of each passed point, from which the tests derive their
//!   points.
//! - `WHARF_HOLD_FILE=FILE`: a thread blocks at points that a line of the file names, as on a kernel or disk that does
//!   not answer. A [`hold`] only blocks.

use std::sync::OnceLock;

struct Armed {
    point: fn(&str),
    hold: fn(&str),
}

/// Set only by [`arm`], so the linker drops the code from other programs.
static ARMED: OnceLock<Armed> = OnceLock::new();

/// Arms this process. Only for the programs of the crash tests.
pub fn arm() {
    ARMED.get_or_init(|| Armed { point: armed::point, hold: armed::hold });
}

/// [`arm`] was called. For points whose names are costly to build.
#[inline]
#[must_use]
pub fn is_armed() -> bool {
    ARMED.get().is_some()
}

/// A point between two side effects, with a unique name `operation/where` in kebab-case: `create/after-lease`.
#[inline]
pub fn point(name: &str) {
    if let Some(armed) = ARMED.get() {
        (armed.point)(name);
    }
}

/// A place where a test may block the thread, named `room/what` in kebab-case.
#[inline]
pub fn hold(name: &str) {
    if let Some(armed) = ARMED.get() {
        (armed.hold)(name);
    }
}

mod armed {
    use std::{
        io::Write as _,
        sync::{
            LazyLock, Mutex, PoisonError,
            atomic::{AtomicU64, Ordering},
        },
    };

    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };

    struct Wish {
        name: String,
        left: AtomicU64,
    }

    static WISH: LazyLock<Option<Wish>> = LazyLock::new(|| {
        let text = std::env::var("WHARF_CRASH_POINT").ok()?;
        let (name, nth) = parse(&text)?;
        Some(Wish { name: name.to_owned(), left: AtomicU64::new(nth) })
    });

    static FILE: LazyLock<Option<std::path::PathBuf>> =
        LazyLock::new(|| std::env::var_os("WHARF_CRASH_FILE").map(Into::into));

    /// The file's text, and the remaining passes before the kill.
    static TOLD: Mutex<(String, u64)> = Mutex::new((String::new(), 0));

    /// `NAME` or `NAME:N`.
    fn parse(text: &str) -> Option<(&str, u64)> {
        match text.rsplit_once(':') {
            Some((name, nth)) => Some((name, nth.parse().ok()?)),
            None => Some((text, 1)),
        }
    }

    fn is_told(name: &str) -> bool {
        let Some(path) = &*FILE else { return false };
        // Held during the read, so that all threads see the texts in one order.
        let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let Some((wanted, nth)) = parse(text.trim()) else { return false };
        if told.0 != text {
            *told = (text.clone(), nth);
        }
        if wanted != name || told.1 == 0 {
            return false;
        }
        told.1 -= 1;
        told.1 == 0
    }

    fn end() {
        // If this fails, the test detects the live process.
        kill(Pid::this(), Signal::SIGKILL).ok();
        std::thread::sleep(std::time::Duration::from_secs(60));
    }

    static TRACE: LazyLock<Option<std::path::PathBuf>> =
        LazyLock::new(|| std::env::var_os("WHARF_CRASH_TRACE").map(Into::into));

    static HOLD: LazyLock<Option<std::path::PathBuf>> =
        LazyLock::new(|| std::env::var_os("WHARF_HOLD_FILE").map(Into::into));

    pub(crate) fn hold(name: &str) {
        let Some(path) = &*HOLD else { return };
        while std::fs::read_to_string(path).is_ok_and(|text| text.lines().any(|line| line.trim() == name)) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[allow(clippy::panic, reason = "a trace that is not written would make the crash tests miss points")]
    pub(crate) fn point(name: &str) {
        if let Some(path) = &*TRACE {
            // Opened each time and appended in one write: processes and threads share the file.
            let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
            if let Err(error) = opened.and_then(|mut f| f.write_all(format!("{name}\n").as_bytes())) {
                panic!("trace crash point {name} to {}: {error}", path.display());
            }
        }
        hold(name);
        if is_told(name) {
            end();
        }
        let Some(wish) = &*WISH else { return };
        if wish.name == name && wish.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            end();
        }
    }
}
