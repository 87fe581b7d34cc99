//! Products of one row and decodes beside what somebody writes in Triton, where the peer's Python has it.

use anyhow::Result;

use super::{attention, linears};
use crate::session::Session;

pub(crate) fn run(session: &mut Session) -> Result<()> {
    linears::beside_triton(session)?;
    attention::beside_triton(session)
}
