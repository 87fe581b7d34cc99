//! What a replica is told: nothing. It acts on supervision events alone.

/// No message exists yet.
pub(crate) enum ReplicaMessage {}
