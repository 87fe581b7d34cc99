//! One rank's weights in device memory: planned from headers, loaded from the checkpoint.

use std::ops::Range;

use consort_kernels::{
    KernelError,
    cuda::{
        device::{Arena, ArenaPlan, CudaDevice, DeviceBuffer, Reservation, Upload},
        row_stride,
    },
    element::bf16,
    linear::cuda::WeightView,
};

use super::super::loader::LoadError;
use crate::{
    checkpoint::{Checkpoint, CheckpointError},
    config::ModelConfig,
    partition::Share,
};

/// Rows and columns of a named matrix of the checkpoint.
struct Part {
    name: String,
    rows: Range<usize>,
    cols: Range<usize>,
}

/// A matrix before there is memory for it: the rows of all parts, one below the other.
struct MatrixPlan {
    parts: Vec<Part>,
    outputs: usize,
    inputs: usize,
    values: Reservation<bf16>,
}

/// A matrix `[outputs, row_stride(inputs)]` of BF16.
pub(super) struct Matrix {
    parts: Vec<Part>,
    values: DeviceBuffer<bf16>,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

/// A vector of the checkpoint, as f32.
struct VectorPlan {
    name: String,
    values: Reservation<f32>,
}

/// The same in device memory.
pub(super) struct Vector {
    name: String,
    pub(super) values: DeviceBuffer<f32>,
}

/// All of a rank before there is memory for it.
pub(super) struct WeightPlan {
    embedding: MatrixPlan,
    layers: Vec<LayerPlan>,
    final_norm: VectorPlan,
    head: Option<MatrixPlan>,
}

struct LayerPlan {
    attention_norm: VectorPlan,
    qkv: MatrixPlan,
    output: MatrixPlan,
    mlp_norm: VectorPlan,
    gate_up: MatrixPlan,
    down: MatrixPlan,
}

/// One rank's weights.
pub(super) struct Weights {
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Vector,
    /// Absent when the embedding is the head.
    head: Option<Matrix>,
}

/// Those of one layer.
pub(super) struct Layer {
    pub(super) attention_norm: Vector,
    pub(super) qkv: Matrix,
    pub(super) output: Matrix,
    pub(super) mlp_norm: Vector,
    pub(super) gate_up: Matrix,
    pub(super) down: Matrix,
}

impl MatrixPlan {
    /// Parts have equally many columns.
    fn new(arena: &mut ArenaPlan, parts: Vec<Part>) -> MatrixPlan {
        let inputs = parts.first().map_or(0, |part| part.cols.len());
        let outputs = parts.iter().map(|part| part.rows.len()).sum();
        let what = parts.first().map_or_else(String::new, |part| part.name.clone());
        let values = arena.reserve(row_stride(inputs).saturating_mul(outputs), what);
        MatrixPlan { parts, outputs, inputs, values }
    }

    fn place(self, arena: &Arena) -> Matrix {
        let MatrixPlan { parts, outputs, inputs, values } = self;
        Matrix { parts, values: arena.buffer(values), outputs, inputs }
    }
}

impl VectorPlan {
    fn new(arena: &mut ArenaPlan, name: String, len: usize) -> VectorPlan {
        let values = arena.reserve(len, name.clone());
        VectorPlan { name, values }
    }

    fn place(self, arena: &Arena) -> Vector {
        Vector { name: self.name, values: arena.buffer(self.values) }
    }
}

impl Matrix {
    /// As operations take it.
    pub(super) fn view(&self) -> WeightView<'_> {
        WeightView { values: self.values.all(), outputs: self.outputs, inputs: self.inputs }
    }

    /// Bytes of memory.
    fn bytes(&self) -> u64 {
        self.values.len() as u64 * size_of::<bf16>() as u64
    }

    fn upload<'a>(
        &'a mut self,
        checkpoint: &'a Checkpoint,
    ) -> Result<Upload<'a, CheckpointError>, KernelError> {
        let (parts, inputs) = (&self.parts, self.inputs);
        let stride = row_stride(inputs);
        Upload::new(self.values.all_mut(), stride, move |rows: Range<usize>, out: &mut [bf16]| {
            fill(checkpoint, parts, rows, inputs, out)
        })
    }

    fn release(&self, checkpoint: &Checkpoint) {
        for part in &self.parts {
            checkpoint.release_rows(&part.name, part.rows.clone());
        }
    }
}

/// Rows of the matrix that `parts` make up, each padded to its stride.
fn fill(
    checkpoint: &Checkpoint,
    parts: &[Part],
    rows: Range<usize>,
    inputs: usize,
    out: &mut [bf16],
) -> Result<(), CheckpointError> {
    if inputs == 0 {
        return Ok(());
    }
    let stride = row_stride(inputs);
    let mut values = vec![0.0; inputs * rows.len()];
    let (mut first, mut filled) = (0, 0);
    for part in parts {
        let within = |row: usize| row.clamp(first, first + part.rows.len()) - first + part.rows.start;
        let wanted = within(rows.start)..within(rows.end);
        if !wanted.is_empty() {
            let values = &mut values[filled..filled + wanted.len() * inputs];
            filled += values.len();
            checkpoint.read_rows(&part.name, wanted, part.cols.clone(), values)?;
        }
        first += part.rows.len();
    }
    for (to, from) in out.chunks_exact_mut(stride).zip(values.chunks_exact(inputs)) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16::from_f32(*from));
    }
    Ok(())
}

impl WeightPlan {
    /// Reserves what `share` holds of the model.
    pub(super) fn new(arena: &mut ArenaPlan, config: &ModelConfig, share: &Share) -> WeightPlan {
        let hidden = config.hidden_size;
        let vocabulary = |arena: &mut ArenaPlan, name: &str| {
            let (name, rows) = (name.to_owned(), share.vocabulary.clone());
            MatrixPlan::new(arena, vec![Part { name, rows, cols: 0..hidden }])
        };
        WeightPlan {
            embedding: vocabulary(arena, "model.embed_tokens.weight"),
            layers: (0..config.num_layers)
                .map(|layer| LayerPlan::new(arena, &format!("model.layers.{layer}"), config, share))
                .collect(),
            final_norm: VectorPlan::new(arena, "model.norm.weight".to_owned(), hidden),
            head: (!config.tie_word_embeddings).then(|| vocabulary(arena, "lm_head.weight")),
        }
    }

    /// The same in the arena.
    pub(super) fn place(self, arena: &Arena) -> Weights {
        Weights {
            embedding: self.embedding.place(arena),
            layers: self.layers.into_iter().map(|layer| layer.place(arena)).collect(),
            final_norm: self.final_norm.place(arena),
            head: self.head.map(|head| head.place(arena)),
        }
    }

    /// Outputs and inputs of every matrix that activations are multiplied by.
    pub(super) fn shapes(&self) -> impl Iterator<Item = (usize, usize)> {
        let layers = self.layers.iter().flat_map(|layer| {
            [&layer.qkv, &layer.output, &layer.gate_up, &layer.down].map(|m| (m.outputs, m.inputs))
        });
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        layers.chain([(head.outputs, head.inputs)])
    }
}

impl LayerPlan {
    fn new(arena: &mut ArenaPlan, prefix: &str, config: &ModelConfig, share: &Share) -> LayerPlan {
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let heads = |heads: &Range<usize>| heads.start * dim..heads.end * dim;
        let (queries, keys) = (heads(&share.query_heads), heads(&share.kv_heads));
        let columns = share.columns.clone();
        let name = |part: &str| format!("{prefix}.{part}.weight");
        let rows_of =
            |part: &str, rows: &Range<usize>| Part { name: name(part), rows: rows.clone(), cols: 0..hidden };
        let columns_of = |part: &str, cols| vec![Part { name: name(part), rows: 0..hidden, cols }];
        let qkv = vec![
            rows_of("self_attn.q_proj", &queries),
            rows_of("self_attn.k_proj", &keys),
            rows_of("self_attn.v_proj", &keys),
        ];
        LayerPlan {
            attention_norm: VectorPlan::new(arena, name("input_layernorm"), hidden),
            qkv: MatrixPlan::new(arena, qkv),
            output: MatrixPlan::new(arena, columns_of("self_attn.o_proj", queries)),
            mlp_norm: VectorPlan::new(arena, name("post_attention_layernorm"), hidden),
            gate_up: MatrixPlan::new(
                arena,
                vec![rows_of("mlp.gate_proj", &columns), rows_of("mlp.up_proj", &columns)],
            ),
            down: MatrixPlan::new(arena, columns_of("mlp.down_proj", columns)),
        }
    }

    fn place(self, arena: &Arena) -> Layer {
        Layer {
            attention_norm: self.attention_norm.place(arena),
            qkv: self.qkv.place(arena),
            output: self.output.place(arena),
            mlp_norm: self.mlp_norm.place(arena),
            gate_up: self.gate_up.place(arena),
            down: self.down.place(arena),
        }
    }
}

impl Weights {
    /// The matrix that makes logits.
    pub(super) fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// The uploads of all matrices.
    pub(super) fn uploads<'a>(
        &'a mut self,
        checkpoint: &'a Checkpoint,
    ) -> Result<Vec<Upload<'a, CheckpointError>>, KernelError> {
        let layers = self
            .layers
            .iter_mut()
            .flat_map(|layer| [&mut layer.qkv, &mut layer.output, &mut layer.gate_up, &mut layer.down]);
        let matrices = [&mut self.embedding].into_iter().chain(layers).chain(&mut self.head);
        matrices.map(|matrix| matrix.upload(checkpoint)).collect()
    }

    /// Uploads the vectors, which are small, and lets go of the checkpoint's pages. After the matrices.
    pub(super) fn finish(&mut self, device: &CudaDevice, checkpoint: &Checkpoint) -> Result<(), LoadError> {
        for vector in self.vectors_mut() {
            let mut values = vec![0.0; vector.values.len()];
            checkpoint.read_rows(&vector.name, 0..1, 0..values.len(), &mut values)?;
            device.upload(&values, vector.values.all_mut())?;
        }
        self.matrices().for_each(|matrix| matrix.release(checkpoint));
        Ok(())
    }

    /// Bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        let norms = (2 * self.layers.len() + 1) * self.final_norm.values.len() * size_of::<f32>();
        self.matrices().map(Matrix::bytes).sum::<u64>() + norms as u64
    }

    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let layers =
            self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]);
        [&self.embedding].into_iter().chain(layers).chain(&self.head)
    }

    fn vectors_mut(&mut self) -> impl Iterator<Item = &mut Vector> {
        let layers =
            self.layers.iter_mut().flat_map(|layer| [&mut layer.attention_norm, &mut layer.mlp_norm]);
        layers.chain([&mut self.final_norm])
    }
}
