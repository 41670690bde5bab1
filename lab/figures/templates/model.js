/* PonderLM-3 as it decodes, in plain JavaScript: one vector at a time, no library.

Names are those of attention.py, router.py and model.py, which do the same in PyTorch.

code        paper         shape
D           D             width of a state
H, G, d                   query heads, key heads, head width
K, S        K, K+1        pondering steps and slots of a token
V                         vocabulary: bytes or words, and the end of text
idx         x_1 .. x_T    (T)         token ids
e           e(x_t)        (D)         scaled token embedding, the input of slot 0
h           h_t^(k)       (D)         output of slot k, the input of slot k + 1
s, log_w    s_{t,k}, log w  (S)       step distribution, log of the mask score
steps       K-hat_t                   pondering steps that are executed
M                                     slots in the cache, each with a key and a value a layer

Vectors are Float32Array; sums are in float64, as numbers are in JavaScript. */

const MASKED = -1e4;  // the bias of a key that must not be seen: exp(-1e4) is 0

// -- Weights --------------------------------------------------------------------------------------

/** 16 bits of a float16 -> number: a sign, 5 bits of exponent, 10 of fraction. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;  // below 2^-14 the steps are even
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);  // infinity and NaN do not occur
}

/** Base64 of float16 numbers, low byte first, and [[name, shape], ..] -> {name: Float32Array}. */
function read_weights(base64, tensors) {
  const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
  const weights = {};
  let at = 0;
  for (const [name, shape] of tensors) {
    weights[name] = new Float32Array(shape.reduce((a, b) => a * b));
    for (let i = 0; i < weights[name].length; i++, at += 2)
      weights[name][i] = half(bytes[at] | bytes[at + 1] << 8);
  }
  return weights;
}

// -- Parts of a layer -----------------------------------------------------------------------------

/** y = W x: weight (n_out * n_in), row after row, and x (n_in) -> (n_out). */
function linear(weight, x) {
  const n = x.length, y = new Float32Array(weight.length / n);
  for (let i = 0, row = 0; i < y.length; i++, row += n) {
    let a = 0, b = 0, c = 0, d = 0, j = 0;  // four sums, none of which waits for another
    for (; j + 3 < n; j += 4) {
      a += weight[row + j] * x[j];
      b += weight[row + j + 1] * x[j + 1];
      c += weight[row + j + 2] * x[j + 2];
      d += weight[row + j + 3] * x[j + 3];
    }
    for (; j < n; j++) a += weight[row + j] * x[j];
    y[i] = a + b + c + d;
  }
  return y;
}

/** RMSNorm: x (D) divided by its root mean square, times weight (D). */
function rms_norm(x, weight, eps) {
  let sum = 0;
  for (const value of x) sum += value * value;
  const scale = 1 / Math.sqrt(sum / x.length + eps);
  return x.map((value, i) => value * scale * weight[i]);
}

/** silu(gate) * up, the heart of SwiGLU. */
const gated = (gate, up) => gate.map((g, i) => g / (1 + Math.exp(-g)) * up[i]);

const add = (x, y) => x.map((value, i) => value + y[i]);
const times = (x, scale) => x.map(value => value * scale);

/** Scores (n) -> probabilities, in float64. */
function softmax(scores) {
  const highest = scores.reduce((a, b) => Math.max(a, b));
  const p = Float64Array.from(scores, score => Math.exp(score - highest));
  const total = p.reduce((a, b) => a + b);
  return p.map(value => value / total);
}

/** RoPE in its half-split form: number i of each head turns with number i + d/2.
 * x (heads * d), changed in place. */
function apply_rotary(x, position, frequencies) {
  const half_d = frequencies.length;
  for (let head = 0; head < x.length; head += 2 * half_d)
    for (let i = 0; i < half_d; i++) {
      const cos = Math.cos(position * frequencies[i]), sin = Math.sin(position * frequencies[i]);
      const a = x[head + i], b = x[head + i + half_d];
      x[head + i] = a * cos - b * sin;
      x[head + i + half_d] = b * cos + a * sin;
    }
}

// -- The router -----------------------------------------------------------------------------------

/** log(exp(a) + exp(b)), never below the larger of the two. */
const logaddexp = (a, b) => Math.max(a, b) + Math.log1p(Math.exp(-Math.abs(a - b)));

/** log s (S) -> log w (S), the tail sums of s: w_k = s_k + .. + s_K, and w_0 = 1. */
function log_mask_score(log_s) {
  const log_w = log_s.slice();
  for (let k = log_s.length - 2; k >= 0; k--) log_w[k] = logaddexp(log_s[k], log_w[k + 1]);
  log_w[0] = 0;
  return log_w.map(value => Math.min(Math.max(value, MASKED), 0));
}

/** K-hat = max{k : w_k >= tau}. w never increases with k, so count. tau = 0 never stops early. */
const stop_step = (log_w, tau) => log_w.filter(value => value >= Math.log(tau) - 1e-6 * (tau < 1)).length - 1;

/** log w (S) -> bias on the keys of a token's slots: no one sees those beyond K-hat. */
function mask_keys(log_w, tau) {
  const steps = stop_step(log_w, tau);
  return log_w.map((value, k) => k > steps ? MASKED : value);
}

// -- The model ------------------------------------------------------------------------------------

/** Keys and values of the slots executed so far, of every layer; bias and slot number of each. */
class Cache {
  constructor(layers, width, most) {
    const table = () => Array.from({length: layers}, () => new Float32Array(most * width));
    this.keys = table();  // (layers)(M * G * d)
    this.values = table();
    this.bias = new Float64Array(most);  // (M), log w: the same in every layer
    this.slots = new Uint8Array(most);  // (M), k
    this.length = 0;  // M
  }
}

class PonderLM {
  constructor(config, weights) {
    this.config = config;
    this.weights = weights;
    const {head_width: d, rope_theta} = config;
    this.frequencies = Array.from({length: d / 2}, (_, i) => rope_theta ** (-2 * i / d));
    this.head = weights["lm_head.weight"] ?? weights["model.embed_tokens.weight"];  // tied
  }

  new_cache(tokens = this.config.block_size) {
    const {num_hidden_layers, key_value_heads: G, head_width: d, ponder_steps: K} = this.config;
    return new Cache(num_hidden_layers, G * d, tokens * (K + 1));
  }

  /** Token id -> e (D), at unit RMS like the states that fill the other slots. */
  embed(token) {
    const D = this.config.hidden_size, table = this.weights["model.embed_tokens.weight"];
    return times(table.subarray(token * D, (token + 1) * D), this.config.scale);
  }

  /** Output of a slot (D) -> the next one's input; in a former Llama e + g h, of its token's e. */
  feed_back(h, e) {
    const g = this.weights["feedback.weight"];
    return g ? e.map((x, i) => x + g[i] * h[i]) : h;
  }

  /** Slot k of a token through all layers: x (D) -> h (D). It joins the cache, and attends to it.
   * `log_w` makes its key fainter for itself and all after it.
   * `seen`, a list, receives each layer's attention (H)(M). */
  forward(x, k, position, log_w, cache, seen) {
    const {num_hidden_layers, rms_norm_eps: eps} = this.config;
    cache.slots[cache.length] = k;
    cache.bias[cache.length++] = log_w;
    for (let i = 0; i < num_hidden_layers; i++) {
      const weight = name => this.weights[`model.layers.${i}.${name}.weight`];
      const y = rms_norm(x, weight("input_layernorm"), eps);
      const q = linear(weight("self_attn.q_proj"), y);  // (H * d)
      const key = linear(weight("self_attn.k_proj"), y);  // (G * d)
      apply_rotary(q, position, this.frequencies);
      apply_rotary(key, position, this.frequencies);
      const row = (cache.length - 1) * key.length;
      cache.keys[i].set(key, row);
      cache.values[i].set(linear(weight("self_attn.v_proj"), y), row);
      const attended = this.attend(q, cache.keys[i], cache.values[i], cache, seen);
      x = add(x, linear(weight("self_attn.o_proj"), attended));
      const z = rms_norm(x, weight("post_attention_layernorm"), eps);
      const up = linear(weight("mlp.up_proj"), z);
      x = add(x, linear(weight("mlp.down_proj"), gated(linear(weight("mlp.gate_proj"), z), up)));
    }
    return rms_norm(x, this.weights["model.norm.weight"], eps);
  }

  /** softmax(q K^T / sqrt(d) + log w) V for one query (H * d), of the newest slot, and all M slots
   * -> (H * d). The method grid hides the slots whose number k is larger than the query's. */
  attend(q, keys, values, cache, seen) {
    const {num_attention_heads: H, key_value_heads: G, head_width: d} = this.config;
    const M = cache.length, out = new Float32Array(H * d), scores = new Float64Array(M);
    const deepest = this.config.method === "grid" ? cache.slots[M - 1] : Infinity, attention = [];
    for (let head = 0; head < H; head++) {
      const mine = head * d, theirs = Math.floor(head / (H / G)) * d;  // H/G heads share a key head
      for (let j = 0; j < M; j++) {
        const row = j * G * d + theirs;
        let score = 0;
        for (let i = 0; i < d; i++) score += q[mine + i] * keys[row + i];
        score = score / Math.sqrt(d) + cache.bias[j];
        scores[j] = cache.slots[j] > deepest ? MASKED : score;
      }
      const p = softmax(scores);
      for (let j = 0; j < M; j++) {
        const row = j * G * d + theirs;
        for (let i = 0; i < d; i++) out[mine + i] += p[j] * values[row + i];
      }
      attention.push(p);
    }
    seen?.push(attention);
    return out;
  }

  /** s = softmax(W h^(0) + offset + alpha [0..K]) -> s (S), log_w (S). */
  router(h0, alpha) {
    const {offset} = this.config;
    const logits = Array.from(linear(this.weights["router.proj.weight"], h0),
      (value, k) => value + offset[k] + alpha * k);
    const highest = Math.max(...logits);
    const total = highest + Math.log(logits.reduce((sum, x) => sum + Math.exp(x - highest), 0));
    const log_s = logits.map(value => value - total);
    return {s: log_s.map(Math.exp), log_w: log_mask_score(log_s)};
  }

  /** State (D) -> logits (V) of the next token. */
  lm_head(h) {
    return linear(this.head, h);
  }

  /** h_hat = sum over k <= K-hat of s_k h^(k), never renormalised. h holds K-hat + 1 states. */
  integrate(h, s) {
    return h.map((state, k) => times(state, s[k])).reduce(add);
  }

  /** Read one token: slot 0, the router, then slots 1 .. K-hat; each one attends to the cache.
   * An executed slot leaves one key and one value a layer; a skipped one leaves and costs nothing.
   * `seen`, a list, receives the attention of each slot, of each layer. */
  ponder_token(token, position, cache, tau, alpha, seen) {
    const attention = k => seen && (seen[k] = []), e = this.embed(token);
    const h = [this.forward(e, 0, position, 0, cache, attention(0))];
    const {s, log_w} = this.router(h[0], alpha), steps = stop_step(log_w, tau);
    for (let k = 1; k <= steps; k++)  // stop as soon as w_k < tau
      h.push(this.forward(this.feed_back(h[k - 1], e), k, position, log_w[k], cache, attention(k)));
    return {logits: this.lm_head(this.integrate(h, s)), steps, s, log_w, h};
  }

  /** One pass over all slots whose inputs are there: e (T)(D), latents (T)(n)(D) of the pass
   * before, bias (T)(S) or null -> h (T)(n+1)(D), s and log_w (T)(S) by the new h^(0).
   * All inputs of a pass are known before it begins, so that a GPU runs its slots at once. Here
   * they run one after the other, with the same result: attention looks back only. */
  jacobi_pass(e, latents, bias, alpha) {
    const cache = this.new_cache(e.length);
    const h = e.map((e_t, t) => [e_t, ...latents[t]].map(
      (x, k) => this.forward(x, k, t, bias ? bias[t][k] : 0, cache)));
    const routed = h.map(([h0]) => this.router(h0, alpha));
    return {h, s: routed.map(({s}) => s), log_w: routed.map(({log_w}) => log_w)};
  }

  /** Yield pass after pass: slot 0 alone, slots 0 and 1, .., then all S, until a pass changes the
   * latents by less than `tolerance` (relative norm). That is what `ponder_token` computes. */
  *jacobi(idx, tau, alpha, tolerance = 1e-4) {
    const K = this.config.ponder_steps, e = idx.map(token => this.embed(token));
    let latents = e.map(() => []), bias = null;
    for (let p = 1; p <= K * idx.length + 1; p++) {
      const pass = this.jacobi_pass(e, latents, bias, alpha), before = latents;
      yield pass;
      latents = pass.h.map((h_t, t) => h_t.slice(0, K).map(state => this.feed_back(state, e[t])));
      if (p > K && relative_error(before.flat(), latents.flat()) < tolerance) return;
      bias = pass.log_w.map(log_w => mask_keys(log_w, tau));
    }
  }
}

/** |x - y| / |y| of two lists of vectors. */
function relative_error(x, y) {
  let difference = 0, norm = 0;
  y.forEach((vector, i) => vector.forEach((value, j) => {
    difference += (x[i][j] - value) ** 2;
    norm += value ** 2;
  }));
  return Math.sqrt(difference / norm);
}
