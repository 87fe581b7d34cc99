//! What a process needs to know to build one rank: what [`ModelFactory`] holds, without the files that it holds open.

use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use consort_actors::ShardError;
use consort_kernels::{
    cuda::{cubins::Cubins, settings::Settings},
    device::Isa,
};
use consort_parallel::{checkpoint::Checkpoint, ids::Rank, model::LoadOptions, partition::Partition};
use wincode::{SchemaRead, SchemaWrite};

use crate::{engine::ModelFactory, topology::DeviceSpec};

/// A rank to build. Folders and variables that CUDA is found by are the process's own, which it has from its parent.
#[derive(Clone, Debug, PartialEq, SchemaRead, SchemaWrite)]
pub(super) struct Blueprint {
    /// Bytes of the path.
    model: Vec<u8>,
    /// Tells a checkpoint that was replaced since.
    stored_bytes: u64,
    partition: Partition,
    options: LoadOptions,
    num_blocks: usize,
    host_blocks: usize,
    overlaps: bool,
    device: String,
    threads_per_rank: usize,
    isa: Isa,
}

#[derive(Debug, thiserror::Error)]
enum BlueprintError {
    #[error("the model at {path} has changed since the engine opened it; start the engine anew")]
    Changed { path: PathBuf },
    #[error("{problem}; {remedy}")]
    Device { problem: String, remedy: String },
}

impl Blueprint {
    pub(super) fn of(factory: &ModelFactory, rank: Rank) -> Self {
        Self {
            model: path_bytes(factory.checkpoint.path()),
            stored_bytes: factory.checkpoint.stored_bytes(),
            partition: factory.partition.clone(),
            options: factory.options,
            num_blocks: factory.num_blocks,
            host_blocks: factory.host_blocks,
            overlaps: factory.overlaps,
            device: factory.devices[rank.index()].to_string(),
            threads_per_rank: factory.threads_per_rank,
            isa: factory.isa,
        }
    }

    pub(super) fn is_on_cpu(&self) -> bool {
        DeviceSpec::parse(&self.device).is_ok_and(|device| device.is_cpu())
    }

    /// The factory of this one rank, with the checkpoint opened anew.
    pub(super) fn into_factory(self, rank: Rank) -> Result<ModelFactory, ShardError> {
        let path = PathBuf::from(OsString::from_vec(self.model));
        let checkpoint = Checkpoint::open(&path).map_err(ShardError::load)?;
        if checkpoint.stored_bytes() != self.stored_bytes {
            return Err(ShardError::load(BlueprintError::Changed { path }));
        }
        let device = DeviceSpec::parse(&self.device);
        let device = device
            .map_err(|(problem, remedy)| ShardError::load(BlueprintError::Device { problem, remedy }))?;
        let settings = Settings::of_process();
        Ok(ModelFactory {
            checkpoint,
            partition: self.partition,
            options: self.options,
            num_blocks: self.num_blocks,
            host_blocks: self.host_blocks,
            overlaps: self.overlaps,
            // The other ranks are none of this process's concern.
            devices: vec![device; rank.index() + 1],
            threads_per_rank: self.threads_per_rank,
            isa: self.isa,
            cubins: Arc::new(Cubins::new(settings.clone())),
            settings,
        })
    }
}

fn path_bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}
