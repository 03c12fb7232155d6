//! The machine that measures, and whether it is fit to.

use std::{fs, thread, time::UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

/// Where a run was made.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Kernel release.
    pub kernel: String,
    /// CPU model.
    pub cpu: String,
    /// CPUs this process may use.
    pub cpus: usize,
    /// Load average of the last minute at the start: processes that run or wait for a disk.
    pub load: f64,
    /// Seconds since the Unix epoch at the start.
    pub unix_time: u64,
    /// False when the binaries were built without optimisation.
    pub optimised: bool,
}

impl Machine {
    /// Looks at the machine.
    ///
    /// # Errors
    /// When `bpf_stats_enabled` is set: it would add some 45 ns to every run of a program.
    pub fn look() -> Result<Self> {
        let stats = "/proc/sys/kernel/bpf_stats_enabled";
        // A kernel without the switch cannot have it on.
        let on = fs::read_to_string(stats).is_ok_and(|text| text.trim() != "0");
        ensure!(!on, "measure: {stats} is on and would slow every program down; write 0 to it first");
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").context("read /proc/cpuinfo")?;
        let model = cpuinfo.lines().find(|l| l.starts_with("model name")).and_then(|l| l.split_once(':'));
        let load = fs::read_to_string("/proc/loadavg").context("read /proc/loadavg")?;
        Ok(Self {
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").context("read osrelease")?.trim().to_owned(),
            cpu: model.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
            cpus: thread::available_parallelism().context("count CPUs")?.get(),
            load: load.split(' ').next().and_then(|l| l.parse().ok()).context("parse /proc/loadavg")?,
            unix_time: UNIX_EPOCH.elapsed().context("read the clock")?.as_secs(),
            optimised: !cfg!(debug_assertions),
        })
    }

    /// Why the numbers of this run may be worse than those of a quiet machine; nothing when all is well.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.load > 0.5 {
            let load = self.load;
            warnings
                .push(format!("the machine was not idle (load average {load:.1}): expect noise; ratios hold better"));
        }
        if !self.optimised {
            warnings.push("this is a debug build of the bench: use `cargo xtask bench`".to_owned());
        }
        warnings
    }
}
