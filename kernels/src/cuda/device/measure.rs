//! How long work took, by the device's own clock.

use std::time::Duration;

use super::{CudaDevice, raw::Event, wait};
use crate::KernelError;

impl CudaDevice {
    /// Enqueues work on the compute stream and returns how long the device took from its beginning to its end. Waits
    /// for that no longer than `limit`. What the host takes to enqueue counts where the device waits for it: enqueue
    /// one graph.
    pub fn measure(
        &self,
        limit: Duration,
        enqueue: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<Duration, KernelError> {
        let doing = "finish what is measured";
        let (start, end) = (Event::timed(&self.context)?, Event::timed(&self.context)?);
        start.record(&self.compute, doing)?;
        enqueue()?;
        end.record(&self.compute, doing)?;
        wait::until(&self.context, doing, limit, || end.is_done(doing))?;
        Ok(Duration::from_secs_f64(f64::from(start.milliseconds_to(&end)?.max(0.0)) / 1e3))
    }
}
