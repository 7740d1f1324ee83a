"""Triton kernels of convolutions in which every client has weights of its own.

Implicit matrix products: pixels are rows, channels columns, and the taps of the window are walked
one after another, so nothing is unfolded in memory. Images are [K, B, H, W, C] and weights
[K, O, KH, KW, C] in memory (channels last), and a client's weights may lie anywhere in its row.
"""

import triton
import triton.language as tl


@triton.jit
def _multiply(a, b, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(tl.trans(b), tl.trans(a), acc, input_precision="tf32")
    else:
        acc = tl.dot(a, b, acc, input_precision="tf32")
    return acc


@triton.jit
def unscaled(acc, unit_a, unit_b, client, SCALED: tl.constexpr):
    """Undo what the operands were multiplied by.

    One after the other, or both together might underflow; the smaller first, or the larger alone
    might overflow.
    """
    if SCALED:
        one, other = tl.load(unit_a + client), tl.load(unit_b + client)
        acc = acc * tl.minimum(one, other) * tl.maximum(one, other)
    return acc


@triton.jit(do_not_specialize=["B"])
def forward_kernel(
    x, w, y, unit_x, unit_w, w_row, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum over taps and c of x[m moved by the tap, c] w[n, tap, c]."""
    client = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (OC + BN - 1) // BN
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    image, pixel = m // (OH * OW), m % (OH * OW)
    top, left = (pixel // OW) * S - P, (pixel % OW) * S - P
    x += client * (B * H * W * C)
    w += client * w_row
    y += client * (B * OH * OW * OC)
    depth: tl.constexpr = (C + BK - 1) // BK
    c = tl.arange(0, BK)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.float32)
    for step in range(KH * KW * depth):
        tap, c0 = step // depth, (step % depth) * BK
        h, v = top + tap // KW, left + tap % KW
        inside = (m < B * OH * OW) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        from_x = ((image * H + h) * W + v)[:, None] * C + (c0 + c)[None, :]
        from_w = (n * (KH * KW) + tap)[None, :] * C + (c0 + c)[:, None]
        if C % BK == 0:
            a = tl.load(x + from_x, mask=inside[:, None], other=0.0)
            b = tl.load(w + from_w, mask=(n < OC)[None, :], other=0.0)
        else:
            a = tl.load(x + from_x, mask=inside[:, None] & (c0 + c < C)[None, :], other=0.0)
            b = tl.load(w + from_w, mask=(n < OC)[None, :] & (c0 + c < C)[:, None], other=0.0)
        acc = _multiply(a, b, acc, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    acc = unscaled(acc, unit_x, unit_w, client, SCALED)
    at = m[:, None] * OC + n[None, :]
    tl.store(
        y + at, acc.to(y.dtype.element_ty), mask=(m < B * OH * OW)[:, None] & (n < OC)[None, :]
    )


@triton.jit(do_not_specialize=["B"])
def input_gradient_kernel(
    dy, w, dx, unit_dy, unit_w, w_row, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """dx[m, n] = sum over taps and o of dy[where the tap puts m, o] w[o, tap, n].

    With a stride S, pixels fall into S x S classes (axis 2 of the grid) that see different taps.
    """
    client = tl.program_id(1).to(tl.int64)
    ph, pw = tl.program_id(2) // S, tl.program_id(2) % S
    HC: tl.constexpr = (H + S - 1) // S
    WC: tl.constexpr = (W + S - 1) // S
    across: tl.constexpr = (C + BN - 1) // BN
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    image, pixel = m // (HC * WC), m % (HC * WC)
    i, j = pixel // WC, pixel % WC
    h, v = ph + S * i, pw + S * j
    first_h, first_w = (ph + P) % S, (pw + P) % S
    top, left = (ph + P - first_h) // S + i, (pw + P - first_w) // S + j
    taps_w = (KW - first_w + S - 1) // S
    taps = ((KH - first_h + S - 1) // S) * taps_w
    dy += client * (B * OH * OW * OC)
    w += client * w_row
    dx += client * (B * H * W * C)
    depth: tl.constexpr = (OC + BK - 1) // BK
    o = tl.arange(0, BK)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.float32)
    for step in range(taps * depth):
        tap, o0 = step // depth, (step % depth) * BK
        down, right = tap // taps_w, tap % taps_w
        oh, ow = top - down, left - right
        inside = (image < B) & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW)
        window = (first_h + S * down) * KW + first_w + S * right
        from_dy = ((image * OH + oh) * OW + ow)[:, None] * OC + (o0 + o)[None, :]
        from_w = ((o0 + o) * (KH * KW) + window)[:, None] * C + n[None, :]
        if OC % BK == 0:
            a = tl.load(dy + from_dy, mask=inside[:, None], other=0.0)
            b = tl.load(w + from_w, mask=(n < C)[None, :], other=0.0)
        else:
            a = tl.load(dy + from_dy, mask=inside[:, None] & (o0 + o < OC)[None, :], other=0.0)
            b = tl.load(w + from_w, mask=(n < C)[None, :] & (o0 + o < OC)[:, None], other=0.0)
        acc = _multiply(a, b, acc, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    acc = unscaled(acc, unit_dy, unit_w, client, SCALED)
    at = ((image * H + h) * W + v)[:, None] * C + n[None, :]
    real = (image < B) & (h < H) & (v < W)
    tl.store(dx + at, acc.to(dx.dtype.element_ty), mask=real[:, None] & (n < C)[None, :])


@triton.jit
def _shifted(x, image, top, left, inside, c, tap, C: tl.constexpr, H: tl.constexpr,
             W: tl.constexpr, KW: tl.constexpr):  # fmt: skip
    """The pixels [depth, channels] of x that a tap sees."""
    h, v = top + tap // KW, left + tap % KW
    inside = inside & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    at = ((image * H + h) * W + v)[:, None] * C + c[None, :]
    return tl.load(x + at, mask=inside[:, None] & (c < C)[None, :], other=0.0)


@triton.jit(do_not_specialize=["B"])
def weight_gradient_kernel(
    dy, x, dw, unit_dy, unit_x, part, B,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TAPS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """dw[o, tap, c] = sum over pixels of dy[pixel, o] x[pixel moved by the tap, c].

    A program does one tap, or the three taps of a row of the window, so that dy is read once.
    Axis 2 of the grid cuts the pixels into parts of `part` each.
    """
    client = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (C + BN - 1) // BN
    down: tl.constexpr = (OC + BM - 1) // BM
    tile, tap = tl.program_id(0) % (across * down), tl.program_id(0) // (across * down) * TAPS
    o = (tile // across) * BM + tl.arange(0, BM)
    c = (tile % across) * BN + tl.arange(0, BN)
    dy += client * (B * OH * OW * OC)
    x += client * (B * H * W * C)
    dw += (tl.program_id(2) * tl.num_programs(1) + client) * (OC * KH * KW * C)
    one = tl.zeros((BM, BN), dtype=tl.float32)
    two, three = one, one
    begin = tl.program_id(2) * part
    for start in range(begin, min(begin + part, B * OH * OW), BK):
        p = start + tl.arange(0, BK)
        image, pixel = p // (OH * OW), p % (OH * OW)
        inside = (p < B * OH * OW) & (p < begin + part)
        top, left = (pixel // OW) * S - P, (pixel % OW) * S - P
        from_dy = p[:, None] * OC + o[None, :]
        a = tl.load(dy + from_dy, mask=inside[:, None] & (o < OC)[None, :], other=0.0)
        a = tl.trans(a)
        b = _shifted(x, image, top, left, inside, c, tap, C, H, W, KW)
        one = tl.dot(a, b, one, input_precision="tf32")
        if TAPS == 3:
            b = _shifted(x, image, top, left, inside, c, tap + 1, C, H, W, KW)
            two = tl.dot(a, b, two, input_precision="tf32")
            b = _shifted(x, image, top, left, inside, c, tap + 2, C, H, W, KW)
            three = tl.dot(a, b, three, input_precision="tf32")
    at = (o[:, None] * (KH * KW) + tap) * C + c[None, :]
    real = (o < OC)[:, None] & (c < C)[None, :]
    one = unscaled(one, unit_dy, unit_x, client, SCALED)
    tl.store(dw + at, one.to(dw.dtype.element_ty), mask=real)
    if TAPS == 3:
        two = unscaled(two, unit_dy, unit_x, client, SCALED)
        three = unscaled(three, unit_dy, unit_x, client, SCALED)
        tl.store(dw + at + C, two.to(dw.dtype.element_ty), mask=real)
        tl.store(dw + at + 2 * C, three.to(dw.dtype.element_ty), mask=real)
