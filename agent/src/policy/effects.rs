//! Performs the effects of a change: files, proxy, kernel.

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering},
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use wharf_core::kernel::KernelError;
use wharf_enforce::{
    inputs::Input,
    redirects::{Ports, ProxyError},
    state::{Awaited, KernelRows, ProxyAnswer, ProxyUpdate},
    transaction::{Effect, File, Terms, Transaction},
};
use wharf_kit::kept;

use super::{Guard, Policy, error::PolicyError, names, now};
use crate::proxy::{Completion, name};

pub(super) type Realized = (Guard, Result<(), PolicyError>);

impl Policy {
    pub(super) async fn realize(&self, inner: Guard, terms: Terms, change: Vec<Input>) -> Realized {
        let first = Transaction::begin(&inner.state, terms, change, now());
        self.perform(inner, first).await
    }

    /// With the node's addresses, so that a realized revision covers them.
    pub(super) async fn realize_with_addresses(&self, inner: Guard, terms: Terms, mut change: Vec<Input>) -> Realized {
        let first = match self.kernel.observe_addresses().await {
            Ok(addresses) => {
                change.push(Input::Node(addresses.into_iter().collect()));
                Transaction::begin(&inner.state, terms, change, now())
            }
            Err(_) => Transaction::correct(&inner.state, terms, change, now()),
        };
        self.perform(inner, first).await
    }

    pub(super) async fn perform(&self, mut inner: Guard, mut effect: Effect) -> Realized {
        loop {
            effect = match effect {
                Effect::Compute(next) if next.is_quick(&inner.state) => next.compute(&mut inner.state),
                Effect::Compute(next) => {
                    let computed = tokio::task::spawn_blocking(move || {
                        let effect = next.compute(&mut inner.state);
                        (inner, effect)
                    });
                    let computed = computed.await;
                    let effect;
                    (inner, effect) =
                        computed.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
                    effect
                }
                Effect::ReadKernel(next) => next.kernel_read(&mut inner.state, self.kernel_rows().await),
                Effect::EnsureWay(next) => {
                    self.uses_proxy.store(true, Ordering::Relaxed);
                    let made = self.kernel.ensure_way_to_proxy(true).await;
                    self.uses_proxy.store(made.is_ok(), Ordering::Relaxed);
                    if made.is_ok() {
                        wharf_crash::point("policy/after-way");
                    }
                    next.way_ensured(&mut inner.state, made)
                }
                Effect::UpdateProxy(update, next) => {
                    let answer = self.update_proxy(update).await;
                    next.proxy_updated(&mut inner.state, answer, now())
                }
                Effect::Save(file, next) => {
                    let saved = self.save(&mut inner.names_stale, file).await;
                    next.saved(&mut inner.state, saved, now())
                }
                Effect::Write(ports, rows, next) => {
                    let is_kept = self.keep_ports(ports);
                    let written = self.kernel.change_policy(rows, self.mode).await;
                    if written.is_ok() {
                        wharf_crash::point("policy/realized");
                    }
                    next.written(&mut inner.state, is_kept, written, now())
                }
                Effect::End(result) => return (inner, result),
            };
        }
    }

    async fn kernel_rows(&self) -> Result<KernelRows, KernelError> {
        Ok(KernelRows {
            rows: self.kernel.observe_policy().await?,
            addresses: self.kernel.observe_addresses().await?.into_iter().collect(),
            peers_max: self.kernel.observe_peers_max().await?,
        })
    }

    async fn update_proxy(&self, ProxyUpdate { ports, redirects, awaited }: ProxyUpdate) -> ProxyAnswer {
        let is_kept = self.keep_ports(ports);
        let mut answer = Ok(());
        if let Some(redirects) = redirects {
            let names: BTreeSet<String> = match &awaited {
                Awaited::Ports(ports) => {
                    let of = |port: &u16| Some(name(*port, redirects.get(port)?.listener.direction));
                    ports.iter().filter_map(of).collect()
                }
                Awaited::Nothing | Awaited::All => BTreeSet::new(),
            };
            let mut asked = self.proxy.redirects.set(redirects);
            wharf_crash::point("policy/after-telling");
            match awaited {
                Awaited::Nothing => asked.clear(),
                Awaited::Ports(_) => asked.retain(|(name, _)| names.contains(name)),
                Awaited::All => {}
            }
            answer = self.await_proxy(asked).await;
        }
        ProxyAnswer { is_kept, answer, outstanding: self.proxy.redirects.outstanding() }
    }

    async fn await_proxy(&self, asked: Vec<(String, Completion)>) -> Result<(), ProxyError> {
        if asked.is_empty() {
            return Ok(());
        }
        let mut answers: FuturesUnordered<_> = asked.into_iter().map(|(_, completion)| completion).collect();
        let late = |_| ProxyError::NoAnswer("the proxy does not answer".to_owned());
        let all = async {
            let mut unanswered = Ok(());
            while let Some(answer) = answers.next().await {
                match answer {
                    Err(refused @ (ProxyError::Refused(_) | ProxyError::Taken(..))) => return Err(refused),
                    other => unanswered = unanswered.and(other),
                }
            }
            unanswered
        };
        let answered = tokio::time::timeout(self.proxy.redirects.patience(), all).await;
        wharf_crash::point("policy/after-acknowledgement");
        answered.map_err(late)?
    }

    fn keep_ports(&self, ports: Option<Ports>) -> bool {
        let Some(ports) = ports else { return false };
        wharf_crash::point("policy/before-ports");
        let kept = ports.to_text().and_then(|text| kept::write(&self.redirects_file, &text));
        if let Err(why) = &kept {
            let file = self.redirects_file.display();
            tracing::warn!(%file, "keep the proxy's ports: {why}; after a restart connections through the proxy begin anew");
        }
        kept.is_ok()
    }

    /// Waits for the fsync outside of runtime threads.
    pub(super) async fn save(&self, names_stale: &mut bool, file: File) -> Result<(), PolicyError> {
        let path = match &file {
            File::Documents { .. } => self.file.clone(),
            File::Names(_) => self.names_file.clone(),
        };
        let (written, at) = (file, path.clone());
        let saved = tokio::task::spawn_blocking(move || {
            let saved = match &written {
                File::Documents { documents, .. } => documents.to_text().and_then(|text| kept::write(&at, &text)),
                File::Names(names) => names::save(&at, names),
            };
            (written, saved)
        });
        let (file, saved) = saved.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        if matches!(file, File::Names(_)) {
            *names_stale = saved.is_err();
        }
        let Err(why) = saved else { return Ok(()) };
        let shown = path.display();
        match file {
            File::Documents { is_required: true, .. } => {}
            File::Documents { is_required: false, .. } => {
                tracing::warn!(file = %shown, "keep policies: {why}; the next start takes them for lost");
            }
            File::Names(_) => {
                tracing::warn!(file = %shown, "keep names: {why}; after a restart containers must ask for them again");
            }
        }
        Err(PolicyError::NotKept { path, why: Arc::new(why) })
    }
}
