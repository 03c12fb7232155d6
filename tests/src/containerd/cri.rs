//! A client of the Container Runtime Interface, version 1, over a unix socket.
//!
//! Of the protocol (`k8s.io/cri-api`, `runtime/v1/api.proto`) only the messages and fields that the tests use, by their
//! numbers; what else an answer holds is skipped, as protobuf has it.

use std::{collections::BTreeMap, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use prost::Message;
use tokio::runtime::Runtime;
use tonic::{
    Code, Request, Status,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

/// Longest a call may take, as the kubelet's: it gives a sandbox four minutes, everything else two.
const LIMIT: Duration = Duration::from_secs(120);

/// A connection that is made when it is first needed, and again when the runtime was started again.
#[derive(Debug)]
pub struct Cri {
    runtime: Runtime,
    channel: Channel,
}

impl Cri {
    /// A client of the runtime that listens there. Nothing is sent yet.
    ///
    /// # Errors
    /// When the path is no text, or no thread can be made.
    pub fn new(socket: &Path) -> Result<Self> {
        // One worker, for the connection; the callers' threads drive their own calls.
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().context("start a tokio runtime")?;
        let text = socket.to_str().context("the path of the runtime's socket is no text")?;
        let endpoint = Endpoint::from_shared(format!("unix://{text}")).context("the runtime's socket")?;
        let channel = runtime.block_on(async { endpoint.connect_lazy() });
        Ok(Self { runtime, channel })
    }

    fn call<Q, A>(&self, method: &'static str, request: Q) -> Result<A, CriError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let fail = |status: Status| CriError { method, code: status.code(), message: status.message().to_owned() };
        let path = PathAndQuery::try_from(format!("/runtime.v1.{}/{method}", service_of(method)));
        let path = path.map_err(|e| fail(Status::internal(e.to_string())))?;
        let ask = async {
            let mut client = Grpc::new(self.channel.clone());
            client.ready().await.map_err(|e| Status::unavailable(e.to_string()))?;
            client.unary(Request::new(request), path, ProstCodec::<Q, A>::default()).await
        };
        let answer = self.runtime.block_on(async { tokio::time::timeout(LIMIT, ask).await });
        let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded(format!("no answer for {LIMIT:?}"))));
        answer.map(tonic::Response::into_inner).map_err(fail)
    }

    /// `RunPodSandbox`: the sandbox's id.
    ///
    /// # Errors
    /// The runtime's.
    pub fn run_pod(&self, pod: &PodSandboxConfig, handler: &str) -> Result<String, CriError> {
        let request = RunPodSandboxRequest { config: Some(pod.clone()), runtime_handler: handler.to_owned() };
        Ok(self.call::<_, PodSandboxId>("RunPodSandbox", request)?.pod_sandbox_id)
    }

    /// `StopPodSandbox`.
    ///
    /// # Errors
    /// The runtime's.
    pub fn stop_pod(&self, id: &str) -> Result<(), CriError> {
        self.call::<_, Empty>("StopPodSandbox", PodSandboxId { pod_sandbox_id: id.to_owned() }).map(drop)
    }

    /// `RemovePodSandbox`.
    ///
    /// # Errors
    /// The runtime's.
    pub fn remove_pod(&self, id: &str) -> Result<(), CriError> {
        self.call::<_, Empty>("RemovePodSandbox", PodSandboxId { pod_sandbox_id: id.to_owned() }).map(drop)
    }

    /// `ListPodSandbox`: all of them.
    ///
    /// # Errors
    /// The runtime's.
    pub fn pods(&self) -> Result<Vec<PodSandbox>, CriError> {
        Ok(self.call::<_, ListPodSandboxResponse>("ListPodSandbox", Empty {})?.items)
    }

    /// `PodSandboxStatus`.
    ///
    /// # Errors
    /// The runtime's, and when it leaves the status out.
    pub fn pod_status(&self, id: &str) -> Result<PodSandboxStatus> {
        let request = PodSandboxId { pod_sandbox_id: id.to_owned() };
        let answer: PodSandboxStatusResponse = self.call("PodSandboxStatus", request)?;
        answer.status.context("PodSandboxStatus: an answer without a status")
    }

    /// `CreateContainer`, then `StartContainer`: a container that runs this program.
    ///
    /// # Errors
    /// The runtime's.
    pub fn start_container(
        &self,
        pod: &str,
        config: &PodSandboxConfig,
        image: &str,
        command: &[&str],
    ) -> Result<String, CriError> {
        let container = ContainerConfig {
            metadata: Some(ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
            image: Some(ImageSpec { image: image.to_owned() }),
            command: command.iter().map(|part| (*part).to_owned()).collect(),
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.to_owned(),
            config: Some(container),
            sandbox_config: Some(config.clone()),
        };
        let id = self.call::<_, ContainerId>("CreateContainer", request)?.container_id;
        self.call::<_, Empty>("StartContainer", ContainerId { container_id: id.clone() })?;
        Ok(id)
    }

    /// `ExecSync`: runs a program in a container and gives what it printed.
    ///
    /// # Errors
    /// The runtime's, and when the program does not end with 0.
    pub fn exec(&self, container: &str, command: &[&str]) -> Result<String> {
        let cmd = command.iter().map(|part| (*part).to_owned()).collect();
        let request = ExecSyncRequest { container_id: container.to_owned(), cmd, timeout: 20 };
        let done: ExecSyncResponse = self.call("ExecSync", request)?;
        let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        ensure!(done.exit_code == 0, "`{}` ended with {}: {out}{err}", command.join(" "), done.exit_code);
        Ok(out.trim_end().to_owned())
    }

    /// `ImageStatus`: whether the runtime has an image.
    ///
    /// # Errors
    /// The runtime's.
    pub fn has_image(&self, image: &str) -> Result<bool, CriError> {
        let request = ImageStatusRequest { image: Some(ImageSpec { image: image.to_owned() }) };
        Ok(self.call::<_, ImageStatusResponse>("ImageStatus", request)?.image.is_some())
    }

    /// `Status`: what keeps the runtime from running pods; empty when nothing does.
    ///
    /// # Errors
    /// The runtime's.
    pub fn not_ready(&self) -> Result<Vec<String>, CriError> {
        let answer: StatusResponse = self.call("Status", Empty {})?;
        let conditions = answer.status.unwrap_or_default().conditions.into_iter();
        Ok(conditions.filter(|c| !c.status).map(|c| format!("{}: {} {}", c.kind, c.reason, c.message)).collect())
    }
}

/// Images have a service of their own.
fn service_of(method: &str) -> &'static str {
    if method.starts_with("Image") { "ImageService" } else { "RuntimeService" }
}

/// A call that failed.
#[derive(Debug, Clone)]
pub struct CriError {
    /// The method's name.
    pub method: &'static str,
    /// As gRPC has it.
    pub code: Code,
    /// The runtime's words.
    pub message: String,
}

impl std::fmt::Display for CriError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {:?}: {}", self.method, self.code, self.message)
    }
}

impl std::error::Error for CriError {}

/// Answers without content that matters here, and requests that ask for all there is.
#[derive(Clone, PartialEq, Eq, Message)]
struct Empty {}

/// `RunPodSandboxResponse`, and the requests of `StopPodSandbox`, `RemovePodSandbox` and `PodSandboxStatus`.
#[derive(Clone, PartialEq, Eq, Message)]
struct PodSandboxId {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandboxRequest {
    #[prost(message, optional, tag = "1")]
    config: Option<PodSandboxConfig>,
    #[prost(string, tag = "2")]
    runtime_handler: String,
}

/// What a pod is to be.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxConfig {
    /// Its name.
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<PodSandboxMetadata>,
    /// Host name in its containers.
    #[prost(string, tag = "2")]
    pub hostname: String,
    /// Published ports.
    #[prost(message, repeated, tag = "5")]
    pub port_mappings: Vec<PortMapping>,
    #[prost(btree_map = "string, string", tag = "6")]
    pub labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "7")]
    pub annotations: BTreeMap<String, String>,
    /// What Linux alone has.
    #[prost(message, optional, tag = "8")]
    pub linux: Option<LinuxPodSandboxConfig>,
}

/// A pod's name.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    /// UID of the Kubernetes object.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// Namespace of the Kubernetes object.
    #[prost(string, tag = "3")]
    pub namespace: String,
    /// Counts the sandboxes of one pod.
    #[prost(uint32, tag = "4")]
    pub attempt: u32,
}

/// A published port.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PortMapping {
    /// 0 TCP, 1 UDP, 2 SCTP.
    #[prost(int32, tag = "1")]
    pub protocol: i32,
    /// Port in the pod.
    #[prost(int32, tag = "2")]
    pub container_port: i32,
    /// Port of the node; 0 for none.
    #[prost(int32, tag = "3")]
    pub host_port: i32,
    /// Address of the node; empty for all.
    #[prost(string, tag = "4")]
    pub host_ip: String,
}

/// A pod's part of Linux.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LinuxPodSandboxConfig {
    /// The cgroup that the pod's are in.
    #[prost(string, tag = "1")]
    pub cgroup_parent: String,
}

#[derive(Clone, PartialEq, Message)]
struct ListPodSandboxResponse {
    #[prost(message, repeated, tag = "1")]
    items: Vec<PodSandbox>,
}

/// A sandbox of a list.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandbox {
    /// Its id, which is the CNI container id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its name.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<PodSandboxMetadata>,
    /// 0 ready, 1 not ready.
    #[prost(int32, tag = "3")]
    pub state: i32,
}

#[derive(Clone, PartialEq, Message)]
struct PodSandboxStatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<PodSandboxStatus>,
}

/// What the runtime tells of a pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxStatus {
    /// 0 ready, 1 not ready.
    #[prost(int32, tag = "3")]
    pub state: i32,
    /// Its addresses.
    #[prost(message, optional, tag = "5")]
    pub network: Option<PodSandboxNetworkStatus>,
}

/// A pod's addresses.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxNetworkStatus {
    /// The first.
    #[prost(string, tag = "1")]
    pub ip: String,
    /// All others.
    #[prost(message, repeated, tag = "2")]
    pub additional_ips: Vec<PodIp>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodIp {
    #[prost(string, tag = "1")]
    pub ip: String,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<PodSandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    image: Option<ImageSpec>,
    #[prost(string, repeated, tag = "3")]
    command: Vec<String>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct ContainerMetadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint32, tag = "2")]
    attempt: u32,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct ImageSpec {
    #[prost(string, tag = "1")]
    image: String,
}

/// `CreateContainerResponse` and `StartContainerRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
struct ContainerId {
    #[prost(string, tag = "1")]
    container_id: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct ExecSyncRequest {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(string, repeated, tag = "2")]
    cmd: Vec<String>,
    /// Seconds.
    #[prost(int64, tag = "3")]
    timeout: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct ExecSyncResponse {
    #[prost(bytes = "vec", tag = "1")]
    stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<RuntimeStatus>,
}

#[derive(Clone, PartialEq, Message)]
struct RuntimeStatus {
    #[prost(message, repeated, tag = "1")]
    conditions: Vec<RuntimeCondition>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct RuntimeCondition {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(bool, tag = "2")]
    status: bool,
    #[prost(string, tag = "3")]
    reason: String,
    #[prost(string, tag = "4")]
    message: String,
}

#[derive(Clone, PartialEq, Message)]
struct ImageStatusRequest {
    #[prost(message, optional, tag = "1")]
    image: Option<ImageSpec>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct ImageStatusResponse {
    #[prost(message, optional, tag = "1")]
    image: Option<Empty>,
}
