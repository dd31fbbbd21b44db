"""Programs for a GPU in Triton; `kernels` runs them and says what they do."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def gram(
    rows,
    factor,
    sums,
    size,
    height,
    both,
    row_stride,
    factor_stride,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Multiply the rows of two tensors with themselves, some columns for each program."""
    row = tl.arange(0, SIDE)[:, None].to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * CHUNK
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for at in range(0, CHUNK, TILE):
        column = first + at + tl.arange(0, TILE)[None, :]
        inside = column < size
        # Each row comes from one of the two tensors; the other gives zero, and reads nothing.
        both_rows = tl.load(rows + row * row_stride + column, mask=(row < height) & inside, other=0.0)
        below = factor + (row - height) * factor_stride + column
        both_rows += tl.load(below, mask=(row >= height) & (row < both) & inside, other=0.0)
        total = tl.dot(both_rows, tl.trans(both_rows), total, input_precision="tf32x3")
    place = tl.program_id(0).to(tl.int64) * SIDE * SIDE
    tl.store(sums + place + row * SIDE + tl.arange(0, SIDE)[None, :], total)


@triton.jit
def project(
    rows,
    factor,
    diag,
    prior,
    weights,
    new_factor,
    new_diag,
    clipped,
    size,
    height,
    row_stride,
    factor_stride,
    new_stride,
    prior_stride,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write U⁺ and d⁺ of some columns, each read once."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    k = tl.arange(0, WIDE)
    made = tl.zeros((WIDE, BLOCK), tl.float32)
    seen, old = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    width = height + RANK + 2
    place = column
    for row in range(height):
        x = tl.load(rows + place, mask=inside, other=0.0)
        place += row_stride
        made += tl.load(weights + k * width + row, mask=k < RANK, other=0.0)[:, None] * x[None, :]
        seen += x * x
    place = column
    for row in tl.static_range(RANK):
        x = tl.load(factor + place, mask=inside, other=0.0)
        place += factor_stride
        made += tl.load(weights + k * width + height + row, mask=k < RANK, other=0.0)[:, None] * x[None, :]
        old += x * x
    beta, gain = tl.load(weights + width - 2), tl.load(weights + width - 1)
    d, lam = (
        tl.load(diag + column, mask=inside, other=1.0),
        tl.load(prior + column * prior_stride, mask=inside, other=1.0),
    )
    base = d + beta * (lam - d)
    left = old - tl.sum(made * made, 0) - beta * old + gain * seen + base
    new = tl.maximum(left, tl.minimum(base, lam))
    tl.store(
        new_factor + k[:, None].to(tl.int64) * new_stride + column[None, :],
        made,
        mask=(k[:, None] < RANK) & inside[None, :],
    )
    tl.store(new_diag + column, new, mask=inside)
    tl.store(clipped + tl.program_id(0), tl.sum(tl.where(inside, new - left, 0.0), 0))


@triton.jit
def products(
    rows,
    factor,
    diag,
    prior,
    sums,
    size,
    height,
    both,
    sum_stride,
    row_stride,
    factor_stride,
    prior_stride,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply G, U and λU/d with U/d, some columns for each program."""
    row, k = tl.arange(0, SIDE)[:, None].to(tl.int64), tl.arange(0, WIDE)[:, None].to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * CHUNK
    total, ends = tl.zeros((SIDE, WIDE), tl.float32), tl.zeros((WIDE, WIDE), tl.float32)
    squares = tl.zeros((SIDE,), tl.float32)
    for at in range(0, CHUNK, TILE):
        column = first + at + tl.arange(0, TILE)[None, :]
        inside = column < size
        both_rows = tl.load(rows + row * row_stride + column, mask=(row < height) & inside, other=0.0)
        below = factor + (row - height) * factor_stride + column
        both_rows += tl.load(below, mask=(row >= height) & (row < both) & inside, other=0.0)
        scaled = tl.load(factor + k * factor_stride + column, mask=(k < both - height) & inside, other=0.0)
        scaled /= tl.load(diag + column, mask=inside, other=1.0)
        lam = tl.load(prior + column * prior_stride, mask=inside, other=1.0)
        total = tl.dot(both_rows, tl.trans(scaled), total, input_precision="tf32x3")
        ends = tl.dot(scaled * lam, tl.trans(scaled), ends, input_precision="tf32x3")
        squares += tl.sum(both_rows * both_rows, 1)
    place = sums + tl.program_id(0).to(tl.int64) * sum_stride
    across = tl.arange(0, WIDE)[None, :]
    tl.store(place + row * WIDE + across, total)
    tl.store(place + (SIDE + k) * WIDE + across, ends)
    tl.store(place + (SIDE + WIDE) * WIDE + tl.arange(0, SIDE), squares)


@triton.jit
def analyse(
    rows,
    factor,
    diag,
    prior,
    weights,
    new_factor,
    new_diag,
    clipped,
    size,
    height,
    row_stride,
    factor_stride,
    new_stride,
    prior_stride,
    least_free,
    least_prior,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write U⁺ and d⁺ of some columns after a step of factor analysis, each read once."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    k = tl.arange(0, WIDE)
    is_row, wide = k < RANK, k[:, None].to(tl.int64)
    within = is_row[:, None] & inside[None, :]
    d = tl.load(diag + column, mask=inside, other=1.0)
    lam = tl.load(prior + column * prior_stride, mask=inside, other=1.0)
    whole = tl.load(factor + wide * factor_stride + column[None, :], mask=within, other=0.0)
    lost = tl.zeros((WIDE, BLOCK), tl.float32)
    seen, held = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    width = height + 3 * RANK + 2
    weights_of = weights + k * width
    place = column
    for row in range(height):
        x = tl.load(rows + place, mask=inside, other=0.0)
        place += row_stride
        lost += tl.load(weights_of + row, mask=is_row, other=0.0)[:, None] * x[None, :]
        seen += x * x
    place = column
    for row in tl.static_range(RANK):
        x = tl.load(factor + place, mask=inside, other=0.0)
        place += factor_stride
        z = x / d
        lost += tl.load(weights_of + height + row, mask=is_row, other=0.0)[:, None] * x[None, :]
        lost -= tl.load(weights_of + height + RANK + row, mask=is_row, other=0.0)[:, None] * (z * lam)[None, :]
        inverse = tl.load(weights_of + height + 2 * RANK + row, mask=is_row, other=0.0)
        held += tl.sum(inverse[:, None] * whole, 0) * z
    beta, gain = tl.load(weights + width - 2), tl.load(weights + width - 1)
    change = (lam - d) * beta - beta * tl.sum(whole * whole, 0) + gain * seen
    change += tl.sum((2 * whole - lost) * lost, 0)
    free = tl.minimum(tl.maximum(1 - held, least_free), 1.0)
    left = d + change
    fewer = d * left / (d + tl.minimum(change, 0.0) * (1 - 1 / free))
    more = d + change / free
    new = tl.maximum(tl.where(change > 0, more, fewer), tl.minimum(d, lam * least_prior))
    tl.store(new_factor + wide * new_stride + column[None, :], whole - lost, mask=within)
    tl.store(new_diag + column, new, mask=inside)
    tl.store(clipped + tl.program_id(0), tl.sum(tl.where(inside, tl.maximum(-left, 0.0), 0.0), 0))


@triton.jit
def split(
    x,
    out,
    positions,
    size,
    row_stride,
    position_stride,
    stride,
    IS_LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the pieces of float32 numbers in bfloat16, in the order of one side of a product."""
    place, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    entries = positions * size
    inside = place < entries
    source = row * row_stride + (place // size) * position_stride + (place % size) * stride
    whole = tl.load(x + source, mask=inside, other=0.0)
    high = whole.to(tl.bfloat16)
    rest = whole - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    out += row * 6 * entries + place
    # Small products come first, and are rounded less.
    tl.store(out, low if IS_LEFT else high, mask=inside)
    tl.store(out + entries, high if IS_LEFT else low, mask=inside)
    tl.store(out + 2 * entries, middle, mask=inside)
    tl.store(out + 3 * entries, middle if IS_LEFT else high, mask=inside)
    tl.store(out + 4 * entries, high if IS_LEFT else middle, mask=inside)
    tl.store(out + 5 * entries, high, mask=inside)
