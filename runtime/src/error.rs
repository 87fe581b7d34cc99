//! What can go wrong with an engine as a whole, and with one request.

use std::path::PathBuf;

use consort_actors::{EnsembleError, GenerationError, SubmitError};
use consort_kernels::{KernelError, cuda::device::CudaError};
use consort_parallel::{
    checkpoint::CheckpointError,
    plan::{Plan, PlanError},
};

use crate::{
    text::{TemplateError, TextError},
    topology::{TopologyError, shown_path},
};

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The topology could not be read, breaks its rules, or asks for what the model does not have.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The checkpoint could not be opened.
    #[error("cannot open the model at {}", shown_path(.path))]
    Checkpoint {
        /// Where it was looked for.
        path: PathBuf,
        /// What was wrong with it.
        #[source]
        source: CheckpointError,
    },
    /// The checkpoint's tokenizer is unusable.
    #[error("cannot use the model's tokenizer")]
    Tokenizer(#[from] TextError),
    /// The checkpoint's chat template is unusable.
    #[error("cannot use the model's chat template")]
    Template(#[from] TemplateError),
    /// The model, or one sequence of full length beside it, is too large for the memory there is.
    #[error("{}", .plan.verdict())]
    DoesNotFit {
        /// What is short where, and what would make it fit.
        plan: Box<Plan>,
    },
    /// The model cannot be planned for.
    #[error("cannot plan for the model")]
    Plan(#[from] PlanError),
    /// The KV cache cannot have that shape.
    #[error("cannot lay out the KV cache")]
    KvLayout(#[from] KernelError),
    /// The instruments could not be set up.
    #[error("cannot set up metrics")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    /// The shard group did not come up.
    #[error("the shard group did not start")]
    Ensemble(#[from] EnsembleError),
    /// A device that the topology names is not there, or of no use.
    #[error(
        "cannot use the devices of the topology; `consort doctor` tells what this machine has, and what to do"
    )]
    Device(#[from] DeviceError),
    /// This process was meant to be a rank of another one's engine.
    #[error(
        "this process was started as a rank of another engine, whose program must call consort::shard_main() at the \
         start of main, before it starts engines; or EngineBuilder::shard_executable must name a program that does"
    )]
    IsShard,
    /// Ranks cannot be processes here.
    #[error("cannot start processes for the ranks")]
    Processes(#[source] std::io::Error),
    /// A helper thread ended without a result.
    #[error("preparing the engine was interrupted")]
    Interrupted(#[from] tokio::task::JoinError),
}

/// Why a device that the topology names cannot be used.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error(transparent)]
pub struct DeviceError(#[from] pub CudaError);

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

impl RequestError {
    /// Whether the request is at fault: sent again, it would be refused again.
    pub fn is_about_the_request(&self) -> bool {
        match self {
            Self::Invalid { .. } | Self::NoChatTemplate { .. } | Self::TextTooLong { .. } => true,
            Self::Text(_) => true,
            Self::Template(error) => error.is_about_the_request(),
            Self::Submit(error) => match error {
                SubmitError::EmptyPrompt
                | SubmitError::UnknownToken { .. }
                | SubmitError::TooLong { .. }
                | SubmitError::NeverFits { .. } => true,
                SubmitError::Overloaded { .. } | SubmitError::NotReady(_) | SubmitError::ShuttingDown => {
                    false
                }
            },
            Self::Generation(_) | Self::Cancelled => false,
        }
    }
}
