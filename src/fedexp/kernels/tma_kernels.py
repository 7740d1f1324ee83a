"""Triton kernels of convolutions whose operands come in boxes: Hopper's tensor memory accelerator.

A box of images x rows x pixels x channels comes by one instruction, moved by the tap, with zeros
where it leaves the image or the client's images, so no thread computes an address and no load is
masked. The channels of the result are the rows of the tensor cores' product: an operand that is
reshaped must be the second one, or it would pass through registers.
"""

import triton
import triton.language as tl

from fedexp.kernels.conv_kernels import unscaled


@triton.jit
def boxed_kernel(
    x, w, y, unit_x, unit_w,
    C: tl.constexpr, OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, P: tl.constexpr,
    NI: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BACK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """y[pixel, n] = sum over taps and c of x[pixel moved by the tap, c] w[n, tap, c].

    With BACK, w is [c, taps, n] with its taps the other way round: the gradient for the images.
    """
    client = tl.program_id(1)
    across: tl.constexpr = OC // BN
    right: tl.constexpr = (OW + NW - 1) // NW
    down: tl.constexpr = (OH + NH - 1) // NH
    box = tl.program_id(0) // across
    n = (tl.program_id(0) % across) * BN
    left, top = (box % right) * NW, (box // right % down) * NH
    image = box // (right * down) * NI
    depth: tl.constexpr = C // BK
    acc = tl.zeros((BN, NI * NH * NW), dtype=tl.float32)
    for step in range(KH * KW * depth):
        tap, c = step // depth, (step % depth) * BK
        seen = x.load([client, image, top + tap // KW - P, left + tap % KW - P, c])
        if BACK:
            weights = w.load([client * C + c, (KH * KW - 1 - tap) * OC + n]).T
        else:
            weights = w.load([client * OC + n, tap * C + c])
        acc = tl.dot(weights, seen.reshape(NI * NH * NW, BK).T, acc)
    acc = unscaled(acc, unit_x, unit_w, client, SCALED)
    y.store([client, image, top, left, n], acc.T.to(y.dtype).reshape(1, NI, NH, NW, BN))


@triton.jit
def _add_taps(
    a, x, client, image, row, column, c, one, two, three,
    PIXELS: tl.constexpr, BN: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The sums with the products of one box: of the tap that sees (row, column), and the next."""
    b = x.load([client, image, row, column, c]).reshape(PIXELS, BN)
    one = tl.dot(a, b, one)
    if TAPS == 3:
        b = x.load([client, image, row, column + 1, c]).reshape(PIXELS, BN)
        two = tl.dot(a, b, two)
        b = x.load([client, image, row, column + 2, c]).reshape(PIXELS, BN)
        three = tl.dot(a, b, three)
    return one, two, three


@triton.jit
def boxed_weight_gradient_kernel(
    dy, dy_rows, x, dw, unit_dy, unit_x, part, B,
    C: tl.constexpr, OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, P: tl.constexpr,
    NI: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TAPS: tl.constexpr, FLAT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """dw[o, tap, c] = sum over pixels of dy[pixel, o] x[pixel moved by the tap, c].

    FLAT: boxes are stretches of memory, so that dy can be fetched as rows of pixels; only a box
    that reaches beyond the client's images cannot, for zero times what is there may be no zero.
    TAPS: one, or a row of three, a program. Axis 2 of the grid cuts the boxes into parts.
    """
    client = tl.program_id(1)
    across: tl.constexpr = C // BN
    tiles: tl.constexpr = across * (OC // BM)
    right: tl.constexpr = (OW + NW - 1) // NW
    down: tl.constexpr = (OH + NH - 1) // NH
    PIXELS: tl.constexpr = NI * NH * NW
    tile, tap = tl.program_id(0) % tiles, tl.program_id(0) // tiles * TAPS
    o, c = (tile // across) * BM, (tile % across) * BN
    one = tl.zeros((BM, BN), dtype=tl.float32)
    two, three = one, one
    begin = tl.program_id(2) * part
    end = min(begin + part, (B + NI - 1) // NI * (right * down))
    inside = min(end, B // NI * (right * down)) if FLAT else end
    for box in range(begin, inside):
        left, top = (box % right) * NW, (box // right % down) * NH
        image = box // (right * down) * NI
        h, v = top + tap // KW - P, left + tap % KW - P
        if FLAT:
            a = dy_rows.load([((client * B + image) * OH + top) * OW, o]).T
        else:
            a = dy.load([client, image, top, left, o]).reshape(PIXELS, BM).T
        one, two, three = _add_taps(a, x, client, image, h, v, c, one, two, three, PIXELS, BN, TAPS)
    if FLAT:
        for box in range(max(begin, inside), end):
            top, image = (box % down) * NH, box // down * NI
            h, v = top + tap // KW - P, tap % KW - P
            a = dy.load([client, image, top, 0, o]).reshape(PIXELS, BM).T
            one, two, three = _add_taps(
                a, x, client, image, h, v, c, one, two, three, PIXELS, BN, TAPS
            )
    rows, columns = o + tl.arange(0, BM), c + tl.arange(0, BN)
    dw += (tl.program_id(2) * tl.num_programs(1) + client).to(tl.int64) * (OC * KH * KW * C)
    at = (rows[:, None] * (KH * KW) + tap) * C + columns[None, :]
    one = unscaled(one, unit_dy, unit_x, client, SCALED)
    tl.store(dw + at, one.to(dw.dtype.element_ty))
    if TAPS == 3:
        two = unscaled(two, unit_dy, unit_x, client, SCALED)
        three = unscaled(three, unit_dy, unit_x, client, SCALED)
        tl.store(dw + at + C, two.to(dw.dtype.element_ty))
        tl.store(dw + at + 2 * C, three.to(dw.dtype.element_ty))
