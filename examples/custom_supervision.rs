//! Two engines inside a larger actor system, under a supervisor of its own. Run, after `cargo xtask model`:
//! `cargo run --release --example custom_supervision -- target/models/SmolLM2-135M-Instruct.Q4_1.gguf`
//!
//! ```text
//! Desk                   routes questions, restarts engines that end, stops them in order
//!   EngineActor 0        owns an engine of three ranks
//!   EngineActor 1        owns an engine of one rank
//! ```
//!
//! An engine recovers from lost shards by itself. What is left to the program around it is the engine's own end: here
//! somebody shuts one down behind the desk's back; it is started anew while the other goes on answering.

#![allow(clippy::print_stdout)] // the story belongs on standard output

use std::{
    env,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use consort::{Engine, EnsembleState, GenerateOptions, Message, RequestError, SubmitError};
use ractor::{
    Actor, ActorProcessingErr, ActorRef, ActorStatus, RactorErr, RpcReplyPort, SupervisionEvent, call_t,
};

/// Restarts of one engine before the desk gives up. A program that runs for months would forget old ones.
const RESTARTS_MAX: u32 = 2;
/// A start that fails at once is not repeated at once.
const RESTART_DELAY: Duration = Duration::from_millis(200);
/// How long open answers may go on when an engine is stopped.
const GRACE: Duration = Duration::from_secs(2);
/// Longest wait for a reply, which may have to wait for a model to load: this only ends a hang.
const REPLY_MS_MAX: u64 = 60_000;
/// Longest wait for a seat that refuses, which is as long as another holder of its engine gives open answers, and a
/// load.
const SEAT_TIME_MAX: Duration = Duration::from_secs(120);

type Handled = Result<(), ActorProcessingErr>;

/// Owns one engine: starts it, fails when it ends, shuts it down when stopped.
struct EngineActor;

enum EngineMessage {
    Ask {
        question: &'static str,
        reply: RpcReplyPort<Result<String, RequestError>>,
    },
    /// Hands out a handle of the engine.
    Lend(RpcReplyPort<Engine>),
    Ended(EnsembleState),
}

#[derive(Clone)]
struct Plan {
    model: PathBuf,
    ranks: usize,
}

impl Actor for EngineActor {
    type Msg = EngineMessage;
    /// The engine, once it is loaded.
    type State = (Plan, Option<Engine>);
    type Arguments = Plan;

    async fn pre_start(&self, _: ActorRef<Self::Msg>, plan: Plan) -> Result<Self::State, ActorProcessingErr> {
        Ok((plan, None))
    }

    /// Loads here and not in `pre_start`, for which the desk would wait. Until it is done, messages wait in the
    /// mailbox. A start that fails is the actor's failure, as is an engine that ends later.
    async fn post_start(&self, myself: ActorRef<Self::Msg>, (plan, slot): &mut Self::State) -> Handled {
        let builder = Engine::builder().model(&plan.model).tensor_parallel_size(plan.ranks);
        let engine = builder.max_model_len(256).max_num_seqs(4).start().await?;
        // A watch does not keep its engine alive: this task ends with the engine, whoever ends that.
        let mut watch = engine.watch();
        tokio::spawn(async move { myself.cast(EngineMessage::Ended(watch.ended().await)) });
        *slot = Some(engine);
        Ok(())
    }

    async fn handle(&self, _: ActorRef<Self::Msg>, message: Self::Msg, state: &mut Self::State) -> Handled {
        let engine = state.1.as_ref().ok_or("a message came before the engine was loaded")?;
        match message {
            EngineMessage::Ask { question, reply } => {
                let options =
                    GenerateOptions { temperature: Some(0.0), max_tokens: Some(8), ..Default::default() };
                let stream = match engine.chat(&[Message::user(question)], options) {
                    // Nothing will be answered here again. The port is dropped, and who asked asks again. The actor
                    // ends with the engine and not before: a successor would load while the old weights are held.
                    Err(RequestError::Submit(SubmitError::ShuttingDown)) => return Ok(()),
                    stream => stream,
                };
                // An answer takes a while; the next message must not wait for it.
                tokio::spawn(async move {
                    let done = async { stream?.collect().await }.await;
                    reply.send(done.map(|done| done.text))
                });
            }
            EngineMessage::Lend(reply) => reply.send(engine.clone())?,
            EngineMessage::Ended(end) => {
                // One that failed still holds its weights, of which a successor would be the second set.
                engine.shutdown(Duration::ZERO).await;
                return Err(format!("the engine ended: {end:?}").into());
            }
        }
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<Self::Msg>, (plan, engine): &mut Self::State) -> Handled {
        if let Some(engine) = engine.take() {
            engine.shutdown(GRACE).await;
            println!("the engine of {} ranks is shut down", plan.ranks);
        }
        Ok(())
    }
}

/// The application's supervisor. It never waits for an engine.
struct Desk;

enum DeskMessage {
    /// For the engine of that seat. If it is being restarted, the message is dropped, and with it the reply port:
    /// who called hears of that at once.
    For(usize, EngineMessage),
    Start(usize),
}

/// One engine's place.
struct Seat {
    plan: Plan,
    actor: Option<ActorRef<EngineMessage>>,
    restarts: u32,
}

impl Actor for Desk {
    type Msg = DeskMessage;
    type State = Vec<Seat>;
    type Arguments = Vec<Plan>;

    async fn pre_start(
        &self,
        myself: ActorRef<Self::Msg>,
        plans: Vec<Plan>,
    ) -> Result<Vec<Seat>, ActorProcessingErr> {
        for index in 0..plans.len() {
            myself.cast(DeskMessage::Start(index))?;
        }
        Ok(plans.into_iter().map(|plan| Seat { plan, actor: None, restarts: 0 }).collect())
    }

    async fn handle(
        &self,
        myself: ActorRef<Self::Msg>,
        message: Self::Msg,
        seats: &mut Vec<Seat>,
    ) -> Handled {
        match message {
            DeskMessage::For(index, message) => {
                if let Some(actor) = seats.get(index).and_then(|seat| seat.actor.as_ref()) {
                    // An error means that it has just ended; its supervision event is on the way.
                    let _ = actor.cast(message);
                }
            }
            DeskMessage::Start(index) => {
                let plan = seats[index].plan.clone();
                // Without a name: ractor's registry of names is one for the whole process.
                let (actor, _) = Actor::spawn_linked(None, EngineActor, plan, myself.get_cell()).await?;
                seats[index].actor = Some(actor);
            }
        }
        Ok(())
    }

    /// All restart policy is here. When the budget is used up the desk fails too: what follows is for who runs it.
    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Self::Msg>,
        event: SupervisionEvent,
        seats: &mut Vec<Seat>,
    ) -> Handled {
        let (who, reason) = match event {
            SupervisionEvent::ActorFailed(who, error) => (who, error.to_string()),
            SupervisionEvent::ActorTerminated(who, _, reason) => (who, reason.unwrap_or_default()),
            _ => return Ok(()),
        };
        let is_lost = |seat: &Seat| seat.actor.as_ref().is_some_and(|actor| actor.get_id() == who.get_id());
        let Some(index) = seats.iter().position(is_lost) else { return Ok(()) };
        let seat = &mut seats[index];
        println!("seat {index} is lost: {reason}");
        (seat.actor, seat.restarts) = (None, seat.restarts + 1);
        if seat.restarts > RESTARTS_MAX {
            return Err(format!("seat {index} is lost for good: {reason}").into());
        }
        myself.send_after(RESTART_DELAY, move || DeskMessage::Start(index));
        Ok(())
    }

    /// One after the other, each with time for its open answers: children that are left here would be killed.
    async fn post_stop(&self, _: ActorRef<Self::Msg>, seats: &mut Vec<Seat>) -> Handled {
        for actor in seats.iter_mut().filter_map(|seat| seat.actor.take()) {
            // An error means that it has ended already.
            let _ = actor.stop_and_wait(None, None).await;
        }
        Ok(())
    }
}

/// Calls the engine of a seat, again while it is being shut down or restarted, for as long as that may reasonably take.
async fn call<T: Send + 'static>(
    desk: &ActorRef<DeskMessage>,
    seat: usize,
    message: impl Fn(RpcReplyPort<T>) -> EngineMessage,
) -> anyhow::Result<T> {
    let patience = Instant::now() + SEAT_TIME_MAX;
    loop {
        match call_t!(desk, |reply| DeskMessage::For(seat, message(reply)), REPLY_MS_MAX) {
            Ok(reply) => return Ok(reply),
            Err(error @ RactorErr::Timeout) => return Err(error.into()),
            Err(_) => tokio::time::sleep(RESTART_DELAY).await,
        }
        ensure!(desk.get_status() < ActorStatus::Stopping, "the desk has given up seat {seat}");
        ensure!(Instant::now() < patience, "seat {seat} has not come back within {SEAT_TIME_MAX:?}");
    }
}

async fn ask(desk: &ActorRef<DeskMessage>, seat: usize) -> anyhow::Result<String> {
    let question = "What is the capital of France?";
    let answer = call(desk, seat, |reply| EngineMessage::Ask { question, reply }).await??;
    println!("seat {seat}: {answer}");
    Ok(answer)
}

/// The whole story; an error if any of it goes another way.
pub(crate) async fn run(model: PathBuf) -> anyhow::Result<()> {
    let plans = [3, 1].map(|ranks| Plan { model: model.clone(), ranks }).to_vec();
    let (desk, ended) = Actor::spawn(None, Desk, plans).await?;
    let (first, other) = tokio::try_join!(ask(&desk, 0), ask(&desk, 1))?;

    let lent = call(&desk, 0, EngineMessage::Lend).await?;
    // What is still being said keeps the engine from ending at once.
    let open =
        lent.generate("Once upon a time", GenerateOptions { ignore_eos: true, ..Default::default() })?;
    let shut_down = async {
        lent.shutdown(GRACE).await;
        anyhow::Ok(())
    };
    let again = async {
        let answer = ask(&desk, 0).await?;
        ensure!(lent.watch().state() == EnsembleState::Stopped, "an engine and its successor ran at once");
        Ok(answer)
    };
    // All at once: one engine ends and is started anew, the other answers meanwhile.
    let ((), again, meanwhile) = tokio::try_join!(shut_down, again, ask(&desk, 1))?;
    drop(open);
    ensure!((&again, &meanwhile) == (&first, &other), "the answers changed: {again} / {meanwhile}");

    let engines = [call(&desk, 0, EngineMessage::Lend).await?, call(&desk, 1, EngineMessage::Lend).await?];
    desk.stop(None);
    ended.await?;
    let is_stopped = |engine: &Engine| engine.watch().state() == EnsembleState::Stopped;
    ensure!(engines.iter().all(is_stopped), "an engine outlives the desk");
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    run(env::args().nth(1).context("usage: custom_supervision MODEL")?.into()).await
}
