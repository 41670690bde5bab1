"""Products of a few rows with weights that stay: x (A, D) times W (D, O), a hundred times a token.

On a CPU such a product takes as long as reading its weights. So it matters how they lie in memory,
and how many bits they have.

weights     form      how W is kept
float32     plain     (in, out) in memory; of one row up to 8 times as fast as (out, in)
            packed    blocks of oneDNN, the same numbers: of 8 rows 2 to 3 times as fast as plain
bfloat16    packed    the same in bfloat16; x and the product are rounded to it, too
int8        codes     whole numbers up to 127 and a scale for each output, x in bfloat16

Which form is the fastest was measured (docs/log.md): `Matrix` goes by the rows and the size alone,
so that a model says the same every time. All but `plain` needs oneDNN, which PyTorch for a CPU has.
"""

import torch
import torch.nn.functional as F

WEIGHTS = ("float32", "bfloat16", "int8")
LARGE = 2**19  # products from so many multiplications on are worth the call of oneDNN
FEW = 4  # rows up to which codes are read as they are
onednn = torch.ops.mkldnn


def can_pack(device):
    return device.type == "cpu" and torch.backends.mkldnn.is_available()


class Matrix:
    """W for about `rows` rows at a time.

    Args:
        weight: (O, D), as a Linear has it.
        dtype: of x and of what comes out.
        weights: one of WEIGHTS, on a CPU and with float32; None: as dtype is.
    """

    def __init__(self, weight, dtype, rows, weights=None):
        self.dtype, self.inputs, self.scale = dtype, weight.size(1), None
        packs = can_pack(weight.device) and dtype in (torch.float32, torch.bfloat16)
        weight = weight.detach().to(dtype)
        if weights == "int8":
            self.scale = weight.abs().amax(1).clamp(min=1e-30) / 127  # (O,)
            weight = (weight / self.scale[:, None]).round()
        self.inner = torch.bfloat16 if weights in ("bfloat16", "int8") else dtype
        large = rows * weight.numel() >= LARGE and (rows > 1 or torch.get_num_threads() > 1)
        if weights == "int8" and rows <= FEW and weight.size(1) % 32 == 0:  # as its kernel wants it
            self.form, self.weight = "codes", weight.to(torch.int8).contiguous()
            self.ones = torch.ones_like(self.scale, dtype=self.inner)
        elif packs and (large or self.inner != torch.float32):
            weight = weight.to(self.inner).contiguous()
            self.form, self.weight = "packed", onednn._reorder_linear_weight(weight, rows)
        else:
            self.form, self.weight = "plain", weight.T.to(self.inner).contiguous()

    def __call__(self, x):
        """x @ W. (A, D) -> (A, O), both in `dtype`."""
        x = x.to(self.inner)
        if self.form == "plain":
            y = x @ self.weight
        elif self.form == "packed":
            y = onednn._linear_pointwise(x, self.weight, None, "none", [], "")
        else:
            y = torch._weight_int8pack_mm(x, self.weight, self.ones)
        y = y.to(self.dtype)
        return y if self.scale is None else y * self.scale

    def added(self, residual, x):
        """residual + x @ W."""
        if self.inner != residual.dtype:
            return residual + self(x)
        if self.form == "plain":
            return torch.addmm(residual, x, self.weight)
        return onednn._linear_pointwise.binary(x, residual, self.weight, None, "add")


def gated(gate, up, x):
    """silu(x @ gate) * (x @ up), SwiGLU without its last product; two operations where packed."""
    if gate.form == up.form == "packed" and gate.inner == gate.dtype:
        y = onednn._linear_pointwise(x, gate.weight, None, "swish", [], "")
        return onednn._linear_pointwise.binary(x, y, up.weight, None, "mul")
    return F.silu(gate(x)) * up(x)
