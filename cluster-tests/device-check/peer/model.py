"""A Llama in PyTorch as fast as it can be written by hand: fused projections, caches of a fixed size, one graph a step.

Where there are several ways (attention; of a decode also the library of products, and whether a product adds to the
residual) all are tried, and the fastest counts.
"""

import weakref

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

EPS = 1e-5
ROPE_THETA = 500_000.0
# All but the one that writes every score to memory.
ATTENTION_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
PRODUCT_LIBRARIES = ("cublas", "cublaslt")


class Layer:
    def __init__(self, bench, shape):
        hidden, queries = shape["hidden"], shape["heads"] * shape["head_dim"]
        keys = shape["kv_heads"] * shape["head_dim"]

        def matrix(outputs, inputs):
            return bench.random(outputs, inputs).mul_(inputs**-0.5)

        self.attention_norm = torch.ones(hidden, device=bench.device, dtype=torch.bfloat16)
        self.qkv = matrix(queries + 2 * keys, hidden)
        self.output = matrix(hidden, queries)
        self.mlp_norm = torch.ones_like(self.attention_norm)
        self.gate_up = matrix(2 * shape["intermediate"], hidden)
        self.down = matrix(hidden, shape["intermediate"])


class Weights:
    """Those of one shape: random."""

    def __init__(self, bench, shape):
        hidden = shape["hidden"]
        self.embedding = bench.random(shape["vocabulary"], hidden)
        self.layers = [Layer(bench, shape) for _ in range(shape["layers"])]
        self.norm = torch.ones(hidden, device=bench.device, dtype=torch.bfloat16)
        self.head = bench.random(shape["vocabulary"], hidden).mul_(hidden**-0.5)


# Shared by the cases of one shape, and gone with the last of them.
_WEIGHTS = weakref.WeakValueDictionary()


def weights_of(bench, request):
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary")
    key = tuple(request[name] for name in names)
    weights = _WEIGHTS.get(key)
    if weights is None:
        weights = Weights(bench, request)
        _WEIGHTS[key] = weights
    return weights


def rotations(positions, head_dim, like):
    """Cosines and signed sines of the two halves of a head, `[positions, 1, 2, head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    angles = positions.to(torch.float32)[:, None] * ROPE_THETA**-exponents
    cos, sin = angles.cos(), angles.sin()
    both = torch.stack((cos, cos), dim=1), torch.stack((-sin, sin), dim=1)
    return tuple(part.unsqueeze(1).to(like.dtype) for part in both)


class Model:
    """One way of doing it. `attend(q, k, v)` is for `[batch, heads, rows, head_dim]`."""

    def __init__(self, weights, shape, attend, fused_residual):
        self.weights = weights
        self.shape = shape
        self.attend = attend
        self.fused_residual = fused_residual
        self.query_heads = shape["heads"]
        self.rotated_heads = shape["heads"] + shape["kv_heads"]
        self.head_dim = shape["head_dim"]

    def hidden_states(self, tokens, cos, sin, attended):
        """From tokens `[rows]` to normalised hidden states; `attended(at, qkv)` takes rotated heads."""
        hidden = F.embedding(tokens, self.weights.embedding)
        width = hidden.shape[-1:]
        for at, layer in enumerate(self.weights.layers):
            qkv = F.linear(F.rms_norm(hidden, width, layer.attention_norm, EPS), layer.qkv)
            qkv = qkv.view(hidden.shape[0], -1, self.head_dim)
            self.rotate(qkv, cos, sin)
            hidden = self.add_product(hidden, attended(at, qkv), layer.output)
            normed = F.rms_norm(hidden, width, layer.mlp_norm, EPS)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = self.add_product(hidden, F.silu(gate).mul_(up), layer.down)
        return F.rms_norm(hidden, width, self.weights.norm, EPS)

    def rotate(self, qkv, cos, sin):
        """Queries and keys, in place."""
        halves = qkv[:, : self.rotated_heads].unflatten(-1, (2, self.head_dim // 2))
        torch.addcmul(halves * cos, halves.flip(2), sin, out=halves)

    def add_product(self, residual, x, weight):
        if self.fused_residual:
            return torch.addmm(residual, x, weight.t())
        return residual + F.linear(x, weight)


class Decoder(Model):
    """Decodes one token of each sequence at the last position of full caches."""

    def __init__(self, bench, weights, shape, caches, attend, fused_residual):
        super().__init__(weights, shape, attend, fused_residual)
        self.caches = caches
        self.position = shape["context"] - 1
        position = torch.tensor([self.position], device=bench.device)
        self.cos, self.sin = rotations(position, self.head_dim, weights.norm)
        self.tokens = torch.randint(shape["vocabulary"], (shape["batch"],), device=bench.device)

    def step(self):
        """Logits of all sequences. The likeliest tokens are the next step's."""
        hidden = self.hidden_states(self.tokens, self.cos, self.sin, self.attended)
        logits = F.linear(hidden, self.weights.head)
        self.tokens.copy_(logits.argmax(dim=-1))
        return logits

    def attended(self, at, qkv):
        cache, kv_heads = self.caches[at], self.shape["kv_heads"]
        # Keys and values of a position in one copy.
        cache[:, :, self.position] = qkv[:, self.query_heads :]
        queries = qkv[:, : self.query_heads].unsqueeze(2)
        attended = self.attend(queries, cache[:, :kv_heads], cache[:, kv_heads:])
        return attended.reshape(qkv.shape[0], -1)


class Prefiller(Model):
    """Computes a whole prompt, and the token after it. Keys and values stay where the product made them."""

    def __init__(self, bench, weights, shape, attend, fused_residual):
        super().__init__(weights, shape, attend, fused_residual)
        positions = torch.arange(shape["context"], device=bench.device)
        self.cos, self.sin = rotations(positions, self.head_dim, weights.norm)
        self.tokens = torch.randint(shape["vocabulary"], (shape["context"],), device=bench.device)

    def step(self):
        hidden = self.hidden_states(self.tokens, self.cos, self.sin, self.attended)
        logits = F.linear(hidden[-1:], self.weights.head)
        return logits, logits.argmax(dim=-1)

    def attended(self, _, qkv):
        heads = qkv.transpose(0, 1).unsqueeze(0)
        queries, keys = heads[:, : self.query_heads], heads[:, self.query_heads : self.rotated_heads]
        attended = self.attend(queries, keys, heads[:, self.rotated_heads :])
        return attended.transpose(1, 2).reshape(qkv.shape[0], -1)


def grouped(backend, causal):
    """Attention of heads that share keys, by one of PyTorch's implementations; its own choice where none is named."""

    def attend(q, k, v):
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return attend


def folded(backend):
    """The same for one row a sequence: heads that share keys are taken for rows of one head."""

    def attend(q, k, v):
        batch, heads, _, head_dim = q.shape
        q = q.reshape(batch, k.shape[1], heads // k.shape[1], head_dim)
        if backend is None:
            attended = F.scaled_dot_product_attention(q, k, v)
        else:
            with sdpa_kernel(backend):
                attended = F.scaled_dot_product_attention(q, k, v)
        return attended.reshape(batch, heads, 1, head_dim)

    return attend


def ways_to_attend(bench, folds, causal):
    for backend in ATTENTION_BACKENDS if bench.device.type == "cuda" else (None,):
        yield grouped(backend, causal)
        if folds:
            yield folded(backend)


def fastest(bench, ways, prepare):
    """That of `ways` for which `prepare` makes the fastest work, and that work. Those that fail are out."""
    found, reasons = [], []
    for way in ways:
        try:
            seconds = prepare(way)
            found.append((seconds(), len(found), way, seconds))
        except Exception as error:  # such as no kernel for these shapes
            reasons.append(repr(error)[:100])
    if not found:
        raise RuntimeError("; ".join(reasons))
    return min(found)[2:]


def prepare_step(bench, model, library):
    """A whole step in a graph, with products by `library`: which it is counts while they are recorded."""
    if bench.device.type != "cuda":
        return bench.prepare(lambda _: model.step(), 1)
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        return bench.prepare(lambda _: model.step(), 1)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def keeping(seconds, *data):
    """The same, with what the graph reads: a graph keeps none of it."""
    return lambda: (seconds(), data)[0]


def model_decode(bench, request):
    """One token of each of `batch` sequences over `context` positions, its own included."""
    weights = weights_of(bench, request)
    kv_heads, head_dim = request["kv_heads"], request["head_dim"]
    batch, context = request["batch"], request["context"]
    caches = [bench.random(batch, 2 * kv_heads, context, head_dim) for _ in range(request["layers"])]
    queries = bench.random(batch, request["heads"], 1, head_dim)

    def prepare_attention(attend):
        def work(at):
            attend(queries, caches[at][:, :kv_heads], caches[at][:, kv_heads:])

        return bench.prepare(work, len(caches))

    attend, _ = fastest(bench, ways_to_attend(bench, True, False), prepare_attention)
    decoders = [Decoder(bench, weights, request, caches, attend, fused) for fused in (False, True)]
    ways = [(decoder, library) for decoder in decoders for library in PRODUCT_LIBRARIES]
    way, seconds = fastest(bench, ways, lambda way: prepare_step(bench, *way))
    return keeping(seconds, way)


def model_prefill(bench, request):
    """A prompt of `context` tokens, to its next token."""
    weights = weights_of(bench, request)
    context, head_dim = request["context"], request["head_dim"]
    queries = bench.random(1, request["heads"], context, head_dim)
    keys, values = (bench.random(1, request["kv_heads"], context, head_dim) for _ in range(2))

    def prepare_attention(attend):
        return bench.prepare(lambda _: attend(queries, keys, values), 1)

    attend, _ = fastest(bench, ways_to_attend(bench, False, True), prepare_attention)
    # In one way only: a replay takes long, and large products leave little to choose.
    prefiller = Prefiller(bench, weights, request, attend, True)
    return keeping(bench.prepare(lambda _: prefiller.step(), 1), prefiller)


CASES = {"model_decode": model_decode, "model_prefill": model_prefill}
