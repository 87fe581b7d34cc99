"""What somebody writes in Triton in an afternoon: a matrix times one row, and a decode cut into parts."""

import triton
import triton.language as tl


@triton.jit
def gemv(x, weight, y, outputs, inputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """`y = weight x`, a program for so many outputs."""
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, INPUTS)
    is_row = rows[:, None] < outputs
    places = weight + rows[:, None] * inputs + columns[None, :]
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        is_column = columns < inputs - start
        part = tl.load(places + start, mask=is_row & is_column[None, :], other=0.0)
        factor = tl.load(x + start + columns, mask=is_column, other=0.0)
        sums += part.to(tl.float32) * factor.to(tl.float32)[None, :]
    tl.store(y + rows, tl.sum(sums, 1), mask=rows < outputs)


@triton.jit
def decode_parts(
    queries, keys, values, sums, scales, context, part_keys, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """A program for one KV head of a sequence and one part of its keys; its query heads are rows of a tile."""
    head, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows, dims, keys_at_once = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
    is_row = rows < HEADS
    query_places = queries + (head * HEADS + rows[:, None]) * DIM + dims[None, :]
    query = tl.load(query_places, mask=is_row[:, None], other=0.0)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sum_of_values = tl.zeros((ROWS, DIM), tl.float32)
    first = part * part_keys
    end = tl.minimum(first + part_keys, context)
    base = head.to(tl.int64) * context * DIM
    for start in range(first, end, KEYS):
        places = base + (start + keys_at_once[:, None]) * DIM + dims[None, :]
        is_key = start + keys_at_once < end
        key = tl.load(keys + places, mask=is_key[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        score = tl.where(is_key[None, :], score, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(score, 1))
        shrunk = tl.exp2(largest - now_largest)
        weight = tl.exp2(score - now_largest[:, None])
        value = tl.load(values + places, mask=is_key[:, None], other=0.0)
        sum_of_values = sum_of_values * shrunk[:, None] + tl.dot(weight.to(value.dtype), value)
        total = total * shrunk + tl.sum(weight, 1)
        largest = now_largest
    row = (head * HEADS + rows) * parts + part
    tl.store(sums + row[:, None] * DIM + dims[None, :], sum_of_values, mask=is_row[:, None])
    tl.store(scales + row * 2, largest, mask=is_row)
    tl.store(scales + row * 2 + 1, total, mask=is_row)


@triton.jit
def decode_join(sums, scales, out, parts, PARTS: tl.constexpr, DIM: tl.constexpr):
    """A program for one query head of a sequence: its parts, joined."""
    row, at, dims = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, DIM)
    is_part = at < parts
    largest = tl.load(scales + (row * parts + at) * 2, mask=is_part, other=float("-inf"))
    total = tl.load(scales + (row * parts + at) * 2 + 1, mask=is_part, other=0.0)
    share = tl.exp2(largest - tl.max(largest, 0))
    places = sums + (row * parts + at[:, None]) * DIM + dims[None, :]
    part = tl.load(places, mask=is_part[:, None], other=0.0)
    result = tl.sum(part * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + row * DIM + dims, result.to(out.dtype.element_ty))
