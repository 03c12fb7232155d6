//! The answering end of a conversation, in a process of its own: two containers never share an address space, and a
//! switch between two processes costs more than one between two threads. Measured with threads, what lies between them
//! would weigh more than it does in life.

use std::{
    env,
    io::{ErrorKind, Read, Write},
    net::{TcpStream, UdpSocket},
    os::fd::{FromRawFd, OwnedFd},
    process::{Child, Command},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use crate::{process, wait};

/// What the answering end is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A connected TCP socket: bytes come back until the other side closes.
    Tcp,
    /// A bound UDP socket: datagrams come back until an empty one comes.
    Udp,
}

impl Kind {
    /// Name on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }

    /// The kind of that name.
    ///
    /// # Errors
    /// When there is none.
    pub fn parse(name: &str) -> Result<Self> {
        [Self::Tcp, Self::Udp].into_iter().find(|k| k.as_str() == name).with_context(|| format!("no kind {name}"))
    }
}

/// Flag by which this program becomes an answering end; its value is `KIND:CPU`.
pub const FLAG: &str = "--answer";

/// A process that answers; killed when dropped.
#[derive(Debug)]
pub struct Answerer(Child);

impl Answerer {
    /// Starts one on a socket, bound to a CPU.
    ///
    /// # Errors
    /// When this program cannot be started again.
    pub fn start(kind: Kind, socket: OwnedFd, cpu: usize) -> Result<Self> {
        let program = env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        command.arg(FLAG).arg(format!("{}:{cpu}", kind.as_str())).stdin(socket);
        Ok(Self(command.spawn().context("start the answering end")?))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it failed, or does not end.
    pub fn finish(mut self) -> Result<()> {
        let status = process::wait(&mut self.0, wait::PATIENCE)?.context("the answering end does not end")?;
        ensure!(status.success(), "the answering end ended with {status}");
        Ok(())
    }
}

impl Drop for Answerer {
    fn drop(&mut self) {
        // An error means it has ended by itself, which is what is wanted.
        if self.0.kill().is_ok() {
            self.0.wait().ok();
        }
    }
}

/// Is the answering end: `spec` is the value of [`FLAG`], the socket is standard input.
///
/// # Errors
/// When the socket breaks.
pub fn answer(spec: &str) -> Result<()> {
    let (kind, cpu) = spec.split_once(':').with_context(|| format!("{spec} is not KIND:CPU"))?;
    bind(cpu.parse().with_context(|| format!("{cpu} is not a CPU"))?)?;
    // SAFETY: standard input is the socket that the parent passed; nothing else of this process uses it.
    let socket = unsafe { OwnedFd::from_raw_fd(0) };
    match Kind::parse(kind)? {
        Kind::Tcp => answer_tcp(TcpStream::from(socket)),
        Kind::Udp => answer_udp(&UdpSocket::from(socket)),
    }
}

fn answer_tcp(mut stream: TcpStream) -> Result<()> {
    let mut byte = [0];
    loop {
        match stream.read_exact(&mut byte) {
            Ok(()) => stream.write_all(&byte).context("answer")?,
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            Err(e) => bail!("wait for a request: {e}"),
        }
    }
}

fn answer_udp(socket: &UdpSocket) -> Result<()> {
    let mut byte = [0];
    loop {
        let (n, from) = socket.recv_from(&mut byte).context("wait for a request")?;
        if n == 0 {
            return Ok(());
        }
        socket.send_to(&byte, from).context("answer")?;
    }
}

/// Binds the calling thread to a CPU, and puts it before whatever else wants that CPU: a machine that does other things
/// would else share it in another way in each round. The thread is not asked to go back; it ends with the measurement.
///
/// # Errors
/// When the thread may not use the CPU, or may not be put first.
pub fn bind(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu).context("name a CPU")?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("bind a thread to CPU {cpu}"))?;
    // SAFETY: three integers; 0 is the calling thread.
    let outcome = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
    ensure!(outcome == 0, "put a thread first: {}", std::io::Error::last_os_error());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_is_told_nonsense_says_so() {
        for spec in ["tcp", "tcp:x", "tcp:99999"] {
            assert!(answer(spec).is_err(), "{spec}");
        }
        assert!(Kind::parse("sctp").is_err());
        assert_eq!(Kind::parse("udp").unwrap(), Kind::Udp);
    }
}
