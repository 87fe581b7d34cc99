//! Messages between a rank's place in the engine and its process, and how they become frames.
//!
//! A frame is a length (four bytes, big-endian), the protocol's version (one byte) and a message in the bytes of
//! bincode with fixed integers. No names of types, no addresses, no closures. Steps carry their epoch and number, so
//! that an answer from before a loss is known for what it is.

use std::{io, sync::Arc};

use bytes::{Bytes, BytesMut};
use consort_actors::{
    Epoch,
    plan::{StepPlan, StepResult},
};
use tokio_util::codec::{Decoder, Encoder, LengthDelimitedCodec};
use wincode::{
    SchemaRead, SchemaWrite,
    config::{Configuration, DefaultConfig},
};

use super::blueprint::Blueprint;

/// Version of the messages below. Two builds that share it may still differ: see [`Hello`].
pub(super) const PROTOCOL: u8 = 3;

/// Largest frame. The largest plan begins as many sequences as there may be and names their cached tokens, four bytes
/// each; this is sixteen million of them. A longer one is refused by whoever would send it, and a length beyond it
/// before anything is allocated.
pub(super) const FRAME_BYTES_MAX: usize = 64 << 20;

/// Most bytes that one list may claim before its elements are read.
const LIST_BYTES_MAX: usize = 16 << 20;

/// How a conversation begins, on both sides. Its bytes stay as they are in every build.
#[derive(Clone, Debug, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub(super) struct Hello {
    magic: [u8; 8],
    pub(super) build: [u8; 16],
}

const MAGIC: [u8; 8] = *b"consort\n";

impl Hello {
    pub(super) fn of(build: [u8; 16]) -> Self {
        Self { magic: MAGIC, build }
    }

    /// Whether it is one at all.
    pub(super) fn is_ours(&self) -> bool {
        self.magic == MAGIC
    }
}

/// What a rank's process is told.
#[derive(Debug, PartialEq, SchemaRead, SchemaWrite)]
pub(super) enum ToShard {
    /// Load. Descriptors of the rank's place in the group come with it.
    Build(Box<Build>),
    /// Meet the other ranks.
    Join,
    /// Carry out a step behind those that were told before.
    Begin(Arc<StepPlan>),
    /// Enter a new epoch with the place that so many descriptors stand for, keeping the weights.
    Rejoin { epoch: Epoch, descriptors: u8 },
    /// The engine is there, and has absorbed so many steps of this process.
    Beat { absorbed: u64 },
    /// Nothing is wanted any more.
    Stop,
}

/// What a process loads.
#[derive(Debug, PartialEq, SchemaRead, SchemaWrite)]
pub(super) struct Build {
    pub(super) rank: consort_parallel::ids::Rank,
    pub(super) blueprint: Blueprint,
    /// How many come with it: the group's segment of memory, and the rank's mailbox where there is one.
    pub(super) descriptors: u8,
    /// What it should log: 0 nothing, 1 errors, up to 5.
    pub(super) log_level: u8,
}

/// What a rank's process says.
#[derive(Debug, PartialEq, SchemaRead, SchemaWrite)]
pub(super) enum ToParent {
    /// How far loading has come.
    Progress { loaded_bytes: u64, total_bytes: u64 },
    /// Weights and pages are in place.
    Built { weight_bytes: u64, kv_bytes: u64 },
    /// The other ranks were met.
    Joined,
    /// They were not: the group was aborted meanwhile, and this rank is sound.
    NotJoined { reason: String },
    /// A step is done.
    Result(StepResult),
    /// A step was cut short by an abort of the group, and this rank is sound.
    Aborted { epoch: Epoch, reason: String },
    /// The new epoch is entered.
    Rejoined { epoch: Epoch, weight_bytes: u64, kv_bytes: u64 },
    /// The process lives and has finished so many steps; its main thread has made so many moves, and may wait for other
    /// ranks.
    Beat { finished: u64, moves: u64, waits: bool },
    /// The rank failed, and its process ends.
    Failed { error: String },
}

/// Why bytes are no message, or a message no bytes.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a frame of more than {FRAME_BYTES_MAX} bytes")]
    TooLong,
    #[error("a frame of protocol {got}, not {PROTOCOL}")]
    Version { got: u8 },
    #[error("an empty frame")]
    Empty,
    #[error("a frame that is no message: {0}")]
    Unreadable(wincode::ReadError),
    #[error("a message that cannot be written: {0}")]
    Unwritable(wincode::WriteError),
    #[error("{0}")]
    Framing(io::Error),
    #[error("more descriptors than any message needs")]
    Descriptors,
}

/// The bytes of bincode's fixed integers, with a bound of our own on what a length may claim.
pub(super) type Wire = Configuration<true, LIST_BYTES_MAX>;

const fn wire() -> Wire {
    DefaultConfig::new().with_preallocation_size_limit::<LIST_BYTES_MAX>()
}

pub(super) fn codec() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder().max_frame_length(FRAME_BYTES_MAX).new_codec()
}

/// One message as a frame.
pub(super) fn encode<M>(codec: &mut LengthDelimitedCodec, message: &M) -> Result<Bytes, FrameError>
where
    M: SchemaWrite<Wire, Src = M>,
{
    let mut payload = vec![PROTOCOL];
    wincode::config::serialize_into(&mut payload, message, wire()).map_err(FrameError::Unwritable)?;
    if payload.len() > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong);
    }
    let mut frame = BytesMut::with_capacity(payload.len() + 4);
    codec.encode(Bytes::from(payload), &mut frame).map_err(FrameError::Framing)?;
    Ok(frame.freeze())
}

/// The next message of `received`, once all of it is there.
pub(super) fn decode<M>(
    codec: &mut LengthDelimitedCodec,
    received: &mut BytesMut,
) -> Result<Option<M>, FrameError>
where
    M: for<'de> SchemaRead<'de, Wire, Dst = M>,
{
    let Some(frame) = codec.decode(received).map_err(FrameError::Framing)? else { return Ok(None) };
    let (version, message) = frame.split_first().ok_or(FrameError::Empty)?;
    if *version != PROTOCOL {
        return Err(FrameError::Version { got: *version });
    }
    let message = wincode::config::deserialize_exact(message, wire()).map_err(FrameError::Unreadable)?;
    Ok(Some(message))
}
