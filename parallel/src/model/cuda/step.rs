//! The launches of one step: from tokens to normalised hidden states of the output rows, and from those to logits.
//!
//! Nothing here depends on what the numbers on the device say, only on how many there are: the same launches are
//! recorded for a graph.

use consort_kernels::{
    KernelError,
    attention::cuda::{Inputs, attention},
    cuda::{DeviceSliceMut, Launcher, device::DeviceBuffer, row_stride},
    element::bf16,
    embedding::cuda::embedding,
    linear::cuda::{linear, rehearse},
    qkv::cuda::{QkvWeights, RowPlaces, qkv},
    rms_norm::cuda::{Norm, rms_norm, rms_norm_of_rows},
    rope::cuda::rope_angles,
    swiglu::cuda::{Activation, swiglu},
};

use super::{
    buffers::{Buffers, scratch},
    numbers::StepNumbers,
    shape::{LayerShape, RankShape},
    sums::Sums,
    weights::{Layer, Matrix, Vector, Weights},
};

/// What a step's launches use.
pub(super) struct Step<'a> {
    pub(super) launcher: &'a dyn Launcher,
    pub(super) shape: &'a RankShape,
    pub(super) weights: &'a Weights,
    pub(super) buffers: &'a mut Buffers,
    /// All pages, slot after slot.
    pub(super) pool: &'a mut DeviceBuffer<bf16>,
    /// `None` for a rank alone.
    pub(super) sums: Option<&'a Sums>,
    pub(super) numbers: &'a StepNumbers,
}

impl Step<'_> {
    /// Launches all layers; the output rows end up in `kept`.
    pub(super) fn layers(&mut self) -> Result<(), KernelError> {
        let (rows, layers) = (self.numbers.rows, &self.weights.layers);
        let Some(first) = layers.first() else { return self.keep(false) };
        self.begin(rows, &first.attention_norm)?;
        for (at, layer) in layers.iter().enumerate() {
            self.attention(at, layer)?;
            self.add_and_normalise(&layer.mlp_norm)?;
            self.mlp(layer)?;
            match layers.get(at + 1) {
                Some(next) => self.add_and_normalise(&next.attention_norm)?,
                None => self.keep(true)?,
            }
        }
        Ok(())
    }

    /// Angles, and the first layer's input.
    fn begin(&mut self, rows: usize, norm: &Vector) -> Result<(), KernelError> {
        let Step { launcher, shape, weights, numbers, .. } = *self;
        let b = &mut *self.buffers;
        let angles = rows * shape.frequencies.len();
        rope_angles(
            launcher,
            b.numbers.slice(numbers.positions()),
            b.frequencies.all(),
            shape.attention_factor,
            b.cos.slice_mut(0..angles),
            b.sin.slice_mut(0..angles),
        )?;
        let (tokens, table) = (b.numbers.slice(numbers.tokens()), weights.embedding.view().values);
        let drawn = b.tokens.all();
        let elements = rows * shape.hidden;
        let (first, hidden) = (shape.first_token as usize, shape.hidden);
        match self.sums {
            None => {
                embedding(launcher, tokens, drawn, table, hidden, first, b.residual.slice_mut(0..elements))?;
            }
            Some(sums) => {
                embedding(launcher, tokens, drawn, table, hidden, first, b.exchange.slice_mut(0..elements))?;
                sums.add(launcher, b.exchange.slice(0..elements), b.residual.slice_mut(0..elements))?;
            }
        }
        let out = b.normed.slice_mut(0..rows * row_stride(hidden));
        let norm = Norm { weight: norm.values.all(), eps: shape.eps };
        rms_norm(launcher, b.residual.slice_mut(0..elements), None, norm, out)
    }

    /// From `normed` to this rank's part, in `exchange`, of what the layer adds.
    fn attention(&mut self, at: usize, layer: &Layer) -> Result<(), KernelError> {
        let Step { launcher, shape, numbers, .. } = *self;
        let (rows, qkv_shape, b) = (numbers.rows, shape.qkv(), &mut *self.buffers);
        let (columns, elements) = (rows * qkv_shape.columns(), rows * qkv_shape.query_elements());
        let invariance = shape.ways.invariance;
        linear(
            launcher,
            b.normed.slice(0..rows * row_stride(shape.hidden)),
            layer.qkv.view(),
            None,
            b.qkv.slice_mut(0..columns),
            &mut scratch(&mut b.products, &mut b.arrivals),
            invariance,
        )?;
        let angles = rows * shape.frequencies.len();
        let LayerShape { attention: attention_shape, place } = &shape.layers[at];
        let slot_elements = self.pool.len() / shape.layers_per_page;
        let pages = place.slot * slot_elements..(place.slot + 1) * slot_elements;
        qkv(
            launcher,
            &qkv_shape,
            QkvWeights::default(),
            b.qkv.slice(0..columns),
            RowPlaces {
                cos: b.cos.slice(0..angles),
                sin: b.sin.slice(0..angles),
                slots: b.numbers.slice(numbers.slots(place.group)),
            },
            b.queries.slice_mut(0..elements),
            self.pool.slice_mut(pages.clone()),
        )?;
        let inputs = Inputs {
            shape: attention_shape,
            queries: b.queries.slice(0..elements),
            pages: self.pool.slice(pages),
            sinks: None,
            plan: numbers.plan(place.group),
            numbers: b.numbers.slice(numbers.attention(place.group)),
        };
        let attended = rows * row_stride(layer.output.inputs);
        attention(launcher, &inputs, b.attention_sums.all_mut(), b.attended.slice_mut(0..attended))?;
        linear(
            launcher,
            b.attended.slice(0..attended),
            layer.output.view(),
            None,
            b.exchange.slice_mut(0..rows * shape.hidden),
            &mut scratch(&mut b.products, &mut b.arrivals),
            invariance,
        )
    }

    /// Likewise of the MLP.
    fn mlp(&mut self, layer: &Layer) -> Result<(), KernelError> {
        let Step { launcher, shape, numbers, .. } = *self;
        let (rows, b, invariance) = (numbers.rows, &mut *self.buffers, shape.ways.invariance);
        let wide = rows * layer.gate_up.outputs;
        linear(
            launcher,
            b.normed.slice(0..rows * row_stride(shape.hidden)),
            layer.gate_up.view(),
            None,
            b.gate_up.slice_mut(0..wide),
            &mut scratch(&mut b.products, &mut b.arrivals),
            invariance,
        )?;
        let activated = rows * row_stride(shape.columns);
        let out = b.activated.slice_mut(0..activated);
        swiglu(launcher, Activation::Silu, b.gate_up.slice(0..wide), shape.columns, out)?;
        linear(
            launcher,
            b.activated.slice(0..activated),
            layer.down.view(),
            None,
            b.exchange.slice_mut(0..rows * shape.hidden),
            &mut scratch(&mut b.products, &mut b.arrivals),
            invariance,
        )
    }

    /// Adds what all ranks made to the residual and normalises it for what comes next.
    fn add_and_normalise(&mut self, norm: &Vector) -> Result<(), KernelError> {
        let Step { launcher, shape, numbers, sums, .. } = *self;
        let (rows, hidden, b) = (numbers.rows, shape.hidden, &mut *self.buffers);
        let elements = rows * hidden;
        let norm = Norm { weight: norm.values.all(), eps: shape.eps };
        let (part, residual) = (b.exchange.slice(0..elements), b.residual.slice_mut(0..elements));
        let out = b.normed.slice_mut(0..rows * row_stride(hidden));
        match sums {
            None => rms_norm(launcher, residual, Some(part), norm, out),
            Some(sums) => {
                let delta = b.delta.slice_mut(0..elements);
                sums.add_and_normalise(launcher, part, delta, residual, norm, out)
            }
        }
    }

    /// Normalises the output rows. `adds`: whether the last layer's part is still to be added.
    fn keep(&mut self, adds: bool) -> Result<(), KernelError> {
        let Step { launcher, shape, numbers, sums, .. } = *self;
        let (elements, b) = (numbers.rows * shape.hidden, &mut *self.buffers);
        let part = b.exchange.slice(0..elements);
        let delta = match (adds, sums) {
            (false, _) => None,
            (true, None) => Some(part),
            (true, Some(sums)) => {
                sums.add(launcher, part, b.delta.slice_mut(0..elements))?;
                Some(b.delta.slice(0..elements))
            }
        };
        let norm = Norm { weight: self.weights.final_norm.values.all(), eps: shape.eps };
        let rows_of = b.numbers.slice(numbers.output_rows());
        let out = b.kept.slice_mut(0..numbers.kept * row_stride(shape.hidden));
        rms_norm_of_rows(launcher, b.residual.slice(0..elements), delta, rows_of, norm, out)
    }
}

/// Has everything ready that a step's products load when they are first launched: nothing may wait for the device in a
/// step, in which the device may wait for peers.
pub(super) fn rehearse_products(
    launcher: &dyn Launcher,
    shape: &RankShape,
    weights: &Weights,
    b: &mut Buffers,
) -> Result<(), KernelError> {
    // Layers are alike. Logits are of fewer rows than a library multiplies.
    let Some(Layer { qkv, output, gate_up, down, .. }) = weights.layers.first() else { return Ok(()) };
    let Buffers { normed, attended, activated, products, arrivals, .. } = b;
    let mut ready = |x: &DeviceBuffer<bf16>, matrix: &Matrix, y: &mut DeviceBuffer<f32>| {
        let (x, y) = (x.slice(0..row_stride(matrix.inputs)), y.slice_mut(0..matrix.outputs));
        let mut scratch = scratch(products, arrivals);
        rehearse(launcher, x, matrix.view(), y, &mut scratch, (shape.ways.invariance, shape.rows_max))
    };
    ready(normed, qkv, &mut b.qkv)?;
    ready(attended, output, &mut b.exchange)?;
    ready(normed, gate_up, &mut b.gate_up)?;
    ready(activated, down, &mut b.exchange)
}

/// Logits `[rows, vocabulary]` of kept rows, whole on every rank.
pub(super) fn logits(
    launcher: &dyn Launcher,
    shape: &RankShape,
    head: &Matrix,
    b: &mut Buffers,
    sums: Option<&Sums>,
    kept: std::ops::Range<usize>,
) -> Result<(), KernelError> {
    let (rows, stride) = (kept.len(), row_stride(shape.hidden));
    let x = b.kept.slice(kept.start * stride..kept.end * stride);
    let mut scratch = scratch(&mut b.products, &mut b.arrivals);
    let mut multiply = |y: DeviceSliceMut<'_, f32>| {
        linear(launcher, x, head.view(), None, y, &mut scratch, shape.ways.invariance)
    };
    let all = rows * shape.vocabulary;
    match sums {
        None => multiply(b.logits.slice_mut(0..all)),
        Some(sums) => {
            multiply(b.exchange.slice_mut(0..rows * head.outputs))?;
            sums.gather(launcher, &b.exchange, rows, &shape.vocabularies, b.logits.slice_mut(0..all))
        }
    }
}
