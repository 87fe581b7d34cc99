//! Whole tokenizers of other families, which are too large to be committed.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;
use serde_json::Value;

use crate::text::{
    Tokenizer,
    testing::{Readings, VocabularyFixture, assert_reads, assert_streams},
    tokenizer::{gguf, testing::plain},
};

/// Where `fixtures/tokenizer/check_families.py` has put them.
const FOLDER: &str = "CONSORT_TOKENIZER_FAMILIES";

#[derive(Deserialize)]
struct Family {
    /// The name that llama.cpp gives to its rules, if Consort knows it.
    pre: Option<String>,
    readings: Readings,
}

#[test]
#[ignore = "needs real tokenizers: runtime/fixtures/tokenizer/check_families.py fetches them and runs this test"]
fn real_tokenizers_read_the_corpus_as_in_python() {
    let root = env::var(FOLDER).unwrap_or_else(|_| panic!("{FOLDER} must name the folder of the tokenizers"));
    let mut folders: Vec<PathBuf> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|folder| folder.join("readings.json").exists());
    folders.sort();
    assert!(!folders.is_empty(), "{FOLDER} holds no tokenizers");
    for folder in folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let family: Family = read(&folder.join("readings.json"));
        let tokenizer = Arc::new(Tokenizer::from_folder(&folder).unwrap());
        check(&tokenizer, &family.readings, &name);
        eprintln!("{name}: {} texts agree from tokenizer.json", family.readings.ids.len());
        if let Some(pre) = &family.pre {
            let rebuilt = Arc::new(as_from_gguf(&read(&folder.join("tokenizer.json")), pre));
            check(&rebuilt, &family.readings, &format!("{name} as `{pre}`"));
            eprintln!("{name}: {} texts agree from metadata as `{pre}`", family.readings.ids.len());
        }
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    serde_json::from_slice(&fs::read(path).unwrap())
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn check(tokenizer: &Arc<Tokenizer>, expected: &Readings, name: &str) {
    assert_reads(tokenizer, expected, name);
    for ids in &expected.ids {
        assert_streams(tokenizer, ids, false, name);
        assert_streams(tokenizer, ids, true, name);
    }
}

/// What a GGUF file made from this tokenizer.json would say, built.
fn as_from_gguf(json: &Value, pre: &str) -> Tokenizer {
    let mut tokens: Vec<(u64, &str, i32)> = Vec::new();
    for (token, id) in json["model"]["vocab"].as_object().unwrap() {
        tokens.push((id.as_u64().unwrap(), token, 1));
    }
    for added in json["added_tokens"].as_array().unwrap() {
        let kind = if added["special"].as_bool().unwrap() { 3 } else { 4 };
        tokens.push((added["id"].as_u64().unwrap(), added["content"].as_str().unwrap(), kind));
    }
    tokens.sort_unstable();
    assert!(tokens.iter().enumerate().all(|(at, token)| token.0 == at as u64), "ids have gaps");
    // Written as pairs, or as one string with a space between.
    let merge = |merge: &Value| match merge.as_array() {
        Some(pair) => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
        None => merge.as_str().unwrap().to_owned(),
    };
    let fixture = VocabularyFixture {
        tokens: tokens.iter().map(|token| token.1.to_owned()).collect(),
        merges: json["model"]["merges"].as_array().unwrap().iter().map(merge).collect(),
    };
    let types: Vec<i32> = tokens.iter().map(|token| token.2).collect();
    let vocabulary = gguf::Vocabulary { bos: None, eos: None, ..plain(&fixture, &types, pre) };
    vocabulary.build(Path::new("test.gguf")).unwrap()
}
