use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    process,
    sync::Arc,
};

use consort_parallel::checkpoint::{Checkpoint, CheckpointError, Encoding};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{ConvertError, ConvertOptions, Converted, DType, convert, text_of_gguf};
use crate::{
    testing,
    text::{ChatInput, ChatTemplate, Tokenizer},
};

/// A folder with the tiny checkpoint in `model`.
fn parent() -> (TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let model = parent.path().join("model");
    fs::create_dir(&model).unwrap();
    testing::write_checkpoint(&model);
    (parent, model)
}

fn run(input: &Path, output: &Path, options: &ConvertOptions) -> Result<Converted, ConvertError> {
    convert(input, output, options, &mut |_, _| ControlFlow::Continue(()))
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_float32_folder_becomes_bfloat16_with_the_same_tokenizer_and_template() {
    let (parent, model) = parent();
    let output = parent.path().join("some/where/out");
    let converted = run(&model, &output, &ConvertOptions::default()).unwrap();
    assert_eq!(converted.folder, fs::canonicalize(&output).unwrap());
    let files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names(&output), files);
    assert_eq!(names(&parent.path().join("some/where")), ["out"], "nothing stays beside it");
    for text in ["tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(fs::read(output.join(text)).unwrap(), fs::read(model.join(text)).unwrap());
    }
    let (from, to) = (Checkpoint::open(&model).unwrap(), Checkpoint::open(&output).unwrap());
    assert_eq!(from.config(), to.config());
    assert_eq!(2 * to.stored_bytes(), from.stored_bytes());
    assert_eq!(to.tensor("model.embed_tokens.weight").unwrap().encoding, Encoding::Bf16);
}

#[test]
fn what_stands_at_the_output_is_replaced_only_when_asked_and_only_if_it_is_a_model() {
    let (parent, model) = parent();
    let at = |name: &str| parent.path().join(name);
    let overwrite = ConvertOptions { overwrite: true, ..ConvertOptions::default() };

    fs::create_dir(at("empty")).unwrap();
    run(&model, &at("empty"), &ConvertOptions::default()).unwrap();

    let old = fs::read(at("empty").join("model.safetensors")).unwrap();
    let error = run(&model, &at("empty"), &ConvertOptions::default()).unwrap_err();
    assert!(
        matches!(error, ConvertError::Exists { .. }) && error.to_string().contains("--overwrite"),
        "{error}"
    );
    assert_eq!(fs::read(at("empty").join("model.safetensors")).unwrap(), old);

    fs::write(at("empty").join("stale"), "x").unwrap();
    run(&model, &at("empty"), &ConvertOptions { dtype: DType::F32, ..overwrite.clone() }).unwrap();
    assert!(!at("empty").join("stale").exists());
    let (from, to) = (Checkpoint::open(&model).unwrap(), Checkpoint::open(&at("empty")).unwrap());
    assert_eq!(from.stored_bytes(), to.stored_bytes(), "the new one is there");

    fs::create_dir(at("home")).unwrap();
    fs::write(at("home").join("letters"), "mine").unwrap();
    fs::write(at("file"), "mine").unwrap();
    for kept in ["home", "file"] {
        let error = run(&model, &at(kept), &overwrite).unwrap_err();
        assert!(matches!(error, ConvertError::NotReplaceable { .. }), "{error}");
    }
    for input in [model.clone(), model.join("model.safetensors")] {
        let error = run(&input, &model, &overwrite).unwrap_err();
        assert!(matches!(error, ConvertError::InputInOutput { .. }), "{error}");
    }
    assert_eq!(names(parent.path()), ["empty", "file", "home", "model"]);
}

#[cfg(unix)]
#[test]
fn a_link_is_followed_to_the_folder_behind_it() {
    let (parent, model) = parent();
    let (real, link) = (parent.path().join("real"), parent.path().join("link"));
    fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    assert_eq!(
        run(&model, &link, &ConvertOptions::default()).unwrap().folder,
        fs::canonicalize(&real).unwrap()
    );
    assert!(link.is_symlink() && real.join("config.json").exists());
}

#[test]
fn an_end_before_the_end_leaves_nothing_and_keeps_what_was_there() {
    let (parent, model) = parent();
    let output = parent.path().join("out");
    run(&model, &output, &ConvertOptions::default()).unwrap();
    let before = fs::read(output.join("model.safetensors")).unwrap();
    let options = ConvertOptions { overwrite: true, dtype: DType::F32, ..ConvertOptions::default() };
    let mut seen = Vec::new();
    let mut progress = |_, _| {
        seen = names(parent.path());
        ControlFlow::Break(())
    };
    let error = convert(&model, &output, &options, &mut progress).unwrap_err();
    assert!(error.is_interrupted(), "{error}");
    assert_eq!(seen, ["model".to_owned(), "out".to_owned(), format!("out.partial-{}", process::id())]);
    assert_eq!(names(parent.path()), ["model", "out"]);
    assert_eq!(fs::read(output.join("model.safetensors")).unwrap(), before);
}

#[test]
fn what_cannot_be_read_or_made_is_named_and_leaves_nothing() {
    let (parent, model) = parent();
    let output = parent.path().join("out");
    let error = run(&parent.path().join("absent.gguf"), &output, &ConvertOptions::default()).unwrap_err();
    assert!(error.to_string().contains("absent.gguf"), "{error}");
    fs::write(parent.path().join("text.txt"), "hello").unwrap();
    let error = run(&parent.path().join("text.txt"), &output, &ConvertOptions::default()).unwrap_err();
    let ConvertError::Open { source: CheckpointError::NotACheckpoint { .. }, .. } = error else {
        panic!("{error}")
    };
    let error = run(&model, &parent.path().join("text.txt/out"), &ConvertOptions::default()).unwrap_err();
    assert!(error.to_string().contains("text.txt"), "{error}");
    let error = run(&model, Path::new("/"), &ConvertOptions::default()).unwrap_err();
    assert!(matches!(error, ConvertError::NoName { .. }), "{error}");
    assert_eq!(names(parent.path()), ["model", "text.txt"]);
}

#[test]
fn a_gguf_file_without_a_tokenizer_that_can_be_rebuilt_is_refused_before_anything_is_made() {
    let parent = tempfile::tempdir().unwrap();
    let twin = Path::new(env!("CARGO_MANIFEST_DIR")).join("../parallel/fixtures/twin.gguf");
    let error = run(&twin, &parent.path().join("out"), &ConvertOptions::default()).unwrap_err();
    assert!(matches!(error, ConvertError::Tokenizer(_)), "{error}");
    assert!(names(parent.path()).is_empty());
}

#[test]
fn smollm2s_text_files_give_the_ids_and_prompts_of_its_gguf_file() {
    let Some(path) = crate::text::testing::smollm2() else { return };
    let checkpoint = Checkpoint::open(&path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (name, contents) in text_of_gguf(&checkpoint, checkpoint.gguf().unwrap()).unwrap() {
        fs::write(folder.path().join(name), contents).unwrap();
    }
    assert_eq!(names(folder.path()), ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]);
    let settings: Value =
        serde_json::from_slice(&fs::read(folder.path().join("tokenizer_config.json")).unwrap()).unwrap();
    let expected = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>", "model_max_length": 8192,
        "clean_up_tokenization_spaces": false,
    });
    assert_eq!(settings, expected);

    let original = Arc::new(Tokenizer::from_checkpoint(&checkpoint).unwrap());
    let written = Arc::new(Tokenizer::from_folder(folder.path()).unwrap());
    let expected = crate::text::testing::smollm2_readings().ids;
    for (text, ids) in crate::text::testing::corpus().iter().zip(expected) {
        assert_eq!(written.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(written.decode(&ids, true), original.decode(&ids, true), "{text:?}");
    }
    assert_eq!(written.vocab_size(), original.vocab_size());
    assert!((0..written.vocab_size() as u32).all(|id| written.is_special(id) == original.is_special(id)));

    let template = fs::read_to_string(folder.path().join("chat_template.jinja")).unwrap();
    let messages = [json!({"role": "user", "content": " é 123\n"})];
    let input = ChatInput { messages: &messages, add_generation_prompt: true, ..ChatInput::default() };
    let of_file = ChatTemplate::from_source(&template, written.bos_token(), written.eos_token()).unwrap();
    let of_gguf = ChatTemplate::from_checkpoint(&checkpoint, &original).unwrap();
    assert_eq!(of_file.render(&input).unwrap(), of_gguf.render(&input).unwrap());
}
