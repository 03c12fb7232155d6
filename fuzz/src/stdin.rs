//! The shim's request: five lines for variables (command, container id, netns, interface name, arguments; `~` for an
//! unset one), then stdin.

use std::{
    ffi::{OsStr, OsString},
    io::{self, Read},
    os::unix::ffi::OsStrExt as _,
};

use serde_json::Value;
use wharf_cni::request::{Env, Request};
use wharf_names::rules as names;

/// Maximum bytes of a message: three texts cut to 80 characters, each escaped, and the words around them.
const MAX_MESSAGE: usize = 4096;

/// Reads a request.
pub fn run(data: &[u8]) {
    let (lines, stdin) = crate::head(data, 5);
    let variable = |at: usize| {
        let line: &[u8] = lines[at];
        // A variable never contains a NUL.
        (line != b"~" && !line.contains(&0)).then(|| OsStr::from_bytes(line).to_owned())
    };
    let env = Env {
        command: variable(0),
        container_id: variable(1),
        netns: variable(2),
        ifname: variable(3),
        args: variable(4),
        path: Some("/opt/cni/bin".into()),
        runtime: None,
    };

    let read = Request::read(&env, &mut &stdin[..]);
    let in_pieces = Request::read(&env, &mut Pieces { rest: stdin, next: 1 });
    assert_eq!(format!("{read:?}"), format!("{in_pieces:?}"), "how stdin arrives makes a difference");

    match &read {
        Ok(request) => {
            accepted(&env, request);
            if let Ok(document) = serde_json::from_slice::<Value>(stdin) {
                let spelt = serde_json::to_vec_pretty(&document).expect("a JSON value is JSON");
                let again = Request::read(&env, &mut spelt.as_slice());
                assert_eq!(format!("{read:?}"), format!("{again:?}"), "the spelling of stdin makes a difference");
            }
        }
        Err(failure) => refused(&failure.to_json()),
    }
}

fn accepted(env: &Env, request: &Request) {
    let text = |variable: &Option<OsString>| variable.as_deref().and_then(OsStr::to_str).unwrap_or_default().to_owned();
    let command = text(&env.command);
    match request {
        Request::Version { cni_version } => {
            assert_eq!(command, "VERSION");
            assert!(["0.3.1", "0.4.0", "1.0.0", "1.1.0"].contains(&cni_version.as_str()), "{cni_version}");
        }
        Request::Ask(_) => {
            assert!(["ADD", "DEL", "CHECK", "GC", "STATUS"].contains(&command.as_str()), "{command}");
            if ["ADD", "DEL", "CHECK"].contains(&command.as_str()) {
                names::name(&text(&env.container_id)).expect("a container id that keeps the rules");
                names::ifname(&text(&env.ifname)).expect("an interface name that keeps the rules");
            }
            if ["ADD", "CHECK"].contains(&command.as_str()) {
                assert!(text(&env.netns).starts_with('/'), "a netns that is no absolute path");
            }
        }
    }
}

fn refused(json: &str) {
    let failure: Value = serde_json::from_str(json).expect("a failure is JSON");
    let code = failure["code"].as_u64().expect("a failure has a code");
    let msg = failure["msg"].as_str().expect("a failure has a message");
    // No agent was contacted, and stdin was readable.
    assert!([1, 4, 6, 7].contains(&code), "{json}");
    assert!(msg.len() <= MAX_MESSAGE, "a message of {} bytes", msg.len());
    let subjects = if code == 4 { ["CNI_"].as_slice() } else { &["netconf", "CNI_ARGS", "runtimeConfig", "args.cni"] };
    assert!(subjects.iter().any(|subject| msg.contains(subject)), "no subject: {json}");
    let version = failure["cniVersion"].as_str().expect("a failure has a version");
    assert!((1..=32).contains(&version.len()), "{json}");
}

/// Returns bytes in pieces of varying size, with interruptions.
struct Pieces<'a> {
    rest: &'a [u8],
    next: usize,
}

impl Read for Pieces<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.next += 1;
        if self.next.is_multiple_of(3) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let piece = self.rest.len().min(self.next).min(room.len());
        room[..piece].copy_from_slice(&self.rest[..piece]);
        self.rest = &self.rest[piece..];
        Ok(piece)
    }
}
