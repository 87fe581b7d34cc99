//! The stream of one request's events.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use ractor::ActorRef;
use tokio::sync::mpsc;
use tokio_stream::Stream;

use crate::{
    ids::SequenceId,
    request::{GenerationError, GenerationEvent},
    router::RouterMessage,
    status::{EnsembleState, StatusBoard},
};

/// Events of one request, in order; [`GenerationEvent::Finished`] or [`GenerationEvent::Failed`] is the last, and
/// always comes. Dropping the stream before that cancels the request: its blocks are free within two steps.
pub struct Generation {
    sequence: SequenceId,
    events: mpsc::Receiver<GenerationEvent>,
    router: ActorRef<RouterMessage>,
    board: Arc<StatusBoard>,
    ended: bool,
}

impl Generation {
    pub(super) fn new(
        sequence: SequenceId,
        events: mpsc::Receiver<GenerationEvent>,
        router: ActorRef<RouterMessage>,
        board: Arc<StatusBoard>,
    ) -> Self {
        Self { sequence, events, router, board, ended: false }
    }

    /// The number under which logs speak of this request.
    pub fn sequence(&self) -> SequenceId {
        self.sequence
    }

    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<GenerationEvent> {
        std::future::poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await
    }
}

impl Stream for Generation {
    type Item = GenerationEvent;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<GenerationEvent>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        let event = std::task::ready!(this.events.poll_recv(context)).unwrap_or_else(|| {
            // The queue closed without a last event: the scheduler is gone, perhaps before it read the submission.
            GenerationEvent::Failed(match this.board.state() {
                EnsembleState::Draining | EnsembleState::Stopped => GenerationError::ShuttingDown,
                _ => GenerationError::ShardLost { reason: "the scheduler ended".into() },
            })
        });
        this.ended = matches!(event, GenerationEvent::Finished(_) | GenerationEvent::Failed(_));
        Poll::Ready(Some(event))
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            // With a router that is gone, all that it placed ends.
            let _ = self.router.cast(RouterMessage::Cancel(self.sequence));
        }
    }
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation").field("sequence", &self.sequence).field("ended", &self.ended).finish()
    }
}
