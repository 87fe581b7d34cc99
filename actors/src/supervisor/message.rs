//! What the supervisor is told: nothing but to stop, which needs no message.

/// No message exists yet.
pub(crate) enum SupervisorMessage {}
