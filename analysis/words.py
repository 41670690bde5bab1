"""How many steps tokens and words take (appendix D): counted by token, by word, and at hyphens."""

import re

import numpy as np
import pandas as pd


def show_token(token):
    """The bytes of a token as one readable line."""
    text = token.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


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


def summaries(kind, keys, steps, K, names):
    """Of the steps (n,) with the same key (n,): count, mean, and the share that stops before K.

    names {key: text} says which keys to show, those that do not occur included.
    """
    groups = pd.DataFrame({"steps": steps, "pruned": steps < K}).groupby(keys)
    frame = groups.mean().reindex(list(names))
    frame.insert(0, "count", groups.size().reindex(list(names), fill_value=0))
    frame.insert(0, "text", list(names.values()))
    frame.insert(0, "kind", kind)
    return frame


LEAST = 50  # tokens that come less often are left out


def token_rows(measured, tokenizer, T, names):
    """Steps after each token, and after each word of `names`; words of one and more tokens.

    Returns:
        a frame of kind, text, count, steps, pruned, of the tokens with at least LEAST occurrences
        and of the names; and a frame of how words of several tokens stop, inside and at their end.
    """
    x, steps, K = measured.x.numpy(), measured.steps.numpy(), measured.ce.size(-1) - 1
    counts = pd.Series(x).value_counts().sort_index()
    pieces = {token: tokenizer.decode([token]) for token in counts.index}
    often = {token: show_token(pieces[token]) for token in counts.index[counts >= LEAST]}
    found = [
        (word.lower(), start + first, start + last)
        for start in range(0, len(x), T)
        for word, first, last in words([pieces[token] for token in x[start : start + T]])
    ]
    word = pd.DataFrame(found, columns=["text", "first", "last"])
    names = {name.lower(): name.lower() for name in names}
    tokens = summaries("token", x, steps, K, often)
    named = summaries("word", word.text.array, steps[word["last"].astype(int)], K, names)

    compound = [(first, last) for _, first, last in found if last > first]
    places = {"non_terminal": [i for pair in compound for i in range(*pair)]}
    places["terminal"] = [last for _, last in compound]
    frame = pd.DataFrame({"steps": range(K + 1)})
    for name, where in places.items():
        stops = pd.Series(steps[np.array(where, dtype=int)]).value_counts(normalize=True)
        frame[name] = stops.reindex(frame.steps, fill_value=0) if where else np.nan
        frame[f"{name}_tokens"] = len(where)
    return pd.concat([tokens, named]), frame
