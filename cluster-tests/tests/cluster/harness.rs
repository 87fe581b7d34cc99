//! The model, a served process, and plain HTTP.

use std::{
    io::{BufRead, BufReader, Read},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::Value;

/// Whole models run one at a time: two at once on two cores would only take turns, and memory is measured.
static ONE_MODEL: Mutex<()> = Mutex::new(());

/// A start takes about a second on a quiet machine; this only ends a hang.
const START_MAX: Duration = Duration::from_secs(120);

/// Held by every test that loads SmolLM2.
pub(crate) fn one_model_at_a_time() -> MutexGuard<'static, ()> {
    ONE_MODEL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The workspace's root.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// SmolLM2-135M-Instruct, which `cargo xtask model` fetches.
pub(crate) fn model() -> PathBuf {
    let path = root().join("target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.exists(), "{} is missing: run `cargo xtask model` first", path.display());
    path
}

/// The command under test.
pub(crate) fn consort() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort-under-test"));
    command.stdin(Stdio::null()).env_remove("RUST_LOG");
    command
}

/// A `consort serve` process; killed when dropped.
pub(crate) struct Served {
    child: Child,
    pub(crate) url: String,
    /// What it printed before it was ready.
    pub(crate) banner: String,
    stderr: JoinHandle<String>,
}

impl Served {
    /// Serves `source` with `arguments` on a free port and waits until it says where.
    pub(crate) fn start(source: &str, arguments: &[&str]) -> Served {
        Self::start_by(consort(), source, arguments)
    }

    /// The same by a command of the caller's.
    pub(crate) fn start_by(mut command: Command, source: &str, arguments: &[&str]) -> Served {
        let mut child = command
            .arg("serve")
            .arg(source)
            .args(["--port", "0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Both pipes are read to their end by threads, so that the server never blocks on a full one.
        let mut errors = child.stderr.take().unwrap();
        let stderr = thread::spawn(move || {
            let mut text = String::new();
            errors.read_to_string(&mut text).map_or_else(|error| error.to_string(), |_| text)
        });
        let lines = BufReader::new(child.stdout.take().unwrap());
        let (tell, told) = mpsc::channel();
        thread::spawn(move || lines.lines().map_while(Result::ok).for_each(|line| drop(tell.send(line))));
        let mut served = Served { child, url: String::new(), banner: String::new(), stderr };
        while served.url.is_empty() {
            match told.recv_timeout(START_MAX) {
                Ok(line) => {
                    let url = line.split_whitespace().find(|word| word.starts_with("http://"));
                    served.url = url.unwrap_or_default().trim_end_matches('/').to_owned();
                    served.banner.push_str(&line);
                    served.banner.push('\n');
                }
                Err(cause) => {
                    let banner = served.banner.clone();
                    let _ = served.child.kill();
                    panic!("no address from the server ({cause}): {banner}{:?}", served.end(START_MAX));
                }
            }
        }
        served.wait_for("/readyz", START_MAX);
        served
    }

    /// Waits until `path` answers 200.
    pub(crate) fn wait_for(&self, path: &str, limit: Duration) {
        let begin = Instant::now();
        while self.get(path).0 != 200 {
            assert!(begin.elapsed() < limit, "{path} is not 200 after {limit:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Status and body of a GET.
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let mut response = agent().get(format!("{}{path}", self.url)).call().unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }

    /// Status and JSON of a POST.
    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.post_text(path, &body.to_string());
        (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
    }

    /// Status and body of a POST of any text as JSON.
    pub(crate) fn post_text(&self, path: &str, body: &str) -> (u16, String) {
        let request = agent().post(format!("{}{path}", self.url)).header("content-type", "application/json");
        let mut response = request.send(body).unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }

    /// An open stream of server-sent events.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Events {
        let request = agent().post(format!("{}{path}", self.url)).header("content-type", "application/json");
        let response = request.send(body.to_string()).unwrap();
        assert_eq!(response.status().as_u16(), 200);
        Events { lines: BufReader::new(Box::new(response.into_body().into_reader())) }
    }

    /// A value of `/metrics`, summed over label sets.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200);
        let values: Vec<f64> = text
            .lines()
            .filter(|line| line.split(['{', ' ']).next() == Some(name))
            .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
            .collect();
        assert!(!values.is_empty(), "no metric {name} in:\n{text}");
        values.iter().sum()
    }

    /// Largest resident set so far, in bytes.
    pub(crate) fn peak_rss_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        1024 * line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    }

    /// Number of the server's process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks the process to end, as an init system would.
    pub(crate) fn terminate(&self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    /// Waits for the end; exit code and what it wrote to standard error.
    pub(crate) fn end(mut self, limit: Duration) -> (Option<i32>, String) {
        let begin = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(begin.elapsed() < limit, "still running after {limit:?}"),
            }
            thread::sleep(Duration::from_millis(20));
        };
        let stderr = std::mem::replace(&mut self.stderr, thread::spawn(String::new));
        (status.code(), stderr.join().unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Server-sent events as they come. Dropping it closes the connection.
pub(crate) struct Events {
    lines: BufReader<Box<dyn Read + Send>>,
}

impl Iterator for Events {
    type Item = String;

    /// The next payload; `None` at the end of the stream.
    fn next(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(payload) = line.trim_end().strip_prefix("data: ") {
                return Some(payload.to_owned());
            }
        }
    }
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(Duration::from_secs(120)))
        .build()
        .into()
}

/// Polls until `condition` holds.
pub(crate) fn eventually(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < limit, "{what}: not within {limit:?}");
        thread::sleep(Duration::from_millis(10));
    }
}
