/* The puzzle: its table as a drawing, and what the model does at the last word of the question.
What lights up in the drawing is the model's attention: where it errs, the drawing does, too. */

const {words} = payload.puzzle, DEEPEST = payload.puzzle.config.ponder_steps;
const COLUMN = 48, ROW = 46;  // of the drawing
const think = thread(payload.puzzle, "puzzle-weights");

/* table: of read_table. ask: the letter. at: how much of the answer is shown; nothing, step 0, ..
thought: see solve. asked: for each tau the questions that were answered, {n, steps, right} by their words. */
const puzzle = {table: null, ask: "", tau: payload.puzzle.tau, at: 0, thought: null, asked: new Map()};
const NUMBERS = ["", "one pair", "two pairs", "three pairs", "four pairs", "five pairs", "six pairs"];
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const letters_of = ({places}, n) =>
  Object.keys(places).filter(letter => n ? places[letter].n === n : places[letter].n);

// -- Asking ---------------------------------------------------------------------------------------

/** What the model does with "n letter": as the worker says, and `looks`, of each step the
 * attention to each pair: the sum over the slots of that pair, of the head where it is most. */
async function solve({pairs, places}, letter, tau) {
  const {n, end} = places[letter], read = [...pairs, String(n), letter];
  const thought = await think("solve", {ids: read.map(word => words.indexOf(word)), tau});
  const to = (t, p) => p.reduce((sum, a, j) => thought.keys[j].t === t ? sum + a : sum, 0);
  const looks = thought.seen.map(layers =>
    pairs.map((_, t) => Math.max(...layers.flat().map(p => to(t, p)))));
  const [id, p] = thought.integrated[0];
  return {...thought, n, end, read, looks, answer: words[id], p, right: words[id] === end};
}

let newest = 0;

/** Ask what changes of {table, ask, tau}, and show the answer. */
async function ask(changes) {
  const mine = ++newest, {table: before} = puzzle;
  Object.assign(puzzle, changes);
  document.body.dataset.puzzle = "thinking";
  walk.pause();
  if (changes.table) show_own(changes.table);
  const thought = await solve(puzzle.table, puzzle.ask, puzzle.tau);
  if (mine !== newest) return;
  puzzle.thought = thought;
  draw();
  show_tally();
  const moves = changes.ask && !matchMedia("(prefers-reduced-motion: reduce)").matches;
  show(moves ? 0 : thought.steps + 1);
  if (moves) walk.play();
  if (before) remember();
  document.body.dataset.puzzle = "ready";
  find("loading").hidden = true;
  find("puzzle").inert = false;
}

function show_own({pairs, usual}) {
  if (document.activeElement !== find("own")) find("own").value = pairs.join(" ");
  find("own-note").textContent = usual ? "" : "The model was not trained on such tables, and may err: "
    + "in its own, one chain has 6 letters, and three share the other 7.";
}

/** A table, and a letter of it that takes n lookups, or 6 where none does. */
function random_puzzle(n) {
  const table = read_table(make_table(Math.random() * 2 ** 32).join(" "));
  return {table, ask: sample(letters_of(table, n), 1, Math.random)[0] ?? table.chains[0][0]};
}

// -- Drawing --------------------------------------------------------------------------------------

function drawn(name, attributes, ...content) {
  const made = document.createElementNS(find("chains").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}

function place(letter, unit = "") {
  const {row, n} = puzzle.table.places[letter];
  const x = COLUMN * (LONGEST + .5 - n), y = ROW * (row + .5);
  return `translate(${x}${unit}, ${y}${unit})`;
}

/** The chains, a row each, so that a column holds the letters of equally many lookups. */
function draw() {
  const svg = find("chains"), focused = svg.contains(document.activeElement);
  const {ask, tau, table: {pairs, chains, places}} = puzzle;
  svg.setAttribute("viewBox", `0 0 ${COLUMN * (LONGEST + 1)} ${ROW * chains.length}`);
  const arrows = pairs.map(([a]) => drawn("g", {class: "arrow", "aria-hidden": true, transform: place(a)},
    drawn("path", {d: "M16 0h12m-5 -5l5 5l-5 5"}), drawn("text", {x: 23, y: -10})));
  const nodes = Object.entries(places).map(([letter, {n}]) => {
    const radio = {class: "letter", role: "radio", "aria-checked": letter === ask,
      tabindex: letter === ask ? 0 : -1, "aria-label": `${letter}, lookups: ${n}`};
    const shape = n ? drawn("circle", {r: 13})
      : drawn("rect", {x: -12, y: -12, width: 24, height: 24, rx: 3});
    return drawn("g", {"data-letter": letter, transform: place(letter), ...n ? radio : {}},
      drawn("rect", {x: -24, y: -23, width: COLUMN, height: ROW, class: "reach"}),
      shape, drawn("text", {y: 5}, letter));
  });
  const here = drawn("circle", {r: 17, id: "here", style: `transform: ${place(ask, "px")}`});
  svg.replaceChildren(...arrows, here, ...nodes);
  if (focused) svg.querySelector("[tabindex='0']").focus();
  for (const button of find("numbers").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", +button.value === places[ask].n);
    button.disabled = !letters_of(puzzle.table, +button.value).length;
  }
  for (const button of [find("think"), find("think-not")])
    button.setAttribute("aria-pressed", (tau < 1) === (+button.value < 1));
  find("asks").textContent = `Then “${places[ask].n} ${ask}” asks: start at ${ask}, follow `
    + `${NUMBERS[places[ask].n]}, and where are you?`;
  show_tau("puzzle-tau", tau);
}

/** The answer up to its first `at` slots. */
function show(at) {
  puzzle.at = at;
  const {ask, tau, table: {pairs}, thought} = puzzle, k = at - 1, done = at > thought.steps;
  const {looks, alone, s, w, read, answer, right} = thought;
  const best = looks.map(look => look.indexOf(Math.max(...look)));
  const arrows = find("chains").querySelectorAll(".arrow");
  pairs.forEach((_, t) => {
    const [now = 0, ...before] = looks.slice(0, at).map(look => look[t]).reverse();
    arrows[t].style.setProperty("--a", Math.max(now, ...before.map(a => .4 * a)));
    arrows[t].lastChild.textContent = [...best.keys()].filter(i => best[i] === t && i < at);
  });
  find("here").style.transform = place(at ? pairs[best[k]][1] : ask, "px");
  find("here").style.opacity = at ? looks[k][best[k]] : 1;
  const line = read.flatMap((word, t) =>
    [shade(element("kbd", word), DARKEST * (looks[k]?.[t] ?? 0)), " "]);
  line.splice(2 * pairs.length, 0, element("br"));  // before the question
  line.push(element("kbd", done ? answer : "?", done ? right ? "right" : "wrong" : ""));
  find("read").replaceChildren(...line);
  const rows = s.map((_, i) => {
    const look = i < at ? [element("kbd", pairs[best[i]]), " ", looks[i][best[i]].toFixed(2)]
      : done ? "not run" : "";
    const [[id, p]] = alone[i] ?? [[]];
    const says = i < at ? [element("kbd", words[id]), " ", p.toFixed(2)] : "";
    const shares = [s[i], w[i]].map(share => at ? [bar(share), share.toFixed(2)] : "");
    const row = cells(String(i), look, says, ...shares);
    row.className = i === k ? "now" : done && i >= at ? "faint" : "";
    return row;
  });
  find("thoughts").style.setProperty("--tau", 100 * tau);
  find("thoughts").replaceChildren(header("step", "looks up", "would say", "s", "w"), ...rows);
  const looked = looks[k]?.[best[k]] < .5 ? "it looks here and there" : pairs[best[k]];
  find("said").textContent = sentence(at, looked);
  find("why").textContent = reason(at);
  if (done) count(thought, tau);
}

/** What a step does, in words, for those who read and those who listen. */
function sentence(at, looked) {
  const {ask, thought: {n, steps, answer, p, right, end}} = puzzle;
  if (!at) return `The model has read the table and “${n} ${ask}”.`;
  if (at <= steps) return `Lookup ${at}: ${looked}.`;
  const took = steps ? `It thought for ${plural(steps, "step")}` : "It did not think";
  return `${took} and says ${answer} (${p.toFixed(2)}). `
    + (right ? "That is right." : `That is wrong: the chain of ${ask} ends at ${end}.`);
}

/** Why it goes on after a step, or stops. */
function reason(at) {
  const {tau, thought: {w, steps}} = puzzle, value = text_of_tau(tau);
  if (!at) return "";
  if (at > DEEPEST) return `Step ${DEEPEST} is its last one.`;
  const left = (w[at] ?? 0).toFixed(2);
  return at <= steps ? `It goes on: w of step ${at} is ${left}, and τ is ${value}.`
    : `It stops: w of step ${at} is ${left}, less than τ = ${value}.`;
}

/** A question that was answered at this tau: it counts once. */
function count({n, steps, right, read}, tau) {
  if (!puzzle.asked.has(tau)) puzzle.asked.set(tau, new Map());
  puzzle.asked.get(tau).set(read.join(" "), {n, steps, right});
  if (tau === puzzle.tau) show_tally();
}

/** The table of executed steps by lookups at this tau, and a line for each tau. */
function show_tally() {
  const all = Array.from({length: LONGEST}, (_, i) => i + 1);
  const asked = [...puzzle.asked.get(puzzle.tau)?.values() ?? []];
  const correct = list => list.filter(one => one.right).length;
  const counted = (n, k) => {
    const here = asked.filter(one => one.n === n && one.steps === k), m = correct(here);
    if (!here.length) return "·";
    return m === here.length ? element("span", m, "count right")
      : element("span", `${m}/${here.length}`, "count wrong");
  };
  const rows = Array.from({length: DEEPEST + 1}, (_, k) =>
    cells(k === 1 ? "1 step" : `${k} steps`, ...all.map(n => counted(n, k))));
  find("staircase").replaceChildren(...rows.reverse(), header("lookups", ...all));
  find("tally").textContent = [...puzzle.asked].sort(([a], [b]) => a - b).map(([tau, questions]) => {
    const list = [...questions.values()], sum = list.reduce((sum, one) => sum + one.steps, 0);
    const how = tau === 1 ? "Not thinking" : tau === payload.puzzle.tau ? "Thinking" : `τ = ${text_of_tau(tau)}`;
    return `${how}: ${correct(list)} of ${list.length} right, ${(sum / list.length).toFixed(1)} steps each.`;
  }).join("\n");
}

// -- What a reader does ---------------------------------------------------------------------------

const walk = player("walk", {
  now: () => puzzle.at, last: () => puzzle.thought.steps + 1, go: show, delay: () => 600});

find("chains").addEventListener("click", event => {
  const node = event.target.closest(".letter");
  if (node) ask({ask: node.dataset.letter});
});
find("chains").addEventListener("keydown", event => {
  const to = {ArrowRight: 1, ArrowLeft: -1}[event.key], over = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (!(to || over) || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  const {chains, places} = puzzle.table, letters = letters_of(puzzle.table);
  if (to) return ask({ask: letters.at((letters.indexOf(puzzle.ask) + to) % letters.length)});
  const {row, n} = places[puzzle.ask], chain = chains.at((row + over) % chains.length);
  ask({ask: chain.at(-1 - Math.min(n, chain.length - 1))});
});
find("numbers").addEventListener("click", ({target}) => {
  const letters = letters_of(puzzle.table, +target.value);
  if (target.value) ask({ask: letters[(letters.indexOf(puzzle.ask) + 1) % letters.length]});
});
for (const button of [find("think"), find("think-not")])
  button.addEventListener("click", () => ask({tau: +button.value, ask: puzzle.ask}));
find("asked").addEventListener("click", event => {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();  // the text of the page stays
  step_in_history();
  follow(link.hash.slice(1));
});
find("new").addEventListener("click", () => { step_in_history(); ask(random_puzzle(LONGEST)); });
find("many").addEventListener("click", async () => {
  const {tau} = puzzle;
  for (let i = 0; i < 30; i++) {
    const {table, ask} = random_puzzle(1 + i % LONGEST), thought = await solve(table, ask, tau);
    count(thought, tau);
  }
});
find("puzzle-tau").addEventListener("input", ({target}) =>
  ask({tau: target.value === target.min ? 0 : PLACES[target.value]}));
find("own").addEventListener("input", ({target}) => follow({puzzle: target.value}));

/** Ask what an address says, as far as it makes sense: puzzle, ask, tau; and show its text. */
function follow(address) {
  const given = new URLSearchParams(address), changes = {};
  const text = given.get("puzzle"), letter = given.get("ask"), tau = parseFloat(given.get("tau"));
  try {
    if (text !== null) changes.table = read_table(text);
  } catch (error) {
    find("own").value = text;
    find("own-note").textContent = `${error.message} Shown above is another table.`;
    find("own-table").open = true;
    return;
  }
  if (letter?.length === 1 && LETTERS.includes(letter)) changes.ask = letter;
  else if (changes.table) changes.ask = changes.table.chains[0][0];
  if (tau >= 0 && tau <= 1) changes.tau = tau;
  if (Object.keys(changes).length) ask(changes);
}

window.addEventListener("hashchange", () => open_address());

/** Show what the address of the page says. */
function open_address() {
  const address = location.hash.slice(1);
  follow_text(new URLSearchParams(address));
  follow(address);
}
follow(document.querySelector("#asked a").hash.slice(1));
open_address();

// For tests and the console: what the page shows. document.body.dataset.state and .puzzle are "ready" when it is
// all there.
window.ponder = {state, puzzle};
