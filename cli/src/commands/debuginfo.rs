//! `wharf debuginfo`: one archive for troubleshooting.
//!
//! Each part has a time limit; an unreadable part becomes a file with the reason. The command works without an agent.
//! The archive has no secrets: no environments or command lines, no store contents, nothing from containers.

mod archive;
mod facts;

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;
use wharf_api::{
    ADMIN_SOCKET, AgentStatus, Endpoint, EndpointFilter, ErrorCode, FlowQuery,
    client::{Client, ClientError},
};

use self::archive::Archive;
use super::Context;
use crate::{
    args::DebuginfoArgs,
    error::{CliError, Exit},
    output::remark,
    render::{status::FROM_ADMIN, text},
};

const PATIENCE: Duration = Duration::from_secs(10);
/// For all explanations together, and for all map dumps together.
const MANY: Duration = Duration::from_secs(30);
/// Most explanations; twice as many maps are dumped.
const MAX_MANY: usize = 512;
/// Delay before the current part is printed.
const QUIET: Duration = Duration::from_secs(2);

#[derive(Debug, Serialize)]
struct Report {
    path: PathBuf,
    bytes: u64,
    files: usize,
    failed: Vec<Failed>,
}

#[derive(Debug, Clone, Serialize)]
struct Failed {
    part: String,
    why: String,
}

#[derive(Debug, thiserror::Error)]
enum Missing {
    /// Error of the first request.
    #[error("not asked: {0}")]
    NotAsked(String),
    #[error(transparent)]
    Agent(#[from] ClientError),
    #[error("{0} {path}: {2}", path = .1.display())]
    Io(&'static str, PathBuf, #[source] io::Error),
    #[error("write it as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Count and skipped operation.
    #[error("{0} {1}: there are too many, or it took too long")]
    TooMany(usize, &'static str),
}

struct Collection {
    archive: Archive,
    failed: Vec<Failed>,
    began: Instant,
}

impl Collection {
    fn add(&mut self, part: &str, content: Result<Vec<u8>, Missing>) -> Result<(), CliError> {
        match content {
            Ok(bytes) => self.archive.add(part, &bytes),
            Err(why) => {
                let why = why.to_string();
                let added = self.archive.add(&format!("{part}.error"), format!("{why}\n").as_bytes());
                self.failed.push(Failed { part: part.to_owned(), why });
                added
            }
        }
    }

    fn json<T: Serialize>(&mut self, part: &str, value: Result<T, Missing>) -> Result<(), CliError> {
        self.add(part, value.and_then(|v| Ok(serde_json::to_vec_pretty(&v)?)))
    }

    fn progress(&self, part: &str) {
        if self.began.elapsed() > QUIET {
            remark(&format!("wharf: collecting {part}"));
        }
    }
}

pub(super) async fn run(cx: &Context, args: &DebuginfoArgs) -> Result<Exit, CliError> {
    let began = Instant::now();
    let (client, status) = reach(&cx.client).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let node = status.as_ref().map_or("node", |s| s.node_name.as_str());
    let path = args.file.clone().unwrap_or_else(|| default_name(node, now.as_secs()).into());
    replaceable(&path).map_err(|e| cannot_write(&path, &e))?;
    let archive = Archive::create(&path, now.as_secs()).map_err(|e| cannot_write(&path, &e))?;
    let mut all = Collection { archive, failed: Vec::new(), began };

    all.json("client.json", Ok(facts::client()))?;
    from_agent(&mut all, &client, status).await?;
    all.progress("the kernel's facts");
    for (part, content) in facts::kernel() {
        all.add(part, content)?;
    }
    all.json("kernel/sysctl.json", Ok(facts::sysctls()))?;
    let run_dir = client.socket().parent().unwrap_or(Path::new("/"));
    all.json("files/run-directory.json", facts::listing(run_dir))?;
    all.json("files/pins.json", facts::pins())?;

    // Last: lists the failures of all parts.
    let failed = all.failed.clone();
    all.archive.add("failed.json", &serde_json::to_vec_pretty(&failed).unwrap_or_default())?;
    let (bytes, files) = all.archive.finish().map_err(|e| cannot_write(&path, &e))?;
    let report = Report { path, bytes, files, failed };
    cx.out.emit(&report, |_| words(&report))?;
    Ok(Exit::well(report.failed.is_empty()))
}

/// The API, or else the admin thread.
async fn reach(api: &Client) -> (Client, Result<AgentStatus, ClientError>) {
    let api = api.clone().with_timeout(PATIENCE);
    let status = api.status().await;
    if status.as_ref().is_err_and(ClientError::is_unreachable) {
        let admin = Client::new(api.socket().with_file_name(ADMIN_SOCKET)).with_timeout(PATIENCE);
        if let Ok(status) = admin.status().await {
            remark(&format!("wharf: {FROM_ADMIN}"));
            return (admin, Ok(status));
        }
    }
    (api, status)
}

async fn from_agent(
    all: &mut Collection,
    client: &Client,
    status: Result<AgentStatus, ClientError>,
) -> Result<(), CliError> {
    // Further requests would fail or hang.
    let away = status.as_ref().err().filter(|e| e.is_unreachable()).map(ToString::to_string);
    all.json("agent/status.json", status.map_err(Missing::from))?;
    macro_rules! ask {
        ($part:literal, $question:expr) => {{
            all.progress($part);
            let answer = match &away {
                Some(why) => Err(Missing::NotAsked(why.clone())),
                None => $question.await.map_err(Missing::from),
            };
            answer
        }};
    }
    let endpoints = ask!("agent/endpoints.json", client.endpoints(&EndpointFilter::default()));
    let known: Vec<Endpoint> = endpoints.as_deref().unwrap_or_default().to_vec();
    all.json("agent/endpoints.json", endpoints)?;
    let ipam = ask!("agent/ipam.json", client.ipam());
    all.json("agent/ipam.json", ipam)?;
    let config = ask!("agent/config.json", client.config());
    all.json("agent/config.json", config)?;
    let health = ask!("agent/health.json", client.health());
    all.json("agent/health.json", health)?;
    let audit = ask!("agent/audit.json", client.audit(false));
    all.json("agent/audit.json", audit)?;
    let metrics = ask!("agent/metrics.json", client.metrics_rows());
    all.json("agent/metrics.json", metrics)?;
    let flows = ask!("agent/flows.json", client.flows(&FlowQuery::default()));
    all.json("agent/flows.json", flows)?;
    let policy = ask!("agent/policy.json", client.policies());
    all.json("agent/policy.json", policy)?;
    let namespaces = ask!("agent/namespaces.json", client.namespaces());
    all.json("agent/namespaces.json", namespaces)?;
    let cluster = ask!("agent/cluster.json", client.cluster());
    all.json("agent/cluster.json", cluster)?;
    let log = ask!("agent/log.txt", client.log());
    let log = log.map(|log| {
        let left_out = (log.left_out > 0).then(|| format!("({} lines before these are not kept)\n", log.left_out));
        left_out.into_iter().chain(log.lines.into_iter().map(|l| l + "\n")).collect::<String>().into_bytes()
    });
    all.add("agent/log.txt", log)?;
    let maps = ask!("agent/maps.json", client.maps());
    let mut names: Vec<String> = maps.iter().flatten().map(|m| m.name.clone()).collect();
    names.sort();
    all.json("agent/maps.json", maps)?;

    let since = Instant::now();
    for (n, endpoint) in known.iter().enumerate() {
        let part = format!("agent/explain/{}.json", endpoint.id);
        if n >= MAX_MANY || since.elapsed() > MANY {
            let why = Missing::TooMany(known.len() - n, "endpoints are not explained");
            all.add("agent/explain/rest", Err(why))?;
            break;
        }
        all.progress(&part);
        let told = client.explain(&endpoint.id.to_string()).await;
        all.json(&part, told.map_err(Missing::from))?;
    }
    let since = Instant::now();
    for (n, name) in names.iter().enumerate() {
        let Some(file) = file_name(name) else { continue };
        let part = format!("agent/maps/{file}.json");
        if n >= 2 * MAX_MANY || since.elapsed() > MANY {
            all.add("agent/maps/rest", Err(Missing::TooMany(names.len() - n, "maps are not dumped")))?;
            break;
        }
        all.progress(&part);
        let dump = client.map(&name.replace('/', ".")).await;
        // Flow tables have no rows; `agent/flows.json` lists flows.
        if dump.as_ref().is_err_and(|e| e.code() == Some(ErrorCode::Unsupported)) {
            continue;
        }
        all.json(&part, dump.map_err(Missing::from))?;
    }
    Ok(())
}

/// `None` if the name could leave the directory.
fn file_name(map: &str) -> Option<String> {
    let name = map.replace('/', ".");
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
    (plain && !name.starts_with('.') && name.len() <= 80 && !name.is_empty()).then_some(name)
}

/// `wharf-debuginfo-NODE-20261120T174500Z.tar.gz`.
fn default_name(node: &str, unix_s: u64) -> String {
    let node: String = node.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_')).take(64).collect();
    let stamp: String = text::timestamp(unix_s.saturating_mul(1_000)).chars().filter(|c| !"-:".contains(*c)).collect();
    let stamp = stamp.split('.').next().unwrap_or_default().to_owned();
    format!("wharf-debuginfo-{}-{stamp}Z.tar.gz", if node.is_empty() { "node" } else { &node })
}

/// The archive replaces only a regular file.
fn replaceable(path: &Path) -> io::Result<()> {
    if path == Path::new("-") {
        return Err(io::Error::other("an archive goes to a file, not to standard output; name one"));
    }
    match std::fs::symlink_metadata(path) {
        Ok(there) if !there.is_file() => {
            Err(io::Error::other("something that is not a file is there, and is left as it is; name another"))
        }
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn cannot_write(path: &Path, error: &io::Error) -> CliError {
    CliError::refused(format!("write {}: {error}", path.display())).hint("name another place with --file")
}

fn words(report: &Report) -> String {
    let files = text::count(report.files as u64, "file");
    let path = text::safe(&report.path.display().to_string());
    let mut out = format!("{path}: {}, {files}\n", text::bytes(report.bytes));
    for f in &report.failed {
        out.push_str(&format!("not in it: {}: {}\n", text::safe(&f.part), text::safe(&f.why)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_names() {
        assert_eq!(default_name("node-a", 1_790_856_000), "wharf-debuginfo-node-a-20261001T120000Z.tar.gz");
        assert_eq!(default_name("../../etc/x y", 0), "wharf-debuginfo-etcxy-19700101T000000Z.tar.gz");
        assert_eq!(default_name("///", 0), "wharf-debuginfo-node-19700101T000000Z.tar.gz");
        assert_eq!(file_name("7/CONFIG").as_deref(), Some("7.CONFIG"));
        for bad in ["", "../x", "/etc/passwd", "a b", "a\nb"] {
            assert!(file_name(bad).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn only_a_file_is_replaced() {
        let directory = tempfile::tempdir().expect("make directory");
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        std::fs::write(&file, "old").expect("write");
        std::os::unix::fs::symlink(&file, &link).expect("link");
        assert!(replaceable(&file).is_ok() && replaceable(&directory.path().join("new")).is_ok());
        for not_a_file in [link.as_path(), directory.path(), Path::new("/dev/null"), Path::new("-")] {
            assert!(replaceable(not_a_file).is_err(), "{}", not_a_file.display());
        }
    }
}
