/* The puzzle, as lab/corpora/lookup.py has it: a table of 13 pairs, the chains that they make. */

const LETTERS = "abcdefghijklm", ENDS = "STUVXYZ", LONGEST = 6;

/** Random numbers in [0, 1) from a seed, the generator called mulberry32. Other numbers than
 * torch's: the same seed writes another text there. */
function random(seed) {
  return () => {
    seed = seed + 0x6D2B79F5 | 0;
    let x = Math.imul(seed ^ seed >>> 15, 1 | seed);
    x = x + Math.imul(x ^ x >>> 7, 61 | x) ^ x;
    return ((x ^ x >>> 14) >>> 0) / 2 ** 32;
  };
}

/** n of a list or text, in random order. */
function sample(list, n, u) {
  const rest = [...list];
  return Array.from({length: n}, () => rest.splice(Math.floor(u() * rest.length), 1)[0]);
}

/** The pairs of a random table, in random order: chains of 6 letters and, three together, of 7. */
function make_table(seed) {
  const u = random(seed), letters = sample(LETTERS, 13, u), ends = sample(ENDS, 4, u);
  const last = [...sample([1, 2, 3, 4, 5, 6], 2, u), 7, 13];  // letters before an end
  const next = i => last.includes(i + 1) ? ends.pop() : letters[i + 1];
  return sample(letters.map((a, i) => a + next(i)), 13, u);
}

/** A text of pairs -> {pairs, chains, places, usual}: the chains as words, longest first, where
 * letters stand, and whether the model has read such tables. An Error says how to mend the text. */
function read_table(text) {
  const goes = {}, comes = {}, wrong = message => { throw new Error(message); };
  const pairs = text.split(/[^a-zA-Z]+/).filter(Boolean), one_end = `an end, one of ${[...ENDS]}`;
  for (const pair of pairs) {
    const [a, b] = pair;
    if (pair.length !== 2 || !LETTERS.includes(a) || !(LETTERS + ENDS).includes(b))
      wrong(`“${pair.slice(0, 9)}” is no pair: write a letter a to m, then where it leads, to `
        + `another such letter or to ${one_end}.`);
    if (goes[a]) wrong(`${a + goes[a]} and ${pair} both begin with ${a}: take one of them away.`);
    if (comes[b]) wrong(`${comes[b] + b} and ${pair} both lead to ${b}: lead one elsewhere.`);
    goes[a] = b;
    comes[b] = a;
  }
  const letters = [...LETTERS], missing = letters.filter(a => !goes[a]);
  if (missing.length) wrong(`No pair begins with ${missing.join(", ")}: add one for each.`);
  const follow = a => goes[a] ? a + follow(goes[a]) : a;
  const chains = letters.filter(a => !comes[a]).map(follow).sort((a, b) => b.length - a.length);
  const round = letters.filter(a => !chains.join("").includes(a)).join(", ");
  if (round) wrong(`${round}: they lead round in a circle. Lead one of them to ${one_end}.`);
  if (chains[0].length > LONGEST + 1)
    wrong(`${chains[0]} takes ${chains[0].length - 1} lookups, but ${LONGEST} is the most: lead `
      + `one of its letters to ${one_end}.`);
  const places = Object.fromEntries(chains.flatMap((chain, row) => [...chain].map(
    (letter, i) => [letter, {row, n: chain.length - 1 - i, end: chain.at(-1)}])));
  return {pairs, chains, places, usual: chains.length === 4 && chains[0].length === LONGEST + 1};
}
