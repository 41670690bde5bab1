/* The other thread, which holds the model: it answers what the page asks, and never stalls typing.

request                          answer
start {config, tensors, weights}
read {ids, tau, alpha}           the summary at tau = 0; before it, steps and summary as they come
open {t}                         all that is known of token t
solve {ids, tau}                 the same of the last token of a puzzle
jacobi {}                        before it, each pass: errors and steps of the first tokens
more {ids, seed, temperature, count}  before it, each token that continues ids, and its steps
stop {}                          ends what is being written

A new `read` ends what still runs. */

const SHOWN = 64;  // tokens of the Jacobi iteration: all their slots run in each pass
const TOP = 5;  // predictions shown of each state

let model, shown, always, newest = 0;
let size = 0, written = 0;  // tokens of the text; which continuation is being written

/** A text as the model reads it, token by token, at one tau and alpha. A text longer than the
 * window goes on in a new segment, which begins with the last half window (sample.py: stream).
 *
 * tokens: what ponder_token returned, in order. segments: where each starts, the first token that
 * is new in it, its cache, and for each of its tokens the slots that were cached before. */
class Reading {
  constructor(tau, alpha) {
    Object.assign(this, {tau, alpha, tokens: [], segments: []});
  }

  /** Forget what comes after the tokens that `ids` begins with, too. */
  keep(ids) {
    let n = 0;
    while (n < Math.min(this.tokens.length, ids.length) && this.tokens[n].id === ids[n]) n++;
    if (n === this.tokens.length) return;
    this.tokens.length = n;
    while (this.segments.at(-1)?.first >= n) this.segments.pop();
    const last = this.segments.at(-1);
    if (!last || last.lengths.length === n - last.start) return;
    last.cache.length = last.lengths[n - last.start];
    last.lengths.length = n - last.start;
  }

  read(id) {
    const n = this.tokens.length, window = model.config.block_size;
    let last = this.segments.at(-1);
    if (!last || n - last.start === window) {
      const start = last ? n + 1 - Math.max(window >> 1, 1) : 0;
      last = {start, first: n, cache: model.new_cache(), lengths: []};
      this.segments.push(last);
      for (const token of this.tokens.slice(start)) this.append(last, token.id);
    }
    this.tokens.push({id, ...this.append(last, id)});
    return this.tokens.at(-1);
  }

  /** Read tokens -> this. */
  all(ids) {
    ids.forEach(id => this.read(id));
    return this;
  }

  append({cache, lengths}, id) {
    lengths.push(cache.length);
    return model.ponder_token(id, lengths.length - 1, cache, this.tau, this.alpha);
  }

  /** Token t once more, with the attention of its slots: its keys and values come out the same. */
  again(t) {
    const segment = this.segments.findLast(({first}) => first <= t), seen = [];
    const {start, cache, lengths} = segment, length = cache.length;
    cache.length = lengths[t - start];
    model.ponder_token(this.tokens[t].id, t - start, cache, this.tau, this.alpha, seen);
    const keys = [];  // a token may take other steps in a later segment: lengths knows
    for (let i = start; i <= t; i++) {
      const first = lengths[i - start], end = i < t ? lengths[i - start + 1] : cache.length;
      for (let j = first; j < end; j++) keys.push({t: i, k: j - first, w: Math.exp(cache.bias[j])});
    }
    cache.length = length;
    return {seen, keys, start};
  }

  /** All that is known of token t, and how probable the one that follows it was, if one does. */
  open(t, next) {
    const {id, steps, s, log_w, h, logits} = this.tokens[t];
    return {
      t, id, steps, s, w: log_w.map(Math.exp), ...this.again(t),
      alone: h.map(state => top(model.lm_head(state))), integrated: top(logits),
      ids: this.tokens.slice(0, t + 1).map(token => token.id), next,
      probability: next === undefined ? null : softmax(logits)[next],
    };
  }

  /** Steps and loss so far. The loss is the mean over all tokens but the first. */
  summary() {
    const before = this.tokens.slice(0, -1);
    const losses = before.map(({logits}, i) => -Math.log(softmax(logits)[this.tokens[i + 1].id]));
    const sum = numbers => numbers.reduce((a, b) => a + b, 0);
    return {n: this.tokens.length, steps: sum(this.tokens.map(({steps}) => steps)),
      loss: losses.length ? sum(losses) / losses.length : null};
  }
}

/** The token at which the cumulative probability passes u: lab/engine/choosing.py: choose. */
function pick(logits, u, temperature) {
  if (temperature < 1e-6) return logits.indexOf(Math.max(...logits));
  const p = softmax(times(logits, 1 / temperature)), whole = p.reduce((a, b) => a + b);
  let total = 0;
  return p.findIndex(value => (total += value) > u * whole);
}

/** The most probable tokens after a state, [[id, probability], ..]. */
function top(logits) {
  return Array.from(softmax(logits), (p, id) => [id, p]).sort((a, b) => b[1] - a[1]).slice(0, TOP);
}

/** Let messages of the page in, and other requests go on. */
const {port1, port2} = new MessageChannel(), waiting = [];
port1.onmessage = () => waiting.shift()();
const pause = () => new Promise(done => {
  waiting.push(done);
  port2.postMessage(null);
});

const requests = {
  start({config, tensors, weights}) {
    model = new PonderLM(config, read_weights(weights, tensors));
  },

  async read({ids, tau, alpha}, say) {
    const mine = ++newest;
    size = ids.length;
    const same = (reading, tau) => reading?.tau === tau && reading.alpha === alpha;
    if (!same(always, 0)) always = new Reading(0, alpha);
    if (!same(shown, tau)) shown = tau === 0 ? always : new Reading(tau, alpha);
    for (const reading of new Set([shown, always])) {
      reading.keep(ids);
      if (reading === shown) say({steps: reading.tokens.map(({steps}) => steps)});
      while (reading.tokens.length < ids.length) {
        const {steps} = reading.read(ids[reading.tokens.length]);
        if (reading === shown) say({steps: [steps]});
        await pause();
        if (mine !== newest) return null;
      }
      if (reading === shown) say({summary: reading.summary()});
    }
    return always.summary();
  },

  open: ({t}) => shown.open(t, t + 1 < size ? shown.tokens[t + 1]?.id : undefined),

  solve: ({ids, tau}) => new Reading(tau, 0).all(ids).open(ids.length - 1),

  async jacobi(_, say) {
    const mine = newest, count = Math.min(SHOWN, model.config.block_size, size);
    const tokens = shown.tokens.slice(0, count);
    const {tau, alpha} = shown;
    const passes = tokens.length ? model.jacobi(tokens.map(({id}) => id), tau, alpha) : [];
    for (const {h, log_w} of passes) {
      const error = h.map((states, t) => states.slice(0, tokens[t].h.length)
        .map((state, k) => relative_error([state], [tokens[t].h[k]])));
      say({error, slots: h[0].length, steps: log_w.map(row => stop_step(row, tau))});
      await pause();
      if (mine !== newest) return null;
    }
    return true;
  },

  async more({ids, seed, temperature, count}, say) {
    const mine = newest, whole = ++written, u = random(seed), end = model.config.vocab_size - 1;
    shown.keep(ids);  // not what was written before
    if (!shown.tokens.length) shown.read(end);  // where a document begins
    for (let i = 0; i < count; i++) {
      const id = pick(shown.tokens.at(-1).logits, u(), temperature);
      if (id === end) return "end";
      say({id, steps: shown.read(id).steps});
      await pause();
      if (mine !== newest || whole !== written) return null;
    }
    return "done";
  },

  stop() {
    written++;
  },
};

self.onmessage = async ({data: {number, name, values}}) => {
  try {
    const result = await requests[name](values, event => self.postMessage({number, event}));
    self.postMessage({number, result, done: true});
  } catch (error) {
    self.postMessage({number, error: `${name}: ${error.message}`, done: true});
  }
};
