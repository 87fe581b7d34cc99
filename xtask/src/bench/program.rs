//! An engine that runs, asked and answering line by line.

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::peers::Engine;

/// An engine that compiles takes minutes until it is ready.
const READY_MAX: Duration = Duration::from_secs(900);
const ANSWER_MAX: Duration = Duration::from_secs(600);

/// Killed when dropped.
pub(super) struct Program {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    name: &'static str,
    log: String,
}

impl Program {
    /// Starts it and waits until it is ready. What it says beside answers goes to the engine's log.
    pub(super) fn start(engine: &Engine) -> Result<Program> {
        let log =
            File::create(&engine.log).with_context(|| format!("cannot create {}", engine.log.display()))?;
        let mut command = engine.command();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", engine.name))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (sender, lines) = mpsc::channel();
        let output = output.context("no standard output")?;
        // Ends with the program.
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let input = input.context("no standard input")?;
        let program =
            Program { child, input, lines, name: engine.name, log: engine.log.display().to_string() };
        match program.line(READY_MAX)?.as_str() {
            "ready" => Ok(program),
            other => bail!("{} said {other:?} before it was ready", program.name),
        }
    }

    /// What it answers to a line.
    pub(super) fn ask(&mut self, line: &str) -> Result<Value> {
        writeln!(self.input, "{line}").and_then(|()| self.input.flush()).with_context(|| self.gone())?;
        let answer = self.line(ANSWER_MAX)?;
        serde_json::from_str(&answer).with_context(|| format!("{} answered {answer:?}", self.name))
    }

    fn line(&self, limit: Duration) -> Result<String> {
        match self.lines.recv_timeout(limit) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                bail!("{} did not answer within {} s", self.name, limit.as_secs())
            }
            Err(RecvTimeoutError::Disconnected) => bail!("{}", self.gone()),
        }
    }

    fn gone(&self) -> String {
        format!("{} ended; see {}", self.name, self.log)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(script: &str, log: &str) -> Engine {
        let log = std::env::temp_dir().join(format!("consort-xtask-{log}-{}", std::process::id()));
        Engine::new("a peer", "", &["sh", "-c", script], log)
    }

    #[test]
    fn a_program_answers_line_by_line() {
        let script = r#"echo ready; while read -r line; do echo "{\"round\": \"$line\"}"; done"#;
        let mut program = Program::start(&engine(script, "answers")).expect("a program");
        assert_eq!(program.ask("8+1").expect("an answer")["round"], "8+1");
        assert_eq!(program.ask("9+1").expect("an answer")["round"], "9+1");
    }

    #[test]
    fn a_program_that_ends_or_says_something_else_is_an_error_that_names_it() {
        let error = |script: &str| match Program::start(&engine(script, "ends")) {
            Ok(mut program) => program.ask("8+1").expect_err("nobody answers"),
            Err(error) => error,
        };
        for (script, part) in [
            ("exit 1", "a peer ended; see "),
            ("echo hello; sleep 9", "said \"hello\" before it was ready"),
            ("echo ready; read -r line; exit 1", "a peer ended; see "),
            ("echo ready; read -r line; echo no JSON; sleep 9", "answered \"no JSON\""),
        ] {
            let error = format!("{:#}", error(script));
            assert!(error.contains(part), "{script}: {error}");
        }
    }
}
