//! What a checkpoint says about its model, format-independent and checked.

use std::num::NonZeroUsize;

use consort_kernels::rope::{Yarn, frequencies, scale_linear, scale_llama3, scale_yarn};

/// Architecture and sizes of a decoder model, from `config.json` or GGUF metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which layers to build.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Columns of the gated MLP.
    pub intermediate_size: usize,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Longest context the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Of each layer the keys that a token sees, its own included; all before it where there is no window.
    pub layer_windows: Vec<Option<NonZeroUsize>>,
    /// Whether the head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Tokens that end a generation, ascending, without duplicates: config's united with generation_config's.
    pub eos_token_ids: Vec<u32>,
    /// Token put before a prompt by `add_special_tokens`, where there is one.
    pub bos_token_id: Option<u32>,
}

/// Families of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// `LlamaForCausalLM`.
    Llama,
    /// `MistralForCausalLM`: Llama's layers, which attend over a sliding window unless the checkpoint says otherwise.
    Mistral,
}

/// Rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f32,
    /// How frequencies are stretched for long contexts.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// One frequency for each pair of `rotary_dim` dimensions, and the factor of cosines and sines.
    pub fn frequencies(&self, rotary_dim: usize) -> (Vec<f32>, f32) {
        let (mut frequencies, mut attention_factor) = (frequencies(self.theta, rotary_dim), 1.0);
        match &self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => scale_linear(&mut frequencies, *factor),
            RopeScaling::Yarn { yarn, attention_factor: factor } => {
                scale_yarn(&mut frequencies, self.theta, yarn);
                attention_factor = *factor;
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                scale_llama3(
                    &mut frequencies,
                    *factor,
                    *low_freq_factor,
                    *high_freq_factor,
                    *original_context,
                )
            }
            RopeScaling::Factors(factors) => {
                frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
            }
        }
        (frequencies, attention_factor)
    }
}

/// Stretching of rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Unchanged.
    None,
    /// All frequencies divided by `factor`, at least 1.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// YaRN: low frequencies divided, a ramp of pairs between, cosines and sines multiplied.
    Yarn {
        /// Which frequencies are divided, and by what.
        yarn: Yarn,
        /// Factor of cosines and sines: the checkpoint's, or the one that follows from its other values.
        attention_factor: f32,
    },
    /// Llama 3.1's: low frequencies divided by `factor`, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context of the original training, in tokens.
        original_context: usize,
    },
    /// Frequencies divided by factors stored in the checkpoint (GGUF's `rope_freqs.weight`), one per pair.
    Factors(Vec<f32>),
}

/// Sampling defaults that a checkpoint's `generation_config.json` asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Temperature.
    pub temperature: Option<f32>,
    /// Top-k.
    pub top_k: Option<u32>,
    /// Top-p.
    pub top_p: Option<f32>,
    /// Min-p.
    pub min_p: Option<f32>,
    /// Repetition penalty.
    pub repetition_penalty: Option<f32>,
}
