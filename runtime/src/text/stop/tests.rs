use std::ops::Range;

use proptest::{prelude::*, string::string_regex};

use super::{StopMatcher, StopPush, StopStrings};

fn matcher_of<S: Into<String>>(stops: impl IntoIterator<Item = S>, include_stop: bool) -> StopMatcher {
    StopMatcher::new(StopStrings::new(stops).unwrap(), include_stop)
}

/// Emitted text and the stop string, for a text cut into these pieces.
fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<String>) {
    let mut matcher = matcher_of(stops.iter().copied(), include);
    let mut emitted = String::new();
    for piece in pieces {
        match matcher.push(piece) {
            StopPush::Emit(text) => emitted.push_str(&text),
            StopPush::Stopped { text, matched } => return (emitted + &text, Some(matched)),
        }
    }
    (emitted + &matcher.flush(), None)
}

/// The definition, in plain loops: the first end at which some stop string is complete, the longest of those.
fn naive(stops: &[&str], include: bool, text: &str) -> (String, Option<String>) {
    for end in 1..=text.len() {
        let complete = stops.iter().filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        if let Some(stop) = complete.max_by_key(|stop| stop.len()) {
            let cut = if include { end } else { end - stop.len() };
            return (text[..cut].to_owned(), Some((*stop).to_owned()));
        }
    }
    (text.to_owned(), None)
}

#[test]
fn only_what_may_become_a_stop_string_is_held_back() {
    let mut matcher = matcher_of(["\n\nUser:"], false);
    assert_eq!(matcher.push("Paris.\n"), StopPush::Emit("Paris.".to_owned()));
    assert_eq!(matcher.push("\nUs"), StopPush::Emit(String::new()));
    assert_eq!(matcher.push("ually"), StopPush::Emit("\n\nUsually".to_owned()));
    assert_eq!(matcher.flush(), "");
}

#[test]
fn a_match_across_pieces_keeps_the_text_before_it() {
    assert_eq!(run(&["STOP"], false, &["go ST", "O", "P on"]), ("go ".to_owned(), Some("STOP".to_owned())));
    assert_eq!(
        run(&["STOP"], true, &["go ST", "O", "P on"]),
        ("go STOP".to_owned(), Some("STOP".to_owned()))
    );
}

#[test]
fn a_match_may_begin_inside_a_failed_one() {
    assert_eq!(run(&["aab"], false, &["a", "a", "a", "b"]), ("a".to_owned(), Some("aab".to_owned())));
}

#[test]
fn the_first_complete_stop_string_wins_and_the_longest_of_those() {
    assert_eq!(run(&["bcd", "c"], false, &["abcd"]), ("ab".to_owned(), Some("c".to_owned())));
    assert_eq!(run(&["c", "bc", "abc"], false, &["xabc"]), ("x".to_owned(), Some("abc".to_owned())));
}

#[test]
fn text_that_only_looked_like_a_stop_string_comes_at_the_end() {
    assert_eq!(run(&["</s>"], false, &["a</", "s"]), ("a</s".to_owned(), None));
}

#[test]
fn after_a_match_nothing_more_is_emitted() {
    let mut matcher = matcher_of(["x"], false);
    assert!(matches!(matcher.push("ax"), StopPush::Stopped { .. }));
    assert_eq!(matcher.push("bx"), StopPush::Emit(String::new()));
    assert_eq!((matcher.pass("c"), matcher.flush()), (String::new(), String::new()));
}

#[test]
fn in_passed_text_a_match_may_begin_and_not_end() {
    let mut matcher = matcher_of(["ab"], false);
    assert_eq!(matcher.pass("xab"), "xab");
    assert_eq!(matcher.push("b"), StopPush::Emit("b".to_owned()), "the passed one is over");
    assert_eq!(matcher.pass("ab a"), "ab ");
    assert_eq!(matcher.push("b"), StopPush::Stopped { text: String::new(), matched: "ab".to_owned() });
    let mut overlapping = matcher_of(["aa"], true);
    assert_eq!(overlapping.pass("aaa"), "aa", "the last one may begin another");
    assert_eq!(overlapping.push("a"), StopPush::Stopped { text: "aa".to_owned(), matched: "aa".to_owned() });
    let mut ended = matcher_of(["abc"], false);
    assert_eq!((ended.pass("ab"), ended.flush(), ended.pass("c")), (String::new(), "ab".into(), "c".into()));
}

#[test]
fn without_stop_strings_text_passes_through() {
    assert_eq!(run(&[], false, &["a", "b"]), ("ab".to_owned(), None));
}

#[test]
fn an_empty_stop_string_is_refused() {
    assert!(StopStrings::new(["a", ""]).is_err());
}

#[test]
fn matchers_of_the_same_strings_share_them_and_not_their_progress() {
    let strings = StopStrings::new(["ab"]).unwrap();
    let [mut one, mut other] = [(); 2].map(|()| StopMatcher::new(strings.clone(), false));
    assert!(one.shares_tables_with(&other));
    assert!(!one.shares_tables_with(&matcher_of(["ab"], false)));
    assert_eq!(one.push("a"), StopPush::Emit(String::new()));
    assert_eq!(other.push("b"), StopPush::Emit("b".to_owned()));
    assert_eq!(one.push("b"), StopPush::Stopped { text: String::new(), matched: "ab".to_owned() });
}

/// Texts over few characters of one to four bytes, two of which share a first byte, so that matches are
/// likely.
fn texts(least: usize, count: Range<usize>) -> impl Strategy<Value = Vec<String>> {
    let text = string_regex(&format!("[abéè€😀]{{{least},4}}")).unwrap();
    prop::collection::vec(text, count)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn any_split_gives_what_the_definition_gives(
        pieces in texts(0, 0..8),
        stops in texts(1, 0..4),
        include: bool,
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        prop_assert_eq!(run(&stops, include, &pieces), naive(&stops, include, &pieces.concat()));
    }

    #[test]
    fn passed_text_gives_what_the_definition_gives_for_ends_behind_it(
        passed in texts(0, 0..5),
        pieces in texts(0, 0..5),
        stops in texts(1, 0..4),
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let (before, after) = (passed.concat(), pieces.concat());
        let all = format!("{before}{after}");
        let end = (before.len() + 1..=all.len()).find_map(|end| {
            let complete = stops.iter().filter(|stop| all.as_bytes()[..end].ends_with(stop.as_bytes()));
            complete.max_by_key(|stop| stop.len()).map(|stop| (end - stop.len(), (*stop).to_owned()))
        });
        let mut matcher = matcher_of(stops.iter().copied(), false);
        let mut emitted: String = passed.iter().map(|piece| matcher.pass(piece)).collect();
        let mut matched = None;
        for piece in &pieces {
            match matcher.push(piece) {
                StopPush::Emit(text) => emitted.push_str(&text),
                StopPush::Stopped { text, matched: stop } => {
                    emitted.push_str(&text);
                    matched = Some(stop);
                    break;
                }
            }
        }
        emitted.push_str(&matcher.flush());
        let expected = end.map_or((all.clone(), None), |(start, stop)| (all[..start].to_owned(), Some(stop)));
        prop_assert_eq!((emitted, matched), expected);
    }

    #[test]
    fn what_is_held_back_begins_some_stop_string(
        pieces in texts(0, 0..8),
        stops in texts(1, 1..4),
    ) {
        let mut matcher = matcher_of(stops.clone(), false);
        for piece in &pieces {
            if matches!(matcher.push(piece), StopPush::Stopped { .. }) {
                return Ok(());
            }
            let held = &matcher.held;
            prop_assert!(stops.iter().any(|stop| stop.starts_with(held.as_str()) && stop != held));
        }
    }
}
