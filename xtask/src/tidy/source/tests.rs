use super::*;

fn source(text: &str) -> Source {
    Source::new("kernels/src/x.rs".to_owned(), text.to_owned())
}

#[test]
fn words_in_comments_and_literals_are_not_code() {
    for text in [
        "// unsafe\nfn f() {}",
        "/* a /* nested unsafe */ unsafe */ fn f() {}",
        "const S: &str = \"unsafe \\\" unsafe\";",
        "const S: &str = r#\"unsafe \" unsafe\"#;",
        "const S: &[u8] = br\"unsafe\";",
        "let c = '\"'; let s = \"unsafe\"; let d = '\\'';",
        "#![allow(unsafe_code)]",
    ] {
        assert_eq!(source(text).line_of_word("unsafe"), None, "{text}");
    }
}

#[test]
fn words_in_code_are_found_on_their_line() {
    let text = "fn f<'a>(x: &'a str) {\n    let quote = '\"';\n    /* é */ unsafe { g(x) }\n}\n";
    assert_eq!(source(text).line_of_word("unsafe"), Some(3));
    assert_eq!(source("let bar = \"x\"; unsafe {}").line_of_word("unsafe"), Some(1));
}

#[test]
fn blanking_keeps_every_line_in_its_place() {
    let text = "a\n/* b\nc */ d\n\"e\nf\" g\n";
    let found = source(text);
    assert_eq!(found.code.lines().count(), text.lines().count());
    assert_eq!(found.line_of_word("d"), Some(3));
    assert_eq!(found.line_of_word("g"), Some(5));
}

#[test]
fn unfinished_text_ends_without_a_panic() {
    for text in ["\"abc", "/* abc", "r##\"abc\"#", "'", "'\\", "'\\x", "b'", "\"\\", "/*/"] {
        assert_eq!(source(text).code.chars().count(), text.chars().count(), "{text}");
    }
}

#[test]
fn a_trailing_test_module_does_not_count() {
    let text = "fn f() {}\n\n#[cfg(test)]\nmod tests {\n    #[test]\n    fn g() {}\n}\n";
    assert_eq!(source(text).lines_without_tests(), 2);
    assert_eq!(source("fn f() {}\n#[cfg(test)]\nmod tests;\nfn g() {}\n").lines_without_tests(), 4);
}

#[test]
fn test_files_are_known_by_their_place() {
    let is_test = |path: &str| Source::new(path.to_owned(), String::new()).is_test();
    assert!(is_test("parallel/src/kv/tests.rs"));
    assert!(is_test("cluster-tests/tests/faults.rs"));
    assert!(!is_test("cluster-tests/src/lib.rs"));
}
