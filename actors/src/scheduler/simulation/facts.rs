//! Claims on whole runs.
