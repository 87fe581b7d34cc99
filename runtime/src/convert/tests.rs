use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};

use consort_parallel::checkpoint::{Checkpoint, CheckpointError, Encoding};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{ConvertError, ConvertOptions, Converted, DType, convert, named_templates, text_of_gguf};
use crate::{
    testing,
    text::{
        ChatInput, ChatTemplate, Tokenizer,
        testing::{assert_reads, smollm2, smollm2_readings},
    },
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

    fs::write(at("empty").join("model-00007-of-00009.safetensors"), "x").unwrap();
    run(&model, &at("empty"), &ConvertOptions { dtype: DType::F32, ..overwrite.clone() }).unwrap();
    assert!(!at("empty").join("model-00007-of-00009.safetensors").exists());
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

#[test]
fn only_what_is_a_model_through_and_through_is_taken_for_one() {
    let (parent, model) = parent();
    let out = parent.path().join("out");
    let overwrite = ConvertOptions { overwrite: true, ..ConvertOptions::default() };
    let weights = "model.safetensors";
    type Damage = fn(&Path);
    let cases: [(&str, Damage); 6] = [
        ("neither architectures nor model_type", |out| {
            fs::write(out.join("config.json"), "{\"auths\": {}}").unwrap()
        }),
        ("neither architectures nor model_type", |out| fs::write(out.join("config.json"), "hello").unwrap()),
        ("neither model.safetensors nor its index", |out| {
            fs::rename(out.join("model.safetensors"), out.join("model.bin")).unwrap();
        }),
        ("\"optimizer.pt\", which no conversion writes", |out| {
            fs::write(out.join("optimizer.pt"), "weeks of work").unwrap();
        }),
        ("folders of its own", |out| fs::create_dir(out.join(".git")).unwrap()),
        ("no config.json", |out| fs::remove_file(out.join("config.json")).unwrap()),
    ];
    for (problem, damage) in cases {
        let _ = fs::remove_dir_all(&out);
        run(&model, &out, &ConvertOptions::default()).unwrap();
        damage(&out);
        let before = names(&out);
        let error = run(&model, &out, &overwrite).unwrap_err();
        assert!(matches!(error, ConvertError::NotReplaceable { .. }), "{error}");
        assert!(error.to_string().contains(problem), "{error}");
        assert_eq!(names(&out), before);
    }
    fs::remove_dir_all(&out).unwrap();
    run(&model, &out, &ConvertOptions { max_shard_bytes: 1, ..ConvertOptions::default() }).unwrap();
    assert!(!out.join(weights).exists(), "several files under an index");
    run(&model, &out, &overwrite).unwrap();
    assert!(out.join(weights).exists());
    assert_eq!(names(parent.path()), ["model", "out"]);
}

#[test]
fn a_model_that_appears_meanwhile_is_not_replaced_unless_asked() {
    let (parent, model) = parent();
    let out = parent.path().join("out");
    let faster = |_, _| {
        if !out.exists() {
            run(&model, &out, &ConvertOptions { dtype: DType::F32, ..ConvertOptions::default() }).unwrap();
        }
        ControlFlow::Continue(())
    };
    let error = convert(&model, &out, &ConvertOptions::default(), &mut { faster }).unwrap_err();
    let ConvertError::Kept { folder, source, .. } = error else { panic!("{error}") };
    assert!(matches!(*source, ConvertError::Exists { .. }), "{source}");
    let done = Checkpoint::open(&folder).unwrap().tensor("model.norm.weight").unwrap().encoding;
    assert_eq!(done, Encoding::Bf16, "the work is not lost");
    assert_eq!(names(parent.path()), ["model", "out", "out.partial-1"]);
    fs::remove_dir_all(parent.path().join("out.partial-1")).unwrap();
    let kept = Checkpoint::open(&out).unwrap().tensor("model.norm.weight").unwrap().encoding;
    assert_eq!(kept, Encoding::F32);

    fs::remove_dir_all(&out).unwrap();
    let overwrite = ConvertOptions { overwrite: true, ..ConvertOptions::default() };
    convert(&model, &out, &overwrite, &mut { faster }).unwrap();
    let replaced = Checkpoint::open(&out).unwrap().tensor("model.norm.weight").unwrap().encoding;
    assert_eq!(replaced, Encoding::Bf16);
    assert_eq!(names(parent.path()), ["model", "out"]);
}

#[test]
fn what_killed_conversions_left_is_in_nobodys_way() {
    let (parent, model) = parent();
    let out = parent.path().join("out");
    let left: Vec<String> = ["1", "2"].into_iter().map(|number| format!("out.partial-{number}")).collect();
    for name in &left {
        fs::create_dir_all(parent.path().join(name).join("old")).unwrap();
    }
    let overwrite = ConvertOptions { overwrite: true, ..ConvertOptions::default() };
    for options in [ConvertOptions::default(), overwrite] {
        run(&model, &out, &options).unwrap();
        assert_eq!(names(parent.path()), ["model", "out", "out.partial-1", "out.partial-2"]);
    }
    assert!(left.iter().all(|name| parent.path().join(name).join("old").exists()), "they are not its own");
}

#[cfg(target_os = "linux")]
#[test]
fn a_mount_point_is_refused_before_the_work() {
    let (_parent, model) = parent();
    let overwrite = ConvertOptions { overwrite: true, ..ConvertOptions::default() };
    let error = run(&model, Path::new("/proc"), &overwrite).unwrap_err();
    assert!(matches!(error, ConvertError::MountPoint { .. }), "{error}");
    assert!(error.to_string().contains("choose a folder in it"), "{error}");
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
    assert_eq!(seen, ["model".to_owned(), "out".to_owned(), "out.partial-1".to_owned()]);
    assert_eq!(names(parent.path()), ["model", "out"]);
    assert_eq!(fs::read(output.join("model.safetensors")).unwrap(), before);

    // Folders above it go too, but for what was there, or came meanwhile.
    let deep = parent.path().join("some/where/out");
    let mut progress = |_, _| ControlFlow::Break(());
    convert(&model, &deep, &options, &mut progress).unwrap_err();
    assert_eq!(names(parent.path()), ["model", "out"]);
    let mut progress = |_, _| {
        fs::write(parent.path().join("some/letter"), "mine").unwrap();
        ControlFlow::Break(())
    };
    convert(&model, &deep, &options, &mut progress).unwrap_err();
    assert_eq!(names(&parent.path().join("some")), ["letter"]);
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
    for below in ["text.txt/out", "text.txt/some/where"] {
        let error = run(&model, &parent.path().join(below), &ConvertOptions::default()).unwrap_err();
        let ConvertError::BelowFile { output, file } = &error else { panic!("{error}") };
        assert_eq!((output, file), (&parent.path().join(below), &parent.path().join("text.txt")));
    }
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

/// The metadata begins behind magic, version and two counts. What is put there keeps the alignment of the data.
#[test]
fn further_chat_templates_are_told_by_name() {
    let twin = Path::new(env!("CARGO_MANIFEST_DIR")).join("../parallel/fixtures/twin.gguf");
    let mut bytes = fs::read(twin).unwrap();
    let count = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
    bytes[16..24].copy_from_slice(&(count + 1).to_le_bytes());
    let key = "tokenizer.chat_template.tool_use";
    let mut entry = (key.len() as u64).to_le_bytes().to_vec();
    entry.extend_from_slice(key.as_bytes());
    entry.extend_from_slice(&8_u32.to_le_bytes());
    let text_len = (entry.len() + 8).next_multiple_of(32) + 32 - entry.len() - 8;
    entry.extend_from_slice(&(text_len as u64).to_le_bytes());
    entry.resize(entry.len() + text_len, b'x');
    bytes.splice(24..24, entry);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(named_templates(checkpoint.gguf().unwrap()), ["tool_use"]);
}

#[test]
fn smollm2s_text_files_give_the_ids_and_prompts_of_its_gguf_file() {
    let Some(path) = smollm2() else { return };
    let checkpoint = Checkpoint::open(&path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (name, contents) in text_of_gguf(&checkpoint, checkpoint.gguf().unwrap()).unwrap() {
        fs::write(folder.path().join(name), contents).unwrap();
    }
    assert_eq!(names(folder.path()), ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]);
    let settings: Value =
        serde_json::from_slice(&fs::read(folder.path().join("tokenizer_config.json")).unwrap()).unwrap();
    let mut expected = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>", "model_max_length": 8192,
        "clean_up_tokenization_spaces": false,
    });
    let template = fs::read_to_string(folder.path().join("chat_template.jinja")).unwrap();
    expected["chat_template"] = json!(template);
    assert_eq!(settings, expected, "the template stands in both places, for old readers and new");
    assert_eq!(named_templates(checkpoint.gguf().unwrap()), Vec::<String>::new());

    let original = Arc::new(Tokenizer::from_checkpoint(&checkpoint).unwrap());
    let written = Arc::new(Tokenizer::from_folder(folder.path()).unwrap());
    let readings = smollm2_readings();
    assert_reads(&written, &readings, "as written");
    for ids in &readings.ids {
        assert_eq!(written.decode(ids, true), original.decode(ids, true), "{ids:?}");
    }
    assert_eq!(written.vocab_size(), original.vocab_size());
    assert!((0..written.vocab_size() as u32).all(|id| written.is_special(id) == original.is_special(id)));

    let messages = [json!({"role": "user", "content": " é 123\n"})];
    let input = ChatInput { messages: &messages, add_generation_prompt: true, ..ChatInput::default() };
    let of_file = ChatTemplate::from_source(&template, written.bos_token(), written.eos_token()).unwrap();
    let of_gguf = ChatTemplate::from_checkpoint(&checkpoint, &original).unwrap();
    assert_eq!(of_file.render(&input).unwrap(), of_gguf.render(&input).unwrap());
}
