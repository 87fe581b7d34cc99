//! Progress bars: one per rank while ranks load, one for a conversion; nothing where the error stream is no terminal.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use consort_actors::LoadProgress;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Bars of one load.
pub(super) struct LoadBars {
    all: MultiProgress,
    /// By replica and rank.
    ranks: Mutex<BTreeMap<(u16, u16), ProgressBar>>,
}

impl LoadBars {
    pub(super) fn new() -> Arc<Self> {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        Arc::new(Self { all, ranks: Mutex::default() })
    }

    /// Takes a report; called from the ranks' threads.
    pub(super) fn report(&self, progress: &LoadProgress) {
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = ranks.entry((progress.replica.0, progress.rank.0)).or_insert_with(|| self.bar(progress));
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.loaded_bytes);
    }

    fn bar(&self, progress: &LoadProgress) -> ProgressBar {
        let bar = self.all.add(ProgressBar::new(progress.total_bytes));
        bar.set_style(style());
        bar.set_prefix(match progress.replica.0 {
            0 => progress.rank.to_string(),
            _ => format!("{}, {}", progress.replica, progress.rank),
        });
        bar
    }

    /// Takes the bars away.
    pub(super) fn finish(&self) {
        let ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        ranks.values().for_each(ProgressBar::finish_and_clear);
    }
}

/// One bar for bytes written.
pub(super) fn write_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(style());
    bar.set_prefix("writing");
    bar
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{prefix} [{bar:40}] {decimal_bytes}/{decimal_total_bytes}")
        .map_or_else(|_| ProgressStyle::default_bar(), |style| style.progress_chars("=> "))
}
