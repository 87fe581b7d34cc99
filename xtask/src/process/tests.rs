use super::*;

#[test]
fn a_command_is_shown_as_it_could_be_typed() {
    let mut command = Command::new("/somewhere/bin/cargo");
    command.env("RUSTDOCFLAGS", "-D warnings").args(["doc", "it's", ""]);
    assert_eq!(shown(&command), r"RUSTDOCFLAGS='-D warnings' cargo doc 'it'\''s' ''");
}

#[test]
fn a_missing_program_is_named_with_advice() {
    let error = run(&mut Command::new("no-such-program-of-consort")).expect_err("the program does not exist");
    let text = format!("{error:#}");
    assert!(text.contains("no-such-program-of-consort") && text.contains("PATH"), "{text}");
}

#[test]
fn a_failing_program_is_named_with_its_status() {
    let error = run(Command::new("sh").args(["-c", "exit 3"])).expect_err("it exits with 3");
    assert_eq!(error.to_string(), "`sh -c 'exit 3'` failed with exit status: 3");
}

#[test]
fn a_missing_python_module_names_the_package_to_install() {
    let error = require_python_module("python3", "no_such_module_of_consort", "python3-pip");
    let text = format!("{:#}", error.expect_err("no such module"));
    assert!(text.contains("python3-pip") || text.contains("apt-get install python3"), "{text}");
}
