"""Products of a few rows with weights that stay: x (A, D) times W (D, O), a hundred times a token.

On a CPU such a product takes as long as reading its weights. So it matters how they lie in memory,
and how many bits they have.

weights     class     how W is kept
float32     Plain     (in, out) in memory; of one row up to 8 times as fast as (out, in)
            Packed    blocks of oneDNN, the same numbers: of 8 rows 0.8 to 3 times as fast as Plain
bfloat16    Small     Packed in bfloat16; x and the product are rounded to it, too (not the
                      product of FEW rows in a compiled pass)
int8        Small     whole numbers up to 127 and a scale for each output, x in bfloat16

Which class is the fastest was measured. `matrix` goes by rows, size and threads, not
by a clock, so that a model says the same every time. All but Plain needs oneDNN, which PyTorch for
a CPU usually has, and bfloat16 in it, which needs AVX-512 or the like.
"""

import torch
import torch.nn.functional as F

WEIGHTS = ("float32", "bfloat16", "int8")
LARGE = 2**21  # products from so many multiplications on are worth the call of oneDNN
FEW = 4  # rows up to which a product reads weights of fewer bits as they are
CACHED = 2**26  # bytes of weights that a CPU may still have in its caches
onednn = torch.ops.mkldnn


def matrix(weight, dtype, rows, weights="float32", compiled=False):
    """W for about `rows` rows at a time.

    Args:
        weight: (O, D), as a Linear has it.
        dtype: of x and of what comes out.
        weights: one of WEIGHTS; those of fewer bits on a CPU and with dtype float32.
        compiled: for a pass that is compiled, which does not know Packed; see is_frozen.
    """
    weight = weight.detach().to(dtype)
    if weights in ("bfloat16", "int8"):
        return Small(weight, rows, weights, compiled)
    if compiled:
        return Plain(weight)
    large = rows * weight.numel() >= LARGE and (rows > 1 or torch.get_num_threads() > 1)
    in_half = dtype == torch.bfloat16 and has_bfloat16()
    in_float = dtype == torch.float32 and large and torch.backends.mkldnn.is_available()
    if weight.is_cpu and (in_half or in_float):
        return Packed(weight, rows)
    return Plain(weight)


def weight_count(model):
    """How many weights the products of a pass read."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def is_frozen(model, rows, weights="float32"):
    """Whether the compiler should pack the weights of a pass (freeze them)."""
    if weights != "float32":
        return rows > FEW
    return rows >= FEW and 4 * weight_count(model) > CACHED


def has_bfloat16():
    """Whether this CPU has blocks of bfloat16."""
    return torch.backends.mkldnn.is_available() and onednn._is_mkldnn_bf16_supported()


class Plain:
    def __init__(self, weight):
        self.weight = weight.T.contiguous()

    def __call__(self, x):
        """x @ W. (A, D) -> (A, O)"""
        return x @ self.weight

    def added(self, residual, x):
        """residual + x @ W."""
        if residual.dtype != x.dtype:
            return residual + self(x)
        return torch.addmm(residual, x, self.weight)


class Packed:
    def __init__(self, weight, rows):
        self.weight = onednn._reorder_linear_weight(weight.contiguous(), rows)

    def __call__(self, x):
        return onednn._linear_pointwise(x, self.weight, None, "none", [], "")

    def added(self, residual, x):
        if residual.dtype != x.dtype:
            return residual + self(x)
        return onednn._linear_pointwise.binary(x, residual, self.weight, None, "add")


class Small:
    """Weights of fewer bits than the float32 of x and of the product."""

    def __init__(self, weight, rows, weights, compiled):
        self.scale, few = None, rows <= FEW
        if weights == "int8":
            self.scale = weight.abs().amax(1).clamp(min=1e-30) / 127  # (O,)
            weight = (weight / self.scale[:, None]).round()
        fits = few and weight.size(1) % 32 == 0  # as its kernel wants
        in_half = weight.bfloat16()  # which holds these whole numbers exactly
        if self.scale is not None and fits:
            codes, ones = weight.to(torch.int8), torch.ones_like(self.scale).bfloat16()
            self.product = lambda x: torch._weight_int8pack_mm(x, codes, ones)
        elif not compiled:
            self.product = Packed(in_half, rows)
        elif few:  # one loop when it is compiled
            self.product = lambda x: (x[:, None] * in_half.float()).sum(-1)
        else:
            self.product = Plain(in_half)

    def __call__(self, x):
        y = self.product(x.bfloat16()).float()
        return y if self.scale is None else y * self.scale

    def added(self, residual, x):
        return residual + self(x)


def gated(gate, up, x):
    """silu(x @ gate) * (x @ up), SwiGLU without its last product; two operations where packed."""
    if isinstance(gate, Packed) and isinstance(up, Packed):
        y = onednn._linear_pointwise(x, gate.weight, None, "swish", [], "")
        return onednn._linear_pointwise.binary(x, y, up.weight, None, "mul")
    return F.silu(gate(x)) * up(x)
