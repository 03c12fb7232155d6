//! Rules for names from outside. Each error is the rule that was broken.

/// Longest container id or network name, bytes.
pub const MAX_NAME_BYTES: usize = 253;
/// Longest interface name, bytes: `IFNAMSIZ` less its terminator.
pub const MAX_IFNAME_BYTES: usize = 15;

/// Container ids and network names.
///
/// # Errors
/// The rule that is broken.
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

/// Interface names, as the kernel takes them.
///
/// # Errors
/// The rule that is broken.
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
        // The kernel's own names below net.ipv6.conf, and its mark for "any free number".
        return Err("must not be 'all' or 'default', nor hold '%'");
    }
    if text.chars().any(|c| c == '/' || c == ':' || c.is_whitespace() || c.is_control()) {
        return Err("must not hold '/', ':', blanks or control characters");
    }
    Ok(())
}
