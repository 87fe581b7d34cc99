"""Tokens from logits, `[rows][vocabulary]` in f32: what a server written in PyTorch does for each mode."""

import torch

from ways import fastest


def multinomial(probabilities):
    return torch.multinomial(probabilities, 1)


def exponential_race(probabilities):
    """The same draw by exponential numbers, without looking at whether the probabilities are ones."""
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)


def greedy(logits, request, draw):
    return logits.argmax(-1, keepdim=True)


def temperature(logits, request, draw):
    return draw(torch.softmax(logits / request["temperature"], -1))


def top_k(logits, request, draw):
    best, tokens = (logits / request["temperature"]).topk(request["top_k"], -1)
    return tokens.gather(-1, draw(torch.softmax(best, -1)))


def top_p(logits, request, draw):
    ordered, tokens = (logits / request["temperature"]).sort(-1, descending=True)
    probabilities = torch.softmax(ordered, -1)
    before = probabilities.cumsum(-1) - probabilities
    return tokens.gather(-1, draw(probabilities.masked_fill(before >= request["top_p"], 0.0)))


def min_p(logits, request, draw):
    probabilities = torch.softmax(logits / request["temperature"], -1)
    least = request["min_p"] * probabilities.amax(-1, keepdim=True)
    return draw(probabilities.masked_fill(probabilities < least, 0.0))


# Of the logits: as ours.
DEVIATION, LIKELY_BY, LIKELY_ONE_IN = 2.0, 10.0, 4096

MODES = {"greedy": greedy, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}


def sample(bench, request):
    """A token for each of `rows`, from `sets` times other logits."""
    rows, vocabulary, sets = (request[name] for name in ("rows", "vocabulary", "sets"))
    logits = bench.random(sets, rows, vocabulary, dtype=torch.float32) * DEVIATION
    # A few tokens far above the others, as models have it: what is drawn from depends on it.
    logits += LIKELY_BY * (torch.rand_like(logits) * LIKELY_ONE_IN < 1)
    mode = MODES[request["mode"]]
    draws = [None] if mode is greedy else [multinomial, exponential_race]
    return fastest(bench, [lambda i, draw=draw: mode(logits[i], request, draw) for draw in draws], sets)


CASES = {"sample": sample}
