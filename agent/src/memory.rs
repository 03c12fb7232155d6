//! The allocator, and the limit of the agent's control group.
//!
//! The kernel charges endpoints' memory (links, programs, maps) to that group, and at the limit kills the agent and its
//! restarts. Creates are refused before.

use std::{
    fs, io,
    path::{Path, PathBuf},
    ptr::null_mut,
    sync::Mutex,
    time::{Duration, Instant},
};

use wharf_kit::sync::lock;

/// An endpoint's kernel memory, fixed and per processor (docs/sizing.md).
const ENDPOINT_BYTES: u64 = 160 << 10;
const ENDPOINT_CPU_BYTES: u64 = 6 << 10;
/// Bounds of the reserve, an eighth of the limit. A start peaks at 25 MiB of anonymous memory, then 15 MiB of kernel
/// memory (docs/sizing.md).
const LEAST_RESERVE: u64 = 32 << 20;
const MOST_RESERVE: u64 = 64 << 20;
/// Version 1 reports the maximum number of pages for no limit.
const NO_LIMIT: u64 = 1 << 62;
/// Cache time of "no limit": the files are slow.
const UNLIMITED: Duration = Duration::from_secs(1);
/// jemalloc returns freed memory soon (docs/sizing.md).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Memory limits of the process.
#[derive(Debug)]
pub struct Memory {
    groups: Vec<Group>,
    endpoint_bytes: u64,
    unlimited: Mutex<Option<Instant>>,
}

/// Limit and room of a control group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Limit, bytes.
    pub limit: u64,
    /// Bytes, without droppable page cache.
    pub used: u64,
    /// Endpoints that still fit.
    pub endpoints: u64,
}

/// No memory for another endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the agent's control group has {} MiB of memory in use and may have {} MiB; another endpoint needs a limit of at least \
     {} MiB, of which {} are kept for the agent's next start",
    room.used >> 20, room.limit >> 20, least_limit >> 20, reserve(*least_limit) >> 20
)]
pub struct NoRoom {
    room: Room,
    /// Bytes that admit another endpoint.
    least_limit: u64,
}

impl Default for Memory {
    fn default() -> Self {
        Self::of(own_groups())
    }
}

impl Memory {
    fn of(groups: Vec<Group>) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        let endpoint_bytes = ENDPOINT_BYTES + ENDPOINT_CPU_BYTES * processors;
        Self { groups, endpoint_bytes, unlimited: Mutex::default() }
    }

    /// Room in the most constrained group; `None` without a limit.
    #[must_use]
    pub fn room(&self) -> Option<Room> {
        let of = |(limit, used): (u64, u64)| {
            let free = limit.saturating_sub(used).saturating_sub(reserve(limit));
            Room { limit, used, endpoints: free / self.endpoint_bytes }
        };
        self.groups.iter().filter_map(Group::usage).map(of).min_by_key(|room| room.endpoints)
    }

    /// Refuses an endpoint that could get the agent killed. Sees a new limit within a second.
    pub fn admit(&self) -> Result<(), NoRoom> {
        if lock(&self.unlimited).is_some_and(|since| since.elapsed() < UNLIMITED) {
            return Ok(());
        }
        let room = self.room();
        *lock(&self.unlimited) = room.is_none().then(Instant::now);
        match room {
            Some(room) if room.endpoints == 0 => {
                Err(NoRoom { room, least_limit: least_limit(room.used.saturating_add(self.endpoint_bytes)) })
            }
            _ => Ok(()),
        }
    }
}

fn reserve(limit: u64) -> u64 {
    (limit / 8).clamp(LEAST_RESERVE, MOST_RESERVE)
}

fn least_limit(bytes: u64) -> u64 {
    // An eighth of the limit is a seventh of the rest.
    let limit = bytes.saturating_add((bytes / 7).clamp(LEAST_RESERVE, MOST_RESERVE));
    limit.saturating_add(2 << 20) >> 20 << 20
}

/// Disables huge pages for this process and its children (PR_SET_THP_DISABLE). With Debian's `always`, they fill holes
/// of freed pages, and before Linux 6.7 small thread stacks.
///
/// # Errors
/// A filter of system calls refuses it.
pub fn refuse_huge_pages() -> nix::Result<()> {
    nix::sys::prctl::set_thp_disable(true)
}

/// Restarts the allocator's thread, with the calling thread's capabilities.
pub fn renew_thread() -> io::Result<()> {
    for mut on in [false, true] {
        let new = (&raw mut on).cast();
        // SAFETY: the NUL-terminated name is a `bool` setting (jemalloc(3), `background_thread`); `new` points to a
        // `bool` of the passed size.
        let error = unsafe {
            tikv_jemalloc_sys::mallctl(c"background_thread".as_ptr(), null_mut(), null_mut(), new, size_of::<bool>())
        };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
    }
    Ok(())
}

/// Returns freed memory: a start frees more than a third, which must not refuse the first create.
pub fn give_back() -> io::Result<()> {
    // SAFETY: the NUL-terminated name is an operation (jemalloc(3), `arena.<i>.purge`; 4096 is MALLCTL_ARENAS_ALL)
    // without input and output, which requires null pointers.
    let refused =
        unsafe { tikv_jemalloc_sys::mallctl(c"arena.4096.purge".as_ptr(), null_mut(), null_mut(), null_mut(), 0) };
    if refused == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(refused)) }
}

/// Bytes (proc(5), /proc/self/statm, second field, in pages); 0 if unreadable.
#[must_use]
pub fn resident_bytes() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()))
        .unwrap_or(0);
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096);
    pages.saturating_mul(u64::try_from(page).unwrap_or(4096))
}

#[derive(Debug, PartialEq, Eq)]
struct Group {
    limit: PathBuf,
    usage: PathBuf,
    stat: PathBuf,
}

impl Group {
    fn version2(directory: &Path) -> Self {
        let file = |name| directory.join(name);
        Self { limit: file("memory.max"), usage: file("memory.current"), stat: file("memory.stat") }
    }

    fn version1(directory: &Path) -> Self {
        let file = |name| directory.join(name);
        Self { limit: file("memory.limit_in_bytes"), usage: file("memory.usage_in_bytes"), stat: file("memory.stat") }
    }

    /// Limit and undroppable bytes; `None` without a limit.
    fn usage(&self) -> Option<(u64, u64)> {
        let limit = number(&self.limit).filter(|limit| *limit < NO_LIMIT)?;
        let used = number(&self.usage)?;
        let stat = fs::read_to_string(&self.stat).unwrap_or_default();
        let of = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|value| value.trim().parse::<u64>().ok())
        };
        let cache = |list: &str| of(&format!("total_{list}")).or_else(|| of(list)).unwrap_or(0);
        let droppable = cache("active_file").saturating_add(cache("inactive_file"));
        Some((limit, used.saturating_sub(droppable)))
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn own_groups() -> Vec<Group> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    groups(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
}

/// From /proc/self/cgroup (cgroups(7)) and /proc/self/mountinfo.
fn groups(cgroup: &str, mountinfo: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let of: fn(&Path) -> Group = match controllers {
            "" => Group::version2,
            list if list.split(',').any(|c| c == "memory") => Group::version1,
            _ => continue,
        };
        let Some((root, point)) = mountinfo.lines().find_map(|mount| mounted(mount, controllers.is_empty())) else {
            continue;
        };
        let Ok(inside) = Path::new(path).strip_prefix(root) else { continue };
        found.extend(inside.ancestors().map(|at| of(&point.join(at))));
    }
    found
}

fn mounted(line: &str, version2: bool) -> Option<(&Path, &Path)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let is_it = match kind.next()? {
        "cgroup2" => version2,
        "cgroup" => !version2 && kind.nth(1)?.split(',').any(|option| option == "memory"),
        _ => false,
    };
    let mut fields = mount.split(' ').skip(3);
    let (root, point) = (fields.next()?, fields.next()?);
    is_it.then_some((Path::new(root), Path::new(point)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "30 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
        35 31 0:32 /slice /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";

    #[test]
    fn both_versions_are_found_with_what_is_around_them() {
        let found = groups("4:cpu:/x\n3:memory:/slice/a/b\n0::/c\n", MOUNTS);
        let limits: Vec<_> = found.iter().map(|g| g.limit.to_str().expect("text")).collect();
        let v1 = |at: &str| format!("/sys/fs/cgroup/memory/{at}memory.limit_in_bytes");
        let v2 = |at: &str| format!("/sys/fs/cgroup/unified/{at}memory.max");
        assert_eq!(limits, [v1("a/b/"), v1("a/"), v1(""), v2("c/"), v2("")]);
        assert_eq!(groups("garbage\n::\n1:memory:/elsewhere\n", MOUNTS), []);
        assert_eq!(groups("0::/c\n", ""), []);
    }

    fn group(directory: &Path, limit: &str, used: u64, cache: u64) -> Group {
        let group = Group::version2(directory);
        fs::write(&group.limit, limit).expect("write");
        fs::write(&group.usage, used.to_string()).expect("write");
        fs::write(&group.stat, format!("anon 1\nactive_file {cache}\nslab 7\n")).expect("write");
        group
    }

    #[test]
    fn an_endpoint_is_refused_before_the_limit_and_page_cache_does_not_count() {
        let mib = |n: u64| n << 20;
        let room = |limit: &str, used, cache| {
            let directory = tempfile::tempdir().expect("make directory");
            let memory = Memory::of(vec![group(directory.path(), limit, used, cache)]);
            (memory.room().map(|r| r.endpoints), memory.admit())
        };
        assert_eq!(room("max\n", mib(500), 0), (None, Ok(())));
        let (left, admitted) = room(&mib(64).to_string(), mib(20), 0);
        assert!(left.is_some_and(|n| (50..280).contains(&n)) && admitted.is_ok(), "{left:?}");
        let (left, refused) = room(&mib(64).to_string(), mib(57), 0);
        assert_eq!(left, Some(0));
        assert!(refused.expect_err("refused").to_string().contains("57 MiB of memory in use and may have 64 MiB"));
        for used in [mib(39), mib(221), mib(300), mib(447), mib(600), mib(5_000)] {
            let refused = room(&used.to_string(), used, 0).1.expect_err("refused");
            assert!(room(&refused.least_limit.to_string(), used, 0).1.is_ok(), "{refused}");
            assert!(room(&(refused.least_limit - mib(3)).to_string(), used, 0).1.is_err(), "{refused}");
        }
        assert!(room(&mib(64).to_string(), mib(57), mib(30)).1.is_ok(), "the cache can be dropped");
    }

    #[test]
    fn the_allocator_knows_how_to_give_memory_back() {
        give_back().expect("a known operation");
    }

    #[test]
    fn the_group_with_the_least_room_counts() {
        let (inner, outer) = (tempfile::tempdir().expect("directory"), tempfile::tempdir().expect("directory"));
        let groups = vec![group(inner.path(), "max", 0, 0), group(outer.path(), &(1 << 30).to_string(), 1 << 30, 0)];
        assert!(Memory::of(groups).admit().is_err());
    }
}
