//! Conversion of kernel failures to [`KernelError`]s.

use std::{error::Error, io};

use aya::programs::{ProgramError, tc::TcError};
use wharf_core::kernel::{KernelError, KernelErrorKind};

pub(crate) fn fail(
    operation: &'static str,
    subject: impl Into<String>,
    kind: KernelErrorKind,
    cause: impl Into<String>,
) -> KernelError {
    KernelError { operation, subject: subject.into(), cause: cause.into(), kind }
}

pub(crate) fn kind_of(error: &io::Error) -> KernelErrorKind {
    match error.raw_os_error() {
        Some(libc::EEXIST) => KernelErrorKind::Exists,
        Some(libc::ENOENT | libc::ENODEV | libc::ESRCH | libc::ENXIO | libc::ENOLINK) => KernelErrorKind::NotFound,
        Some(libc::EPERM | libc::EACCES) => KernelErrorKind::Permission,
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EAFNOSUPPORT) => KernelErrorKind::Unsupported,
        Some(
            libc::ENOMEM
            | libc::ENOSPC
            | libc::E2BIG
            | libc::EBUSY
            | libc::EAGAIN
            | libc::ENFILE
            | libc::EMFILE
            | libc::ENOBUFS,
        ) => KernelErrorKind::Exhausted,
        _ => KernelErrorKind::Other,
    }
}

/// aya wraps the errno several layers deep.
pub(crate) fn io_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    let mut next = Some(error);
    while let Some(e) = next {
        if let Some(io) = e.downcast_ref::<io::Error>() {
            return Some(io);
        }
        // `TcError` is transparent in `ProgramError`, so its `io::Error` is no source.
        if let Some(ProgramError::TcError(TcError::IoError(io))) = e.downcast_ref::<ProgramError>() {
            return Some(io);
        }
        next = e.source();
    }
    None
}

pub(crate) fn wrap(operation: &'static str, subject: impl Into<String>, error: &(dyn Error + 'static)) -> KernelError {
    let kind = io_cause(error).map_or(KernelErrorKind::Other, kind_of);
    let mut cause = String::new();
    let mut next = Some(error);
    while let Some(e) = next {
        let text = e.to_string();
        if !cause.contains(&text) {
            if !cause.is_empty() {
                cause.push_str(": ");
            }
            cause.push_str(&text);
        }
        next = e.source();
    }
    KernelError { operation, subject: subject.into(), cause, kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] io::Error);

    #[test]
    fn the_errno_deep_in_the_chain_decides_the_kind() {
        let e = wrap("test", "x", &Outer(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(e.kind, KernelErrorKind::Exhausted);
        assert!(e.cause.starts_with("outer: No space left"), "{}", e.cause);
    }

    #[test]
    fn the_errno_of_an_interface_that_went_away_is_found() {
        let gone = io::Error::from_raw_os_error(libc::ENODEV);
        let e = wrap("test", "x", &ProgramError::from(TcError::from(gone)));
        assert_eq!(e.kind, KernelErrorKind::NotFound, "{e}");
    }

    #[test]
    fn a_transparent_wrapper_is_not_told_twice() {
        #[derive(Debug, thiserror::Error)]
        #[error(transparent)]
        struct Same(#[from] Outer);
        let e = wrap("test", "x", &Same(Outer(io::Error::from_raw_os_error(libc::EPERM))));
        assert_eq!(e.cause.matches("outer").count(), 1);
        assert_eq!(e.kind, KernelErrorKind::Permission);
    }
}
