//! Layers that look differently far back: pages behind a window belong to others, pages of a prefix to several.

use std::{ops::Range, sync::Arc};

use consort_kernels::{DType, device::Isa};
use consort_parallel::{
    batch::{Batch, BatchSpan},
    checkpoint::Checkpoint,
    collective::{Collective, Local, LocalGroup},
    ids::BlockId,
    kv::{KvGroups, KvStore},
    model::{LoadOptions, Model, kv_layout, load},
    partition::Partition,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    bits::assert_same_bits,
    harness::{BLOCK_SIZE, Random, Setup, evenly_spread, kept_logits, made_up, teacher_forced},
};

/// Keys that a layer with a window sees: more than a page, and no whole number of them.
pub(crate) const WINDOW: usize = 20;

const VOCABULARY: usize = 67;

/// A Llama of which the layers listed have a window.
fn config(layers: usize, windows: impl Fn(usize) -> bool) -> Value {
    let kind = |layer| if windows(layer) { "sliding_attention" } else { "full_attention" };
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "intermediate_size": 40,
        "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false, "eos_token_id": 0, "sliding_window": WINDOW,
        "layer_types": (0..layers).map(kind).collect::<Vec<_>>(),
    })
}

/// A model, and one of the same shape all of whose weights are NaN: what it leaves in pages is NaN.
pub(crate) struct Mixture {
    pub(crate) checkpoint: Arc<Checkpoint>,
    poisonous: Arc<Checkpoint>,
    _folders: [TempDir; 2],
}

impl Mixture {
    /// Layers with a window and without take turns: two groups.
    pub(crate) fn alternating() -> Mixture {
        Mixture::new(&config(4, |layer| layer % 2 == 0))
    }

    /// Three layers with a window to one without: a group for each layer, since no larger page would be filled.
    pub(crate) fn uneven() -> Mixture {
        Mixture::new(&config(4, |layer| layer % 4 != 3))
    }

    /// All layers with a window: one group, whose pages are given away.
    pub(crate) fn all_windows() -> Mixture {
        Mixture::new(&config(2, |_| true))
    }

    fn new(config: &Value) -> Mixture {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        Mixture {
            checkpoint: made_up(folders[0].path(), config, scaled(evenly_spread())),
            poisonous: made_up(folders[1].path(), config, || f32::NAN),
            _folders: folders,
        }
    }

    pub(crate) fn groups(&self) -> KvGroups {
        KvGroups::of(self.checkpoint.config())
    }
}

/// Large enough for keys far back to count.
fn scaled(mut next: impl FnMut() -> f32) -> impl FnMut() -> f32 {
    move || 1.5 * next()
}

/// One rank, and a pool all of whose pages hold NaN.
pub(crate) struct Ranked {
    model: Box<dyn Model>,
    kv: KvStore,
    comm: Local,
    /// A page that keeps its NaN.
    poison: BlockId,
}

impl Ranked {
    fn new(mixture: &Mixture, setup: Setup, blocks: usize, mut comm: Local, mut of_poison: Local) -> Ranked {
        let (config, rank) = (mixture.checkpoint.config(), comm.rank());
        let partition = Partition::new(config, setup.width, None).unwrap();
        let options = LoadOptions { num_blocks: blocks, ..setup.options() };
        let device = setup.device(rank);
        let build = |checkpoint: &Checkpoint, comm: &mut Local| {
            let mut model = load(&device, checkpoint, &partition, rank, &options, &|_, _| {}).unwrap();
            model.join(comm).unwrap();
            model
        };
        let layout = kv_layout(config, partition.share(rank), setup.dtype, BLOCK_SIZE).unwrap();
        let mut kv = KvStore::new(&device, layout, blocks + 1).unwrap();
        let (groups, poison) = (mixture.groups().count(), BlockId(blocks as u32));
        let mut poisonous = build(&mixture.poisonous, &mut of_poison);
        let tables = vec![vec![poison]; groups];
        let batch = batch_over(groups, &[Part { tokens: &[1; BLOCK_SIZE], start: 0, tables: &tables }]);
        poisonous.forward(&Batch { output_rows: vec![], ..batch }, &mut kv, &mut of_poison).unwrap();
        // A rank that leaves ends the group.
        of_poison.barrier().unwrap();
        drop(poisonous);
        let model = build(&mixture.checkpoint, &mut comm);
        let mut ranked = Ranked { model, kv, comm, poison };
        ranked.poison((0..blocks as u32).map(BlockId));
        ranked
    }

    fn poison(&mut self, blocks: impl Iterator<Item = BlockId>) {
        let copies: Vec<_> = blocks.map(|block| (self.poison, block)).collect();
        self.kv.copy_blocks(&copies).unwrap();
    }

    /// Logits of all rows of a step.
    fn step(&mut self, batch: &Batch) -> Vec<f32> {
        self.model.forward(batch, &mut self.kv, &mut self.comm).unwrap();
        kept_logits(&mut *self.model, &mut self.comm, batch.output_rows.len())
    }
}

/// What `work` makes on every rank, which must be the same, with a pool of `blocks` pages. `blocks` is what models are
/// loaded for as well.
pub(crate) fn on_ranks<R: PartialEq + Send>(
    mixture: &Mixture,
    setup: Setup,
    blocks: usize,
    work: impl Fn(&mut Ranked) -> R + Sync,
) -> R {
    let pairs = LocalGroup::new(setup.width).into_iter().zip(LocalGroup::new(setup.width));
    let work = &work;
    let mut results: Vec<R> = std::thread::scope(|scope| {
        let ranks: Vec<_> = pairs
            .map(|(comm, of_poison)| {
                scope.spawn(move || {
                    let mut ranked = Ranked::new(mixture, setup, blocks, comm, of_poison);
                    let result = work(&mut ranked);
                    ranked.comm.barrier().unwrap();
                    result
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let first = results.swap_remove(0);
    assert!(results.iter().all(|other| *other == first), "ranks disagree");
    first
}

/// New tokens of a sequence, from position `start` on.
struct Part<'a> {
    tokens: &'a [u32],
    start: usize,
    tables: &'a [Vec<BlockId>],
}

/// A step that keeps all rows.
fn batch_over(groups: usize, parts: &[Part<'_>]) -> Batch {
    let mut batch = Batch::new(groups);
    for part in parts {
        let (first, first_entry) = (batch.tokens.len(), batch.tables[0].len());
        let context_len = part.start + part.tokens.len();
        batch.tokens.extend(part.tokens);
        batch.positions.extend(part.start as u32..context_len as u32);
        for (tables, of_group) in batch.tables.iter_mut().zip(part.tables) {
            tables.extend(&of_group[..context_len.div_ceil(BLOCK_SIZE)]);
        }
        let (rows, table) = (first..batch.tokens.len(), first_entry..batch.tables[0].len());
        batch.spans.push(BatchSpan { rows, context_len, table });
    }
    batch.output_rows = (0..batch.tokens.len()).collect();
    batch
}

/// A sequence whose pages behind a window go back to the pool.
#[derive(Default)]
struct Window {
    fed: usize,
    /// For each group all pages it ever had, in the order of its tokens.
    tables: Vec<Vec<BlockId>>,
    /// Pages of each that were given back.
    gone: Vec<usize>,
}

/// Logits of sequences that advance side by side, each step by the next of `chunks` (the last of which repeats). What a
/// sequence's next row does not see is thrown away, filled with NaN, and taken by whoever comes first in that step.
/// With them how often a page was taken that somebody's table still names.
fn with_pages_given_away(
    ranked: &mut Ranked,
    groups: &KvGroups,
    sequences: &[Vec<u32>],
    chunks: &[usize],
) -> (Vec<Vec<f32>>, usize) {
    let count = groups.count();
    let windows: Vec<Option<usize>> = groups.windows().collect();
    let mut free: Vec<BlockId> = (0..ranked.poison.0).map(BlockId).collect();
    let mut states: Vec<Window> = sequences
        .iter()
        .map(|_| Window { tables: vec![vec![]; count], gone: vec![0; count], ..Window::default() })
        .collect();
    let (mut logits, mut given_away, mut reused) = (vec![Vec::new(); sequences.len()], Vec::new(), 0);
    for step in 0.. {
        let chunk = chunks[step.min(chunks.len() - 1)];
        let next = |at: usize, state: &Window| state.fed..sequences[at].len().min(state.fed + chunk);
        let mut thrown_away = Vec::new();
        for state in &mut states {
            for (group, window) in windows.iter().enumerate() {
                let behind = window.map_or(0, |window| (state.fed + 1).saturating_sub(window) / BLOCK_SIZE);
                // The last token may have left the last page.
                let behind = behind.min(state.tables[group].len());
                thrown_away.extend(&state.tables[group][state.gone[group]..behind]);
                state.gone[group] = behind;
            }
        }
        ranked.poison(thrown_away.iter().copied());
        given_away.extend_from_slice(&thrown_away);
        free.append(&mut thrown_away);
        for (at, state) in states.iter_mut().enumerate() {
            let end = next(at, state).end;
            for table in &mut state.tables {
                while table.len() < end.div_ceil(BLOCK_SIZE) {
                    table.push(free.pop().expect("the pool is large enough"));
                    reused += usize::from(given_away.contains(table.last().unwrap()));
                }
            }
        }
        let running: Vec<usize> = (0..states.len()).filter(|&at| !next(at, &states[at]).is_empty()).collect();
        if running.is_empty() {
            break;
        }
        let part = |&at: &usize| {
            let new = next(at, &states[at]);
            Part { tokens: &sequences[at][new.clone()], start: new.start, tables: &states[at].tables }
        };
        let batch = batch_over(count, &running.iter().map(part).collect::<Vec<_>>());
        let rows = ranked.step(&batch);
        let mut rows = rows.chunks_exact(VOCABULARY);
        for at in running {
            let new = next(at, &states[at]);
            logits[at].extend(rows.by_ref().take(new.len()).flatten());
            states[at].fed = new.end;
        }
    }
    (logits, reused)
}

/// Compares, bit by bit, sequences whose pages behind windows belong to others with those that keep all.
pub(crate) fn assert_pages_behind_windows_do_not_matter(
    mixture: &Mixture,
    setups: &[Setup],
    schedules: &[&[usize]],
) {
    let mut random = Random(9);
    let sequences = [random.tokens(93, VOCABULARY), random.tokens(70, VOCABULARY)];
    let groups = mixture.groups();
    for &setup in setups {
        let expected = teacher_forced(&mixture.checkpoint, Setup { isa: Isa::detect(), ..setup }, &sequences);
        for chunks in schedules {
            let blocks = groups.count() * 12;
            let run = |ranked: &mut Ranked| with_pages_given_away(ranked, &groups, &sequences, chunks);
            let (got, reused) = on_ranks(mixture, setup, blocks, run);
            let is_whole = chunks[0] >= 93;
            assert!(is_whole || reused > 2, "{setup:?} {chunks:?}: {reused} pages went to others");
            for (got, expected) in got.iter().zip(&expected) {
                assert_same_bits(got, expected, &format!("{setup:?}, steps of {chunks:?}"));
            }
        }
    }
}

/// Compares, bit by bit, sequences that share the pages of a prefix with the same ones alone.
pub(crate) fn assert_shared_prefixes_do_not_matter(mixture: &Mixture, setups: &[Setup]) {
    const PREFIX: usize = 3 * BLOCK_SIZE;
    let mut random = Random(4);
    let prefix = random.tokens(PREFIX, VOCABULARY);
    let sequences: Vec<Vec<u32>> =
        [26, 9, 30].into_iter().map(|len| [&prefix[..], &random.tokens(len, VOCABULARY)].concat()).collect();
    let groups = mixture.groups();
    let windows: Vec<Option<usize>> = groups.windows().collect();
    // In each step whose tokens come, in the order of rows. The second joins while the first fills the pages that both
    // read, the third when they are filled.
    let steps: [&[(usize, Range<usize>)]; 5] = [
        &[(1, PREFIX..PREFIX + 5), (0, 0..PREFIX + 20)],
        &[(0, PREFIX + 20..PREFIX + 21), (2, PREFIX..PREFIX + 17), (1, PREFIX + 5..PREFIX + 6)],
        &[(1, PREFIX + 6..PREFIX + 9), (0, PREFIX + 21..PREFIX + 26)],
        &[(2, PREFIX + 17..PREFIX + 18)],
        &[(2, PREFIX + 18..PREFIX + 30)],
    ];
    for &setup in setups {
        let alone = Setup { isa: Isa::detect(), ..setup };
        let expected = teacher_forced(&mixture.checkpoint, alone, &sequences);
        let run = |ranked: &mut Ranked| {
            let mut free = (0..ranked.poison.0).rev().map(BlockId);
            let mut tables: Vec<Vec<Vec<BlockId>>> = Vec::new();
            for tokens in &sequences {
                let of_group = |group: usize| {
                    let own = tokens.len().div_ceil(BLOCK_SIZE);
                    let mut table: Vec<BlockId> = free.by_ref().take(own).collect();
                    if let Some(first) = tables.first() {
                        let first: &Vec<BlockId> = &first[group];
                        table[..PREFIX / BLOCK_SIZE].copy_from_slice(&first[..PREFIX / BLOCK_SIZE]);
                        if windows[group].is_some() {
                            // Its first row sees keys from 29 on.
                            table[0] = ranked.poison;
                        }
                    }
                    table
                };
                let table = (0..groups.count()).map(of_group).collect();
                tables.push(table);
            }
            let mut logits = vec![Vec::new(); sequences.len()];
            for step in steps {
                let part = |(at, new): &(usize, Range<usize>)| Part {
                    tokens: &sequences[*at][new.clone()],
                    start: new.start,
                    tables: &tables[*at],
                };
                let batch = batch_over(groups.count(), &step.iter().map(part).collect::<Vec<_>>());
                let rows = ranked.step(&batch);
                let mut rows = rows.chunks_exact(VOCABULARY);
                for (at, new) in step {
                    logits[*at].extend(rows.by_ref().take(new.len()).flatten());
                }
            }
            logits
        };
        let got = on_ranks(mixture, setup, groups.count() * 17, run);
        for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let own = &expected[expected.len() - got.len()..];
            assert_same_bits(got, own, &format!("{setup:?}, sequence {at}"));
        }
    }
}

/// Every width, type and instruction set that this machine has.
fn every_way() -> Vec<Setup> {
    let isas: Vec<Isa> = Isa::available().collect();
    let mut setups = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for width in 1..=3 {
            setups.extend(isas.iter().map(|&isa| Setup { isa, ..Setup::new(width, dtype, 200) }));
        }
    }
    setups
}

/// All at once, in parts, token by token, and as a prompt with its answer.
const SCHEDULES: [&[usize]; 5] = [&[93], &[7], &[1], &[40, 1], &[33, 17, 1, 16]];

#[test]
fn pages_behind_a_window_may_be_anybodys_and_hold_anything() {
    for mixture in [Mixture::alternating(), Mixture::uneven(), Mixture::all_windows()] {
        assert_pages_behind_windows_do_not_matter(&mixture, &every_way(), &SCHEDULES);
    }
}

#[test]
fn sequences_that_share_the_pages_of_a_prefix_give_the_bits_that_they_give_alone() {
    for mixture in [Mixture::alternating(), Mixture::uneven()] {
        assert_shared_prefixes_do_not_matter(&mixture, &every_way());
    }
}

#[test]
fn a_batch_for_other_groups_than_the_models_is_refused() {
    let mixture = Mixture::alternating();
    let refused = on_ranks(&mixture, Setup::new(1, DType::F32, 16), 4, |ranked| {
        let tables = vec![vec![BlockId(0)]; 3];
        [1, 2, 3].map(|groups| {
            let batch = batch_over(groups, &[Part { tokens: &[1], start: 0, tables: &tables[..groups] }]);
            ranked.model.forward(&batch, &mut ranked.kv, &mut ranked.comm).map_err(|error| error.to_string())
        })
    });
    let refusal = |groups| Err(format!("batch refused: block tables of {groups} groups for a model of 2"));
    assert_eq!(refused, [refusal(1), Ok(()), refusal(3)]);
}
