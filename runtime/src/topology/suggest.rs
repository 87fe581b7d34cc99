//! What somebody probably meant.

use super::schema;

/// Longer names are nobody's misspelling, and comparing them takes time.
const LENGTH_MAX: usize = 64;

const LISTEN: &str = "write listen = \"HOST:PORT\" in [server]";

/// The same names in the environment, and the keys that they stand for.
const FOREIGN_VARIABLES: [(&str, &str); 10] = [
    ("tp", "parallel.tensor_parallel_size"),
    ("tp_size", "parallel.tensor_parallel_size"),
    ("dp", "parallel.data_parallel_size"),
    ("dp_size", "parallel.data_parallel_size"),
    ("replicas", "parallel.data_parallel_size"),
    ("model", "model.path"),
    ("threads", "parallel.threads_per_rank"),
    ("isa", "parallel.cpu_isa"),
    ("deterministic", "parallel.batch_invariant"),
    ("devices", "node.devices"),
];

/// Names from other tools and habits that no edit distance would find.
const FOREIGN_KEYS: [(&str, &str); 15] = [
    ("tp", "did you mean `tensor_parallel_size` in [parallel]?"),
    ("tp_size", "did you mean `tensor_parallel_size` in [parallel]?"),
    ("dp", "did you mean `data_parallel_size` in [parallel]?"),
    ("dp_size", "did you mean `data_parallel_size` in [parallel]?"),
    ("replicas", "did you mean `data_parallel_size` in [parallel]?"),
    ("model", "did you mean `path` in [model]?"),
    ("model_path", "did you mean `path` in [model]?"),
    ("threads", "did you mean `threads_per_rank` in [parallel]?"),
    ("isa", "did you mean `cpu_isa` in [parallel]?"),
    ("deterministic", "did you mean `batch_invariant` in [parallel]?"),
    ("host", LISTEN),
    ("port", LISTEN),
    ("prefix_caching", "did you mean `enable_prefix_caching` in [cache]?"),
    (
        "api_keys",
        "keys do not belong in files: name the variable that holds them, as in api_key_env = \"API_KEYS\"",
    ),
    (
        "api_key",
        "keys do not belong in files: name the variable that holds it, as in api_key_env = \"API_KEY\"",
    ),
];

/// The candidate nearest to what was given, if one is near: every third letter may be wrong, three at most.
pub(super) fn nearest<'a>(given: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let letters = given.trim().chars().count();
    within((letters / 3).clamp(1, 3), given, candidates)
}

/// The candidate nearest to what was given, at most `allowed` edits away.
pub(super) fn within<'a>(
    allowed: usize,
    given: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    if given.len() > LENGTH_MAX {
        return None;
    }
    let plain = |name: &str| name.to_lowercase().replace('-', "_");
    let given = plain(given.trim());
    candidates
        .into_iter()
        .map(|candidate| (strsim::osa_distance(&given, &plain(candidate)), candidate))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// What to do about a name that is no key of `table`, and the key that was probably meant.
pub(super) fn for_key(given: &str, table: &str) -> (String, Option<String>) {
    if let Some(name) = nearest(given, schema::keys_of(table)) {
        return (format!("did you mean `{name}`?"), Some(format!("{table}.{name}")));
    }
    if let Some(elsewhere) = key_of_another_table(given) {
        return elsewhere;
    }
    let keys: Vec<&str> = schema::keys_of(table).collect();
    (format!("the keys of {} are {}", schema::header(table), keys.join(", ")), None)
}

/// What to do about a name at the top of a file that is no table.
pub(super) fn for_table(given: &str) -> (String, Option<String>) {
    if let Some(table) = nearest(given, schema::TABLES) {
        return (format!("did you mean {}?", schema::header(table)), Some(table.to_owned()));
    }
    if let Some(elsewhere) = key_of_another_table(given) {
        return elsewhere;
    }
    let tables = schema::TABLES.map(schema::header).join(", ");
    (format!("the tables are {tables}"), None)
}

/// The key that another tool's name stands for in the environment.
pub(super) fn foreign_variable(rest: &str) -> Option<&'static str> {
    FOREIGN_VARIABLES.iter().find(|(name, _)| name.eq_ignore_ascii_case(rest)).map(|(_, key)| *key)
}

fn key_of_another_table(given: &str) -> Option<(String, Option<String>)> {
    let keys = || schema::KEYS.iter().filter(|key| key.in_file);
    if let Some((_, remedy)) = FOREIGN_KEYS.iter().find(|(name, _)| name.eq_ignore_ascii_case(given)) {
        return Some(((*remedy).to_owned(), None));
    }
    // Of a node's `host` only files with several machines speak: outside of [[node]], the server's is more likely.
    if nearest(given, ["host", "port"]).is_some() {
        return Some((LISTEN.to_owned(), None));
    }
    if let Some(key) = keys().find(|key| key.parts().1 == given) {
        return Some((format!("it belongs in {}", schema::header(key.parts().0)), Some(key.name.to_owned())));
    }
    let name = nearest(given, keys().map(|key| key.parts().1))?;
    let key = keys().find(|key| key.parts().1 == name)?;
    let remedy = format!("did you mean `{name}` in {}?", schema::header(key.parts().0));
    Some((remedy, Some(key.name.to_owned())))
}

/// What to do about a word that is none of `words`. `aliases` are other spellings of some of them.
pub(super) fn for_word(given: &str, words: &[&str], aliases: &[(&str, &str)]) -> String {
    let is_given = |(alias, _): &&(&str, &str)| alias.eq_ignore_ascii_case(given.trim());
    let meant = aliases.iter().find(is_given).map(|(_, word)| *word);
    match meant.or_else(|| nearest(given, words.iter().copied())) {
        Some(word) => format!("did you mean \"{word}\"?"),
        None => format!("use {}", listed(words)),
    }
}

/// `"a", "b" or "c"`.
fn listed(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}
