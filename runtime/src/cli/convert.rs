//! `consort convert`: a model as a folder for `transformers`.

use std::{
    io::{self, Write},
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

use super::{args::ConvertArgs, progress, report, serve::Signals};
use crate::convert::{self, ConvertOptions};

pub(super) async fn convert(args: ConvertArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    let options = ConvertOptions {
        dtype: args.dtype.dtype(),
        max_shard_bytes: args.max_shard_size,
        overwrite: args.overwrite,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let mut signals = Signals::new()?;
    let work = tokio::task::spawn_blocking(move || {
        let bar = progress::write_bar();
        let mut progress = |written, total| {
            bar.set_length(total);
            bar.set_position(written);
            if stopped.load(Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let converted = convert::convert(&args.input, &args.output, &options, &mut progress);
        bar.finish_and_clear();
        converted
    });
    let converted = finished(work, &stop, async || signals.next().await).await???;
    for name in &converted.weights.left_out {
        eprintln!(
            "left out: {name}, which the model does not need and which is stored in a type that cannot be read"
        );
    }
    for name in &converted.templates_left_out {
        eprintln!("left out: the chat template {name}; the default one is written");
    }
    let (weights, files) = (&converted.weights, converted.weights.files.len());
    writeln!(
        io::stdout(),
        "{}: {} tensors in {}, {} of weights in {files} {}, {:.1} s",
        converted.folder.display(),
        weights.tensors,
        args.dtype.dtype(),
        report::size(weights.bytes),
        if files == 1 { "file" } else { "files" },
        started.elapsed().as_secs_f64(),
    )?;
    Ok(())
}

/// Waits for the work. A signal asks it to end, which it does at its next report, and it takes what it has written with
/// it; a second signal ends the wait at once.
pub(super) async fn finished<T>(
    mut work: impl Future<Output = T> + Unpin,
    stop: &AtomicBool,
    mut signal: impl AsyncFnMut(),
) -> anyhow::Result<T> {
    tokio::select! {
        done = &mut work => return Ok(done),
        () = signal() => stop.store(true, Relaxed),
    }
    eprintln!("ending at the next step; a second signal ends at once and leaves what was written");
    tokio::select! {
        done = work => Ok(done),
        () = signal() => anyhow::bail!("ended by a second signal; a folder named OUTPUT.partial-N may be left"),
    }
}
