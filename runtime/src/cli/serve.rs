//! `consort serve`: a model behind OpenAI's API, until told to stop.

use std::{
    io::{self, Write},
    net::SocketAddr,
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{signal, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{args::ServeArgs, progress::LoadBars, report};
use crate::{
    engine::{Engine, EngineBuilder},
    server::{Server, ServerSettings},
    topology::shown_whole,
};

pub(super) async fn serve(args: ServeArgs) -> anyhow::Result<()> {
    let builder = args.model.builder(args.source, args.server);
    let builder = builder.with_overrides(|overrides| overrides.isolates_gpus = true);
    if args.print_config {
        let config = tokio::task::spawn_blocking(move || builder.effective_config()).await??;
        let mut out = io::stdout().lock();
        out.write_all(config.as_bytes())?;
        return Ok(out.flush()?);
    }
    raise_file_limit();
    let settings = builder.server_settings()?;
    let mut signals = Signals::new()?;
    let Some(running) = Running::start(builder, settings, &mut signals).await? else { return Ok(()) };
    running.announce()?;
    running.wait(&mut signals).await
}

/// Connections are files, and the usual soft limit is below the server's own bound on them. The process is ours alone
/// here, so it takes what the system grants.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "could not raise the limit of open files");
    }
}

/// A server with its engine, both up.
pub(super) struct Running {
    pub(super) engine: Engine,
    pub(super) address: SocketAddr,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

impl Running {
    /// Takes the port first, so that a taken one is known before minutes of loading; then loads while the probes
    /// answer. `None` if a signal came meanwhile.
    pub(super) async fn start(
        builder: EngineBuilder,
        settings: ServerSettings,
        signals: &mut Signals,
    ) -> anyhow::Result<Option<Self>> {
        let server = Server::bind(settings).await?;
        let (address, handle) = (server.local_addr(), server.handle());
        let stop = CancellationToken::new();
        let serving = tokio::spawn(server.run(stop.clone().cancelled_owned()));
        let bars = LoadBars::new();
        let reporting = bars.clone();
        let loading = builder.on_progress(move |progress| reporting.report(&progress)).start();
        let loaded = tokio::select! {
            loaded = loading => Some(loaded),
            () = signals.next() => None,
        };
        bars.finish();
        let Some(loaded) = loaded else { return Ok(None) };
        let engine = loaded?;
        handle.attach(engine.clone())?;
        Ok(Some(Self { engine, address, stop, serving }))
    }

    /// Address and ranks, on standard output.
    pub(super) fn announce(&self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", report::compute_line(self.engine.compute()))?;
        for line in report::ensemble_lines(&self.engine.status().ensemble) {
            writeln!(out, "{line}")?;
        }
        writeln!(out, "{} is ready at http://{}", shown_whole(self.engine.model_name()), self.address)?;
        out.flush()
    }

    /// Serves until a signal, then drains; a second signal ends everything at once. An engine that has failed for good
    /// ends it too, with an error: whoever watches this process may start it anew.
    pub(super) async fn wait(self, signals: &mut Signals) -> anyhow::Result<()> {
        let failure = tokio::select! {
            () = signals.next() => None,
            reason = self.engine.failed() => Some(reason),
        };
        if let Some(reason) = failure {
            eprintln!("the engine has failed; telling open requests");
            // However that ends, the failure is the reason to report.
            let _ = self.end(signals).await;
            anyhow::bail!("the engine has failed for good and must be started anew: {reason}");
        }
        eprintln!("finishing open requests; a second signal ends at once");
        self.end(signals).await
    }

    /// Drains and ends.
    pub(super) async fn end(self, signals: &mut Signals) -> anyhow::Result<()> {
        self.stop.cancel();
        tokio::select! {
            ended = self.serving => Ok(ended?),
            () = signals.next() => anyhow::bail!("ended by a second signal; open requests were cut off"),
        }
    }
}

/// Ctrl-C, the supervisor's request to stop, and the end of the terminal.
pub(super) struct Signals {
    #[cfg(unix)]
    interrupt: signal::unix::Signal,
    #[cfg(unix)]
    terminate: signal::unix::Signal,
    /// `None` where the process is to outlive its terminal.
    #[cfg(unix)]
    hang_up: Option<signal::unix::Signal>,
}

impl Signals {
    /// From here on none of them ends the process by itself, and one that comes between two waits is kept.
    pub(super) fn new() -> io::Result<Self> {
        #[cfg(unix)]
        {
            use signal::unix::{SignalKind, signal};
            let hang_up = !ignores_hang_up();
            Ok(Self {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
                hang_up: hang_up.then(|| signal(SignalKind::hangup())).transpose()?,
            })
        }
        #[cfg(not(unix))]
        Ok(Self {})
    }

    /// Waits for the next of any.
    pub(super) async fn next(&mut self) {
        #[cfg(unix)]
        {
            let hang_up = async {
                match &mut self.hang_up {
                    Some(signal) => signal.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = self.interrupt.recv() => {}
                _ = self.terminate.recv() => {}
                _ = hang_up => {}
            }
        }
        #[cfg(not(unix))]
        let _ = signal::ctrl_c().await;
    }
}

/// Whether this process was started to ignore the end of its terminal, as `nohup` does. Listening would undo that.
/// Where it cannot be told, the system's default stays in force.
#[cfg(unix)]
fn ignores_hang_up() -> bool {
    const HANG_UP: u64 = 1 << (rustix::process::Signal::HUP.as_raw() - 1);
    let ignored = || -> Option<u64> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    };
    ignored().is_none_or(|ignored| ignored & HANG_UP != 0)
}
