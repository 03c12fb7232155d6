//! `wharf-agent --check-config`: the settings are checked without a change of the node, by an ordinary user too.
#![allow(clippy::expect_used, reason = "a test fails by panicking")]

use std::process::Command;

/// Exit status, standard output and standard error of an agent with these arguments and variables, and no others.
fn agent(arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wharf-agent"));
    command.args(arguments).env_clear().envs(variables.iter().copied());
    let output = command.output().expect("the agent starts");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn good_settings_are_shown_with_where_they_come_from() {
    let directory = tempfile::tempdir().expect("make directory");
    let file = directory.path().join("agent.toml");
    std::fs::write(&file, "mtu = 1400\nnode-name = 'node-a'\n").expect("write");
    let run = directory.path().join("run");
    let arguments = ["--check-config", "--config", &file.to_string_lossy(), "--run-dir", &run.to_string_lossy()];
    let (code, out, err) = agent(&arguments, &[("WHARF_IP_REST_MS", "5000")]);
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    for line in ["mtu = 1400  (file)", "ip-rest-ms = 5000  (environment)", "log-level = info  (default)"] {
        assert!(out.lines().any(|l| l == line), "{line}: {out}");
    }
    assert!(out.ends_with("the configuration is valid\n"), "{out}");
    assert!(!run.exists(), "nothing is made");
}

#[test]
fn bad_settings_are_told_once_with_where_they_come_from() {
    let directory = tempfile::tempdir().expect("make directory");
    let file = directory.path().join("agent.toml");
    std::fs::write(&file, "mtu = 1400\n[[pool]]\nname = 'a'\ncidrs = ['10.87.3.0/24']\n").expect("write");
    let file = file.to_string_lossy();
    let none: &[(&str, &str)] = &[];
    for (arguments, variables, words) in [
        (&["--mtu", "abc"] as &[&str], none, "invalid value 'abc' for '--mtu <BYTES>'"),
        (&[], &[("WHARF_MTU", "abc")], "invalid value 'abc' for 'environment variable WHARF_MTU'"),
        (&["--mtu", "1400x"], &[("WHARF_MTU", "abc")], "invalid value '1400x' for '--mtu <BYTES>'"),
        (&[], &[("WHARF_MTU", "99")], "setting mtu (WHARF_MTU): 99 is not within"),
        (&["--log-level", "zzz"], none, "setting log-level (--log-level): \"zzz\": "),
        (&["--config", "/nonexistent"], none, "read configuration /nonexistent: No such file"),
        (&["--config", "/dev/zero"], none, "read configuration /dev/zero: it is larger than 1024 KiB"),
        (&["--config", &file], none, "overlap"),
        (&["--no-such-flag"], none, "unexpected argument '--no-such-flag'"),
    ] {
        let (code, out, err) = agent(&[&["--check-config"], arguments].concat(), variables);
        assert_eq!((code, out.as_str()), (Some(3), ""), "{arguments:?} {variables:?}: {err}");
        assert_eq!(err.matches(words).count(), 1, "{arguments:?} {variables:?}: {err}");
        assert_eq!(err.matches("os error").count(), usize::from(words.contains("No such file")), "{err}");
        // An agent that is to serve refuses them in the same way.
        let (code, _, again) = agent(arguments, variables);
        assert_eq!((code, again.lines().next()), (Some(3), err.lines().next()), "{arguments:?} {variables:?}");
    }
}

#[test]
fn files_that_a_start_needs_are_checked() {
    let directory = tempfile::tempdir().expect("make directory");
    let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let (absent, plain, policies) = (path("absent"), path("plain"), path("policies"));
    std::fs::write(&plain, "").expect("write");
    std::fs::create_dir(&policies).expect("make directory");
    let check = |flag: &str, value: &str| agent(&["--check-config", flag, value], &[]);
    for (flag, value, words) in [
        ("--policy-dir", &absent, "No such file"),
        ("--envoy", &absent, "No such file"),
        ("--envoy", &plain, "chmod o+x"),
        ("--envoy", &policies, "it is not a file"),
    ] {
        let (code, out, err) = check(flag, value);
        assert_eq!((code, out.contains("is valid")), (Some(3), false), "{flag} {value}: {out}");
        let setting = format!("setting {}: ", flag.trim_start_matches('-'));
        assert!(err.contains(&setting) && err.contains(words), "{err}");
    }
    assert_eq!(check("--policy-dir", &policies).0, Some(0));
    let set_mode = |path: &str, mode| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).expect("a mode");
    };
    set_mode(&plain, 0o755);
    for mode in [0o755, 0o700] {
        set_mode(&directory.path().to_string_lossy(), mode);
        let (code, out, err) = check("--envoy", &plain);
        assert_eq!((code, err.as_str()), (Some(0), ""), "a directory of mode {mode:o}: {out}");
    }
    let in_path = |name: &str| agent(&["--check-config", "--envoy", name], &[("PATH", "/usr/bin:/bin")]);
    let (code, _, err) = in_path("sleep");
    assert_eq!((code, err.as_str()), (Some(0), ""), "a name that PATH finds");
    let (code, _, err) = in_path("wharf-no-such-program");
    assert!(code == Some(3) && err.contains("PATH (/usr/bin:/bin)"), "{err}");
    std::fs::write(format!("{policies}/a.yaml"), "kind: None").expect("write");
    let (code, _, err) = check("--policy-dir", &policies);
    assert!(code == Some(3) && err.contains("a.yaml"), "{err}");
}
