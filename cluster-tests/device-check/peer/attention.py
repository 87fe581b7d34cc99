"""Attention over keys and values that lie side by side, `[sequence][KV head][token][dim]`."""

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ways import fastest

# All but the one that writes every score to memory.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def attend(backend, *tensors, **options):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*tensors, **options)


def decode(bench, request):
    """One new token of each of `batch` sequences over `context` tokens; `sets` times other keys and values."""
    batch, context, queries, kv, dim, sets = (
        request[name] for name in ("batch", "context", "queries", "kv", "dim", "sets")
    )
    keys = [bench.random(batch, kv, context, dim) for _ in range(sets)]
    values = [bench.random(batch, kv, context, dim) for _ in range(sets)]
    # The query heads of a KV head as rows of one head, which all see all keys.
    rows = bench.random(batch, kv, queries // kv, dim)
    heads = rows.view(batch, queries, 1, dim)
    ways = []
    for backend in BACKENDS:
        ways.append(lambda i, backend=backend: attend(backend, rows, keys[i], values[i]))
        ways.append(lambda i, backend=backend: attend(backend, heads, keys[i], values[i], enable_gqa=True))
    return fastest(bench, ways, sets)


def prefill(bench, request):
    """A prompt of `tokens`."""
    tokens, queries, kv, dim = (request[name] for name in ("tokens", "queries", "kv", "dim"))
    query = bench.random(1, queries, tokens, dim)
    key, value = bench.random(1, kv, tokens, dim), bench.random(1, kv, tokens, dim)
    wide_key, wide_value = (x.repeat_interleave(queries // kv, dim=1) for x in (key, value))
    ways = []
    for backend in BACKENDS:
        ways.append(
            lambda _, backend=backend: attend(backend, query, key, value, is_causal=True, enable_gqa=True)
        )
        ways.append(lambda _, backend=backend: attend(backend, query, wide_key, wide_value, is_causal=True))
    return fastest(bench, ways, 1)


CASES = {"decode": decode, "prefill": prefill}
