//! Llama and Mistral on a CUDA device.
//!
//! | file | what it is |
//! |---|---|
//! | `shape` | sizes, known before there is memory |
//! | `weights`, `buffers`, `arenas` | one arena, or two: planned, taken at once, filled |
//! | `numbers` | what a step tells the device |
//! | `step` | the launches, once for all: enqueued, or recorded for a graph |
//! | `group`, `meeting` | the ranks' memory and how waits end |
//! | `sums` | what ranks sum with: kernels, NCCL |
//! | `draws` | tokens and log-probabilities |
//! | `overlap`, `under_way` | a step that is enqueued while another is computed |
//!
//! Decodes are replayed from graphs, one for each [frame](consort_kernels::attention::cuda::Frame) of batch and length,
//! recorded when it is first needed. All else is launched step by step.

mod arenas;
mod buffers;
mod draws;
mod group;
mod meeting;
mod numbers;
mod overlap;
mod shape;
mod step;
mod sums;
mod under_way;
mod weights;

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use consort_kernels::{
    DType, KernelError,
    attention::cuda::Frame,
    cuda::{
        Launcher,
        device::{ArenaPlan, CudaDevice, CudaError, DeviceBuffer, Graph, UploadError, Uploader},
    },
    element::bf16,
};

use self::{
    arenas::{Arenas, Plans},
    buffers::{BufferPlan, Buffers},
    draws::Rows,
    group::Group,
    numbers::StepNumbers,
    shape::{LOGIT_ROWS_MAX, RankShape},
    step::Step,
    sums::Wishes,
    under_way::UnderWay,
    weights::{WeightPlan, Weights},
};
use super::{
    LoadError, LoadOptions, Model, ModelError, Overlap, RowOutcome, RowRequest, check_layout,
    check_logit_rows, kv_layout,
};
use crate::{
    batch::{Batch, BatchLimits},
    checkpoint::Checkpoint,
    collective::Collective,
    config::ModelConfig,
    ids::Rank,
    kv::{KvLayout, KvStore},
    partition::Partition,
};

/// What is waited for in vain where a device hangs.
const PEERS_WORK: &str = "a peer's work in this rank's memory to end";

/// Longest wait for the weights' last copies.
const UPLOAD_LIMIT: Duration = Duration::from_secs(600);

/// Graphs kept at most: a few for each size of batch.
const GRAPHS_MAX: usize = 128;

/// Page-locked memory of each loading thread, twice.
const UPLOAD_CHUNK_BYTES: usize = 16 << 20;
/// Threads that read weights at most: as many as keep a link busy.
const UPLOAD_THREADS_MAX: usize = 8;

/// One rank's part of a Llama model on its device.
pub(super) struct CudaLlama {
    // Graphs go before what they use.
    graphs: Graphs,
    device: Arc<CudaDevice>,
    shape: RankShape,
    weights: Weights,
    buffers: Buffers,
    arenas: Arenas,
    /// `None` before the first meeting, and for a rank alone.
    group: Option<Group>,
    kv_layout: KvLayout,
    max_batch_tokens: usize,
    step_limit: Duration,
    wishes: Wishes,
    kept_rows: usize,
    under_way: UnderWay,
    /// For [`Model::logits`].
    host_logits: Vec<f32>,
}

/// Recorded decodes over one pool of pages and in one life of the group.
#[derive(Default)]
struct Graphs {
    /// With the time of their last use.
    recorded: BTreeMap<Frame, (Graph, u64)>,
    pool: u64,
    time: u64,
}

impl Graphs {
    /// The graph of a frame over the pool at an address, made by `record` where there is none. Of too many the one
    /// goes that was not used for the longest time. `None` where the device has no memory for another: then a step
    /// does without.
    fn get(
        &mut self,
        frame: Frame,
        pool: u64,
        record: impl FnOnce() -> Result<Graph, KernelError>,
    ) -> Result<Option<&Graph>, KernelError> {
        if self.pool != pool {
            *self = Graphs { pool, ..Graphs::default() };
        }
        self.time += 1;
        if !self.recorded.contains_key(&frame) && self.recorded.len() >= GRAPHS_MAX {
            let oldest = self.recorded.iter().min_by_key(|(_, (_, used))| *used).map(|(frame, _)| *frame);
            oldest.map(|frame| self.recorded.remove(&frame));
        }
        let (graph, used) = match self.recorded.entry(frame) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => match record() {
                Ok(graph) => {
                    tracing::debug!(?frame, launches = graph.launches(), "recorded a decode");
                    place.insert((graph, 0))
                }
                Err(KernelError::Cuda(error)) if matches!(*error, CudaError::OutOfMemory { .. }) => {
                    tracing::warn!(%error, "no memory for a graph; its decodes are launched one by one");
                    return Ok(None);
                }
                Err(error) => return Err(error),
            },
        };
        *used = self.time;
        Ok(Some(graph))
    }
}

/// Bytes of device memory of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelMemory {
    /// Of weights.
    pub weight_bytes: u64,
    /// Of activations and scratch.
    pub workspace_bytes: u64,
}

impl ModelMemory {
    /// Of both.
    pub fn total_bytes(&self) -> u64 {
        self.weight_bytes + self.workspace_bytes
    }
}

/// What a rank's weights and activations take, known from headers alone.
pub fn memory(
    config: &ModelConfig,
    partition: &Partition,
    rank: Rank,
    options: &LoadOptions,
    multiprocessors: u32,
) -> Result<ModelMemory, KernelError> {
    let mut arena = ArenaPlan::new();
    WeightPlan::new(&mut arena, config, partition.share(rank));
    let weight_bytes = arena.bytes();
    let mut plans = Plans::new(partition.size(), options);
    plan(&mut plans, config, partition, rank, options, multiprocessors)?;
    Ok(ModelMemory { weight_bytes, workspace_bytes: plans.bytes() - weight_bytes })
}

fn plan(
    plans: &mut Plans,
    config: &ModelConfig,
    partition: &Partition,
    rank: Rank,
    options: &LoadOptions,
    multiprocessors: u32,
) -> Result<(RankShape, WeightPlan, BufferPlan), KernelError> {
    let shape = RankShape::new(config, partition, rank, options, multiprocessors)?;
    let weights = WeightPlan::new(&mut plans.own, config, partition.share(rank));
    let scratch = shape.linear_scratch(weights.shapes(), multiprocessors)?;
    let buffers = BufferPlan::new(plans, &shape, scratch)?;
    Ok((shape, weights, buffers))
}

impl CudaLlama {
    /// Reads the slices of `rank` from `checkpoint`.
    pub(super) fn load(
        device: &Arc<CudaDevice>,
        checkpoint: &Checkpoint,
        partition: &Partition,
        rank: Rank,
        options: &LoadOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<CudaLlama, LoadError> {
        let config = checkpoint.config();
        if options.dtype != DType::BF16 {
            let reason = format!("{} on a CUDA device; bfloat16 it is, or float32 on the CPU", options.dtype);
            return Err(KernelError::Unsupported { operation: "load", reason }.into());
        }
        device.load_all().map_err(KernelError::from)?;
        let mut plans = Plans::new(partition.size(), options);
        let multiprocessors = device.multiprocessors();
        let (shape, weights, buffers) = plan(&mut plans, config, partition, rank, options, multiprocessors)?;
        let arenas = plans.allocate(device).map_err(KernelError::from)?;
        let (mut weights, mut buffers) = (weights.place(&arenas.own), buffers.place(&arenas));
        upload(device, &mut weights, checkpoint, progress)?;
        device.upload(&shape.frequencies, buffers.frequencies.all_mut())?;
        step::rehearse_products(&**device, &shape, &weights, &mut buffers)?;
        device.synchronize("multiply for the first time", UPLOAD_LIMIT).map_err(KernelError::from)?;
        Ok(CudaLlama {
            graphs: Graphs::default(),
            device: device.clone(),
            kv_layout: kv_layout(config, partition.share(rank), options.dtype, options.block_size)?,
            shape,
            weights,
            buffers,
            arenas,
            group: None,
            max_batch_tokens: options.max_batch_tokens,
            step_limit: options.step_limit,
            wishes: Wishes { all_reduce: options.all_reduce, deterministic: options.deterministic },
            kept_rows: 0,
            under_way: UnderWay::new(device, options.max_batch_tokens).map_err(KernelError::from)?,
            host_logits: Vec::new(),
        })
    }

    /// Enqueues a step, or replays its graph, recorded now where it is the first of its kind.
    fn enqueue(
        &mut self,
        numbers: &StepNumbers,
        pool: &mut DeviceBuffer<bf16>,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        let CudaLlama { graphs, device, shape, weights, buffers, group, .. } = self;
        for (at, words) in numbers.copies() {
            device.upload(words, buffers.numbers.slice_mut(at..at + words.len()))?;
        }
        let sums = group.as_ref().map(|group| Arc::clone(&group.sums));
        let sums = sums.as_deref();
        let blame = |error: KernelError, comm: &mut dyn Collective| match sums {
            Some(sums) => sums.blame(error, comm),
            None => error.into(),
        };
        let mut layers = |launcher: &dyn Launcher, pool: &mut DeviceBuffer<bf16>| {
            Step { launcher, shape, weights, buffers, pool, sums, numbers }.layers()
        };
        let graph = match numbers.frame {
            Some(frame) => {
                let address = pool.address();
                let record = || device.capture(|recorder| layers(recorder, pool));
                graphs.get(frame, address, record).map_err(|error| blame(error, comm))?
            }
            None => None,
        };
        if let Some(group) = group {
            group.meet(comm)?;
            // Not before: a rank that leaves waits for all who have begun, and they may wait for it no longer.
            group.begin(comm)?;
        }
        let launch = |graph| Ok(device.launch_graph(graph)?);
        let launched = match (graph, sums) {
            (Some(graph), Some(sums)) => sums.replay(|| launch(graph)),
            (Some(graph), None) => launch(graph),
            (None, _) => layers(&**device, pool),
        };
        launched.map_err(|error| blame(error, comm))
    }

    /// Checks and enqueues the layers of a step, which may name the tokens of `drawn` rows of the step before.
    fn launch(
        &mut self,
        batch: &Batch,
        drawn: usize,
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        check_layout(kv, &self.kv_layout)?;
        if comm.size() != self.shape.ranks() || (comm.size() > 1 && self.group.is_none()) {
            return Err(ModelError::Batch(format!(
                "a step of {} ranks for a model over {} that has {}met them",
                comm.size(),
                self.shape.ranks(),
                if self.group.is_some() { "" } else { "not " }
            )));
        }
        let blocks = kv.num_blocks();
        batch.check(BatchLimits {
            max_tokens: self.max_batch_tokens,
            vocab_size: self.shape.vocabulary,
            groups: self.shape.groups,
            block_size: self.kv_layout.pages.block_size(),
            num_blocks: blocks,
            drawn,
        })?;
        self.kept_rows = 0;
        let numbers = StepNumbers::new(batch, &self.shape, blocks)?;
        self.enqueue(&numbers, kv.device_pages_mut()?, comm)
    }

    /// Refuses what is to happen with no step under way.
    fn check_alone(&self) -> Result<(), ModelError> {
        match self.under_way.is_empty() {
            true => Ok(()),
            false => Err(ModelError::Batch("a step is under way, and was not waited for".to_owned())),
        }
    }

    /// Makes the logits of kept rows.
    fn make_logits(&mut self, kept: Range<usize>, comm: &mut dyn Collective) -> Result<(), ModelError> {
        let sums = self.group.as_ref().map(|group| &*group.sums);
        let head = self.weights.head();
        let launched = step::logits(&*self.device, &self.shape, head, &mut self.buffers, sums, kept);
        launched.map_err(|error| match sums {
            Some(sums) => sums.blame(error, comm),
            None => error.into(),
        })
    }

    /// Before work is enqueued in which ranks touch each other's memory.
    fn begin_group_work(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        self.group.as_mut().map_or(Ok(()), |group| group.begin(comm))
    }

    /// Refuses what the device computed where a rank has stopped.
    fn check_group(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        match &mut self.group {
            Some(group) => group.check(&self.device, &self.buffers.area, comm, self.step_limit),
            None => Ok(()),
        }
    }
}

/// Fills all matrices, by several threads.
fn upload(
    device: &Arc<CudaDevice>,
    weights: &mut Weights,
    checkpoint: &Checkpoint,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), LoadError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(UPLOAD_THREADS_MAX);
    let mut uploader = Uploader::new(device, threads, UPLOAD_CHUNK_BYTES).map_err(KernelError::from)?;
    let uploads = weights.uploads(checkpoint)?;
    let outcome = uploader.run(&uploads, &|done| progress(done.done_bytes, done.total_bytes));
    drop(uploads);
    outcome.map_err(|error| match error {
        UploadError::Fill(error) => LoadError::from(error),
        UploadError::Device(error) => error.into(),
    })?;
    weights.finish(device, checkpoint)?;
    device.synchronize("take the weights", UPLOAD_LIMIT).map_err(KernelError::from)?;
    Ok(())
}

impl Model for CudaLlama {
    fn join(&mut self, comm: &mut dyn Collective) -> Result<(), ModelError> {
        self.kept_rows = 0;
        if let Some(group) = &self.group {
            group.call_off();
        }
        self.device
            .synchronize("end the work of an earlier epoch", self.step_limit)
            .map_err(KernelError::from)?;
        self.under_way.restart();
        // Their launches hold the addresses of the earlier life.
        self.graphs = Graphs::default();
        if let Some(group) = self.group.take()
            && !group.ends()
        {
            // What a device that hangs would do when it goes on must not meet the next epoch's work.
            self.device.abandon(PEERS_WORK);
            return Err(group::refusal(
                "a peer's device may go on in this rank's memory; it needs other".into(),
            ));
        }
        if comm.size() > 1 {
            let wanted = (self.wishes, self.step_limit);
            let joined = Group::join(&self.device, &mut self.buffers, &self.arenas, wanted, comm);
            if joined.is_err() {
                // Others may know the addresses already.
                Group::give_up(&self.device, comm);
            }
            self.group = Some(joined?);
        }
        Ok(())
    }

    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        comm: &mut dyn Collective,
    ) -> Result<(), ModelError> {
        self.check_alone()?;
        self.launch(batch, 0, kv, comm)?;
        self.kept_rows = batch.output_rows.len();
        if self.kept_rows == 0 {
            // Nobody waits for this step's results, and nobody else tells of its end.
            self.device.synchronize("end a step", self.step_limit).map_err(KernelError::from)?;
            self.check_group(comm)?;
        }
        Ok(())
    }

    fn outcomes(
        &mut self,
        requests: &[RowRequest<'_>],
        report: bool,
        comm: &mut dyn Collective,
    ) -> Result<Vec<RowOutcome>, ModelError> {
        if requests.len() != self.kept_rows {
            let (asked, kept) = (requests.len(), self.kept_rows);
            return Err(ModelError::Batch(format!("{asked} requests for {kept} kept rows")));
        }
        let mut outcomes = Vec::with_capacity(requests.len());
        for group in draws::groups(requests, self.shape.vocabulary)? {
            self.begin_group_work(comm)?;
            self.make_logits(group.rows.clone(), comm)?;
            let (device, shape, buffers) = (&*self.device, &self.shape, &mut self.buffers);
            let mut rows = Rows { device, shape, buffers, report, limit: self.step_limit };
            outcomes.extend(rows.outcomes(&group, &requests[group.rows.clone()])?);
        }
        if self.kept_rows > 0 {
            self.check_group(comm)?;
        }
        Ok(outcomes)
    }

    fn logits(&mut self, rows: Range<usize>, comm: &mut dyn Collective) -> Result<&[f32], ModelError> {
        check_logit_rows(&rows, self.kept_rows, LOGIT_ROWS_MAX)?;
        let elements = rows.len() * self.shape.vocabulary;
        self.begin_group_work(comm)?;
        self.make_logits(rows, comm)?;
        self.host_logits.resize(elements, 0.0);
        let from = self.buffers.logits.slice(0..elements);
        self.device.download(from, &mut self.host_logits, self.step_limit)?;
        self.check_group(comm)?;
        Ok(&self.host_logits)
    }

    fn overlap(&mut self) -> Option<&mut dyn Overlap> {
        Some(self)
    }

    fn logit_rows_max(&self) -> usize {
        LOGIT_ROWS_MAX
    }

    fn vocab_size(&self) -> usize {
        self.shape.vocabulary
    }

    fn weight_bytes(&self) -> u64 {
        self.weights.bytes()
    }

    fn workspace_bytes(&self) -> u64 {
        self.arenas.bytes() - self.weights.bytes()
    }
}

impl Drop for CudaLlama {
    /// Other ranks' devices may be reading this one's memory: it is given back when they have stopped, or never.
    fn drop(&mut self) {
        let Some(group) = self.group.take() else { return };
        let graphs = &mut self.graphs;
        if !group.leave(&self.device, || *graphs = Graphs::default()) {
            self.device.abandon(PEERS_WORK);
        }
    }
}
