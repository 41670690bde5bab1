"""A formula for the bytes of a training step, in bfloat16 with fused attention.

There are P parameters, P' of them in the matrices of blocks and head, and B windows of T tokens. In a pass of
the Jacobi iteration a token runs n slots: 1 .. K in the first K passes, which grow the slots (here called the
ladder), then K+1 in each of R refinements and in the final pass.

part           bytes
weights        16 P           weights, gradients, and two moments of AdamW, in float32
copies         2 P'           weights in bfloat16; compiled blocks keep them for each pass, since each call of
                              a compiled block casts the weights anew, inside its graph
activations    n B T (L a + b) for each pass: a slot keeps `a` in each of L layers, and `b` beside the layers
logits         12 B T V       at the start of the backward pass: log-softmax and two gradients of its size

With --recompute, a pass keeps only its input and its output until it is computed again. Small parts are left
out: angles, routers, and gradients within a layer, which with --recompute are up to a tenth of the peak. Also
left out is the memory that a GPU's allocator and CUDA take for themselves.
"""

import math


def slots_of_passes(K, R):
    """How many slots a token runs in each pass of a training step: the ladder, then R + 1 whole passes."""
    return [*range(1, K + 1), *[K + 1] * (R + 1)]


def kept_by_a_slot(shape, masked=True, compiled=False, fused=True):
    """Bytes that a slot keeps for the backward pass.

    Args:
        shape: a Config, the settings of a model.
        masked: whether keys carry log w, as in all passes but the first.
        compiled: whether the blocks are compiled.
        fused: whether RMSNorm is one kernel, as on a GPU; on a CPU it keeps its normed input, too.

    Returns:
        The bytes in one layer, and those beside the layers.
    """
    D = shape.hidden_size
    inner = shape.intermediate_size
    H = shape.num_attention_heads
    G = shape.kv_heads
    width = shape.head_width  # of a head in the kernel
    if masked:
        width = 8 * math.ceil((shape.head_width + 1) / 8)  # one channel for log w, padded to a multiple of 8
    norm_input = 4 * D if fused or compiled else 8 * D  # in float32; on a CPU also the normed input

    # q and the output (H heads each), k and v (G each): 2 bytes a number, at the width of the kernel; and
    # log-sum-exp, in float32, for each head of q.
    heads = 2 * (2 * H + 2 * G) * width + 4 * H
    o_proj_input = 2 * H * shape.head_width
    if compiled:
        # x in float32 (4 D); the outputs of both norms and of o_proj in bfloat16 (6 D). SwiGLU: gate, up, and
        # their product.
        layer = 10 * D + heads + o_proj_input + 6 * inner
    else:
        # The inputs of both norms; their outputs in bfloat16, once for each of the five products that read
        # them (10 D), since autocast casts its input anew for each product. SwiGLU: gate, its SiLU, up, and
        # the product.
        layer = 2 * norm_input + 10 * D + heads + o_proj_input + 8 * inner
    layer += 8  # the inverse RMS of both norms, in float32
    final_norm = 4 * D if fused else 8 * D
    h = 4 * D  # which the router reads
    return layer, final_norm + h


def bytes_of_step(shape, B, R, *, recompute=False, compiled=False, fused=True):
    """Bytes at the peak of a training step, by part.

    Args:
        shape: a Config, the settings of a model.
        B: windows at a time.
        R: refinements.
        recompute, compiled: whether the step runs with these flags.
        fused: as kept_by_a_slot.
    """
    D = shape.hidden_size
    T = shape.block_size
    V = shape.vocab_size
    L = shape.num_hidden_layers
    K = shape.ponder_steps
    slots = slots_of_passes(K, R)
    block = (
        2 * D * (shape.num_attention_heads * shape.head_width + shape.kv_heads * shape.head_width)
        + 3 * D * shape.intermediate_size
    )
    blocks = L * block
    head = V * D
    tables = 1 if shape.tie_word_embeddings else 2
    P = blocks + tables * head + D * (2 * L + 1 + K + 1)  # the last: norms and router

    running = []  # what each pass keeps while it runs forward or backward
    waiting = []  # what it keeps in between
    for i, n in enumerate(slots):
        layer, beside = kept_by_a_slot(shape, i > 0, compiled, fused)
        running.append(n * B * T * (L * layer + beside))
        waiting.append(n * B * T * 8 * D if recompute else running[i])  # the inputs, and h
    logits = 12 * B * T * V
    # The backward pass goes from the last pass to the first, and frees each pass when it is done.
    at_start = sum(waiting) + logits
    in_passes = max(sum(waiting[:i]) + running[i] for i in range(len(slots)))
    if at_start >= in_passes:
        activations = sum(waiting)
    else:
        activations = in_passes
        logits = 0
    copies_of_blocks = len(slots) if compiled and not recompute else 1
    return {
        "weights": 16 * P,
        "copies": 2 * (blocks * copies_of_blocks + head),
        # beside the passes, per token: the integrated states in bfloat16, and about one float32 for each
        # step, which the router keeps
        "activations": activations + B * T * (2 * D + 4 * K),
        "logits": logits,
    }
