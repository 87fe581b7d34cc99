//! A report as a drawing: each rank's memory as a bar.

use std::fmt::Write;

use consort_parallel::plan::amount;

use super::{report::Report, text::parts};

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 24.0;
/// Where bars begin and end: names stand before them, sizes behind.
const BAR_FROM: f64 = 190.0;
const BAR_TO: f64 = 850.0;
const BAR_HEIGHT: f64 = 28.0;
const LINE: f64 = 44.0;
const HEAD: f64 = 96.0;
const FOOT: f64 = 24.0;
/// Ranks that are drawn; more would be no picture.
const RANKS_MAX: usize = 64;

pub(super) fn svg(report: &Report) -> String {
    let ranks = &report.ranks[..report.ranks.len().min(RANKS_MAX)];
    let height = HEAD + LINE * ranks.len() as f64 + FOOT;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"system-ui, sans-serif\" font-size=\"14\" fill=\"#222222\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    let fits = if report.fits { "fits" } else { "does not fit" };
    let title = format!(
        "{} in {}: {} of weights over {} {}{}, {fits}",
        report.model.name,
        report.settings.dtype,
        amount(report.weight_bytes),
        report.ranks.len(),
        if report.ranks.len() == 1 { "rank" } else { "ranks" },
        match report.settings.data_parallel_size {
            1 => String::new(),
            replicas => format!(" in each of {replicas} replicas"),
        }
    );
    let _ = writeln!(
        out,
        "<text x=\"{MARGIN}\" y=\"36\" font-size=\"18\" font-weight=\"600\">{}</text>",
        escaped(&title)
    );
    legend(&mut out, report);
    // One scale for all bars.
    let most = ranks.iter().map(|rank| parts(rank).1).max().unwrap_or(1).max(1) as f64;
    for (line, rank) in ranks.iter().enumerate() {
        let top = HEAD + LINE * line as f64;
        let middle = top + BAR_HEIGHT / 2.0 + 5.0;
        let name = format!("rank {}, {}", rank.rank, rank.device);
        let (parts, all) = parts(rank);
        let _ = writeln!(out, "<text x=\"{MARGIN}\" y=\"{middle}\">{}</text>", escaped(&shortened(&name)));
        let mut from = BAR_FROM;
        for part in &parts {
            let width = part.bytes as f64 / most * (BAR_TO - BAR_FROM);
            if width > 0.0 {
                let _ = writeln!(
                    out,
                    "<rect x=\"{from:.2}\" y=\"{top}\" width=\"{width:.2}\" height=\"{BAR_HEIGHT}\" \
                     fill=\"{}\"><title>{}: {}</title></rect>",
                    part.css,
                    part.name,
                    amount(part.bytes)
                );
                label(&mut out, part.name, &amount(part.bytes), from + width / 2.0, middle, width);
            }
            from += width;
        }
        // Beyond the memory there is nothing: what stands there does not fit.
        if let Some(memory) = rank.memory_bytes.filter(|memory| *memory < all) {
            let at = BAR_FROM + memory as f64 / most * (BAR_TO - BAR_FROM);
            let bottom = top + BAR_HEIGHT + 5.0;
            let _ = writeln!(
                out,
                "<line x1=\"{at:.2}\" y1=\"{}\" x2=\"{at:.2}\" y2=\"{bottom}\" stroke=\"#c0392b\" \
                 stroke-width=\"3\"/>",
                top - 5.0
            );
        }
        let size = rank.memory_bytes.map_or_else(|| "unknown".to_owned(), amount);
        let _ =
            writeln!(out, "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\">{size}</text>", WIDTH - MARGIN);
    }
    out.push_str("</svg>\n");
    out
}

/// The size of a part within it, where there is room.
fn label(out: &mut String, name: &str, text: &str, middle: f64, y: f64, width: f64) {
    const LETTER: f64 = 8.0;
    if name != "free" && width > text.len() as f64 * LETTER {
        let _ = writeln!(
            out,
            "<text x=\"{middle:.2}\" y=\"{y}\" text-anchor=\"middle\" font-size=\"13\" fill=\"#ffffff\">{text}</text>"
        );
    }
}

fn legend(out: &mut String, report: &Report) {
    let Some(rank) = report.ranks.first() else { return };
    let mut x = MARGIN;
    for part in parts(rank).0 {
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"58\" width=\"14\" height=\"14\" fill=\"{}\"/><text x=\"{}\" y=\"70\">{}</text>",
            part.css,
            x + 20.0,
            part.name
        );
        x += 48.0 + 8.0 * part.name.len() as f64;
    }
}

fn shortened(name: &str) -> String {
    const LETTERS_MAX: usize = 22;
    match name.char_indices().nth(LETTERS_MAX) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}

/// As text in XML, without what no XML may have.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars().filter(|c| !c.is_control()) {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}
