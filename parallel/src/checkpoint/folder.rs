//! A folder as `transformers` writes it: `config.json`, perhaps `generation_config.json`, and safetensors in one
//! file or in several under an index.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use safetensors::Dtype;

use super::{
    Checkpoint, CheckpointError, Encoding, MappedFile, StoredTensor, header, hf_config, index, json,
};
use crate::config::GenerationDefaults;

pub(super) const SINGLE_FILE: &str = "model.safetensors";
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";
pub(super) const CONFIG_FILE: &str = "config.json";
const GENERATION_FILE: &str = "generation_config.json";
const HEAD: &str = "lm_head.weight";

/// Opens a folder. Which tensors it must hold is checked by the caller.
pub(super) fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let config_path = path.join(CONFIG_FILE);
    if !config_path.exists() {
        return Err(not_a_folder(path));
    }
    let config = json::read_object(&config_path)?;
    let generation_path = path.join(GENERATION_FILE);
    let (generation_defaults, generation_eos) = if generation_path.exists() {
        hf_config::parse_generation(&generation_path, &json::read_object(&generation_path)?)?
    } else {
        (GenerationDefaults::default(), Vec::new())
    };

    let mut contents = Contents::default();
    // The single file first, as transformers looks for it.
    if path.join(SINGLE_FILE).exists() {
        contents.add_file(&path.join(SINGLE_FILE), |_| true)?;
    } else if path.join(INDEX_FILE).exists() {
        contents.add_index(path)?;
    } else {
        // What is wrong with the configuration is told first: weights would not mend it.
        hf_config::parse(&config_path, &config, true, &generation_eos)?;
        return Err(CheckpointError::NoWeights { path: path.to_owned() });
    }

    let has_head = contents.tensors.contains_key(HEAD);
    let config = hf_config::parse(&config_path, &config, has_head, &generation_eos)?;
    if config.tie_word_embeddings {
        // Some writers store the tied head a second time; a model must not read what the configuration overrules.
        contents.tensors.remove(HEAD);
        contents.unreadable.remove(HEAD);
    }
    Ok(Checkpoint {
        path: path.to_owned(),
        files: contents.files,
        tensors: contents.tensors,
        unreadable: contents.unreadable,
        nameless: Vec::new(),
        config,
        generation_defaults,
        gguf: None,
    })
}

/// The error of a folder without `config.json`; names the GGUF file where the user probably meant that.
fn not_a_folder(path: &Path) -> CheckpointError {
    let is_gguf = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "gguf");
    let file = std::fs::read_dir(path)
        .ok()
        .and_then(|entries| entries.filter_map(Result::ok).map(|entry| entry.path()).find(is_gguf));
    let problem = match file {
        Some(file) => {
            format!("it has no {CONFIG_FILE}; to use a GGUF file, pass the file: {}", file.display())
        }
        None => format!("it has no {CONFIG_FILE}"),
    };
    CheckpointError::NotACheckpoint { path: path.to_owned(), problem }
}

/// Files of a folder and the tensors found in them.
#[derive(Default)]
struct Contents {
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, StoredTensor>,
    unreadable: BTreeMap<String, String>,
}

impl Contents {
    /// Adds every file of the index, and of each file the tensors that the index puts there.
    fn add_index(&mut self, folder: &Path) -> Result<(), CheckpointError> {
        let file_of_name = index::read(&folder.join(INDEX_FILE))?;
        let mut names_of_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, file) in &file_of_name {
            names_of_file.entry(file).or_default().push(name);
        }
        // In the order of the map, so that they can be searched.
        for (file, names) in names_of_file {
            let file = folder.join(file);
            let before = self.tensors.len() + self.unreadable.len();
            self.add_file(&file, |name| names.binary_search(&name).is_ok())?;
            let added = self.tensors.len() + self.unreadable.len() - before;
            if added == names.len() {
                continue;
            }
            let missing = names
                .iter()
                .find(|name| !self.tensors.contains_key(**name) && !self.unreadable.contains_key(**name));
            let name = missing.copied().unwrap_or_default().to_owned();
            return Err(CheckpointError::MissingTensor { path: file, name, stored_name: None, count: added });
        }
        Ok(())
    }

    /// Adds the wanted tensors of one safetensors file.
    fn add_file(&mut self, path: &Path, wanted: impl Fn(&str) -> bool) -> Result<(), CheckpointError> {
        let file = MappedFile::open(path)?;
        let (data_start, entries) = header::read(&file)?;
        let file_len = file.bytes().len();
        for header::Entry { name, dtype, shape, offset } in entries {
            if !wanted(&name) {
                continue;
            }
            let encoding = match dtype {
                Dtype::F32 => Encoding::F32,
                Dtype::F16 => Encoding::F16,
                Dtype::BF16 => Encoding::Bf16,
                other => {
                    self.unreadable.insert(name, format!("{other:?}"));
                    continue;
                }
            };
            let tensor = StoredTensor::new(self.files.len(), file_len, offset, shape, encoding).map_err(
                |problem| CheckpointError::Malformed {
                    path: path.to_owned(),
                    offset,
                    problem: format!("tensor `{name}`: {problem}"),
                },
            )?;
            self.tensors.insert(name, tensor);
        }
        file.release(0..data_start);
        self.files.push(file);
        Ok(())
    }
}
