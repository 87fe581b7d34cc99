//! One rank's Llama on an emulated device: the op sequence of a step, every operation a CUDA kernel.
#![allow(unsafe_code)]

use std::ops::Range;

use consort_emulator::Memory;
use consort_kernels::{
    all_reduce::cuda::all_reduce_two_shot,
    all_reduce::cuda::{AREA_WORDS, PeerAddresses, Peers, all_gather_peers, all_reduce, all_reduce_rms_norm},
    attention::{
        AttentionShape, PagedSpan,
        cuda::{Chunks, Inputs, Plan, attention},
    },
    cuda::{DeviceSlice, DeviceSliceMut, row_stride},
    embedding::cuda::embedding,
    kv_append::PageShape,
    linear::cuda::{Invariance, WeightView, Workspace, WorkspaceLen, linear, workspace_len},
    qkv::cuda::{QkvShape, QkvWeights, RowPlaces, qkv},
    rms_norm::cuda::{Norm, rms_norm},
    rope::{Pairs, cuda::rope_angles},
    swiglu::cuda::{Activation, swiglu},
};
use consort_parallel::{checkpoint::Checkpoint, config::ModelConfig, ids::Rank, partition::Partition};
use half::bf16;

use super::device::{MULTIPROCESSORS, Stream, view, view_mut};

/// Tokens of a KV page.
pub(super) const BLOCK_SIZE: usize = 16;

/// How a group computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ways {
    pub(super) invariance: Invariance,
    pub(super) chunks: Chunks,
    pub(super) exchange: Exchange,
}

/// How the sum over ranks is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Exchange {
    /// Together with residual and norm, in one launch.
    Fused,
    /// In two shots, then the norm.
    TwoShot,
}

/// A weight matrix of one rank.
struct Matrix {
    values: Memory<bf16>,
    outputs: usize,
    inputs: usize,
}

/// Rows and columns of a named matrix.
type Part<'a> = (&'a str, Range<usize>, Range<usize>);

impl Matrix {
    /// The rows of all parts, one below the other.
    fn load(checkpoint: &Checkpoint, parts: &[Part<'_>]) -> Matrix {
        let inputs = parts[0].2.len();
        let outputs = parts.iter().map(|(_, rows, _)| rows.len()).sum();
        let stride = row_stride(inputs);
        let mut values = vec![bf16::ZERO; outputs * stride];
        let mut rest = &mut values[..];
        for (name, rows, columns) in parts {
            let (mine, after) = rest.split_at_mut(rows.len() * stride);
            rest = after;
            if mine.is_empty() || inputs == 0 {
                continue;
            }
            let mut read = vec![0.0; rows.len() * inputs];
            checkpoint.read_rows(name, rows.clone(), columns.clone(), &mut read).unwrap();
            for (to, from) in mine.chunks_exact_mut(stride).zip(read.chunks_exact(inputs)) {
                to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16::from_f32(*from));
            }
        }
        Matrix { values: Memory::from_slice(&values), outputs, inputs }
    }

    fn view(&self) -> WeightView<'_> {
        WeightView {
            values: view(&self.values, self.values.len()),
            outputs: self.outputs,
            inputs: self.inputs,
        }
    }
}

struct Layer {
    attention_norm: Memory<f32>,
    qkv: Matrix,
    output: Matrix,
    mlp_norm: Memory<f32>,
    gate_up: Matrix,
    down: Matrix,
    pages: Memory<bf16>,
}

/// One step of several sequences.
pub(super) struct Step {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    pub(super) spans: Vec<PagedSpan>,
    pub(super) tables: Vec<u32>,
}

/// What a step's launches read and write besides weights: lives until they have run.
struct Buffers {
    tokens: Memory<u32>,
    positions: Memory<u32>,
    slots: Memory<u32>,
    numbers: Memory<u32>,
    cos: Memory<f32>,
    sin: Memory<f32>,
    residual: Memory<f32>,
    normed: Memory<bf16>,
    qkv: Memory<f32>,
    queries: Memory<bf16>,
    attended: Memory<bf16>,
    gate_up: Memory<f32>,
    activated: Memory<bf16>,
    /// The whole sum over ranks, where the exchange leaves it.
    delta: Memory<f32>,
    attention_workspace: Memory<f32>,
    logits: Memory<f32>,
}

/// One rank.
pub(super) struct CudaRank {
    config: ModelConfig,
    rank: usize,
    ways: Ways,
    first_token: usize,
    query_heads: usize,
    columns: usize,
    /// Vocabulary rows of each rank.
    vocabularies: Vec<usize>,
    /// Of each layer.
    shapes: Vec<AttentionShape>,
    page_count: usize,
    embedding: Matrix,
    layers: Vec<Layer>,
    final_norm: Memory<f32>,
    head: Option<Matrix>,
    frequencies: Memory<f32>,
    attention_factor: f32,
    partials: Memory<f32>,
    arrivals: Memory<u32>,
    /// What this rank adds to the sums, and its part of the logits: read by all ranks.
    exchange: Memory<f32>,
    area: Memory<u32>,
    abort: Memory<u32>,
    step: Option<Buffers>,
}

impl CudaRank {
    /// Loads the slices of `rank`; room for steps of `rows_max` rows and pools of `page_count` pages.
    pub(super) fn load(
        checkpoint: &Checkpoint,
        partition: &Partition,
        rank: usize,
        ways: Ways,
        rows_max: usize,
        page_count: usize,
    ) -> CudaRank {
        let (config, share) = (checkpoint.config().clone(), partition.share(Rank(rank as u16)));
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let pages = PageShape::new(BLOCK_SIZE, share.kv_heads.len(), dim).unwrap();
        let heads = |heads: &Range<usize>| heads.start * dim..heads.end * dim;
        let (queries, keys, columns) = (heads(&share.query_heads), heads(&share.kv_heads), &share.columns);
        let vector = |name: &str| {
            let mut values = vec![0.0; hidden];
            checkpoint.read_rows(name, 0..1, 0..hidden, &mut values).unwrap();
            Memory::from_slice(&values)
        };
        let layers = (0..config.num_layers).map(|layer| {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let matrix = |parts: &[(&str, &Range<usize>)]| {
                let names: Vec<String> = parts.iter().map(|(part, _)| name(part)).collect();
                let parts = parts.iter().zip(&names);
                let parts: Vec<Part<'_>> =
                    parts.map(|((_, rows), name)| (&name[..], (*rows).clone(), 0..hidden)).collect();
                Matrix::load(checkpoint, &parts)
            };
            let slice = |part: &str, columns: &Range<usize>| {
                Matrix::load(checkpoint, &[(&name(part), 0..hidden, columns.clone())])
            };
            Layer {
                attention_norm: vector(&name("input_layernorm")),
                qkv: matrix(&[
                    ("self_attn.q_proj", &queries),
                    ("self_attn.k_proj", &keys),
                    ("self_attn.v_proj", &keys),
                ]),
                output: slice("self_attn.o_proj", &queries),
                mlp_norm: vector(&name("post_attention_layernorm")),
                gate_up: matrix(&[("mlp.gate_proj", columns), ("mlp.up_proj", columns)]),
                down: slice("mlp.down_proj", columns),
                // Never written pages hold NaN: nothing of them may reach a result.
                pages: Memory::poisoned(page_count * pages.page_elements()),
            }
        });
        let layers: Vec<Layer> = layers.collect();
        let vocabulary = |name| Matrix::load(checkpoint, &[(name, share.vocabulary.clone(), 0..hidden)]);
        let embedding = vocabulary("model.embed_tokens.weight");
        let head = (!config.tie_word_embeddings).then(|| vocabulary("lm_head.weight"));
        let vocabularies: Vec<usize> =
            partition.shares().iter().map(|share| share.vocabulary.len()).collect();
        let (frequencies, attention_factor) = config.rope.frequencies(dim);
        let matrices =
            layers.iter().flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]);
        let scratch =
            matrices.chain(&head).chain([&embedding]).fold(WorkspaceLen::default(), |most, matrix| {
                let (outputs, inputs) = (matrix.outputs, matrix.inputs);
                most.max(workspace_len(MULTIPROCESSORS, outputs, inputs, rows_max, ways.invariance).unwrap())
            });
        let widest = vocabularies.iter().copied().max().unwrap_or(0).max(hidden);
        CudaRank {
            rank,
            ways,
            first_token: share.vocabulary.start,
            query_heads: share.query_heads.len(),
            columns: columns.len(),
            vocabularies,
            shapes: config
                .layer_windows
                .iter()
                .map(|&window| AttentionShape {
                    pages,
                    kv_of_query: share.kv_of_query.clone(),
                    scale: 1.0 / (dim as f32).sqrt(),
                    window,
                })
                .collect(),
            page_count,
            embedding,
            layers,
            final_norm: vector("model.norm.weight"),
            head,
            frequencies: Memory::from_slice(&frequencies),
            attention_factor,
            partials: Memory::poisoned(scratch.partials),
            arrivals: Memory::from_slice(&vec![0; scratch.arrivals]),
            exchange: Memory::poisoned(rows_max * widest),
            area: Memory::from_slice(&[0; AREA_WORDS]),
            abort: Memory::from_slice(&[0; 4]),
            step: None,
            config,
        }
    }

    /// Where the other ranks find this one.
    pub(super) fn addresses(&self) -> PeerAddresses {
        PeerAddresses { buffer: self.exchange.address(), area: self.area.address() }
    }

    fn buffers(&self, step: &Step, plan: &Plan) -> Buffers {
        let (rows, hidden, dim) = (step.tokens.len(), self.config.hidden_size, self.config.head_dim);
        let shape = self.qkv_shape();
        let slots = step.spans.iter().flat_map(|span| {
            let table = &step.tables[span.table.clone()];
            span.rows.clone().map(|row| {
                let position = step.positions[row] as usize;
                table[position / BLOCK_SIZE] * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32
            })
        });
        Buffers {
            tokens: Memory::from_slice(&step.tokens),
            positions: Memory::from_slice(&step.positions),
            slots: Memory::from_slice(&slots.collect::<Vec<u32>>()),
            numbers: Memory::from_slice(plan.numbers()),
            cos: Memory::poisoned(rows * self.frequencies.len()),
            sin: Memory::poisoned(rows * self.frequencies.len()),
            residual: Memory::poisoned(rows * hidden),
            normed: Memory::poisoned(rows * row_stride(hidden)),
            qkv: Memory::poisoned(rows * shape.columns()),
            queries: Memory::poisoned(rows * shape.query_elements()),
            attended: Memory::poisoned(rows * row_stride(self.query_heads * dim)),
            gate_up: Memory::poisoned(rows * 2 * self.columns),
            activated: Memory::poisoned(rows * row_stride(self.columns)),
            delta: Memory::poisoned(rows * hidden),
            attention_workspace: Memory::poisoned(plan.workspace_floats()),
            logits: Memory::poisoned(rows * self.config.vocab_size),
        }
    }

    fn qkv_shape(&self) -> QkvShape {
        QkvShape {
            query_heads: self.query_heads,
            pages: self.shapes[0].pages,
            rotary_dim: self.config.head_dim,
            pairs: Pairs::HalfSplit,
        }
    }

    /// Records a whole step on `stream`. Its logits can be had when the stream has run.
    pub(super) fn enqueue(&mut self, stream: &Stream, peers: &[PeerAddresses], step: &Step) {
        let rows = step.tokens.len();
        let (shape, chunks) = (&self.shapes[0], self.ways.chunks);
        let plan = Plan::new(shape, chunks, &step.spans, rows, &step.tables, self.page_count).unwrap();
        let buffers = self.buffers(step, &plan);
        let capacity = self.exchange.len();
        // SAFETY: all ranks live until all streams have run, and record the same operations in the same order.
        let peers =
            unsafe { Peers::new(self.rank, peers, capacity, self.abort.address(), MULTIPROCESSORS).unwrap() };
        let mut run = Run { stream, peers, rows, plan, buffers };
        run.begin(self);
        for layer in 0..self.layers.len() {
            run.attention(self, layer);
            run.exchange(self, |rank| &rank.layers[layer].mlp_norm);
            run.mlp(self, layer);
            let next = layer + 1;
            run.exchange(self, |rank| {
                rank.layers.get(next).map_or(&rank.final_norm, |next| &next.attention_norm)
            });
        }
        run.logits(self);
        self.step = Some(run.buffers);
    }

    /// `[rows, vocabulary]` of the step that has run.
    pub(super) fn take_logits(&mut self) -> Vec<f32> {
        self.step.take().expect("a step has been recorded").logits.to_vec()
    }
}

/// A step being recorded.
struct Run<'a> {
    stream: &'a Stream,
    peers: Peers,
    rows: usize,
    plan: Plan,
    buffers: Buffers,
}

/// `y = x · weightᵀ` with scratch memory of the rank.
fn multiply(
    stream: &Stream,
    scratch: (&mut Memory<f32>, &mut Memory<u32>, Invariance),
    weight: WeightView<'_>,
    x: DeviceSlice<'_, bf16>,
    y: DeviceSliceMut<'_, f32>,
) {
    let (partials, arrivals, invariance) = scratch;
    let (partials_len, arrivals_len) = (partials.len(), arrivals.len());
    let mut workspace =
        Workspace { partials: view_mut(partials, partials_len), arrivals: view_mut(arrivals, arrivals_len) };
    linear(stream, x, weight, None, y, &mut workspace, invariance).unwrap();
}

impl Run<'_> {
    /// Angles, and the first layer's input.
    fn begin(&mut self, rank: &mut CudaRank) {
        let (rows, hidden, b) = (self.rows, rank.config.hidden_size, &mut self.buffers);
        let angles = rows * rank.frequencies.len();
        rope_angles(
            self.stream,
            view(&b.positions, rows),
            view(&rank.frequencies, rank.frequencies.len()),
            rank.attention_factor,
            view_mut(&mut b.cos, angles),
            view_mut(&mut b.sin, angles),
        )
        .unwrap();
        let table = rank.embedding.view().values;
        let mine = view_mut(&mut rank.exchange, rows * hidden);
        let (tokens, drawn) = (view(&b.tokens, rows), view(&b.tokens, 0));
        embedding(self.stream, tokens, drawn, table, hidden, rank.first_token, mine).unwrap();
        all_reduce(self.stream, &self.peers, view_mut(&mut b.residual, rows * hidden)).unwrap();
        let norm =
            Norm { weight: view(&rank.layers[0].attention_norm, hidden), eps: rank.config.rms_norm_eps };
        let out = view_mut(&mut b.normed, rows * row_stride(hidden));
        rms_norm(self.stream, view_mut(&mut b.residual, rows * hidden), None, norm, out).unwrap();
    }

    /// From `normed` to this rank's part of what the layer adds.
    fn attention(&mut self, rank: &mut CudaRank, layer: usize) {
        let (rows, hidden, shape) = (self.rows, rank.config.hidden_size, rank.qkv_shape());
        let b = &mut self.buffers;
        let scratch = (&mut rank.partials, &mut rank.arrivals, rank.ways.invariance);
        let Layer { qkv: weight, output, pages, .. } = &mut rank.layers[layer];
        let x = view(&b.normed, rows * row_stride(hidden));
        multiply(self.stream, scratch, weight.view(), x, view_mut(&mut b.qkv, rows * shape.columns()));
        let angles = rows * rank.frequencies.len();
        let places =
            RowPlaces { cos: view(&b.cos, angles), sin: view(&b.sin, angles), slots: view(&b.slots, rows) };
        let (columns, elements, pool) = (rows * shape.columns(), rows * shape.query_elements(), pages.len());
        qkv(
            self.stream,
            &shape,
            QkvWeights::default(),
            view(&b.qkv, columns),
            places,
            view_mut(&mut b.queries, elements),
            view_mut(pages, pool),
        )
        .unwrap();
        let inputs = Inputs {
            shape: &rank.shapes[layer],
            queries: view(&b.queries, elements),
            pages: view(pages, pool),
            sinks: None,
            plan: &self.plan,
            numbers: view(&b.numbers, b.numbers.len()),
        };
        let (floats, attended) = (b.attention_workspace.len(), rows * row_stride(output.inputs));
        let workspace = view_mut(&mut b.attention_workspace, floats);
        attention(self.stream, &inputs, workspace, view_mut(&mut b.attended, attended)).unwrap();
        let scratch = (&mut rank.partials, &mut rank.arrivals, rank.ways.invariance);
        let y = view_mut(&mut rank.exchange, rows * hidden);
        multiply(self.stream, scratch, output.view(), view(&b.attended, attended), y);
    }

    /// Likewise of the MLP.
    fn mlp(&mut self, rank: &mut CudaRank, layer: usize) {
        let (rows, hidden, columns) = (self.rows, rank.config.hidden_size, rank.columns);
        let b = &mut self.buffers;
        let Layer { gate_up, down, .. } = &rank.layers[layer];
        let scratch = (&mut rank.partials, &mut rank.arrivals, rank.ways.invariance);
        let x = view(&b.normed, rows * row_stride(hidden));
        multiply(self.stream, scratch, gate_up.view(), x, view_mut(&mut b.gate_up, rows * 2 * columns));
        let activated = rows * row_stride(columns);
        let out = view_mut(&mut b.activated, activated);
        swiglu(self.stream, Activation::Silu, view(&b.gate_up, rows * 2 * columns), columns, out).unwrap();
        let scratch = (&mut rank.partials, &mut rank.arrivals, rank.ways.invariance);
        let y = view_mut(&mut rank.exchange, rows * hidden);
        multiply(self.stream, scratch, down.view(), view(&b.activated, activated), y);
    }

    /// Adds what all ranks made to the residual and normalises it for what comes next.
    fn exchange(&mut self, rank: &CudaRank, norm: impl Fn(&CudaRank) -> &Memory<f32>) {
        let (rows, hidden, eps) = (self.rows, rank.config.hidden_size, rank.config.rms_norm_eps);
        let weight = view(norm(rank), hidden);
        let b = &mut self.buffers;
        let residual = view_mut(&mut b.residual, rows * hidden);
        let out = view_mut(&mut b.normed, rows * row_stride(hidden));
        match rank.ways.exchange {
            Exchange::Fused => {
                all_reduce_rms_norm(self.stream, &self.peers, residual, weight, eps, out).unwrap()
            }
            Exchange::TwoShot => {
                let delta = view_mut(&mut b.delta, rows * hidden);
                all_reduce_two_shot(self.stream, &self.peers, delta).unwrap();
                let delta = Some(view(&b.delta, rows * hidden));
                rms_norm(self.stream, residual, delta, Norm { weight, eps }, out).unwrap();
            }
        }
    }

    /// Logits of every row, gathered from all ranks.
    fn logits(&mut self, rank: &mut CudaRank) {
        let (rows, hidden) = (self.rows, rank.config.hidden_size);
        let b = &mut self.buffers;
        let head = rank.head.as_ref().unwrap_or(&rank.embedding);
        let scratch = (&mut rank.partials, &mut rank.arrivals, rank.ways.invariance);
        let x = view(&b.normed, rows * row_stride(hidden));
        let mine = view_mut(&mut rank.exchange, rows * head.outputs);
        multiply(self.stream, scratch, head.view(), x, mine);
        let out = view_mut(&mut b.logits, rows * rank.config.vocab_size);
        all_gather_peers(self.stream, &self.peers, rows, &rank.vocabularies, out).unwrap();
    }
}
