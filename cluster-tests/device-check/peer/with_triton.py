"""Cases in Triton, for who has it."""

import math

import torch

from ways import fastest

triton = triton_kernels = None


def check_triton():
    """Loads Triton when it is first asked for: few ask, and all would wait for it."""
    global triton, triton_kernels
    if triton is not None:
        return
    try:
        import triton as found
        import triton_kernels as kernels
    except ImportError as missing:
        raise RuntimeError(f"no Triton: {missing}") from missing
    triton, triton_kernels = found, kernels


def right(shapes, work, got, expected):
    """Those of `shapes` that a card has room for. Wrong results are no baseline. By roots of mean squares, since single
    elements may be near zero."""
    taken, reason = [], None
    for shape in shapes:
        try:
            work(0, *shape)
        except Exception as error:  # such as more shared memory than there is
            reason = error
            continue
        error = (got.float() - expected.float()).square().mean().sqrt() / expected.float().square().mean().sqrt()
        if not error.item() < 0.02:
            raise RuntimeError(f"{shape} in Triton is wrong: {error.item():.3f} of the result")
        taken.append(shape)
    if not taken:
        raise reason
    return taken


def gemv(bench, request):
    """One row of `k` times `sets` weights of `n` rows."""
    check_triton()
    n, k, sets = (request[name] for name in ("n", "k", "sets"))
    weights = [bench.random(n, k) for _ in range(sets)]
    x, y = bench.random(k), torch.empty(n, device=bench.device)

    def multiply(i, outputs, inputs, warps):
        grid = (triton.cdiv(n, outputs),)
        triton_kernels.gemv[grid](x, weights[i], y, n, k, OUTPUTS=outputs, INPUTS=inputs, num_warps=warps)

    shapes = [(1, 1024, 4), (2, 1024, 4), (4, 512, 4), (8, 256, 4), (16, 128, 4), (4, 1024, 8)]
    shapes = right(shapes, multiply, y, weights[0] @ x)
    return fastest(bench, [lambda i, shape=shape: multiply(i, *shape) for shape in shapes], sets)


def decode(bench, request):
    """As the case of PyTorch, over keys and values that lie side by side."""
    check_triton()
    batch, context, queries, kv, dim, sets = (
        request[name] for name in ("batch", "context", "queries", "kv", "dim", "sets")
    )
    keys = [bench.random(batch, kv, context, dim) for _ in range(sets)]
    values = [bench.random(batch, kv, context, dim) for _ in range(sets)]
    rows = bench.random(batch, kv, queries // kv, dim)
    out = torch.empty_like(rows)
    multiprocessors = 4
    if bench.device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(bench.device).multi_processor_count
    scale = dim**-0.5 * math.log2(math.e)

    def attend(i, at_once, per_multiprocessor, warps):
        parts = max(1, min(per_multiprocessor * multiprocessors // (batch * kv), triton.cdiv(context, at_once)))
        part_keys = triton.cdiv(triton.cdiv(context, parts), at_once) * at_once
        parts = triton.cdiv(context, part_keys)
        sums = torch.empty(batch * queries * parts * dim, device=bench.device)
        scales = torch.empty(batch * queries * parts * 2, device=bench.device)
        triton_kernels.decode_parts[(batch * kv, parts)](
            rows, keys[i], values[i], sums, scales, context, part_keys, scale,
            HEADS=queries // kv, ROWS=16, KEYS=at_once, DIM=dim, num_warps=warps,
        )  # fmt: skip
        triton_kernels.decode_join[(batch * queries,)](
            sums, scales, out, parts, PARTS=triton.next_power_of_2(parts), DIM=dim, num_warps=4
        )

    shapes = [(64, 2, 4), (64, 4, 4), (128, 2, 4), (128, 4, 8)]
    expected = torch.nn.functional.scaled_dot_product_attention(rows, keys[0], values[0])
    shapes = right(shapes, attend, out, expected)
    return fastest(bench, [lambda i, shape=shape: attend(i, *shape) for shape in shapes], sets)


CASES = {"triton_gemv": gemv, "triton_decode": decode}
