//! `/v1/ipam`: addresses leased without an endpoint.

use std::{net::IpAddr, sync::Arc};

use axum::{Json, extract::State, http::StatusCode};
use serde::Deserialize;
use wharf_api::{ApiError, ErrorCode, IpFamily, IpamAllocate, IpamAllocation, IpamLease, IpamView, RestingAddress};
use wharf_core::{
    ids::PoolName,
    ipam::{LeaseRequest, Wanted, describe_owner},
    store::{Change, Lease, LeaseOwner},
};
use wharf_kit::sync::lock;

use crate::{
    addresses::{pools, resting},
    node::{Node, health},
    rest::{
        early::Restored,
        endpoint::accepts_work,
        error::{Answer, Body, Failure, Query, Segment, invalid},
    },
};

/// Pools with their usage, and all leases.
#[utoipa::path(get, path = "/v1/ipam", tag = "ipam", responses((status = 200, body = IpamView), (status = 503, body = ApiError)))]
pub async fn view(Restored(node): Restored) -> Json<IpamView> {
    let (leases, resting) = {
        let ipam = lock(&node.life.network.addresses.ipam);
        (ipam.leases().iter().map(api_lease).collect(), ipam.resting())
    };
    let resting = resting
        .into_iter()
        .map(|r| RestingAddress {
            ip: r.rest.ip,
            pool: r.rest.pool.to_string(),
            last_owner: r.rest.last_owner,
            since_unix_ms: r.rest.since_unix_ms,
            blocked: r.blocked,
        })
        .collect();
    let pools = pools::fill(&node.life.network.addresses, node.life.config.masquerade.as_ref());
    Json(IpamView { pools, leases, resting })
}

/// Leases an address of each family, or of one, to a caller.
#[utoipa::path(post, path = "/v1/ipam", tag = "ipam", request_body = IpamAllocate,
    responses((status = 201, body = IpamAllocation), (status = 400, body = ApiError), (status = 429, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn allocate(
    State(node): State<Arc<Node>>,
    Body(body): Body<IpamAllocate>,
) -> Answer<(StatusCode, Json<IpamAllocation>)> {
    let pool = match &body.pool {
        Some(name) => Some(PoolName::parse(name).map_err(|e| invalid(format!("lease address: {e}")))?),
        None => None,
    };
    let (ipv4, ipv6) = match body.family {
        Some(IpFamily::Ipv4) => (Wanted::Any, Wanted::None),
        Some(IpFamily::Ipv6) => (Wanted::None, Wanted::Any),
        None => (Wanted::Any, Wanted::Any),
    };
    lease(&node, LeaseRequest { pool, ipv4, ipv6 }, body.owner).await
}

/// Owner and pool of a requested address.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct OwnerQuery {
    /// Name of the owner; shown in `wharf ipam list`.
    #[param(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 253, example = "me")]
    owner: String,
    /// Pool; the default pool when absent.
    pool: Option<String>,
}

/// Leases a given address to a caller.
#[utoipa::path(post, path = "/v1/ipam/{ip}", tag = "ipam", params(("ip" = String, Path), OwnerQuery),
    responses((status = 201, body = IpamAllocation), (status = 400, body = ApiError), (status = 409, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn allocate_exact(
    State(node): State<Arc<Node>>,
    Segment(ip): Segment,
    Query(query): Query<OwnerQuery>,
) -> Answer<(StatusCode, Json<IpamAllocation>)> {
    let pool = match &query.pool {
        Some(name) => Some(PoolName::parse(name).map_err(|e| invalid(format!("lease address: {e}")))?),
        None => None,
    };
    let (ipv4, ipv6) = match parse_ip(&ip)? {
        IpAddr::V4(a) => (Wanted::Exact(a), Wanted::None),
        IpAddr::V6(a) => (Wanted::None, Wanted::Exact(a)),
    };
    lease(&node, LeaseRequest { pool, ipv4, ipv6 }, query.owner).await
}

async fn lease(node: &Node, request: LeaseRequest, owner: String) -> Answer<(StatusCode, Json<IpamAllocation>)> {
    accepts_work(node, "lease address")?;
    if owner.is_empty() || owner.len() > 253 || owner.chars().any(char::is_control) {
        return Err(invalid("lease address: owner must be 1 to 253 bytes without control characters".into()));
    }
    let owner = LeaseOwner::Caller { name: owner };
    if health::holds(&owner) {
        return Err(invalid(format!("lease address: the owner {} is the agent's own", health::NAME)));
    }
    let leased = resting::lease(&node.life.network.addresses, &request, &owner)
        .await
        .map_err(|e| Failure::from(e).of("lease address"))?;
    let leases: Vec<Lease> = {
        let ipam = lock(&node.life.network.addresses.ipam);
        let ips = leased.ipv4.map(IpAddr::V4).into_iter().chain(leased.ipv6.map(IpAddr::V6));
        ips.filter_map(|ip| ipam.get(ip).cloned()).collect()
    };
    if let Err(error) = node.life.store.commit(leases.iter().cloned().map(Change::PutLease).collect()).await {
        resting::in_memory(&node.life.network.addresses, &leases);
        return Err(Failure::new(ErrorCode::Store, error.to_string()));
    }
    Ok((StatusCode::CREATED, Json(IpamAllocation { leases: leases.iter().map(api_lease).collect() })))
}

/// Releases an address. An unleased address of a pool is a success; an address of an endpoint, of the node or of no
/// pool is an error.
#[utoipa::path(delete, path = "/v1/ipam/{ip}", tag = "ipam", params(("ip" = String, Path)),
    responses((status = 200, description = "not leased any more"), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn release(State(node): State<Arc<Node>>, Segment(text): Segment) -> Answer<StatusCode> {
    accepts_work(&node, "release address")?;
    let ip = parse_ip(&text)?;
    let (lease, cidrs) = {
        let ipam = lock(&node.life.network.addresses.ipam);
        (ipam.get(ip).cloned(), ipam.cidrs())
    };
    let Some(lease) = lease else {
        if cidrs.iter().any(|cidr| cidr.contains(&ip)) {
            return Ok(StatusCode::OK);
        }
        let pools: Vec<String> = cidrs.iter().map(ToString::to_string).collect();
        let message = format!("release {ip}: it is in no pool of this node ({})", pools.join(", "));
        return Err(
            Failure::new(ErrorCode::NotFound, message).hint("`wharf ipam list` shows the pools and who holds what")
        );
    };
    let in_use = || {
        Failure::new(ErrorCode::Exists, format!("release {ip}: held by {}", describe_owner(&lease.owner))).hint(
            match lease.owner {
                LeaseOwner::Node => "it is the node's own, and its endpoints' gateway: it is never given back",
                LeaseOwner::Caller { .. } => "it is the health endpoint's, which the agent keeps",
                LeaseOwner::Attachment { .. } => "an endpoint's address goes with the endpoint: delete that",
            },
        )
    };
    if !matches!(lease.owner, LeaseOwner::Caller { .. }) || health::holds(&lease.owner) {
        return Err(in_use());
    }
    // An endpoint with a caller's address uses it.
    if let Some(user) =
        node.life.endpoints.registry.list().iter().find(|h| h.shared.read(|v| v.record.addresses().any(|a| a == ip)))
    {
        return Err(Failure::new(ErrorCode::Exists, format!("release {ip}: endpoint {} uses it", user.id))
            .hint("delete the endpoint first"));
    }
    resting::release(&node.life.network.addresses, std::slice::from_ref(&lease), Vec::new())
        .await
        .map_err(|e| Failure::new(ErrorCode::Store, e.to_string()))?;
    Ok(StatusCode::OK)
}

fn api_lease(lease: &Lease) -> IpamLease {
    IpamLease {
        ip: lease.ip,
        pool: lease.pool.to_string(),
        owner: describe_owner(&lease.owner),
        since_unix_ms: lease.since_unix_ms,
    }
}

fn parse_ip(text: &str) -> Answer<IpAddr> {
    let shown: String = text.chars().take(80).collect();
    text.parse().map_err(|e| invalid(format!("read address {shown:?}: {e}")))
}
