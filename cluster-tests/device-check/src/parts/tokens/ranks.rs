//! A model over one rank or several, each a thread of this process, and its steps through the product's own interface.

use std::{thread, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use consort_kernels::{
    DType,
    device::Device,
    sampling::{SamplingParams, TokenHistory},
};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    checkpoint::Checkpoint,
    collective::{Collective, LocalGroup},
    ids::BlockId,
    kv::KvStore,
    model::{
        AllReduce, Draw, LoadOptions, Model, RowOutcome, RowRequest, STEPS_UNDER_WAY_MAX, drawn_by,
        kv_layout, load,
    },
    partition::Partition,
};

/// Tokens of a block of pages.
const BLOCK_SIZE: usize = 16;
/// A step takes milliseconds; one that takes so long hangs.
const STEP_LIMIT: Duration = Duration::from_secs(8);

/// What is loaded, and for how much work.
pub(in crate::parts) struct Plan<'a> {
    pub(in crate::parts) checkpoint: &'a Checkpoint,
    /// One for each rank.
    pub(in crate::parts) devices: &'a [Device],
    pub(in crate::parts) dtype: DType,
    pub(in crate::parts) deterministic: bool,
    /// Whether each rank has a process of its own.
    pub(in crate::parts) separate_processes: bool,
    /// Sequences at a time.
    pub(in crate::parts) sequences: usize,
    /// Most tokens of one sequence.
    pub(in crate::parts) context: usize,
    /// Most tokens of one step.
    pub(in crate::parts) step_tokens: usize,
}

/// New tokens of one sequence in a step.
#[derive(Clone, Copy)]
pub(in crate::parts) struct Part<'a> {
    pub(in crate::parts) sequence: usize,
    /// Position of the first one.
    pub(in crate::parts) start: usize,
    pub(in crate::parts) tokens: &'a [u32],
}

/// Which rows of a step are kept.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::parts) enum Rows {
    All,
    /// The last one of each sequence.
    Last,
}

/// One rank at work.
pub(in crate::parts) struct Ranked {
    // Before the pages, which its graphs use, and before its place in the group, where others may wait for its device.
    model: Box<dyn Model>,
    kv: KvStore,
    comm: Box<dyn Collective>,
    blocks_of_one: usize,
    /// Rows that the last step kept.
    kept: usize,
    likeliest: Likeliest,
}

/// How the likeliest token is drawn.
struct Likeliest {
    sampling: SamplingParams,
    history: TokenHistory,
}

impl Likeliest {
    fn new() -> Likeliest {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        Likeliest { sampling, history: TokenHistory::default() }
    }

    fn draw(&self) -> Draw<'_> {
        Draw { sampling: &self.sampling, history: &self.history, position: 0, logprobs: None }
    }
}

/// What a sequence went on with.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::parts) struct Spoken {
    pub(in crate::parts) tokens: Vec<u32>,
    /// The logits of each of them.
    pub(in crate::parts) logits: Vec<Vec<f32>>,
}

/// Does `work` on all ranks and returns what they found, which must be the same on all.
pub(in crate::parts) fn on_ranks<T: PartialEq + Send>(
    plan: &Plan<'_>,
    work: impl Fn(&mut Ranked) -> Result<T> + Sync,
) -> Result<T> {
    let (partition, work) = (&Partition::new(plan.checkpoint.config(), plan.devices.len(), None)?, &work);
    let found: Vec<Result<T>> = thread::scope(|scope| {
        let ranks: Vec<_> = LocalGroup::new(plan.devices.len())
            .into_iter()
            .zip(plan.devices)
            .map(|(comm, device)| {
                scope.spawn(move || {
                    let mut rank = Ranked::load(plan, partition, device, Box::new(comm))?;
                    let found = work(&mut rank)?;
                    // Others may still wait for its device.
                    rank.meet()?;
                    Ok(found)
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked"))))
            .collect()
    });
    let mut found = first_cause(found)?.into_iter();
    let first = found.next().context("a group without ranks")?;
    if found.any(|other| other != first) {
        bail!("the ranks found different things");
    }
    Ok(first)
}

/// All results, or the error that came first: the others only tell of a group that has ended.
fn first_cause<T>(found: Vec<Result<T>>) -> Result<Vec<T>> {
    let ended_by_another = |error: &anyhow::Error| format!("{error:#}").contains("collective aborted");
    let (mut results, mut cause) = (Vec::new(), None::<anyhow::Error>);
    for found in found {
        match found {
            Ok(result) => results.push(result),
            Err(error) if cause.as_ref().is_none_or(ended_by_another) => cause = Some(error),
            Err(_) => {}
        }
    }
    cause.map_or(Ok(results), Err)
}

impl Ranked {
    /// Loads a rank's part and meets the others.
    pub(in crate::parts) fn load(
        plan: &Plan<'_>,
        partition: &Partition,
        device: &Device,
        mut comm: Box<dyn Collective>,
    ) -> Result<Ranked> {
        let (rank, blocks_of_one) = (comm.rank(), plan.context.div_ceil(BLOCK_SIZE));
        let blocks = plan.sequences * blocks_of_one;
        let options = LoadOptions {
            dtype: plan.dtype,
            max_batch_tokens: plan.step_tokens,
            block_size: BLOCK_SIZE,
            max_num_seqs: plan.sequences,
            max_model_len: plan.context,
            num_blocks: blocks,
            step_limit: STEP_LIMIT,
            deterministic: plan.deterministic,
            separate_processes: plan.separate_processes,
            // NCCL refuses ranks that share a card.
            all_reduce: AllReduce::Kernels,
        };
        let mut model = load(device, plan.checkpoint, partition, rank, &options, &|_, _| {})?;
        model.join(&mut *comm)?;
        let share = partition.share(rank);
        let layout = kv_layout(plan.checkpoint.config(), share, plan.dtype, BLOCK_SIZE)?;
        let kv = KvStore::new(device, layout, blocks)?;
        Ok(Ranked { model, kv, comm, blocks_of_one, kept: 0, likeliest: Likeliest::new() })
    }

    /// Waits until all ranks have come here. One that leaves before ends the group for the others.
    pub(in crate::parts) fn meet(&mut self) -> Result<()> {
        Ok(self.comm.barrier()?)
    }

    /// Bytes of weights that this rank holds.
    pub(in crate::parts) fn weight_bytes(&self) -> u64 {
        self.model.weight_bytes()
    }

    /// Bytes of keys and values of one sequence at its longest.
    pub(in crate::parts) fn kv_bytes_of_one(&self) -> u64 {
        self.kv.layout().block_bytes() * self.blocks_of_one as u64
    }

    /// Runs a step. Its results are waited for by [`Ranked::draw`] and [`Ranked::logits`].
    pub(in crate::parts) fn step(&mut self, parts: &[Part<'_>], rows: Rows) -> Result<()> {
        let batch = batch(parts, rows, self.blocks_of_one);
        self.model.forward(&batch, &mut self.kv, &mut *self.comm)?;
        self.kept = batch.output_rows.len();
        Ok(())
    }

    /// The likeliest token of each kept row, as the product draws it.
    pub(in crate::parts) fn draw(&mut self) -> Result<Vec<u32>> {
        let requests = vec![RowRequest { prompt: None, draw: Some(self.likeliest.draw()) }; self.kept];
        tokens_of(self.model.outcomes(&requests, false, &mut *self.comm)?)
    }

    /// The tokens of each of `count` steps of one new token of each sequence, at the step's position. Each step is
    /// enqueued while the one before is under way, and its input is what that one draws on the device.
    pub(in crate::parts) fn overlapped(
        &mut self,
        first: &[u32],
        position: impl Fn(usize) -> usize,
        count: usize,
    ) -> Result<Vec<Vec<u32>>> {
        let Ranked { model, kv, comm, blocks_of_one, likeliest, .. } = self;
        let overlap = model.overlap().context("the model's steps cannot be enqueued behind each other")?;
        let requests = vec![RowRequest { prompt: None, draw: Some(likeliest.draw()) }; first.len()];
        if !overlap.takes(&requests) {
            bail!("the model does not begin steps that draw the likeliest token");
        }
        let drawn: Vec<u32> = (0..first.len()).map(drawn_by).collect();
        let (mut begun, mut tokens) = (0, Vec::with_capacity(count));
        while tokens.len() < count {
            while begun < count && begun - tokens.len() < STEPS_UNDER_WAY_MAX {
                let inputs = if begun == 0 { first } else { &drawn };
                let parts: Vec<Part<'_>> = inputs
                    .iter()
                    .enumerate()
                    .map(|(sequence, token)| Part {
                        sequence,
                        start: position(begun),
                        tokens: std::slice::from_ref(token),
                    })
                    .collect();
                overlap.begin(&batch(&parts, Rows::Last, *blocks_of_one), &requests, kv, &mut **comm)?;
                begun += 1;
            }
            let outcomes = overlap.finish(STEP_LIMIT, &mut **comm)?;
            tokens.push(tokens_of(outcomes.context("a step under way takes too long")?)?);
        }
        Ok(tokens)
    }

    /// The logits of each kept row.
    pub(in crate::parts) fn logits(&mut self) -> Result<Vec<Vec<f32>>> {
        let (mut rows, vocabulary) = (Vec::with_capacity(self.kept), self.model.vocab_size());
        for start in (0..self.kept).step_by(self.model.logit_rows_max()) {
            let end = self.kept.min(start + self.model.logit_rows_max());
            let logits = self.model.logits(start..end, &mut *self.comm)?;
            rows.extend(logits.chunks_exact(vocabulary).map(<[f32]>::to_vec));
        }
        Ok(rows)
    }

    /// The logits at each token of the first sequence, fed so many at a time.
    pub(in crate::parts) fn teacher_forced(
        &mut self,
        tokens: &[u32],
        at_a_time: usize,
    ) -> Result<Vec<Vec<f32>>> {
        let mut logits = Vec::with_capacity(tokens.len());
        for (at, tokens) in tokens.chunks(at_a_time).enumerate() {
            let part = Part { sequence: 0, start: at * at_a_time, tokens };
            self.step(&[part], Rows::All)?;
            logits.extend(self.logits()?);
        }
        Ok(logits)
    }

    /// What follows each of several prompts, all advancing in the same steps, by the likeliest token. `listens`:
    /// whether logits are kept too.
    pub(in crate::parts) fn greedy(
        &mut self,
        prompts: &[Vec<u32>],
        count: usize,
        listens: bool,
    ) -> Result<Vec<Spoken>> {
        let mut spoken = vec![Spoken::default(); prompts.len()];
        let mut next = prompts.to_vec();
        let mut fed = vec![0; prompts.len()];
        for _ in 0..count {
            let parts: Vec<Part<'_>> = next
                .iter()
                .zip(&fed)
                .enumerate()
                .map(|(sequence, (tokens, start))| Part { sequence, start: *start, tokens })
                .collect();
            self.step(&parts, Rows::Last)?;
            let logits = if listens { self.logits()? } else { Vec::new() };
            spoken.iter_mut().zip(logits).for_each(|(spoken, logits)| spoken.logits.push(logits));
            for (at, token) in self.draw()?.into_iter().enumerate() {
                spoken[at].tokens.push(token);
                fed[at] += next[at].len();
                next[at] = vec![token];
            }
        }
        Ok(spoken)
    }

    /// Copies the first sequence's pages to those of all others.
    pub(in crate::parts) fn copy_first_to_others(&mut self) -> Result<()> {
        let sequences = self.kv.num_blocks() / self.blocks_of_one;
        let blocks = |sequence: usize| table(sequence, self.blocks_of_one);
        let copies: Vec<(BlockId, BlockId)> =
            (1..sequences).flat_map(|sequence| blocks(0).zip(blocks(sequence))).collect();
        Ok(self.kv.copy_blocks(&copies)?)
    }
}

/// The drawn tokens.
fn tokens_of(outcomes: Vec<RowOutcome>) -> Result<Vec<u32>> {
    let token = |outcome: RowOutcome| {
        outcome.drawn.and_then(|drawn| drawn.token).context("a row has no finite logit")
    };
    outcomes.into_iter().map(token).collect()
}

/// The blocks of a sequence, in descending order, so that a table is never the identity.
fn table(sequence: usize, blocks_of_one: usize) -> impl Iterator<Item = BlockId> {
    (sequence * blocks_of_one..(sequence + 1) * blocks_of_one).rev().map(|block| BlockId(block as u32))
}

/// For a model whose layers look equally far back.
fn batch(parts: &[Part<'_>], rows: Rows, blocks_of_one: usize) -> Batch {
    let mut batch = Batch::new(1);
    for part in parts {
        let (first, table_start) = (batch.tokens.len(), batch.tables[0].len());
        let context_len = part.start + part.tokens.len();
        batch.tokens.extend(part.tokens);
        batch.positions.extend(part.start as u32..context_len as u32);
        batch.tables[0].extend(table(part.sequence, blocks_of_one).take(context_len.div_ceil(BLOCK_SIZE)));
        let (end, table) = (batch.tokens.len(), table_start..batch.tables[0].len());
        batch.spans.push(BatchSpan { rows: first..end, context_len, table });
        batch.output_rows.extend(if rows == Rows::All { first..end } else { end - 1..end });
    }
    batch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_lays_sequences_end_to_end_over_tables_of_their_own() {
        let parts =
            [Part { sequence: 1, start: 15, tokens: &[7, 8] }, Part { sequence: 0, start: 0, tokens: &[9] }];
        let batch = batch(&parts, Rows::Last, 3);
        assert_eq!((batch.tokens, batch.positions), (vec![7, 8, 9], vec![15, 16, 0]));
        assert_eq!(batch.tables, [[5, 4, 2].map(BlockId)]);
        assert_eq!(batch.spans[0], BatchSpan { rows: 0..2, context_len: 17, table: 0..2 });
        assert_eq!(batch.spans[1], BatchSpan { rows: 2..3, context_len: 1, table: 2..3 });
        assert_eq!(batch.output_rows, [1, 2]);
    }

    #[test]
    fn a_groups_error_is_the_one_that_ended_it() {
        fn aborted<T>() -> Result<T> {
            bail!("collective aborted on rank 0: rank 1 is gone")
        }
        let error = first_cause::<()>(vec![aborted(), Err(anyhow!("no memory")), aborted()]).unwrap_err();
        assert_eq!(error.to_string(), "no memory");
        assert_eq!(first_cause(vec![Ok(1), Ok(2)]).unwrap(), [1, 2]);
        assert!(first_cause(vec![Ok(1), aborted()]).is_err());
    }
}
