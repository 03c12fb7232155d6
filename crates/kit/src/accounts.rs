//! Users and groups from `/etc/passwd` and `/etc/group`: the C library's look-ups load shared objects, which a
//! statically linked agent cannot.

use std::{fs, io};

/// A group's id.
///
/// # Errors
/// Unreadable `/etc/group`.
pub fn group(name: &str) -> io::Result<Option<u32>> {
    Ok(row(&read("/etc/group")?, name).and_then(|(gid, _)| gid.parse().ok()))
}

/// Ids of a user and its group.
///
/// # Errors
/// Unreadable `/etc/passwd`.
pub fn user(name: &str) -> io::Result<Option<(u32, u32)>> {
    let numbers = |(uid, rest): (&str, &str)| Some((uid.parse().ok()?, rest.split(':').next()?.parse().ok()?));
    Ok(row(&read("/etc/passwd")?, name).and_then(numbers))
}

/// Some images lack the file; comments need not be UTF-8.
fn read(path: &str) -> io::Result<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

fn row<'a>(text: &'a str, name: &str) -> Option<(&'a str, &'a str)> {
    let fields = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':')?.split_once(':')?.1.split_once(':');
    text.lines().find_map(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_name_is_found_and_no_other() {
        let text = "wharf-envoy:x:990:991:a comment:/nowhere:/usr/sbin/nologin\nwharf:x:992:\nbroken\nwharf2:x\n";
        assert_eq!(row(text, "wharf"), Some(("992", "")));
        assert_eq!(row(text, "wharf-envoy"), Some(("990", "991:a comment:/nowhere:/usr/sbin/nologin")));
        for none in ["wharf2", "broken", "envoy", "", "wharf-"] {
            assert_eq!(row(text, none), None, "{none}");
        }
    }

    #[test]
    fn root_is_number_0_and_nobody_has_an_impossible_name() {
        assert_eq!((group("root").ok(), user("root").ok()), (Some(Some(0)), Some(Some((0, 0)))));
        assert_eq!((group("a:b").ok(), user("no such user").ok()), (Some(None), Some(None)));
    }
}
