/* The text of the page: what its model does with it, byte by byte. puzzle.js, which follows, shows
the puzzle. Both ask a worker (worker.js), which holds the model, and show what comes back. Texts
reach the document as textContent only. */

const payload = JSON.parse(document.getElementById("payload").textContent);
const {config} = payload.text, K = config.ponder_steps, END = 256;  // END: the token behind a text
const MOST = 512;  // bytes that are read
const WRITTEN = 200;  // bytes of a continuation
const DARKEST = 60;  // percent of colour behind text
const find = id => document.getElementById(id);

// -- Asking ---------------------------------------------------------------------------------------

const source = new Blob([find("worker").textContent], {type: "text/javascript"});

/** Say why nothing works, where it does not: an old browser, a file that was cut short. */
function fail({message}) {
  find("loading").hidden = false;
  find("loading").textContent = `The model does not run here (${message}). It needs a browser of 2022 or later.`;
}

addEventListener("error", fail);
addEventListener("unhandledrejection", ({reason}) => fail(reason));

/** A thread that holds a model -> a function that asks it (see worker.js), which gives a promise
 * of the answer; `hear` gets what comes before it. The weights may come behind this script. */
function thread(model, weights) {
  const worker = new Worker(URL.createObjectURL(source)), asked = [];
  worker.onerror = fail;
  worker.onmessage = ({data: {number, event, result, error, done}}) => {
    if (!done) return asked[number].hear(event);
    if (error) asked[number].reject(new Error(error));
    else asked[number].resolve(result);
    delete asked[number];
  };
  const send = (name, values, hear) => new Promise((resolve, reject) => {
    worker.postMessage({number: asked.push({resolve, reject, hear}) - 1, name, values});
  });
  const loaded = new Promise(done => find(weights) ? done() : addEventListener("DOMContentLoaded", done));
  const started = loaded.then(() => send("start", {...model, weights: find(weights).textContent})).catch(fail);
  return (name, values = {}, hear = () => {}) => started.then(() => send(name, values, hear));
}

/** The buttons NAME-play, -step and -again, which walk to last() by go(n), from what now() says.
 * Playing waits `delay()` before each, and until it is ready(). -> its functions play and pause. */
function player(name, {now, last, go, delay, ready = () => true}) {
  let timer = null;
  const button = part => find(`${name}-${part}`);
  const pause = () => {
    clearTimeout(timer);
    timer = null;
    button("play").textContent = "Play";
  };
  const play = () => {
    if (now() >= last()) return pause();
    button("play").textContent = "Pause";
    timer = setTimeout(() => {
      if (ready()) go(now() + 1);
      play();
    }, delay());
  };
  button("play").addEventListener("click", () => {
    if (timer !== null) return pause();
    if (now() >= last()) go(0);
    play();
  });
  button("step").addEventListener("click", () => {
    pause();
    if (now() < last()) go(now() + 1);
  });
  button("again").addEventListener("click", () => {
    pause();
    go(0);
    play();
  });
  return {play, pause};
}

// -- Bytes as text --------------------------------------------------------------------------------

/** What stands for each byte. A character of several bytes stands at its last one, dots before. */
function labels(bytes) {
  const decoder = new TextDecoder("utf-8", {ignoreBOM: true});
  const seen = byte => byte < 32 && byte !== 10 ? String.fromCharCode(0x2400 + byte)
    : byte === 127 ? "\u2421" : null;  // symbols of control characters
  return bytes.map(byte => {
    if (byte === END) return "\u2403";
    return seen(byte) ?? (decoder.decode(Uint8Array.of(byte), {stream: true}) || "·");
  });
}

/** A byte by itself, in one line: a letter, a symbol, or its number. */
function name_of(byte) {
  if (byte === END) return "end of text";
  if (byte === 32) return "␣";
  if (byte === 10) return "↵";
  return byte < 128 ? labels([byte])[0] : "0x" + byte.toString(16);
}

const element = (name, content = "", className = "") =>
  Object.assign(document.createElement(name), {textContent: content, className});
const kbd = byte => element("kbd", name_of(byte));
const styled = (node, name, value) => { node.style.setProperty(name, value); return node; };
const shade = (node, p) => styled(node, "--p", p);
const bar = w => styled(element("span", "", "bar"), "--w", 100 * w);
const by_steps = steps => DARKEST * steps / K;
const number_text = x => x >= 0.001 || x === 0 ? x.toFixed(3) : x.toExponential(0);

/** Spans of bytes in `place`: those that are there and still right stay. */
function write_bytes(place, bytes) {
  labels(bytes).forEach((label, i) => {
    const text = label.replace("\n", "↵\n"), old = place.children[i];
    if (!old) place.append(element("span", text));
    else if (old.textContent !== text) old.textContent = text;
  });
  while (place.children.length > bytes.length) place.lastChild.remove();
}

// -- 2. The text, shaded --------------------------------------------------------------------------

/* ids: the bytes of the text. steps: K-hat of those that are read. at: the open byte, or -1.
shown, always: {n, steps, loss} of the text at tau, and at tau = 0. */
const request = thread(payload.text, "weights");
const state =
  {ids: [], steps: [], tau: payload.text.tau, alpha: 0, at: -1, chosen: false, shown: null, always: null};
let reading = null;  // a promise: the worker knows the text

/** Read the text of the page at its tau and alpha, from where they differ from what was read. */
function read() {
  const bytes = [...new TextEncoder().encode(find("input").value)];
  state.ids = bytes.slice(0, MOST);
  state.steps = [];
  document.body.dataset.state = "reading";
  const window_ = config.block_size, half = Math.max(window_ >> 1, 1);
  find("note").textContent = `${state.ids.length} byte${state.ids.length === 1 ? "" : "s"}`
    + (bytes.length > MOST ? `, the first of ${bytes.length}: no more are read` : "")
    + (state.ids.length > window_ ? `. The model sees ${window_} at a time: where a text outgrows `
      + `this window, it goes on from its last ${half}` : "")
    + (state.ids.some(byte => byte > 127) ? ". A character of several bytes stands at its last one" : "");
  write_bytes(find("text"), state.ids);
  [find("legend"), ...find("text").children].forEach(part => part.classList.add("pending"));
  find("cost-shown").classList.add("faint");
  stop_writing();
  find("continuation").classList.add("faint");  // it goes on from another text
  forget_passes();
  const {ids, tau, alpha} = state;
  const hear = event => mine === reading && heard(event);  // else another text is being read
  const mine = reading = request("read", {ids, tau, alpha}, hear);
  mine.then(always => {
    if (mine !== reading) return;
    show_costs(always, "always");
    document.body.dataset.state = "ready";
  });
}

/** Of the worker, while it reads: the steps of the next bytes, and what the whole text costs. */
function heard({steps, summary}) {
  if (steps) {
    const spans = find("text").children, from = state.steps.length;
    steps.forEach((value, i) => {
      if (spans[from + i]) shade(spans[from + i], by_steps(value)).classList.remove("pending");
    });
    state.steps.push(...steps);
    return;
  }
  show_costs(summary, "shown");
  show_legend();
  show_passes();
  if (state.at < 0) state.at = state.steps.lastIndexOf(Math.max(...state.steps));
  open_byte(Math.min(state.at, state.ids.length - 1));
}

function show_legend() {
  find("legend").classList.remove("pending");
  const counts = Array(K + 1).fill(0);
  for (const steps of state.steps) counts[steps]++;
  find("legend").replaceChildren("steps: ", ...counts.flatMap((count, k) => {
    const item = element("span", "", "item");
    item.append(shade(element("b", k), by_steps(k)), ` ${count} byte${count === 1 ? "" : "s"}`);
    return [item, " "];
  }));
}

// -- 3. What it costs -----------------------------------------------------------------------------

/** tau at a place of its slider: 0, then 1.1e-6 .. 1 in steps that are even in the logarithm. */
const tau_at = place => place === 0 ? 0 : +(10 ** ((place - 120) / 20)).toPrecision(2);
const PLACES = Array.from({length: 121}, (_, place) => tau_at(place));
const text_of_tau = tau => tau >= 0.001 || tau === 0 ? String(tau) : tau.toExponential();

function show_costs({n, steps, loss}, name) {
  const all = n * (K + 1), saved = all - n - steps;
  const values = n ? [(steps / n).toFixed(2), n + steps, `${saved} (${Math.round(100 * saved / all)} %)`] : ["", 0, 0];
  const row = find("cost-" + name);
  row.classList.remove("faint");
  [...values, loss === null ? "" : loss.toFixed(3)].forEach((value, i) => {
    row.cells[i + 1].textContent = value;
  });
  state[name] = {n, steps, loss};
}

function show_tau(id, tau) {
  find(id).value = PLACES.findLastIndex(value => value <= tau);
  find(id).setAttribute("aria-valuetext", text_of_tau(tau));
  find(id + "-value").textContent = text_of_tau(tau);
}

function show_sliders() {
  show_tau("tau", state.tau);
  find("alpha").value = state.alpha;
  find("alpha-value").textContent = (state.alpha > 0 ? "+" : "") + state.alpha;
}

function move_to(tau, alpha) {
  Object.assign(state, {tau, alpha});
  show_sliders();
  read();
  remember();
}

find("tau").addEventListener("input", () => move_to(PLACES[+find("tau").value], state.alpha));
find("alpha").addEventListener("input", () => move_to(state.tau, +find("alpha").value));
find("reset").addEventListener("click", () => move_to(payload.text.tau, 0));

// -- 4. One byte, opened --------------------------------------------------------------------------

let opened = null;  // what the worker knows of byte state.at

async function open_byte(t) {
  const spans = find("text").children;
  spans[state.at]?.classList.remove("on");
  state.at = t;
  find("attention").hidden = t < 0;
  if (t < 0) return find("opened").replaceChildren();
  spans[t].classList.add("on");
  const answer = await request("open", {t});
  if (state.at !== t) return;
  opened = answer;
  show_opened();
  show_choices();
  show_attention();
}

/** Open a byte that a reader has chosen. */
function choose_byte(t) {
  state.chosen = true;
  open_byte(t);
  remember();
}

/** The most probable bytes, [[byte, probability], ..], the one that follows in a frame. */
function guesses(list) {
  return list.map(([byte, p]) => {
    const made = element("span", "", byte === opened.next ? "guess right" : "guess");
    made.append(kbd(byte), " ", element("i", p.toFixed(2)));
    return shade(made, DARKEST * p);
  });
}

/** A row of a table: what stands in each of its cells, or several things in a list. */
function row_of(name, contents) {
  const row = element("tr");
  for (const content of contents) {
    const cell = element(name);
    cell.append(...[content].flat());
    row.append(cell);
  }
  return row;
}

const cells = (...contents) => row_of("td", contents), header = (...titles) => row_of("th", titles);

function show_opened() {
  const {t, id, steps, s, w, alone, integrated, next, probability} = opened;
  const title = element("p"), table = element("table"), wide = element("div", "", "wide");
  title.append(element("strong", `Byte ${t}: `), kbd(id), `, K\u0302 = ${steps} of ${K} steps. `);
  if (probability !== null)
    title.append("What follows is ", kbd(next), `, of probability ${number_text(probability)}: `
      + `${(-Math.log(probability)).toFixed(3)} nats.`);
  else title.append("Nothing follows it yet.");
  table.id = "slots";
  table.append(header("slot", "input", "s", "w", "its state alone predicts"));
  s.forEach((value, k) => {
    const skipped = element("span", `not run: w < τ = ${text_of_tau(state.tau)}`, "faint");
    table.append(cells(String(k), k ? `h(${k - 1})` : "e(x)", value.toFixed(4),
      [bar(w[k]), number_text(w[k])], k <= steps ? guesses(alone[k]) : skipped));
  });
  table.append(cells("sum", "", s.slice(0, steps + 1).reduce((a, b) => a + b).toFixed(4), "",
    guesses(integrated)));
  wide.append(table);
  find("opened").replaceChildren(title, wide);
}

function show_choices() {
  const {steps} = opened, slot = find("slot"), layer = find("layer");
  slot.replaceChildren(...Array.from({length: steps + 1}, (_, k) => new Option(k, k)));
  slot.value = steps;
  if (layer.options.length) return;
  layer.append(...Array.from({length: config.num_hidden_layers}, (_, i) => new Option(i + 1, i)));
  layer.value = config.num_hidden_layers - 1;
}

/** A byte and its slots: one cell each. */
function column(byte) {
  const made = element("div", "", "column");
  made.append(kbd(byte), ...Array.from({length: K + 1}, () => element("span", "", "cell")));
  return made;
}

/** Which keys the chosen slot of the opened byte sees in the chosen layer, and how strongly. */
function show_attention() {
  const {t, keys, seen, start, ids} = opened, slot = +find("slot").value;
  const heads = seen[slot][+find("layer").value];
  const attention = heads[0].map((_, j) => heads.reduce((sum, p) => sum + p[j], 0) / heads.length);
  const most = Math.max(...attention);
  const columns = ids.slice(start).map(id => column(id));
  columns[t - start].classList.add("on");
  columns.forEach(made => made.querySelectorAll(".cell").forEach(c => c.classList.add("hidden")));
  const rows = [...attention].map((a, j) => ({...keys[j], a}));
  for (const key of rows) {
    const cell = styled(columns[key.t - start].children[1 + key.k], "--w", 100 * key.w);
    cell.className = "cell attended visible";
    shade(cell, 95 * Math.sqrt(key.a / most));
    const [a, w] = [key.a, key.w].map(number_text);
    cell.title = `byte ${key.t}, slot ${key.k}: attention ${a}, w ${w}`;
  }
  find("keys").replaceChildren(...columns);
  const strongest = rows.sort((a, b) => b.a - a.a).slice(0, 6);
  find("strongest").replaceChildren(header("the strongest keys", "slot", "attention", "w"),
    ...strongest.map(key => cells([kbd(ids[key.t]), ` byte ${key.t}`], String(key.k),
      [bar(key.a), number_text(key.a)], [bar(key.w), number_text(key.w)])));
}

find("slot").addEventListener("input", show_attention);
find("layer").addEventListener("input", show_attention);
find("text").addEventListener("click", event => {
  const t = [...find("text").children].indexOf(event.target);
  if (t >= 0 && t < state.steps.length) choose_byte(t);
});
find("text").addEventListener("keydown", event => {
  const to = {ArrowRight: state.at + 1, ArrowLeft: state.at - 1, Home: 0, End: Infinity}[event.key];
  if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  if (!state.steps.length) return;
  choose_byte(Math.min(Math.max(to, 0), state.steps.length - 1));
  find("text").children[state.at].scrollIntoView({block: "nearest"});
});

// -- 5. The Jacobi iteration ----------------------------------------------------------------------

const SHOWN = 64;  // bytes, as in worker.js
const SETTLED = 1e-4;  // relative distance to the fixed point
let passes = null;  // of this text, as the worker sends them: a list

function forget_passes() {
  film.pause();
  passes = null;
  find("pass").value = 0;
}

/** Have the worker iterate, once for a text. */
async function run_passes() {
  if (passes) return;
  const mine = passes = [];
  await reading;
  if (mine !== passes) return;  // the text has changed meanwhile
  mine.done = await request("jacobi", {}, pass => {
    mine.push(pass);
    if (mine === passes) show_passes();
  });
  if (mine === passes) show_passes();
}

/** The order in which decoding runs the slots: [byte, slot] of each forward pass. */
function in_sequence() {
  const shown = state.steps.slice(0, Math.min(SHOWN, config.block_size));
  return shown.flatMap((steps, t) => Array.from({length: steps + 1}, (_, k) => [t, k]));
}

/** Both grids after as many forward passes as the slider says. */
function show_passes() {
  const order = in_sequence(), n = Math.min(+find("pass").value, order.length);
  const count = order.length ? order.at(-1)[0] + 1 : 0, ids = state.ids.slice(0, count);
  find("pass").max = order.length;
  find("pass-value").textContent = n;
  const p = Math.min(n, passes?.length ?? 0), pass = passes?.[p - 1];
  let wrong = 0, largest = 0;
  const parallel = ids.map((id, t) => {
    const made = column(id), steps = pass?.steps[t];
    for (let k = 0; pass && k < pass.slots; k++) {
      const cell = made.children[1 + k], error = pass.error[t][k] ?? 1;
      if (k > steps) cell.classList.add("hidden");
      else if (error < SETTLED) cell.classList.add("settled");
      else shade(cell, 75 * (1 + Math.log10(Math.min(error, 1)) / 4.5)).classList.add("off");
      if (k <= state.steps[t]) largest = Math.max(largest, error);
    }
    const digit = element("small", steps ?? "");
    if (pass && steps !== state.steps[t]) wrong++, digit.classList.add("differs");
    made.append(digit);
    return made;
  });
  const sequential = ids.map((id, t) => column(id));
  order.slice(0, n).forEach(([t, k]) => sequential[t].children[1 + k].classList.add("settled"));
  const [last] = order[n - 1] ?? [-1];
  sequential.forEach((made, t) => {
    const over = n === order.length || t < last;  // all its slots are run
    for (let k = state.steps[t] + 1; over && k <= K; k++)
      made.children[1 + k].classList.add("hidden");
  });
  find("parallel").replaceChildren(...parallel);
  find("sequential").replaceChildren(...sequential);
  const arrived = passes?.done && p === passes.length ? `: there after ${p}` : "";
  find("parallel-state").textContent = !pass ? "" : `pass ${p}${arrived}; `
    + `${count * pass.slots} slots a pass, largest distance ${number_text(largest)}, `
    + `K\u0302 wrong at ${wrong} byte${wrong === 1 ? "" : "s"}`;
  find("sequential-state").textContent = !n ? "" : `pass ${n} of ${order.length}, one slot a pass`;
}

function go_to(n) {
  run_passes();
  find("pass").value = n;
  show_passes();
}

const film = player("passes", {
  now: () => +find("pass").value,
  last: () => +find("pass").max,
  go: go_to,
  delay: () => find("pass").value < (passes?.length ?? 1) ? 600 : 40,  // slowly while both run
  ready: () => {
    run_passes();
    return passes.done || find("pass").value < passes.length;
  },
});
find("pass").addEventListener("input", () => { film.pause(); go_to(+find("pass").value); });

// -- 6. A continuation ----------------------------------------------------------------------------

let writing = null;  // the bytes of the one that is being written

function stop_writing() {
  writing = null;
  find("write").textContent = "Continue the text";
}

async function write() {
  const mine = writing = [], place = find("continuation");
  find("write").textContent = "Stop";
  place.replaceChildren();
  place.classList.remove("faint");
  await reading;
  if (mine !== writing) return;  // the text has changed meanwhile
  const [seed, temperature] = ["seed", "temperature"].map(id => +find(id).value);
  const asked = {ids: state.ids, seed, temperature, count: WRITTEN};
  const ended = await request("more", asked, ({id, steps}) => {
    if (mine !== writing) return;
    mine.push(id);
    write_bytes(place, mine);
    shade(place.lastChild, by_steps(steps));
  });
  if (mine !== writing) return;
  if (ended === "end") place.append(element("em", " (here the model ends the text)", "faint"));
  stop_writing();
}

find("temperature").addEventListener("input", stop_writing);
find("temperature").addEventListener("change", ({target}) => {
  target.value = Math.min(Math.max(+target.value, target.min), target.max);
});
find("write").addEventListener("click", () => {
  if (!writing) return write();
  stop_writing();
  request("stop");
});

// -- Begin ----------------------------------------------------------------------------------------

/** Put what the page shows into its address, which can be sent. */
function write_address() {
  waiting_to_write = clearTimeout(waiting_to_write);
  const {table, ask, tau} = puzzle, said = {puzzle: table.pairs.join("."), ask, tau};
  if (find("input").value !== find("input").defaultValue)
    said.text = new TextDecoder().decode(Uint8Array.from(state.ids));  // what is read of it
  if (state.tau !== payload.text.tau) said["text-tau"] = state.tau;
  if (state.alpha) said.alpha = state.alpha;
  if (state.chosen) said.byte = state.at;
  history.replaceState(null, "", "#" + new URLSearchParams(said));
}
let waiting_to_write;

/** What follows is another place in the history, so that Back leads here. */
function step_in_history() {
  write_address();
  history.pushState(null, "", location.href);
}

/** Write it soon: at most three times a second. */
function remember() {
  waiting_to_write ??= setTimeout(write_address, 300);
}

/** Show the text, tau, alpha and byte of an address, as far as it makes sense; else as they begin. */
function follow_text(given) {
  const within = (name, least, most, otherwise) => {
    const value = parseFloat(given.get(name));
    return value >= least && value <= most ? value : otherwise;
  };
  const at = within("byte", 0, MOST, -1);
  Object.assign(state, {tau: within("text-tau", 0, 1, payload.text.tau), alpha: within("alpha", -6, 6, 0)});
  Object.assign(state, {at, chosen: at >= 0});
  find("input").value = given.get("text") ?? find("input").defaultValue;
  show_sliders();
  read();
}

/** An example puts a value into a field, and clicks something: {put: {id: value}, click: css}. */
document.addEventListener("click", event => {
  if (!event.target.dataset?.example) return;
  const {put, click} = JSON.parse(event.target.dataset.example);
  if (put.input) step_in_history();
  for (const [id, value] of Object.entries(put)) {
    find(id).value = value;
    find(id).dispatchEvent(new Event("input"));
  }
  if (click) document.querySelector(click)?.click();
});

/** A file of the code on GitHub, if a page of this address is served from there; else null. */
function on_github(hostname, pathname, file) {
  const [, user] = hostname.match(/^(.+)\.github\.io$/) ?? [];
  return user ? `//github.com/${user}/${pathname.split("/")[1]}/blob/main/${file}` : null;
}

for (const link of document.querySelectorAll(`a[href^="${payload.root}/"]`)) {
  const file = link.getAttribute("href").slice(payload.root.length + 1);
  link.href = on_github(location.hostname, location.pathname, file) ?? link.href;
}

find("input").addEventListener("input", () => { read(); remember(); });
