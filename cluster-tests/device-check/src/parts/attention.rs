use anyhow::Result;

use crate::session::Session;

pub(crate) fn run(_session: &mut Session) -> Result<()> {
    anyhow::bail!("not yet")
}
