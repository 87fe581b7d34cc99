//! Where the model is, and what it is called.

use std::path::{Path, PathBuf};

use super::super::{
    error::Violations,
    excerpt::{shown, shown_path},
    raw::{Leaf, Origin, RawTopology, Sourced},
};

const KEY: &str = "model.path";

/// A path that the program was given in so many words. What is not Unicode cannot be held or written down here.
pub(in crate::topology) fn named(path: &Path, by: &str, raw: &mut RawTopology, violations: &mut Violations) {
    let origin = Origin::Given(by.to_owned());
    match path.to_str() {
        Some(path) => raw.model.path = Some(Sourced { value: path.to_owned(), origin }),
        None => {
            let problem = format!("the path \"{}\" is not Unicode", shown_path(path));
            violations.add(KEY, &origin, problem, "rename it, or give a link to it that is");
        }
    }
}

/// The model's place. A relative path written in the file is looked for beside the file first; one from a
/// flag or the environment, where it was typed: in the current directory.
pub(super) fn path(given: Option<&Sourced<String>>, folder: &Path, violations: &mut Violations) -> PathBuf {
    let Some(given) = given else {
        violations.add_missing(
            KEY,
            "no model is named",
            "add path = \"...\" under [model]: a model folder or GGUF file",
        );
        return PathBuf::new();
    };
    let path = PathBuf::from(&given.value);
    if given.value.trim().is_empty() {
        violations.add(KEY, &given.origin, "it is empty", "give the path of a model folder or GGUF file");
        return path;
    }
    let beside_file = folder.join(&path);
    let candidates = match given.origin {
        Origin::File(_) => [beside_file, path.clone()],
        Origin::Variable(_) | Origin::Given(_) => [path.clone(), beside_file],
    };
    match candidates.iter().find(|candidate| candidate.exists()) {
        Some(found) => {
            if let Some((problem, remedy)) = unusable(found) {
                violations.add(KEY, &given.origin, problem, remedy);
            }
            found.clone()
        }
        None => {
            let (problem, remedy) = not_found(&given.value, &candidates);
            violations.add(KEY, &given.origin, problem, remedy);
            path
        }
    }
}

fn unusable(found: &Path) -> Option<(String, &'static str)> {
    let extension = found.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let remedy = match extension {
        "safetensors" | "json" => "give the folder that holds it",
        "toml" => "a topology cannot be a model: give it in place of the model",
        "bin" | "pt" | "pth" => "convert it to safetensors first: pickled weights are not read",
        _ => return None,
    };
    found.is_file().then(|| (format!("{} is not a model folder or GGUF file", shown_path(found)), remedy))
}

fn not_found(given: &str, candidates: &[PathBuf; 2]) -> (String, String) {
    if is_hub_id(given) {
        let name = given.rsplit('/').next().unwrap_or(given);
        return (
            format!("\"{}\" is not a local folder or GGUF file", shown(given)),
            format!(
                "download it first (`hf download {given} --local-dir {name}`) and give that folder: this \
                 version does not fetch models"
            ),
        );
    }
    let [first, second] = candidates.each_ref().map(|path| shown_path(path));
    let looked = if first == second { first } else { format!("{first} and {second}") };
    (format!("nothing is at {looked}"), "give the path of a model folder or GGUF file".to_owned())
}

/// `organisation/name`, as model hubs write it.
fn is_hub_id(given: &str) -> bool {
    let part = |text: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !text.is_empty() && !text.starts_with('.') && text.chars().all(allowed)
    };
    let extension = Path::new(given).extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let is_file_name = matches!(extension, "gguf" | "safetensors" | "toml" | "json");
    given.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name)) && !is_file_name
}

/// The name for clients: the given one, or the last part of the path without `.gguf`.
pub(super) fn served_name(given: Leaf<String>, path: &Path, violations: &mut Violations) -> String {
    if let Some(given) = given {
        if given.value.trim().is_empty() {
            violations.add(
                "model.served_model_name",
                &given.origin,
                "it is empty",
                "give a name, or remove the key",
            );
        }
        return given.value;
    }
    // A path such as `.` has no last part of its own.
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let path = if path.file_name().is_some() { path } else { &absolute };
    let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let name = if is_gguf { path.file_stem() } else { path.file_name() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}
