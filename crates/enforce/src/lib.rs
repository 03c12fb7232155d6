//! Policy of the node, pure: no kernel, no proxy, no files, no clock.
//!
//! | module | content |
//! |---|---|
//! | [`inputs`] | inputs of policy, and their changes |
//! | [`state`] | the inputs, and the states of kernel and proxy |
//! | [`transaction`] | a change, as a sequence of effects |
//! | [`feed`] | policies of the cluster feed that are not in force |
//! | [`documents`] | policies, labels of namespaces, and the content of their file |
//! | [`members`] | containers as policy sees them |
//! | [`redirects`] | listeners, members, and the content of the file of ports |
//! | `rounds` | members that restart connections |
//! | [`rows`] | conversion from and to the kernel's rows |
//! | [`limits`] | rows that the kernel's tables hold |
//! | [`error`] | errors |

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
