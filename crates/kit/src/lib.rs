//! Basics of the agent's tasks, independent of endpoints: files, sockets, clocks, periodic tasks, admission, logs.
//!
//! Log lines have the agent's targets (`wharf_agent::ROOM`), which operators' filters name.

pub mod accounts;
pub mod clock;
pub mod controller;
pub mod gate;
pub mod kept;
pub mod log_ring;
pub mod pulse;
pub mod serve;
pub mod socket;
pub mod sync;
pub mod systemd;
pub mod telemetry;
