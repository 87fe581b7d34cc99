//! What a rank is made of: device, model slices, KV pages. Called by the ensemble on each shard's own thread.

use std::sync::Arc;

use consort_actors::{ModelExecutor, ProgressReporter, RankShare, ShardError, ShardExecutor, ShardFactory};
use consort_kernels::{
    cuda::{cubins::Cubins, device::CudaDevice, settings::Settings},
    device::{Device, Isa},
};
use consort_parallel::{
    checkpoint::Checkpoint,
    collective::Collective,
    config::ModelConfig,
    ids::Rank,
    kv::KvStore,
    model::{self, LoadOptions},
    partition::Partition,
};

use super::cards::selector;
use crate::{error::DeviceError, topology::DeviceSpec};

/// Builds the ranks of one replica. A restarted rank is built by the same factory.
pub(crate) struct ModelFactory {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) partition: Partition,
    pub(crate) options: LoadOptions,
    pub(crate) num_blocks: usize,
    pub(crate) host_blocks: usize,
    /// Whether a step may be begun while another is computed.
    pub(crate) overlaps: bool,
    /// In rank order.
    pub(crate) devices: Vec<DeviceSpec>,
    pub(crate) threads_per_rank: usize,
    pub(crate) isa: Isa,
    /// Where CUDA's libraries are, and the kernels that all ranks share.
    pub(crate) settings: Settings,
    pub(crate) cubins: Arc<Cubins>,
}

impl ModelFactory {
    fn config(&self) -> &ModelConfig {
        self.checkpoint.config()
    }

    /// Opens the rank's device, on the thread that will use it.
    fn device(&self, rank: Rank) -> Result<Device, ShardError> {
        match self.devices[rank.index()] {
            DeviceSpec::Cpu(_) => Device::cpu_with(self.threads_per_rank, self.isa).map_err(ShardError::load),
            device => {
                let open = |device| CudaDevice::open_with(&selector(device)?, &self.settings, &self.cubins);
                Ok(Device::Cuda(open(device).map_err(|error| ShardError::load(DeviceError(error)))?))
            }
        }
    }
}

impl ShardFactory for ModelFactory {
    fn build(
        &self,
        rank: Rank,
        comm: Box<dyn Collective>,
        progress: &ProgressReporter,
    ) -> Result<Box<dyn ShardExecutor>, ShardError> {
        let device = self.device(rank)?;
        let report = |loaded, total| progress.report(loaded, total);
        let model = model::load(&device, &self.checkpoint, &self.partition, rank, &self.options, &report)
            .map_err(ShardError::load)?;
        let share = self.partition.share(rank);
        let layout = model::kv_layout(self.config(), share, self.options.dtype, self.options.block_size)
            .map_err(ShardError::load)?;
        let kv = KvStore::new(&device, layout, self.num_blocks).map_err(ShardError::load)?;
        let kv = kv.with_host_pool(&device, self.host_blocks).map_err(ShardError::load)?;
        Ok(Box::new(ModelExecutor::new(model, kv, comm).with_overlap(self.overlaps)))
    }

    fn describe(&self, rank: Rank) -> RankShare {
        let share = self.partition.share(rank);
        RankShare { query_heads: share.query_heads.clone(), kv_heads: share.kv_heads.clone() }
    }
}
