//! graphs
