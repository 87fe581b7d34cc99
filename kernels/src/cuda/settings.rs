//! Where to look for NVIDIA's libraries and where to keep cubins: the one place of this crate that reads the
//! environment.

use std::{env, ffi::OsString, path::PathBuf};

/// What the environment says, as of one moment. An empty variable is as good as none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `CONSORT_CUDA_LIB_PATH`: the folder of NVIDIA's libraries, the driver's included, or the file of one of them; if
    /// set, nothing else is tried for those that it may name.
    pub library: Option<PathBuf>,
    /// `CUDA_HOME` and `CUDA_PATH`: toolkits.
    pub toolkits: Vec<PathBuf>,
    /// `VIRTUAL_ENV` and `CONDA_PREFIX`: active Python environments.
    pub environments: Vec<PathBuf>,
    /// `PATH`: where programs are.
    pub programs: Vec<PathBuf>,
    /// `HOME`.
    pub home: Option<PathBuf>,
    /// Folder of the cubin cache: `CONSORT_CACHE_DIR`, else `consort` in `XDG_CACHE_HOME` or in `.cache` of `HOME`.
    pub cache: Option<PathBuf>,
}

impl Settings {
    /// The process's.
    pub fn of_process() -> Settings {
        Settings::of(|name| env::var_os(name))
    }

    /// Those of any set of variables.
    pub fn of(variable: impl Fn(&str) -> Option<OsString>) -> Settings {
        let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        // The XDG base directory rules: a relative path is to be ignored.
        let shared_cache = || path("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let home = path("HOME");
        let user_cache = || shared_cache().or_else(|| Some(home.as_ref()?.join(".cache")));
        Settings {
            library: path("CONSORT_CUDA_LIB_PATH"),
            toolkits: ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(path).collect(),
            environments: ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(path).collect(),
            programs: variable("PATH").map(|value| env::split_paths(&value).collect()).unwrap_or_default(),
            cache: path("CONSORT_CACHE_DIR").or_else(|| Some(user_cache()?.join("consort"))),
            home,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Settings {
        Settings::of(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn the_cache_is_where_the_first_of_three_variables_says() {
        let cache = |variables: &[(&str, &str)]| settings(variables).cache;
        let all = [("CONSORT_CACHE_DIR", "/c"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(cache(&all).as_deref(), Some(Path::new("/c")));
        assert_eq!(cache(&all[1..]).as_deref(), Some(Path::new("/x/consort")));
        assert_eq!(cache(&all[2..]).as_deref(), Some(Path::new("/h/.cache/consort")));
        assert_eq!(
            cache(&[("XDG_CACHE_HOME", "x"), ("HOME", "/h")]).as_deref(),
            Some(Path::new("/h/.cache/consort"))
        );
        assert_eq!(cache(&[]), None);
    }

    #[test]
    fn an_empty_variable_is_as_good_as_none() {
        assert_eq!(
            settings(&[("CONSORT_CUDA_LIB_PATH", ""), ("CUDA_HOME", ""), ("HOME", "")]),
            Settings::default()
        );
    }

    #[test]
    fn several_toolkits_and_environments_keep_their_order() {
        let found = settings(&[
            ("CUDA_PATH", "/b"),
            ("CUDA_HOME", "/a"),
            ("CONDA_PREFIX", "/d"),
            ("VIRTUAL_ENV", "/c"),
        ]);
        assert_eq!(found.toolkits, [Path::new("/a"), Path::new("/b")]);
        assert_eq!(found.environments, [Path::new("/c"), Path::new("/d")]);
    }
}
