"""The cases: each takes a bench and a request, makes its data and returns a function that gives seconds."""

import torch
import torch.nn.functional as F

import attention
import model
import sampling
import with_triton


def copy(bench, request):
    source = torch.empty(request["bytes"], dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    return bench.prepare(lambda _: target.copy_(source), 1)


def linear(bench, request):
    """`m` rows of `k` times `sets` weights of `n` rows."""
    m, n, k, sets = (request[name] for name in ("m", "n", "k", "sets"))
    weights = [bench.random(n, k) for _ in range(sets)]
    rows = bench.random(m, k)
    return bench.prepare(lambda i: F.linear(rows, weights[i]), sets)


CASES = {
    "copy": copy,
    "linear": linear,
    **attention.CASES,
    **model.CASES,
    **sampling.CASES,
    **with_triton.CASES,
}
