//! mistakes
