//! A command's pseudoterminal, connected to this process's standard input and output.

use std::{
    io::{self, IsTerminal as _, Write as _},
    os::fd::{AsFd as _, OwnedFd},
    sync::{Arc, Weak},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, ioctl_fionbio, read, write},
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize},
};

use crate::command::{Handle, Started};

const CHUNK: usize = 4096;
/// VEOF (termios(3)).
const END_OF_INPUT: u8 = 4;
/// Reads after the command's end; more than the terminal's buffer.
const LAST_READS: usize = 16;

/// A new pseudoterminal.
#[derive(Debug)]
pub struct Terminal {
    /// This process's end.
    control: OwnedFd,
    command: Arc<OwnedFd>,
}

impl Terminal {
    /// Copies size and modes of this process's terminal, if any.
    pub fn open() -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let control = openpt(flags)?;
        grantpt(&control)?;
        unlockpt(&control)?;
        let command = ioctl_tiocgptpeer(&control, flags)?;
        if io::stdin().is_terminal() {
            tcsetattr(&command, OptionalActions::Now, &tcgetattr(io::stdin())?)?;
        }
        resize(&control)?;
        ioctl_fionbio(&control, true)?;
        Ok(Self { control, command: Arc::new(command) })
    }

    /// The command's end.
    #[must_use]
    pub fn command_end(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.command)
    }

    /// Connects to a command on the terminal. `input`: forwards standard input.
    pub fn join(self, started: Started, input: bool) -> io::Result<Session> {
        Ok(Session { handle: started.handle()?, control: Arc::new(self.control), started, input })
    }
}

/// A command on a terminal.
#[derive(Debug)]
pub struct Session {
    control: Arc<OwnedFd>,
    started: Started,
    handle: Handle,
    input: bool,
}

/// Forwards size changes, without keeping the command's terminal open.
#[derive(Debug)]
pub struct Resizer(Weak<OwnedFd>);

impl Resizer {
    /// Copies the size of this process's terminal.
    pub fn resize(&self) -> io::Result<()> {
        self.0.upgrade().map_or(Ok(()), |control| resize(&control))
    }
}

impl Session {
    /// A handle for size changes.
    #[must_use]
    pub fn resizer(&self) -> Resizer {
        Resizer(Arc::downgrade(&self.control))
    }

    /// A handle for signals.
    pub fn handle(&self) -> io::Result<Handle> {
        self.started.handle()
    }

    /// Forwards input and output until the command's end, with this process's terminal in raw mode. Returns
    /// [`Started::wait`].
    pub fn run(self) -> io::Result<u8> {
        let raw = if self.input { Raw::enter()? } else { None };
        let passed = self.pass();
        let Self { control, started, .. } = self;
        // Hangs up the terminal: the rest of the session gets SIGHUP.
        drop(control);
        drop(raw);
        let status = started.wait()?;
        passed.map(|()| status)
    }

    fn pass(&self) -> io::Result<()> {
        let stdin = io::stdin();
        let mut pending: Vec<u8> = Vec::new();
        let (mut has_input, mut is_open, mut ends_line) = (self.input, true, true);
        loop {
            let out = if pending.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            let mut fds = vec![PollFd::new(&self.handle, PollFlags::IN)];
            if is_open {
                fds.push(PollFd::new(&self.control, PollFlags::IN | out));
            }
            let reads = is_open && has_input && pending.is_empty();
            if reads {
                fds.push(PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN));
            }
            match poll(&mut fds, None) {
                Err(Errno::INTR) => continue,
                other => other?,
            };
            let mut seen = fds.iter().map(PollFd::revents);
            let has_ended = seen.next().is_some_and(|seen| !seen.is_empty());
            let control = if is_open { seen.next().unwrap_or(PollFlags::empty()) } else { PollFlags::empty() };
            let may_read = reads && seen.next().is_some_and(|seen| !seen.is_empty());
            if has_ended {
                // A remaining process may print endlessly.
                let mut reads = 0..LAST_READS;
                while is_open && reads.next().is_some() && self.print()? == Printed::Some {}
                return Ok(());
            }
            if control.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                is_open = self.print()? != Printed::Closed;
            }
            if is_open && control.contains(PollFlags::OUT) {
                match write(&self.control, &pending) {
                    Ok(written) => drop(pending.drain(..written.min(pending.len()))),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(Errno::IO) => is_open = false,
                    Err(e) => return Err(e.into()),
                }
            }
            if may_read {
                let mut chunk = vec![0; CHUNK];
                match read(&stdin, &mut chunk) {
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    Ok(length) if length > 0 => {
                        chunk.truncate(length);
                        ends_line = chunk.ends_with(b"\n");
                        pending = chunk;
                    }
                    // On an unfinished line, the first one only ends the line.
                    Ok(_) | Err(_) => {
                        has_input = false;
                        pending = vec![END_OF_INPUT; if ends_line { 1 } else { 2 }];
                    }
                }
            }
        }
    }

    fn print(&self) -> io::Result<Printed> {
        let mut chunk = [0; CHUNK];
        match read(&self.control, &mut chunk) {
            // EIO: the command's end is closed.
            Ok(0) | Err(Errno::IO) => Ok(Printed::Closed),
            Ok(length) => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(chunk.get(..length).unwrap_or_default())?;
                stdout.flush()?;
                Ok(Printed::Some)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Printed::Nothing),
            Err(e) => Err(e.into()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Printed {
    Some,
    Nothing,
    Closed,
}

fn resize(control: &OwnedFd) -> io::Result<()> {
    let size = tcgetwinsize(io::stdin()).or_else(|_| tcgetwinsize(io::stdout()));
    if let Ok(size) = size {
        tcsetwinsize(control, size)?;
    }
    Ok(())
}

struct Raw(Termios);

impl Raw {
    /// `None` if standard input is no terminal.
    fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Some(Self(before)))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Fails if the terminal is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}
