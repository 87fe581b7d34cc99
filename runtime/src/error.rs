//! What can go wrong with an engine as a whole, and with one request.

use std::path::PathBuf;

use consort_actors::{EnsembleError, GenerationError, SubmitError};
use consort_kernels::KernelError;
use consort_parallel::{checkpoint::CheckpointError, partition::PartitionError};

use crate::{
    text::{TemplateError, TextError},
    topology::TopologyError,
};

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The topology could not be read, or breaks its rules.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The checkpoint could not be opened.
    #[error("cannot open the model at {}", path.display())]
    Checkpoint {
        /// Where it was looked for.
        path: PathBuf,
        /// What was wrong with it.
        #[source]
        source: CheckpointError,
    },
    /// The model cannot be split over that many ranks.
    #[error("cannot split the model over {ranks} ranks")]
    Partition {
        /// Ranks asked for.
        ranks: usize,
        /// Why not.
        #[source]
        source: PartitionError,
    },
    /// The checkpoint's tokenizer is unusable.
    #[error("cannot use the model's tokenizer")]
    Tokenizer(#[from] TextError),
    /// The checkpoint's chat template is unusable.
    #[error("cannot use the model's chat template")]
    Template(#[from] TemplateError),
    /// The KV cache cannot have that shape.
    #[error("cannot lay out the KV cache")]
    KvLayout(#[from] KernelError),
    /// A longer context was asked for than the model knows.
    #[error(
        "max_model_len = {requested} exceeds the {trained} positions that the model was trained for; \
         lower it or leave it out"
    )]
    MaxModelLen {
        /// What was asked for.
        requested: usize,
        /// What the model has.
        trained: usize,
    },
    /// Not even one sequence of full length would fit.
    #[error(
        "kv_cache_memory_bytes = {given_bytes} holds {given_blocks} KV blocks, but one sequence of max_model_len = \
         {max_model_len} tokens needs {needed_blocks} ({needed_bytes} bytes); raise kv_cache_memory_bytes, or lower \
         max_model_len ({fitting_len} tokens would fit)"
    )]
    CacheTooSmall {
        /// Memory given, over all ranks.
        given_bytes: u64,
        /// Blocks that fit into it.
        given_blocks: usize,
        /// Longest sequence.
        max_model_len: usize,
        /// Blocks of one such sequence.
        needed_blocks: usize,
        /// Their size, over all ranks.
        needed_bytes: u64,
        /// Longest sequence that the given memory holds.
        fitting_len: usize,
    },
    /// The instruments could not be set up.
    #[error("cannot set up metrics")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    /// The shard group did not come up.
    #[error("the shard group did not start")]
    Ensemble(#[from] EnsembleError),
    /// A helper thread ended without a result.
    #[error("preparing the engine was interrupted")]
    Interrupted(#[from] tokio::task::JoinError),
}

/// Why a request was refused, or ended without an answer.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// A field has a value that means nothing.
    #[error("{field}: {message}")]
    Invalid {
        /// Its name, as on the wire.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The text could not be tokenised.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The chat template refused the messages.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The checkpoint has no chat template.
    #[error(
        "the model `{model}` has no chat template; send a plain prompt (/v1/completions, Engine::generate)"
    )]
    NoChatTemplate {
        /// The served name.
        model: String,
    },
    /// The text has more bytes than the context's tokens can stand for.
    #[error(
        "this model's maximum context length is {max_model_len} tokens, but the prompt's {bytes} bytes are at least \
         {tokens_min} tokens; shorten the prompt"
    )]
    TextTooLong {
        /// Length of the text, the chat template's part included.
        bytes: usize,
        /// Tokens if each were the longest of the vocabulary.
        tokens_min: usize,
        /// Most tokens of one sequence.
        max_model_len: usize,
    },
    /// The scheduler did not admit it.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// It was admitted and could not be carried to its end.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// Somebody called [`crate::Engine::cancel`].
    #[error("the request was cancelled")]
    Cancelled,
}
