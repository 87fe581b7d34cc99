"""Chats and completions through OpenAI's client: what applications send, checked as they would read it.

    python openai_chat.py http://127.0.0.1:8000/v1
"""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0)
model = client.models.list().data[0].id
question = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]

whole = client.chat.completions.create(model=model, messages=question, temperature=0, max_completion_tokens=32)
text = whole.choices[0].message.content
assert "Paris" in text, text
assert whole.choices[0].finish_reason in ("stop", "length")
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

pieces, usage = [], None
stream = client.chat.completions.create(
    model=model,
    messages=question,
    temperature=0,
    max_completion_tokens=32,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    usage = chunk.usage or usage
    if chunk.choices and chunk.choices[0].delta.content:
        pieces.append(chunk.choices[0].delta.content)
assert len(pieces) > 2, pieces
assert "".join(pieces) == text, (pieces, text)
assert usage.completion_tokens == whole.usage.completion_tokens

seeded = [
    client.chat.completions.create(model=model, messages=question, temperature=1, seed=7, max_tokens=12)
    .choices[0]
    .message.content
    for _ in range(2)
]
assert seeded[0] == seeded[1], seeded

completion = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0, logprobs=2)
logprobs = completion.choices[0].logprobs
assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 8
assert "".join(logprobs.tokens) == completion.choices[0].text

try:
    client.chat.completions.create(model=model, messages=question, temperature=9)
    raise SystemExit("temperature 9 was accepted")
except openai.BadRequestError as error:
    assert "temperature" in str(error), error
try:
    client.chat.completions.create(model="no-such-model", messages=question)
    raise SystemExit("an unknown model was accepted")
except openai.NotFoundError as error:
    assert "no-such-model" in str(error), error

# A reader that leaves early must not disturb the next request.
with client.chat.completions.create(model=model, messages=question, stream=True, max_tokens=200) as early:
    next(iter(early))
again = client.chat.completions.create(model=model, messages=question, temperature=0, max_completion_tokens=32)
assert again.choices[0].message.content == text

print("all checks passed")
