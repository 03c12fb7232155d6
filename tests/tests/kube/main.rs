//! `wharf-kube` and the agent together, against the scripted API server of `kube/tests`.

mod follow;
mod histories;
mod pair;
mod steps;
