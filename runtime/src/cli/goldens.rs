//! Mistakes in topologies, variables and flags, each held against the whole text that `consort serve` answers it with.
//!
//! `fixtures/topologies/bad/NAME.toml` is a mistake, `NAME.txt` the answer. Lines at the top of a case may say
//! `#! args --flag value`, `#! env NAME=VALUE`, and `#! source PATH` to serve something else than the case itself.
//! Mistakes that no text file can hold are in [`SPECIAL`]. `CONSORT_BLESS=1` rewrites the answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use clap::Parser;

use super::{
    args::{Cli, Command, ServeArgs},
    report,
};
use crate::{testing, topology::Environment};

/// Makes what a path of the case's name leads to.
type Make = fn(&Path);

const SPECIAL: [(&str, Make); 6] = [
    ("file_absent", |_| {}),
    ("file_is_a_folder", |path| fs::create_dir(path).expect("a new folder")),
    ("file_is_binary", |path| write(path, &[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 10, 1, 2, 3])),
    ("file_is_a_gguf_model", |path| write(path, b"GGUF\x03\0\0\0\xff\xfe")),
    ("file_is_latin_1", |path| write(path, b"[model]\n# caf\xe9\npath = \"tiny\"\n")),
    ("file_is_too_large", |path| {
        fs::File::create(path).and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
    }),
];

fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).expect("the test folder is writable");
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/topologies/bad")
}

/// Serves a case as far as its configuration, and returns what people see.
fn answer(place: &Path, name: &str) -> String {
    let path = place.join(format!("{name}.toml"));
    let text = fs::read(&path).ok().filter(|bytes| bytes.len() < 1 << 20).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let said = |what: &str| -> Vec<String> {
        let prefix = format!("#! {what} ");
        text.lines().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
    };
    let source = said("source").first().map_or_else(|| path.clone(), |source| place.join(source));
    let flags: Vec<String> =
        said("args").iter().flat_map(|line| line.split(' ')).map(str::to_owned).collect();
    let environment: Environment = said("env")
        .iter()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let words = ["consort".into(), "serve".into(), source.into_os_string()];
    let cli = match Cli::try_parse_from(words.into_iter().chain(flags.into_iter().map(Into::into))) {
        Ok(cli) => cli,
        Err(error) => return error.to_string(),
    };
    let Command::Serve(ServeArgs { source, model, server, .. }) = cli.command else { panic!("not serve") };
    let outcome = model.builder(source, server).environment(environment).effective_config();
    let answer = match outcome {
        Ok(config) => format!("accepted:\n{config}"),
        Err(error) => report::chain(&error.into()) + "\n",
    };
    answer.replace(&format!("{}/", place.display()), "")
}

#[test]
fn every_mistake_is_answered_word_for_word() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let tiny = place.path().join("tiny");
    fs::create_dir(&tiny).expect("a new folder");
    testing::write_checkpoint(&tiny);
    let mut expected = BTreeMap::new();
    let mut names: BTreeSet<String> = SPECIAL.iter().map(|(name, _)| (*name).to_owned()).collect();
    for (name, make) in SPECIAL {
        make(&place.path().join(format!("{name}.toml")));
    }
    for entry in fs::read_dir(folder()).expect("the fixtures are there") {
        let path = entry.expect("a readable folder").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("UTF-8").to_owned();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => {
                fs::copy(&path, place.path().join(format!("{name}.toml"))).expect("a copy");
                assert!(names.insert(name), "{} hides a case of the same name", path.display());
            }
            Some("txt") => drop(expected.insert(name, fs::read_to_string(&path).expect("text"))),
            _ => panic!("{} is neither a case nor an answer", path.display()),
        }
    }
    let answers: BTreeMap<&String, String> =
        names.iter().map(|name| (name, answer(place.path(), name))).collect();
    if std::env::var("CONSORT_BLESS").is_ok_and(|value| value == "1") {
        for (name, answer) in &answers {
            write(&folder().join(format!("{name}.txt")), answer.as_bytes());
        }
        return;
    }
    let differing: Vec<String> = answers
        .iter()
        .filter(|(name, answer)| expected.get(**name) != Some(*answer))
        .map(|(name, answer)| {
            let expected = expected.get(*name).map_or("", String::as_str);
            format!("{name}:\n{}", difference(expected, answer))
        })
        .collect();
    assert!(
        differing.is_empty(),
        "{}\nrun with CONSORT_BLESS=1 to accept these answers, and read what changed",
        differing.join("\n")
    );
    let orphans: Vec<&String> = expected.keys().filter(|name| !names.contains(*name)).collect();
    assert!(orphans.is_empty(), "answers without a case: {orphans:?}");
    assert!(names.len() >= 60, "{} cases", names.len());
}

/// Lines that only one side has, with their side.
fn difference(expected: &str, answer: &str) -> String {
    let same = expected.lines().zip(answer.lines()).take_while(|(left, right)| left == right).count();
    let side = |sign: char, text: &str| -> String {
        text.lines().skip(same).map(|line| format!("{sign} {line}\n")).collect()
    };
    format!("  ({same} lines agree)\n{}{}", side('-', expected), side('+', answer))
}

#[test]
fn no_answer_shows_a_key_or_a_control_character() {
    for entry in fs::read_dir(folder()).expect("the fixtures are there") {
        let path = entry.expect("a readable folder").path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            let text = fs::read_to_string(&path).expect("text");
            for secret in ["sk-secret", "8675309123", "f3a9c0ffee", "hf_secret", "AKIASECRET"] {
                assert!(!text.contains(secret), "{}", path.display());
            }
            let control = text.chars().find(|c| c.is_control() && !matches!(c, '\n' | '\t'));
            assert_eq!(control, None, "{}", path.display());
        }
    }
}
