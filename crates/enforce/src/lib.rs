//! Policy of the node, without kernel, proxy, files or clock: a [`transaction`] changes the [`state`].

pub mod documents;
pub mod error;
pub mod feed;
pub mod inputs;
pub mod limits;
pub mod members;
mod names;
pub mod redirects;
mod rounds;
pub mod rows;
pub mod state;
pub mod transaction;

#[cfg(test)]
mod tests;
