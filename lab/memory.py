"""Bytes of a training step in bfloat16 through fused attention, by a formula.

P parameters, P' of them in the matrices of blocks and head; B windows of T tokens. A token runs n slots in a
pass of the Jacobi iteration: 1 .. K on the ladder, then K+1 in each of R refinements and in the last one.

part           bytes
weights        16 P           weights, gradients, and two numbers of AdamW, in float32
copies         2 P'           weights in bfloat16; of compiled blocks for each pass that is kept
activations    n B T (L a + b) of each pass: a slot in one of L layers keeps a, in a pass beside them b
logits         12 B T V       when the backward pass begins: log-softmax and two gradients of its size

With --recompute a pass keeps its input and output until it is computed again. What is left out is small:
angles, routers, and gradients within a layer, which are up to a tenth of the peak then. What a GPU's
allocator and CUDA themselves take is left out, too.
"""


def slots_of_passes(K, R):
    """How many slots a token has in each pass of a training step: the ladder, then R + 1 whole passes."""
    return [*range(1, K + 1), *[K + 1] * (R + 1)]


def kept_by_a_slot(c, masked=True, compiled=False, fused=True):
    """Bytes that a slot keeps for the backward pass: in a layer, and in a pass beside its layers.

    Args:
        masked: whether log w travels along: in all passes but the first.
        fused: whether RMSNorm is one kernel, as on a GPU: on a CPU it keeps what it has normed, too.
    """
    D, inner, Hd, Gd = (
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads * c.head_width,
        c.kv_heads * c.head_width,
    )
    width = c.head_width + masked * (1 + -(c.head_width + 1) % 8)  # of a head in the kernel
    norm = 4 * D if fused or compiled else 8 * D  # float32
    heads = 4 * (Hd + Gd) // c.head_width * width + 4 * c.num_attention_heads  # q, k, v, out; log-sum-exp
    if compiled:  # x, both norms' outputs and o_proj's; gate, up and their product
        layer = 10 * D + heads + 2 * Hd + 6 * inner
    else:  # two norms, a copy of their outputs for each of five products; o_proj's input; SwiGLU
        layer = 2 * norm + 10 * D + heads + 2 * Hd + 8 * inner
    layer += 8  # of both norms
    beside = (4 * D if fused else 8 * D) + 4 * D  # the final norm's, and h, which the router reads
    return layer, beside


def bytes_of_step(c, B, R, *, recompute=False, compiled=False, fused=True):
    """Bytes at the peak of a step with R refinements on B windows, by part."""
    D, T, V, L = c.hidden_size, c.block_size, c.vocab_size, c.num_hidden_layers
    Hd, Gd, slots = (
        c.num_attention_heads * c.head_width,
        c.kv_heads * c.head_width,
        slots_of_passes(c.ponder_steps, R),
    )
    blocks, head = L * (2 * D * (Hd + Gd) + 3 * D * c.intermediate_size), V * D
    P = blocks + (1 if c.tie_word_embeddings else 2) * head + D * (2 * L + 1 + c.ponder_steps + 1)
    whole, least = [], []  # of each pass: as it runs, and until it is computed again
    for i, n in enumerate(slots):
        layer, beside = kept_by_a_slot(c, i > 0, compiled, fused)
        whole.append(n * B * T * (L * layer + beside))
        least.append(n * B * T * 8 * D if recompute else whole[i])  # the inputs, and h
    head_states, logits = B * T * (2 * D + 4 * c.ponder_steps), 12 * B * T * V
    # The backward pass goes from the last pass to the first, and frees what it has done.
    peaks = [sum(least) + logits] + [sum(least[:i]) + whole[i] for i in range(len(slots))]
    activations = max(peaks) - (logits if (at_start := peaks[0] == max(peaks)) else 0)
    return {
        "weights": 16 * P,
        "copies": 2 * (blocks * (len(slots) if compiled and not recompute else 1) + head),
        "activations": activations + head_states,
        "logits": logits if at_start else 0,
    }
