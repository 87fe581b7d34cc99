//! Tests over the driver, each in a process of its own: libraries, environment and failed contexts are nobody else's.

use std::{
    env, fs,
    io::Read,
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{Report, folder};

/// Set in a process that runs the body of this test.
const CHILD: &str = "CONSORT_SOFTWARE_DRIVER_CHILD";

/// What a body may take, on a machine that does other things, too.
const TIME_MAX: Duration = Duration::from_secs(240);

/// Runs `body` in a process of its own, with the software libraries and the environment given. `test` is the full name
/// of the calling test, by which the test program is started again.
///
/// Panics when the process does not end well, with all that it printed.
pub fn in_child(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if is_child(test) {
        // A test that calls this several times, for several environments, has started this process for one of them.
        static BEGUN: AtomicBool = AtomicBool::new(false);
        if !BEGUN.swap(true, Ordering::Relaxed) {
            body();
        }
        return;
    }
    let (status, output) = run_again(test, environment);
    let Some(status) = status else {
        panic!("{test} did not end within {TIME_MAX:?} over the software driver\n{output}");
    };
    assert!(status.success(), "{test} over the software driver: {status}\n{output}");
    // A name that is nobody's runs nothing, successfully.
    assert!(output.contains("1 passed"), "there is no test {test}\n{output}");
}

/// [`in_child`], with what the driver reported at the child's end. `None` in the child, where the test ends, too.
pub fn in_child_reported(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) -> Option<Report> {
    let name = format!("consort-software-driver-{}-{}.json", std::process::id(), test.replace("::", "-"));
    let path = env::temp_dir().join(name);
    let text = path.to_string_lossy().into_owned();
    let mut environment = environment.to_vec();
    environment.push(("CONSORT_SOFTWARE_DRIVER_REPORT", &text));
    in_child(test, &environment, body);
    if is_child(test) {
        return None;
    }
    let report = Report::read(&path);
    // Its absence is what the report's error says.
    let _ = fs::remove_file(&path);
    Some(report.unwrap_or_else(|error| panic!("{test}: {error}")))
}

fn is_child(test: &str) -> bool {
    env::var(CHILD).is_ok_and(|name| name == test)
}

/// The test program once more, for one test; how it ended, if it did, and what it printed.
fn run_again(test: &str, environment: &[(&str, &str)]) -> (Option<ExitStatus>, String) {
    let (read, write) = std::io::pipe().expect("a pipe");
    let program = env::current_exe().expect("the test program has a path");
    let mut command = Command::new(program);
    command.args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"]);
    command.stdin(Stdio::null()).stdout(write.try_clone().expect("a pipe has two ends")).stderr(write);
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("CONSORT_SOFTWARE_DRIVER_") {
            command.env_remove(name);
        }
    }
    // What is compiled here is of no use elsewhere.
    command.env("CONSORT_CACHE_DIR", folder().join("cache"));
    command.env(CHILD, test).env("CONSORT_CUDA_LIB_PATH", folder()).envs(environment.iter().copied());
    let mut child = command.spawn().expect("the test program starts again");
    drop(command);
    let reader = thread::spawn(move || read_all(read));
    let status = wait(&mut child);
    (status, reader.join().unwrap_or_default())
}

fn read_all(mut pipe: impl Read) -> String {
    let mut output = Vec::new();
    // What was read before an error is all there is.
    let _ = pipe.read_to_end(&mut output);
    String::from_utf8_lossy(&output).into_owned()
}

fn wait(child: &mut Child) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if start.elapsed() < TIME_MAX => thread::sleep(Duration::from_millis(5)),
            _ => break,
        }
    }
    // It may have ended meanwhile.
    let _ = child.kill();
    let _ = child.wait();
    None
}
