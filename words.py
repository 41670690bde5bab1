"""How many steps tokens and words take (appendix D): counted by token, by word, and at hyphens."""

import re

import numpy as np

from measure import mean


def show_token(token):
    """The bytes of a token as one readable line."""
    text = token.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def step_row(kind, text, steps, K):
    """count, mean steps, and the share of `steps` that stop before K."""
    pruned = mean(steps < K)
    return {"kind": kind, "text": text, "count": len(steps), "steps": mean(steps), "pruned": pruned}


def words(pieces):
    """Tokens (bytes) of one window -> [(word, first, last)]: the tokens that make up each word.

    A word is ASCII letters, with none of any other kind, digit or underscore beside them; it may
    share its first token with a space before it. One that the window cuts, or that shares a token
    with anything else, is left out.
    """
    ends = np.cumsum([len(piece) for piece in pieces])
    text, found = b"".join(pieces), []
    for match in re.finditer(rb"(?<![\w\x80-\xff])[A-Za-z]+(?![\w\x80-\xff])", text):
        if match.start() == 0 or match.end() == len(text):
            continue
        first = int(np.searchsorted(ends, match.start(), side="right"))
        last = int(np.searchsorted(ends, match.end() - 1, side="right"))
        whole = b"".join(pieces[first : last + 1])
        if whole.removeprefix(b" ") == match[0]:
            found.append((match[0].decode(), first, last))
    return found


def token_rows(measured, tokenizer, T, names, least=50):
    """Steps after each token, and after each word of `names` -> rows; words of one and more tokens.

    Returns:
        rows {kind, text, count, steps, pruned} of tokens with at least `least` occurrences and of
        the names; and rows of how words of several tokens stop, inside and at their end.
    """
    if least < 1:
        raise ValueError(f"least = {least}: it must be at least 1")
    names = [name.lower() for name in names]
    K, steps, rows = measured.ce.size(-1) - 1, measured.steps, []
    for token in measured.x.unique().tolist():
        mine = steps[measured.x == token]
        if len(mine) >= least:
            rows.append(step_row("token", show_token(tokenizer.decode([token])), mine, K))
    of_word, inside, at_end = {name: [] for name in names}, [], []
    pieces = {token: tokenizer.decode([token]) for token in measured.x.unique().tolist()}
    for start in range(0, len(steps), T):
        for word, first, last in words([pieces[t] for t in measured.x[start : start + T].tolist()]):
            if word.lower() in of_word:
                of_word[word.lower()].append(start + last)
            if last > first:
                inside += range(start + first, start + last)
                at_end.append(start + last)
    rows += [step_row("word", name, steps[where], K) for name, where in of_word.items()]
    compound = []
    for k in range(K + 1):
        shares = [mean(steps[where] == k) for where in (inside, at_end)]
        row = {"steps": k, "non_terminal": shares[0], "terminal": shares[1]}
        compound.append(row | {"non_terminal_tokens": len(inside), "terminal_tokens": len(at_end)})
    return rows, compound
