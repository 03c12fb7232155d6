//! Rules for names from outside.

/// Longest container id or network name, bytes.
pub const MAX_NAME_BYTES: usize = 253;
/// Longest interface name, bytes: `IFNAMSIZ` less its terminator.
pub const MAX_IFNAME_BYTES: usize = 15;

/// Container ids and network names.
///
/// # Errors
/// The broken rule.
pub fn name(text: &str) -> Result<(), &'static str> {
    if text.is_empty() {
        return Err("must not be empty");
    }
    if text.len() > MAX_NAME_BYTES {
        return Err("must be at most 253 bytes");
    }
    if !text.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Err("must start with a letter or digit");
    }
    if !text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-')) {
        return Err("may hold only letters, digits, '_', '.' and '-'");
    }
    Ok(())
}

/// Interface names (`dev_valid_name` in net/core/dev.c).
///
/// # Errors
/// The broken rule.
pub fn ifname(text: &str) -> Result<(), &'static str> {
    if text.is_empty() {
        return Err("must not be empty");
    }
    if text.len() > MAX_IFNAME_BYTES {
        return Err("must be at most 15 bytes (IFNAMSIZ less the terminator)");
    }
    if text == "." || text == ".." {
        return Err("must not be '.' or '..'");
    }
    if text == "all" || text == "default" || text.contains('%') {
        // Below net.ipv6.conf, and the kernel's placeholder for a number.
        return Err("must not be 'all' or 'default', nor hold '%'");
    }
    if text.chars().any(|c| c == '/' || c == ':' || c.is_whitespace() || c.is_control()) {
        return Err("must not hold '/', ':', blanks or control characters");
    }
    Ok(())
}

/// Longest program name, bytes: `TASK_COMM_LEN` less its terminator.
pub const MAX_PROGRAM_BYTES: usize = 15;

/// The shim replaces other bytes with `_`.
#[must_use]
pub fn is_program_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-')
}

/// Program names, as in `/proc/PID/comm`.
///
/// # Errors
/// The broken rule.
pub fn program(text: &str) -> Result<(), &'static str> {
    if text.is_empty() || text.len() > MAX_PROGRAM_BYTES {
        return Err("must be 1 to 15 bytes (TASK_COMM_LEN less the terminator)");
    }
    if !text.bytes().all(is_program_byte) {
        return Err("may hold only letters, digits, '_', '.' and '-'");
    }
    Ok(())
}

/// Longest port name, bytes.
pub const MAX_PORT_NAME_BYTES: usize = 15;

/// IANA service names (RFC 6335 section 5.1) in lower case, as in Kubernetes.
///
/// # Errors
/// The broken rule.
pub fn port_name(text: &str) -> Result<(), &'static str> {
    if text.is_empty() || text.len() > MAX_PORT_NAME_BYTES {
        return Err("must be 1 to 15 bytes");
    }
    if !text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
        return Err("may hold only lower-case letters, digits and '-'");
    }
    if !text.bytes().any(|b| b.is_ascii_lowercase()) {
        return Err("must hold a letter");
    }
    if text.starts_with('-') || text.ends_with('-') || text.contains("--") {
        return Err("must not begin or end with '-', nor hold '--'");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ports_are_iana_service_names() {
        for good in ["http", "a", "h2", "8080-http", "x11-1-2", "a23456789012345"] {
            assert_eq!(port_name(good), Ok(()), "{good}");
        }
        for bad in ["", "80", "-a", "a-", "a--b", "Http", "a_b", "a.b", "a2345678901234567", "ä", "a b"] {
            assert!(port_name(bad).is_err(), "{bad:?}");
        }
    }
}
