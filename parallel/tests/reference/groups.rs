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
use consort_software_driver::in_child_reported;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    bits::assert_same_bits,
    harness::{
        BLOCK_SIZE, Differences, Place, Random, Setup, evenly_spread, kept_logits, made_up, teacher_forced,
    },
};

/// Keys that a layer with a window sees: more than a page, and no whole number of them.
const WINDOW: usize = 20;

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
struct Mixture {
    checkpoint: Arc<Checkpoint>,
    poisonous: Arc<Checkpoint>,
    _folders: [TempDir; 2],
}

impl Mixture {
    /// Layers with a window and without take turns: two groups.
    fn alternating() -> Mixture {
        Mixture::new(&config(4, |layer| layer % 2 == 0))
    }

    /// Three layers with a window to one without: a group for each layer, since no larger page would be filled.
    fn uneven() -> Mixture {
        Mixture::new(&config(4, |layer| layer % 4 != 3))
    }

    /// All layers with a window: one group, whose pages are given away.
    fn all_windows() -> Mixture {
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

    fn groups(&self) -> KvGroups {
        KvGroups::of(self.checkpoint.config())
    }
}

/// Large enough for keys far back to count.
fn scaled(mut next: impl FnMut() -> f32) -> impl FnMut() -> f32 {
    move || 1.5 * next()
}

/// One rank, and a pool all of whose pages hold NaN.
struct Ranked {
    model: Box<dyn Model>,
    kv: KvStore,
    comm: Local,
    /// A page that keeps its NaN.
    poison: BlockId,
}

impl Ranked {
    fn new(
        mixture: &Mixture,
        (setup, options): (Setup, LoadOptions),
        mut comm: Local,
        mut of_poison: Local,
    ) -> Ranked {
        let (config, rank) = (mixture.checkpoint.config(), comm.rank());
        let partition = Partition::new(config, setup.width, None).unwrap();
        let (blocks, device) = (options.num_blocks, setup.device(rank));
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

/// What `work` makes on every rank, which must be the same, over a pool of the options' size.
fn on_ranks<R: PartialEq + Send>(
    mixture: &Mixture,
    setup: Setup,
    options: LoadOptions,
    work: impl Fn(&mut Ranked) -> R + Sync,
) -> R {
    let pairs = LocalGroup::new(setup.width).into_iter().zip(LocalGroup::new(setup.width));
    let work = &work;
    let mut results: Vec<R> = std::thread::scope(|scope| {
        let ranks: Vec<_> = pairs
            .map(|(comm, of_poison)| {
                scope.spawn(move || {
                    let mut ranked = Ranked::new(mixture, (setup, options), comm, of_poison);
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
fn assert_pages_behind_windows_do_not_matter(mixture: &Mixture, setups: &[Setup], schedules: &[&[usize]]) {
    let mut random = Random(9);
    let sequences = [random.tokens(93, VOCABULARY), random.tokens(70, VOCABULARY)];
    let groups = mixture.groups();
    for &setup in setups {
        let expected = teacher_forced(&mixture.checkpoint, Setup { isa: Isa::detect(), ..setup }, &sequences);
        for chunks in schedules {
            let options = LoadOptions { num_blocks: groups.count() * 12, ..setup.options() };
            let run = |ranked: &mut Ranked| with_pages_given_away(ranked, &groups, &sequences, chunks);
            let (got, reused) = on_ranks(mixture, setup, options, run);
            let is_whole = chunks[0] >= 93;
            assert!(is_whole || reused > 2, "{setup:?} {chunks:?}: {reused} pages went to others");
            for (got, expected) in got.iter().zip(&expected) {
                assert_same_bits(got, expected, &format!("{setup:?}, steps of {chunks:?}"));
            }
        }
    }
}

/// Compares, bit by bit, sequences that share the pages of a prefix with the same ones alone.
fn assert_shared_prefixes_do_not_matter(mixture: &Mixture, setups: &[Setup]) {
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
        let options = LoadOptions { num_blocks: groups.count() * 17, ..setup.options() };
        let got = on_ranks(mixture, setup, options, run);
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
    assert_pages_behind_windows_do_not_matter(&Mixture::alternating(), &every_way(), &SCHEDULES);
    let few = [Setup::new(2, DType::F32, 200), Setup::new(3, DType::BF16, 200)];
    for mixture in [Mixture::uneven(), Mixture::all_windows()] {
        assert_pages_behind_windows_do_not_matter(&mixture, &few, &SCHEDULES);
    }
}

#[test]
fn sequences_that_share_the_pages_of_a_prefix_give_the_bits_that_they_give_alone() {
    assert_shared_prefixes_do_not_matter(&Mixture::alternating(), &every_way());
    assert_shared_prefixes_do_not_matter(&Mixture::uneven(), &[Setup::new(3, DType::BF16, 200)]);
}

#[test]
fn a_batch_for_other_groups_than_the_models_is_refused() {
    let mixture = Mixture::alternating();
    let setup = Setup::new(1, DType::F32, 16);
    let options = LoadOptions { num_blocks: 4, ..setup.options() };
    let refused = on_ranks(&mixture, setup, options, |ranked| {
        let tables = vec![vec![BlockId(0)]; 3];
        [1, 2, 3].map(|groups| {
            let batch = batch_over(groups, &[Part { tokens: &[1], start: 0, tables: &tables[..groups] }]);
            ranked.model.forward(&batch, &mut ranked.kv, &mut ranked.comm).map_err(|error| error.to_string())
        })
    });
    let refusal = |groups| Err(format!("batch refused: block tables of {groups} groups for a model of 2"));
    assert_eq!(refused, [refusal(1), Ok(()), refusal(3)]);
}

/// Logits `[tokens, vocabulary]` as the formulas have them, in f64: no pages, no packing, no slices.
fn by_the_formulas(checkpoint: &Checkpoint, tokens: &[u32]) -> Vec<f64> {
    let config = checkpoint.config();
    let (hidden, dim, group) = (config.hidden_size, config.head_dim, config.num_heads / config.num_kv_heads);
    let read = |name: &str| {
        let [rows, cols] = checkpoint.tensor(name).unwrap().shape[..] else { panic!("{name}") };
        let mut values = vec![0.0f32; rows * cols];
        checkpoint.read_rows(name, 0..rows, 0..cols, &mut values).unwrap();
        (values, cols)
    };
    let multiply = |name: &str, x: &[f64]| -> Vec<f64> {
        let (weight, cols) = read(name);
        let dot = |row: &[f32], x: &[f64]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        x.chunks_exact(cols).flat_map(|x| weight.chunks_exact(cols).map(move |row| dot(row, x))).collect()
    };
    let normalise = |name: &str, x: &[f64]| -> Vec<f64> {
        let mut weight = vec![0.0f32; hidden];
        checkpoint.read_rows(name, 0..1, 0..hidden, &mut weight).unwrap();
        let row = |x: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
            let factor = 1.0 / (mean + f64::from(config.rms_norm_eps)).sqrt();
            x.iter().zip(&weight).map(|(x, w)| x * factor * f64::from(*w)).collect()
        };
        x.chunks_exact(hidden).flat_map(row).collect()
    };
    let rotate = |x: &mut [f64], heads: usize| {
        for (position, row) in x.chunks_exact_mut(heads * dim).enumerate() {
            for head in row.chunks_exact_mut(dim) {
                for pair in 0..dim / 2 {
                    let turn = position as f64 * 10_000f64.powf(-2.0 * pair as f64 / dim as f64);
                    let (a, b) = (head[pair], head[pair + dim / 2]);
                    head[pair] = a * turn.cos() - b * turn.sin();
                    head[pair + dim / 2] = b * turn.cos() + a * turn.sin();
                }
            }
        }
    };
    let (embedding, _) = read("model.embed_tokens.weight");
    let embedded =
        |token: &u32| embedding[*token as usize * hidden..][..hidden].iter().map(|x| f64::from(*x));
    let mut x: Vec<f64> = tokens.iter().flat_map(embedded).collect();
    for layer in 0..config.num_layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let normed = normalise(&name("input_layernorm"), &x);
        let [mut q, mut k, v] =
            ["q", "k", "v"].map(|part| multiply(&name(&format!("self_attn.{part}_proj")), &normed));
        rotate(&mut q, config.num_heads);
        rotate(&mut k, config.num_kv_heads);
        let mut attended = Vec::new();
        for position in 0..tokens.len() {
            for head in 0..config.num_heads {
                let of = |all: &[f64], token: usize, heads: usize, head: usize| {
                    all[(token * heads + head) * dim..][..dim].to_vec()
                };
                let query = of(&q, position, config.num_heads, head);
                let seen = config.layer_windows[layer].map_or(usize::MAX, std::num::NonZeroUsize::get);
                let keys = (position + 1).saturating_sub(seen)..position + 1;
                let of_key = |all: &[f64], key| of(all, key, config.num_kv_heads, head / group);
                let score = |key| -> f64 { query.iter().zip(of_key(&k, key)).map(|(q, k)| q * k).sum() };
                let weights: Vec<f64> =
                    keys.clone().map(|key| (score(key) / (dim as f64).sqrt()).exp()).collect();
                let total: f64 = weights.iter().sum();
                let mut sum = vec![0.0; dim];
                for (key, weight) in keys.zip(&weights) {
                    sum.iter_mut().zip(of_key(&v, key)).for_each(|(sum, v)| *sum += weight / total * v);
                }
                attended.extend(sum);
            }
        }
        x.iter_mut().zip(multiply(&name("self_attn.o_proj"), &attended)).for_each(|(x, add)| *x += add);
        let normed = normalise(&name("post_attention_layernorm"), &x);
        let [gate, up] = ["gate", "up"].map(|part| multiply(&name(&format!("mlp.{part}_proj")), &normed));
        let activated: Vec<f64> = gate.iter().zip(up).map(|(g, up)| g / (1.0 + (-g).exp()) * up).collect();
        x.iter_mut().zip(multiply(&name("mlp.down_proj"), &activated)).for_each(|(x, add)| *x += add);
    }
    multiply("lm_head.weight", &normalise("model.norm.weight", &x))
}

#[test]
fn each_layer_looks_as_far_back_as_the_config_says() {
    let tokens = Random(6).tokens(75, VOCABULARY);
    let mut all = Vec::new();
    for mixture in [Mixture::alternating(), Mixture::uneven(), Mixture::all_windows()] {
        let expected = by_the_formulas(&mixture.checkpoint, &tokens);
        let setup = Setup::new(2, DType::F32, 32);
        let got = teacher_forced(&mixture.checkpoint, setup, std::slice::from_ref(&tokens)).remove(0);
        let largest = expected.iter().fold(0.0f64, |most, logit| most.max(logit.abs()));
        for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let error = (f64::from(*got) - expected).abs();
            assert!(error < 1e-4 * largest, "logit {at}: {got}, {expected} by the formulas");
        }
        all.push(got);
    }
    // The same weights, and windows in other layers.
    let differ = all[0].iter().zip(&all[1]).filter(|(a, b)| (*a - *b).abs() > 0.01).count();
    assert!(differ > all[0].len() / 2, "{differ} logits tell the two mixtures apart");
}

fn on_cuda(width: usize, deterministic: bool, chunk: usize) -> Setup {
    Setup { place: Place::Cuda { deterministic }, ..Setup::new(width, DType::BF16, chunk) }
}

#[test]
fn software_driver_looks_as_far_back_in_each_layer_as_the_config_says() {
    let test = "groups::software_driver_looks_as_far_back_in_each_layer_as_the_config_says";
    let report = in_child_reported(test, &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "2")], || {
        let tokens = [Random(6).tokens(75, VOCABULARY)];
        for mixture in [Mixture::alternating(), Mixture::uneven()] {
            let expected = by_the_formulas(&mixture.checkpoint, &tokens[0]);
            let differ = |setup| {
                let got = teacher_forced(&mixture.checkpoint, setup, &tokens).remove(0);
                let mut differences = Differences::default();
                got.iter().zip(&expected).for_each(|(got, expected)| differences.add(*got, *expected as f32));
                differences
            };
            let cpu = differ(Setup::new(1, DType::BF16, 75));
            // All at once, and token by token: from graphs.
            for (width, deterministic, chunk) in [(1, false, 75), (2, true, 75), (1, false, 1)] {
                let cuda = differ(on_cuda(width, deterministic, chunk));
                println!("width {width} steps of {chunk}: RMS {:.2e} (CPU {:.2e})", cuda.rms(), cpu.rms());
                assert!(cuda.rms() < 1.5 * cpu.rms() && cuda.largest < 2.0 * cpu.largest);
            }
        }
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
}

#[test]
fn software_driver_reads_no_page_behind_a_window() {
    let test = "groups::software_driver_reads_no_page_behind_a_window";
    let report = in_child_reported(test, &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "2")], || {
        let one = [on_cuda(1, true, 200)];
        assert_pages_behind_windows_do_not_matter(&Mixture::alternating(), &one, &[&[7], &[40, 1]]);
        assert_pages_behind_windows_do_not_matter(&Mixture::all_windows(), &one, &[&[33, 17, 1, 16]]);
        assert_pages_behind_windows_do_not_matter(
            &Mixture::alternating(),
            &[on_cuda(2, true, 200)],
            &[&[31]],
        );
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    assert!(report.graph_launches > 40, "decodes from graphs: {report:?}");
}

#[test]
fn software_driver_lets_sequences_share_pages_that_one_of_them_fills() {
    let test = "groups::software_driver_lets_sequences_share_pages_that_one_of_them_fills";
    let report = in_child_reported(test, &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "2")], || {
        for width in [1, 2] {
            assert_shared_prefixes_do_not_matter(&Mixture::alternating(), &[on_cuda(width, true, 200)]);
        }
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
}

/// Logits of sequences that share all pages but their last, and are longer together than the pool, each decoded alone
/// and then all in one step.
fn longer_than_the_pool(mixture: &Mixture, deterministic: bool) -> (Vec<f32>, Vec<f32>) {
    const SEQUENCES: usize = 8;
    const PREFIX: usize = 36 * BLOCK_SIZE;
    let groups = mixture.groups().count();
    let setup = on_cuda(1, deterministic, 64);
    let options = LoadOptions {
        num_blocks: groups * (PREFIX / BLOCK_SIZE + SEQUENCES),
        max_num_seqs: SEQUENCES,
        max_model_len: PREFIX + 1,
        ..setup.options()
    };
    assert!(SEQUENCES * PREFIX > 3 * options.num_blocks * BLOCK_SIZE);
    let prefix = Random(8).tokens(PREFIX, VOCABULARY);
    on_ranks(mixture, setup, options, |ranked| {
        let mut free = (0..ranked.poison.0).map(BlockId);
        let shared: Vec<Vec<BlockId>> =
            (0..groups).map(|_| free.by_ref().take(PREFIX / BLOCK_SIZE).collect()).collect();
        for (at, tokens) in prefix.chunks(64).enumerate() {
            ranked.step(&batch_over(groups, &[Part { tokens, start: 64 * at, tables: &shared }]));
        }
        let mut tables = vec![shared.clone(); SEQUENCES];
        for (table, own) in tables.iter_mut().flatten().zip(free) {
            table.push(own);
        }
        let tokens: Vec<[u32; 1]> = (0..SEQUENCES as u32).map(|token| [token]).collect();
        let parts = tokens.iter().zip(&tables);
        let parts: Vec<Part<'_>> =
            parts.map(|(tokens, tables)| Part { tokens, start: PREFIX, tables }).collect();
        let alone = parts.chunks(1).flat_map(|part| ranked.step(&batch_over(groups, part))).collect();
        (alone, ranked.step(&batch_over(groups, &parts)))
    })
}

#[test]
fn software_driver_decodes_sequences_that_are_longer_together_than_the_pool() {
    let test = "groups::software_driver_decodes_sequences_that_are_longer_together_than_the_pool";
    let asked = |deterministic: &str| {
        in_child_reported(test, &[("DETERMINISTIC", deterministic)], || {
            let deterministic = std::env::var("DETERMINISTIC").unwrap() == "true";
            let (alone, together) = longer_than_the_pool(&Mixture::alternating(), deterministic);
            if deterministic {
                assert_same_bits(&together, &alone, "together");
            }
            let largest = alone.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
            let differs = |(a, b): (&f32, &f32)| (a - b).abs() > 0.02 * largest || !a.is_finite();
            assert!(!alone.iter().zip(&together).any(differs), "of up to {largest}");
        })
    };
    // Chunks of 512 keys: 16 partial sums, and memory for ten. They take turns, and no graph is recorded for that.
    let Some(invariant) = asked("true") else { return };
    let Some(fast) = asked("false") else { return };
    for report in [&invariant, &fast] {
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    }
    assert_eq!((invariant.graph_launches, fast.graph_launches), (8, 9));
}
