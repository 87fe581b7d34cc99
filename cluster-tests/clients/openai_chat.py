"""Chats and completions through OpenAI's client: what applications send, checked as they would read it.

    python openai_chat.py http://127.0.0.1:8000/v1
"""

import math
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0)
model = client.models.list().data[0].id
question = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]


def chat(**options):
    options = {"temperature": 0, "max_completion_tokens": 32} | options
    return client.chat.completions.create(model=model, messages=question, **options)


def check_logprobs(content, text, top):
    """Every token has its log-probability and `top` alternatives, best first; together they spell the text."""
    spelled = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert spelled.startswith(text), (spelled, text)
    for entry in content:
        assert entry.logprob <= 0 and math.isfinite(entry.logprob), entry
        assert len(entry.top_logprobs) == top, entry
        ranked = [other.logprob for other in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True), entry
        if top:
            best = entry.top_logprobs[0]
            assert (best.token, best.logprob) == (entry.token, entry.logprob), entry


def check_whole_and_stream():
    whole = chat()
    text = whole.choices[0].message.content
    assert "Paris" in text, text
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    pieces, usage = [], None
    for chunk in chat(stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            pieces.append(chunk.choices[0].delta.content)
    assert len(pieces) > 2, pieces
    assert "".join(pieces) == text, (pieces, text)
    assert usage.completion_tokens == whole.usage.completion_tokens
    return text


def check_chat_logprobs(text):
    for top in (0, 2, 20):
        options = {"logprobs": True, "top_logprobs": top}
        content = chat(**options).choices[0].logprobs.content
        check_logprobs(content, text, top)
        streamed = [chunk.choices[0] for chunk in chat(stream=True, **options) if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in streamed) == text
        entries = [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content]
        assert entries == content, (entries, content)
    assert chat().choices[0].logprobs is None


def check_seeds():
    def draw(seed):
        return chat(temperature=1.5, seed=seed, max_completion_tokens=12).choices[0].message.content

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def check_stop(text):
    for stop in ("Paris", [" is", "never said"]):
        first = [stop] if isinstance(stop, str) else stop
        cut = chat(stop=stop).choices[0]
        assert cut.finish_reason == "stop"
        assert cut.message.content == text.split(first[0])[0], (cut, text)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chat(stop=stop, stream=True))
        assert streamed == cut.message.content, (streamed, cut)


def check_choices(text):
    """Whole, the choices come in the order of their indices; streamed, each piece says whose it is."""
    options = {"n": 3, "temperature": 1.5, "seed": 11, "max_completion_tokens": 12, "logprobs": True}
    whole = chat(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2], whole
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3, texts
    for choice in whole.choices:
        check_logprobs(choice.logprobs.content, choice.message.content, 0)
    streamed, ended, usage = ["", "", ""], [0, 0, 0], None
    for chunk in chat(stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert not ended[choice.index], choice
            streamed[choice.index] += choice.delta.content or ""
            ended[choice.index] += choice.finish_reason is not None
    assert streamed == texts and ended == [1, 1, 1], (streamed, texts, ended)
    assert usage == whole.usage, (usage, whole.usage)

    alone, three = chat(), chat(n=3)
    assert [choice.message.content for choice in three.choices] == [text] * 3
    assert three.usage.prompt_tokens == alone.usage.prompt_tokens
    assert three.usage.completion_tokens == 3 * alone.usage.completion_tokens

    prompts = client.completions.create(model=model, prompt=["One", "Two"], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in prompts.choices] == [0, 1, 2, 3]
    assert prompts.choices[0].text == prompts.choices[1].text != prompts.choices[2].text == prompts.choices[3].text


def check_penalties_and_bias():
    def complete(**options):
        options = {"prompt": "no no no no no no no no", "max_tokens": 12, "temperature": 0} | options
        extra = {"return_token_ids": True}
        return client.completions.create(model=model, extra_body=extra, **options).choices[0].token_ids

    plain = complete()
    for penalty in ("frequency_penalty", "presence_penalty"):
        penalised = complete(**{penalty: 2.0})
        assert len(set(penalised)) > len(set(plain)), (penalty, plain, penalised)
        assert complete(**{penalty: 0.0}) == plain
        encouraged = complete(**{penalty: -2.0})
        assert len(set(encouraged)) <= len(set(plain)), (penalty, plain, encouraged)
    assert plain[0] not in complete(logit_bias={str(plain[0]): -100})
    assert set(complete(logit_bias={"4000": 100})) == {4000}
    chat(frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"4000": -1})


def check_completions():
    options = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    choice = client.completions.create(model=model, logprobs=2, **options).choices[0]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 8
    assert "".join(choice.logprobs.tokens) == choice.text
    streamed = client.completions.create(model=model, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def check_errors():
    wrong = {
        "temperature": 9,
        "top_p": 0,
        "stop": [""],
        "top_logprobs": 21,
        "seed": "seven",
        "max_completion_tokens": -1,
        "n": 0,
        "frequency_penalty": 2.1,
        "presence_penalty": -2.1,
        "logit_bias": {"99999999": 1},
    }
    for field, value in wrong.items():
        for stream in (False, True):
            try:
                chat(stream=stream, logprobs=True, **{field: value})
            except openai.BadRequestError as error:
                # `max_completion_tokens` goes by the name of the field that it replaced.
                assert error.param in (field, field.replace("_completion", "")), (error, error.param)
                assert error.status_code == 400 and error.code == "400", error
                assert field in str(error) or error.param in str(error), error
            else:
                raise SystemExit(f"{field}={value!r} was accepted")
    try:
        client.chat.completions.create(model="no-such-model", messages=question)
        raise SystemExit("an unknown model was accepted")
    except openai.NotFoundError as error:
        assert error.param == "model" and "no-such-model" in str(error), error


def check_early_leave(text):
    """A reader that leaves early must not disturb the next request."""
    with chat(stream=True, max_completion_tokens=200) as early:
        next(iter(early))
    assert chat().choices[0].message.content == text


text = check_whole_and_stream()
check_chat_logprobs(text)
check_seeds()
check_stop(text)
check_choices(text)
check_penalties_and_bias()
check_completions()
check_errors()
check_early_leave(text)

print("all checks passed")
