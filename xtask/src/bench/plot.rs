//! The table as bars: within a line, lengths are shares of its longest.

use svg::{
    Document,
    node::element::{Rectangle, Text},
};

use super::report::{Report, median, rounded};

const COLOURS: [&str; 4] = ["#1d6fb8", "#b0b7bf", "#c9a66b", "#7fae8d"];
const WIDTH: f64 = 820.0;
const BAR: f64 = 14.0;
const BARS_AT: f64 = 120.0;
const BARS: f64 = 560.0;

/// A picture of the medians.
pub(super) fn svg(report: &Report) -> String {
    let rows = report.rows();
    let group = 34.0 + (BAR + 3.0) * report.engines.len() as f64;
    let height = 40.0 + group * rows.len() as f64;
    let mut document = Document::new()
        .set("viewBox", (0.0, 0.0, WIDTH, height))
        .set("font-family", "sans-serif")
        .set("font-size", 12)
        .add(Rectangle::new().set("width", WIDTH).set("height", height).set("fill", "#ffffff"))
        .add(label(
            &format!("{}, {} threads of {}", report.model, report.threads, report.cpu),
            10.0,
            20.0,
            true,
        ));
    for (at, row) in rows.iter().enumerate() {
        let top = 40.0 + at as f64 * group;
        let better = if row.more_is_better { "more is better" } else { "less is better" };
        let ratio = row.ratio().map_or(String::new(), |ratio| format!(": {ratio:.2} x the best peer"));
        document = document.add(label(
            &format!("{}, {} ({better}){ratio}", row.name, row.unit),
            10.0,
            top + 12.0,
            true,
        ));
        let medians: Vec<Option<f64>> = row.numbers.iter().map(|numbers| median(numbers)).collect();
        let longest = medians.iter().flatten().fold(f64::MIN_POSITIVE, |a, b| a.max(*b));
        for (engine, number) in medians.into_iter().enumerate() {
            let y = top + 20.0 + (BAR + 3.0) * engine as f64;
            document = document.add(label(report.engines[engine].1.name, 10.0, y + 11.0, false));
            let (length, shown) = match number {
                Some(number) => (BARS * number / longest, rounded(number)),
                None => (0.0, "-".to_owned()),
            };
            let bar = Rectangle::new().set("x", BARS_AT).set("y", y).set("width", length).set("height", BAR);
            document = document.add(bar.set("fill", COLOURS[engine % COLOURS.len()])).add(label(
                &shown,
                BARS_AT + length + 6.0,
                y + 11.0,
                false,
            ));
        }
    }
    document.to_string() + "\n"
}

fn label(text: &str, x: f64, y: f64, is_title: bool) -> Text {
    let weight = if is_title { "bold" } else { "normal" };
    Text::new(text).set("x", x).set("y", y).set("font-weight", weight)
}

#[cfg(test)]
mod tests {
    use super::{super::report::tests::report, *};

    #[test]
    fn every_engine_has_a_bar_in_every_line_as_long_as_its_share() {
        let text = svg(&report());
        assert_eq!(text.matches("<rect").count(), 1 + 4 * 3);
        // 45 of 90, and nothing of who failed.
        assert!(
            text.contains("width=\"560\"") && text.contains("width=\"280\"") && text.contains("width=\"0\"")
        );
        assert!(text.contains("decode, 32+128, tokens/s (more is better): 2.00 x the best peer"), "{text}");
    }
}
