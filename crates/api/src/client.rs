//! HTTP over the agent's unix socket.
