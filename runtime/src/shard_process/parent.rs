//! That a process ends with the one that started it, from its very first moment on.
#![allow(unsafe_code)]

use std::{io, os::unix::process::CommandExt, process::Command};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Has the process that `command` starts killed when the thread that starts it ends, or has ended by then. Whatever
/// program it becomes need know nothing of that.
pub(super) fn ends_with_parent(command: &mut Command) {
    let parent = getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        match getppid() {
            Some(now) if now == parent => Ok(()),
            // The signal is for ends to come.
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    };
    // SAFETY: between fork and exec, where other threads may have held any lock, it makes two system calls and
    // allocates nothing: the error is a kind without text.
    unsafe {
        command.pre_exec(prepare);
    }
}
