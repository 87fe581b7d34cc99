//! A report for people: tables, and a bar of each rank's memory.

use std::{ffi::OsStr, fmt::Write};

use consort_parallel::plan::amount;
use unicode_width::UnicodeWidthStr;

use super::report::{Rank, Report, Step, Users};
use crate::topology::shown_whole;

/// Cells of a bar.
const BAR_CELLS: usize = 60;

/// Whether colours may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Coloured,
}

impl Style {
    /// Colours on a terminal, unless its user wants none.
    pub(super) fn of_terminal(is_terminal: bool, no_color: Option<&OsStr>) -> Style {
        let is_unwanted = no_color.is_some_and(|value| !value.is_empty());
        if is_terminal && !is_unwanted { Style::Coloured } else { Style::Plain }
    }
}

/// A part of a rank's memory: name, letter without colours, colour.
pub(super) struct Part {
    pub(super) name: &'static str,
    letter: char,
    ansi: u8,
    pub(super) css: &'static str,
    pub(super) bytes: u64,
}

/// What a rank's memory holds, in the order of a bar, and how much of it there is.
pub(super) fn parts(rank: &Rank) -> (Vec<Part>, u64) {
    let part = |name, letter, ansi, css, bytes| Part { name, letter, ansi, css, bytes };
    let mut parts = vec![
        part("weights", '#', 34, "#3b6ea8", rank.weight_bytes),
        part("workspace", '+', 33, "#d9a441", rank.workspace_bytes),
        part("keys and values", '=', 32, "#5a9e6f", rank.kv_bytes),
        part("reserves", '.', 90, "#9a9a9a", rank.reserves.total_bytes),
    ];
    let taken: u64 = parts.iter().map(|part| part.bytes).sum();
    let all = rank.memory_bytes.unwrap_or(taken).max(taken);
    parts.push(part("free", ' ', 37, "#eeeeee", all - taken));
    (parts, all)
}

pub(super) fn text(report: &Report, style: Style) -> String {
    let mut out = String::new();
    head(&mut out, report);
    ranks(&mut out, report, style);
    cache(&mut out, report);
    match report.settings.data_parallel_size {
        1 => users(&mut out, "users at once, with tokens each:", &report.users),
        replicas => {
            users(&mut out, "users of a replica at once, with tokens each:", &report.users);
            let of_all = format!("users of all {replicas} replicas at once:");
            users(&mut out, &of_all, &report.users_of_all_replicas);
        }
    }
    steps(&mut out, &report.steps);
    let _ = match (&report.shortfall, report.changes.split_first()) {
        (None, _) => writeln!(out, "\nit fits"),
        (Some(shortfall), None) => {
            let shortfall = wrapped(&format!("it does not fit: {}", shown_whole(shortfall)));
            writeln!(out, "\n{shortfall}\nno single change makes it fit")
        }
        (Some(shortfall), Some((smallest, others))) => {
            let _ = writeln!(out, "\n{}", wrapped(&format!("it does not fit: {}", shown_whole(shortfall))));
            let _ = writeln!(out, "the smallest change: {smallest}");
            others.iter().try_for_each(|other| writeln!(out, "                 or: {other}"))
        }
    };
    for note in &report.notes {
        let _ = writeln!(out, "note: {}", shown_whole(note));
    }
    out
}

fn head(out: &mut String, report: &Report) {
    let (model, settings) = (&report.model, &report.settings);
    let billions = |count: u64| match count {
        1_000_000_000.. => format!("{:.2} billion", count as f64 / 1e9),
        _ => format!("{:.2} million", count as f64 / 1e6),
    };
    let _ = write!(out, "{}: {} parameters", shown_whole(&model.name), billions(model.parameters));
    if model.experts > 0 {
        let active = billions(model.active_parameters);
        let _ = write!(
            out,
            ", {active} of them for a token ({} of {} experts)",
            model.experts_per_token, model.experts
        );
    }
    let stored = model.stored_bytes.map(|bytes| format!(" ({} on disk)", amount(bytes))).unwrap_or_default();
    let _ = writeln!(
        out,
        "\nweights in {}, {} in all{stored}; keys and values in {}; contexts of up to {} tokens",
        settings.dtype,
        amount(report.weight_bytes),
        settings.kv_cache_dtype,
        grouped(settings.max_model_len as u64)
    );
    if settings.data_parallel_size > 1 {
        let (replicas, ranks) = (settings.data_parallel_size, settings.tensor_parallel_size);
        let ranks = if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
        let _ = writeln!(out, "{replicas} replicas of {ranks} each; all that follows is of one of them");
    }
    out.push('\n');
}

fn ranks(out: &mut String, report: &Report, style: Style) {
    let has_columns = report.ranks.iter().any(|rank| rank.columns > 0);
    let has_experts = report.ranks.iter().any(|rank| rank.expert_columns > 0);
    let mut header = vec!["rank", "device", "heads", "KV heads"];
    header.extend(has_columns.then_some("columns"));
    header.extend(has_experts.then_some("expert columns"));
    header.extend(["vocabulary", "weights", "workspace", "KV", "reserves", "memory"]);
    let mut rows = vec![header.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for rank in &report.ranks {
        let mut row = vec![rank.rank.to_string(), shown_whole(&rank.device).to_string()];
        row.push(rank.query_heads.to_string());
        row.push(if rank.kv_heads > 0 { rank.kv_heads.to_string() } else { "latent".to_owned() });
        row.extend(has_columns.then(|| rank.columns.to_string()));
        row.extend(has_experts.then(|| rank.expert_columns.to_string()));
        row.push(rank.vocabulary_rows.to_string());
        row.extend([rank.weight_bytes, rank.workspace_bytes, rank.kv_bytes].map(amount));
        row.push(amount(rank.reserves.total_bytes));
        row.push(rank.memory_bytes.map_or_else(|| "unknown".to_owned(), amount));
        rows.push(row);
    }
    table(out, &rows, 2);
    let _ = writeln!(out);
    for rank in &report.ranks {
        let _ = writeln!(out, "rank {:<3} |{}|", rank.rank, bar(rank, style));
    }
    let legend: Vec<String> = report.ranks.first().map_or_else(Vec::new, |rank| {
        parts(rank)
            .0
            .iter()
            .filter(|part| part.letter != ' ')
            .map(|part| cells(part, 1, style) + " " + part.name)
            .collect()
    });
    let _ = writeln!(out, "          {}", legend.join("   "));
}

/// Parts in proportion: every part that is there has a cell, and all cells are used.
fn bar(rank: &Rank, style: Style) -> String {
    let (parts, all) = parts(rank);
    let mut counts: Vec<usize> = parts
        .iter()
        .map(|part| {
            let share = part.bytes as f64 / all.max(1) as f64 * BAR_CELLS as f64;
            if part.bytes > 0 && part.letter != ' ' {
                (share.round() as usize).max(1)
            } else {
                share.round() as usize
            }
        })
        .collect();
    // What rounding left over or took too much is the largest part's.
    let total: usize = counts.iter().sum();
    if let Some(largest) = counts.iter_mut().max() {
        *largest = (*largest + BAR_CELLS).saturating_sub(total);
    }
    parts.iter().zip(counts).map(|(part, count)| cells(part, count, style)).collect()
}

fn cells(part: &Part, count: usize, style: Style) -> String {
    match style {
        _ if count == 0 => String::new(),
        Style::Coloured if part.letter != ' ' => format!("\x1b[{}m{}\x1b[0m", part.ansi, "█".repeat(count)),
        _ => part.letter.to_string().repeat(count),
    }
}

fn cache(out: &mut String, report: &Report) {
    let (model, cache) = (&report.model, &report.cache);
    let kib = |bytes: u64| format!("{:.1} KiB", bytes as f64 / 1024.0);
    let _ = write!(out, "\nkeys and values: {} a token", kib(model.kv_bytes_per_token));
    if model.kv_bytes_of_windows > 0 {
        let _ = write!(
            out,
            "; where windows are freed, {} a token and {} a sequence",
            kib(model.kv_bytes_per_kept_token),
            amount(model.kv_bytes_of_windows)
        );
    }
    let _ = writeln!(
        out,
        "\n{} pages of {} tokens in {} {} ({} over all ranks); the longest sequence needs {}",
        grouped(cache.pages),
        report.settings.block_size,
        cache.layers_per_page,
        if cache.layers_per_page == 1 { "layer" } else { "layers" },
        amount(cache.page_bytes),
        grouped(cache.pages_needed)
    );
    if let Some(bytes) = report.settings.kv_offloading_bytes {
        let replicas = report.settings.data_parallel_size as u64;
        let in_all = match replicas {
            1 => String::new(),
            _ => format!(", {} for all replicas", amount(bytes.saturating_mul(replicas))),
        };
        let _ = writeln!(out, "{} of the host's memory for evicted pages{in_all}", amount(bytes));
    }
}

fn users(out: &mut String, title: &str, users: &[Users]) {
    type Count = fn(&Users) -> Option<u64>;
    let rows: [(&str, Count); 4] = [
        ("longest reserved", |users| users.reserved),
        ("paged", |users| users.paged),
        ("windows freed", |users| users.windows_freed),
        ("windows freed, KV in fp8", |users| users.windows_freed_fp8),
    ];
    let contexts = users.iter().map(|users| grouped(users.context as u64));
    let mut lines = vec![[title.to_owned()].into_iter().chain(contexts).collect::<Vec<_>>()];
    for (name, count) in rows {
        let counts = users.iter().map(|users| count(users).map_or_else(|| "-".to_owned(), grouped));
        lines.push([name.to_owned()].into_iter().chain(counts).collect());
    }
    out.push('\n');
    table(out, &lines, 1);
}

fn steps(out: &mut String, steps: &[Step]) {
    let Some(first) = steps.first() else { return };
    let _ = writeln!(
        out,
        "\nleast time of a decode step, {} tokens of context each:",
        grouped(first.context as u64)
    );
    let header = ["batch", "step", "tokens/s", "limit", "weights read", "experts", "KV read", "over links"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for step in steps {
        rows.push(vec![
            format!("{}{}", step.batch, if step.has_room { "" } else { "*" }),
            format!("{:.2} ms", step.seconds * 1e3),
            grouped(step.tokens_per_second.round() as u64),
            step.limit.to_owned(),
            amount(step.weight_bytes as u64),
            if step.experts_read > 0.0 { format!("{:.1}", step.experts_read) } else { "-".to_owned() },
            amount(step.kv_bytes as u64),
            amount(step.link_bytes as u64),
        ]);
    }
    table(out, &rows, 0);
    if steps.iter().any(|step| !step.has_room) {
        let _ = writeln!(out, "* more sequences than there is room for");
    }
}

/// Columns under each other: the first `left` begin on the left, numbers end on the right.
fn table(out: &mut String, rows: &[Vec<String>], left: usize) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|at| rows.iter().filter_map(|row| Some(row.get(at)?.width())).max().unwrap_or(0))
        .collect();
    for row in rows {
        let cell = |(at, text): (usize, &String)| {
            let gap = " ".repeat(widths[at].saturating_sub(text.width()));
            if at < left { format!("{text}{gap}") } else { format!("{gap}{text}") }
        };
        let line = row.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ");
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

/// Words on lines of bounded width.
fn wrapped(text: &str) -> String {
    const COLUMNS: usize = 100;
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        let width = word.width();
        if column > 0 && column + 1 + width > COLUMNS {
            out.push_str("\n  ");
            column = 2;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += width;
    }
    out
}

/// A number with commas between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
