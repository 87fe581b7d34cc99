//! The environment variables that Consort heeds, as far as they may be shown.

use super::facts::Variable;
use crate::topology::{Environment, is_key_name_variable, is_plain_name, setting_variables, shown_whole};

const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Those besides the settings of a topology.
const OTHERS: [&str; 11] = [
    "CONSORT_CUDA_LIB_PATH",
    "CONSORT_CACHE_DIR",
    "CUDA_HOME",
    "CUDA_PATH",
    VISIBLE,
    "CUDA_DEVICE_ORDER",
    "CONDA_PREFIX",
    "LD_LIBRARY_PATH",
    "RUST_LOG",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
];

/// Those that are set. Values are shown of known variables only: any other of our prefix may hold an API key.
pub(super) fn set(environment: &Environment) -> Vec<Variable> {
    let settings = setting_variables();
    let of_keys: Vec<&str> = settings
        .iter()
        .filter(|name| is_key_name_variable(name))
        .filter_map(|name| environment.get(name))
        .collect();
    let mut found = Vec::new();
    // An empty variable is as good as none, but for the one that then hides all cards.
    for (name, value) in environment.iter().filter(|(name, value)| !value.is_empty() || *name == VISIBLE) {
        let is_known = OTHERS.contains(&name) || settings.iter().any(|setting| setting == name);
        if !is_known && !name.starts_with("CONSORT_") {
            continue;
        }
        // Who mistakes it for the place of the key itself must not see it here.
        let names_a_key = !is_key_name_variable(name) || is_plain_name(value);
        let may_be_shown = is_known && names_a_key && !of_keys.contains(&name);
        found.push(Variable { name: shown_whole(name), value: may_be_shown.then(|| shown_whole(value)) });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_of(variables: &[(&str, &str)]) -> Vec<(String, Option<String>)> {
        let environment = variables.iter().copied().collect();
        set(&environment).into_iter().map(|variable| (variable.name, variable.value)).collect()
    }

    #[test]
    fn settings_and_what_finds_libraries_are_shown() {
        let shown = set_of(&[
            ("CONSORT_CPU_ISA", "avx2"),
            ("CONSORT_SCHEDULER__MAX_NUM_SEQS", "7"),
            ("CONSORT_CUDA_LIB_PATH", "/opt/li\u{1b}b"),
            ("CUDA_VISIBLE_DEVICES", "0,1"),
            ("HOME", "/root"),
            ("CUDA_HOME", ""),
        ]);
        let expected = [
            ("CONSORT_CPU_ISA", "avx2"),
            ("CONSORT_CUDA_LIB_PATH", "/opt/li␛b"),
            ("CONSORT_SCHEDULER__MAX_NUM_SEQS", "7"),
            ("CUDA_VISIBLE_DEVICES", "0,1"),
        ];
        assert_eq!(shown, expected.map(|(name, value)| (name.to_owned(), Some(value.to_owned()))));
        assert_eq!(set_of(&[("CUDA_VISIBLE_DEVICES", "")]), [(VISIBLE.to_owned(), Some(String::new()))]);
    }

    #[test]
    fn no_value_that_may_be_a_key_is_shown() {
        let secret = "sk-8675309123";
        let shown = set_of(&[
            ("CONSORT_API_KEY", secret),
            ("CONSORT_SERVER__API_KEY_ENV", secret),
            ("OTHER_API_KEY", secret),
            ("CONSORT_SERVER__API_KEY", secret),
        ]);
        let names: Vec<&str> = shown.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["CONSORT_API_KEY", "CONSORT_SERVER__API_KEY", "CONSORT_SERVER__API_KEY_ENV"]);
        assert!(shown.iter().all(|(_, value)| value.is_none()), "{shown:?}");
        // A name of a variable is shown, and even a known one is not when it holds the key.
        let shown =
            set_of(&[("CONSORT_SERVER__API_KEY_ENV", "CONSORT_CACHE_DIR"), ("CONSORT_CACHE_DIR", secret)]);
        assert_eq!(shown[0].1, None);
        assert_eq!(shown[1].1.as_deref(), Some("CONSORT_CACHE_DIR"));
    }
}
