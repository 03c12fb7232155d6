//! `wharf sandbox`: sandboxes through the real plugin and a real agent, through chains of other plugins, and after
//! deaths.

mod command;
mod crash;
mod life;
mod networks;
mod odd;
mod scene;
