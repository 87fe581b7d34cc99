use std::{path::Path, sync::Arc, time::Instant};

use consort_parallel::checkpoint::Checkpoint;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{ChatInput, ChatTemplate, sources_of_folder, strftime};
use crate::text::{TemplateError, Tokenizer, testing::smollm2};

#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: bool,
    kwargs: Option<Map<String, Value>>,
    expected: String,
}

fn source(name: &str) -> &'static str {
    match name {
        "smollm2" => include_str!("../../../fixtures/templates/smollm2.jinja"),
        "header_style" => include_str!("../../../fixtures/templates/header_style.jinja"),
        "thinking_style" => include_str!("../../../fixtures/templates/thinking_style.jinja"),
        "corners" => include_str!("../../../fixtures/templates/corners.jinja"),
        other => panic!("no template {other}"),
    }
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::from_source(source, Some("<|begin|>"), Some("<|im_end|>")).unwrap()
}

fn render(source: &str, messages: &[Value]) -> Result<String, TemplateError> {
    template(source).render(&ChatInput { messages, ..ChatInput::default() })
}

fn hello() -> Vec<Value> {
    vec![json!({"role": "user", "content": "Hi"})]
}

#[test]
fn templates_render_byte_for_byte_as_pythons_jinja_does() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("../../../fixtures/templates/expected.json")).unwrap();
    assert_eq!(cases.len(), 13);
    for (at, case) in cases.iter().enumerate() {
        let input = ChatInput {
            messages: &case.messages,
            tools: case.tools.as_deref(),
            add_generation_prompt: case.add_generation_prompt,
            kwargs: case.kwargs.as_ref(),
        };
        let rendered = template(source(&case.template)).render(&input).unwrap();
        assert_eq!(rendered, case.expected, "case {at}, {}", case.template);
    }
}

#[test]
fn smollm2s_own_template_comes_from_its_gguf_file_and_gives_special_ids() {
    let Some(path) = smollm2() else { return };
    let checkpoint = Checkpoint::open(&path).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_checkpoint(&checkpoint).unwrap());
    let template = ChatTemplate::from_checkpoint(&checkpoint, &tokenizer).unwrap();
    let input = ChatInput { messages: &hello(), add_generation_prompt: true, ..ChatInput::default() };
    let text = template.render(&input).unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let ids = tokenizer.encode(&text, false).unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == 1).count(), 3);
    assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 2);
}

#[test]
fn text_parts_become_one_text_and_other_parts_are_refused() {
    let source = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let messages = [json!({"role": "user", "content": parts}), json!({"role": "assistant", "content": null})];
    assert_eq!(render(source, &messages).unwrap(), "[a\nb][None]");
    let image = json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]);
    let error = render(source, &[json!({"role": "user", "content": image})]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "messages[0].content has a part of type `image_url`: this model takes text only"
    );
    assert!(error.is_about_the_request());
}

#[test]
fn messages_that_are_none_are_refused_by_position() {
    for (bad, problem) in
        [(json!("hi"), "messages[1] is not an object"), (json!({"content": "x"}), "messages[1] has no role")]
    {
        let messages = [hello().remove(0), bad];
        assert_eq!(render("x", &messages).unwrap_err().to_string(), problem);
    }
}

#[test]
fn a_template_that_refuses_speaks_for_itself() {
    let source = "{% if messages|length > 1 %}{{ raise_exception('Roles must alternate!') }}{% endif %}";
    let error = render(source, &[hello(), hello()].concat()).unwrap_err();
    assert!(
        matches!(&error, TemplateError::Refused { message } if message == "Roles must alternate!"),
        "{error}"
    );
    assert!(error.to_string().contains("Roles must alternate!"));
    let in_macro = "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}";
    assert!(
        matches!(render(in_macro, &hello()), Err(TemplateError::Refused { message }) if message == "deep")
    );
}

#[test]
fn endless_work_ends_with_an_error() {
    let range = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    let recursion = "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
    let doubling = "{% set ns = namespace(x='xxxxxxxx') %}\
                    {% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    let nesting = "{% set ns = namespace(x=[1]) %}\
                   {% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}";
    let shown = nesting.replace("|tojson", "");
    let huge = "{{ 'x' * 1000000000000 }}";
    let padded = "{{ '%1000000000s'|format('x') }}";
    for source in [range, recursion, doubling, nesting, &shown, huge, padded] {
        let begun = Instant::now();
        let error = render(source, &hello()).unwrap_err();
        assert!(error.is_about_the_request(), "{error}");
        assert!(begun.elapsed().as_secs() < 20, "{:?} in {source}", begun.elapsed());
    }
    assert!(matches!(render(range, &hello()), Err(TemplateError::TooMuchWork { .. })));
}

#[test]
fn giant_output_ends_with_an_error() {
    let source = "{% set x = 'x' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}";
    assert!(matches!(render(source, &hello()), Err(TemplateError::TooLong { .. })));
}

#[test]
fn failures_name_the_line() {
    let error = render("\n{{ messages.nothing.more }}", &hello()).unwrap_err();
    assert!(matches!(error, TemplateError::Render { line: Some(2), .. }), "{error}");
    let error = ChatTemplate::from_source("a\n{% if %}", None, None).unwrap_err();
    assert!(matches!(error, TemplateError::Syntax { line: Some(2), .. }), "{error}");
    assert!(!error.is_about_the_request());
}

#[test]
fn variables_of_the_request_reach_the_template_but_not_its_messages() {
    let kwargs =
        json!({"mode": {"fast": true}, "messages": [], "bos_token": "x", "add_generation_prompt": false});
    let input = ChatInput {
        messages: &hello(),
        add_generation_prompt: true,
        kwargs: kwargs.as_object(),
        ..ChatInput::default()
    };
    let source = "{{ bos_token }}{{ messages|length }}{{ mode.fast }}{{ add_generation_prompt }}{{ tools }}";
    assert_eq!(template(source).render(&input).unwrap(), "<|begin|>1TrueFalseNone");
}

#[test]
fn a_folders_template_file_wins_over_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let none = sources_of_folder(folder.path()).unwrap();
    assert!(none.is_empty());
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let first = |folder: &Path| sources_of_folder(folder).unwrap().remove(0).1;
    write("tokenizer_config.json", r#"{"chat_template": "inline"}"#);
    assert_eq!(first(folder.path()), "inline");
    write("chat_template.jinja", "file");
    assert_eq!(first(folder.path()), "file");
}

#[test]
fn a_model_with_several_templates_uses_the_one_for_tools_when_tools_are_offered() {
    let sources = [("default", "plain"), ("tool_use", "tools")];
    let sources = sources.map(|(name, source)| (name.to_owned(), source.to_owned())).to_vec();
    let template = ChatTemplate::compile(sources, None, None).unwrap();
    let tools = [json!({"type": "function"})];
    let with = |tools| ChatInput { messages: &[], tools, ..ChatInput::default() };
    assert_eq!(template.render(&with(None)).unwrap(), "plain");
    assert_eq!(template.render(&with(Some(&[]))).unwrap(), "plain");
    assert_eq!(template.render(&with(Some(&tools))).unwrap(), "tools");
}

#[test]
fn a_missing_template_says_what_to_do() {
    let text = TemplateError::Missing { path: "model".into() }.to_string();
    assert!(text.contains("/v1/completions"), "{text}");
}

#[test]
fn dates_are_formatted_as_strftime_does() {
    // date -u -d @1721995445
    let at = 1_721_995_445;
    let formatted = strftime::format("%d %b %Y|%A %B %e|%H:%M:%S|%I %p|%y%m|%j|%-d %-I|%F %T%%", at).unwrap();
    assert_eq!(formatted, "26 Jul 2024|Friday July 26|12:04:05|12 PM|2407|208|26 12|2024-07-26 12:04:05%");
    assert_eq!(strftime::format("%F %a %j %I %p", 951_782_400).unwrap(), "2000-02-29 Tue 060 12 AM");
    assert_eq!(strftime::format("%F %-m/%-d", 1_735_689_599).unwrap(), "2024-12-31 12/31");
    assert_eq!(strftime::format("%F", 0).unwrap(), "1970-01-01");
    assert_eq!(strftime::format("%F", u64::MAX).unwrap(), "9999-12-31");
    assert_eq!(strftime::format("%Q", 0).unwrap_err(), "%Q is not supported");
    assert!(strftime::format("%", 0).is_err());
    let now = render("{{ strftime_now('%Y') }}", &[]).unwrap();
    assert!(now.parse::<u32>().unwrap() >= 2024);
}
