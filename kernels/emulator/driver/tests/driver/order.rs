//! Streams, events and the host: what waits for what.
