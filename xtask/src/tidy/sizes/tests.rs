use super::*;

fn of_lines(path: &str, lines: usize) -> Source {
    Source::new(path.to_owned(), "fn f() {}\n".repeat(lines))
}

#[test]
fn a_file_may_have_600_lines_and_is_warned_about_from_501() {
    let sources = [500, 501, 600, 601].map(|lines| of_lines(&format!("a/src/f{lines}.rs"), lines));
    let found = check(&sources, 110);
    assert_eq!(found.warnings.len(), 2, "{found:?}");
    assert_eq!(found.errors.len(), 1, "{found:?}");
    assert!(found.errors[0].starts_with("a/src/f601.rs has 601 lines"), "{found:?}");
}

#[test]
fn tests_may_be_long() {
    let mut text = "fn f() {}\n".repeat(400) + "#[cfg(test)]\nmod tests {\n";
    text += &"fn g() {}\n".repeat(400);
    let sources = [of_lines("a/src/tests.rs", 2_000), Source::new("a/src/b.rs".to_owned(), text)];
    assert_eq!(check(&sources, 110), Findings::default());
}

#[test]
fn a_wide_comment_is_refused_by_characters_not_bytes() {
    let (fits, wide, long) = ("é".repeat(107), "é".repeat(108), "x".repeat(200));
    let text = format!("// {fits}\n// {wide}\n// https://{long}\nf(r\"{long}\");\n");
    let found = check(&[Source::new("a/src/b.rs".to_owned(), text)], 110);
    assert_eq!(found.errors, ["a/src/b.rs:2 is 111 characters wide, at most 110 are allowed"]);
}
