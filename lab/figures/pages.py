"""HTML pages that need nothing but themselves: the depth map of a text, and the report of a run.

The depth map shades each token by the steps that were executed before it was chosen, at the token that
predicts it (as sample.py --show-steps does), or by its loss there. What the pages look like, and what they
say, is in templates/.
"""

import codecs
import json
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import jinja2
import torch

import analyze
from analyze import show_token, write_csv
from lab.common import Count, Given, strict_dataclass
from lab.corpora.tokenizers import load_tokenizer
from lab.evaluation.texts import Share
from lab.figures.comparing import read_results
from lab.figures.subject import decoded, measure, open_subject
from lab.interop import find_model, load
from lab.methods.cost import cost
from lab.train import read_run
from model import UserError, pick_device, write_whole

LONGEST = 4096  # tokens of a depth map
PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def write_page(file, template, **values):
    """Fill in a template of templates/."""
    text = PAGES.get_template(template).render(values)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, lambda part: part.write_text(text, encoding="utf-8"))
    print(f"written: {file}")


@strict_dataclass
class Study:
    """The flags that all pages of one run have."""

    run: Given | None = None  # directory of a trained model; by default the newest in out/
    data: Given | None = None  # the text that it was scored on, if that is no named corpus
    tau: Share | None = None  # where pondering stops; by default where the run scored it
    out: Path | None = None  # where the results go; by default <run>/report
    device: str = "auto"  # auto, cpu, cuda or mps

    windows = 1  # of the validation text

    def __post_init__(self):
        self.path = find_model(self.run)
        self.out = self.out or self.path / "report"

    @cached_property
    def subject(self):
        """The model and its text, when they are first needed."""
        found = open_subject(self.path, self.windows, self.tau, pick_device(self.device), self.data)
        if not found.model.has_router:
            raise UserError(f"{self.path} is of method {found.model.method}: it has no router")
        return found


# -- The depth map ---------------------------------------------------------------------------------


def overlapping(ids, T, stride):
    """Token ids -> windows (.., T+1), a stride from each other, so that all tokens but the first have at
    least T - stride before them; and for each window the first of its targets that is new."""
    last = max(len(ids) - 1 - T, 0)
    starts = sorted({*range(0, last, stride), last})
    rows = torch.stack([ids[start : start + T + 1] for start in starts])
    ends = [0] + [start + rows.size(1) - 1 for start in starts]  # targets up to here are done
    return rows, [end - start for start, end in zip(starts, ends, strict=False)]


def readable(tokenizer, ids):
    """Each token as text. One that ends inside a character leaves it to the token that ends it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(tokenizer.decode([token])) or "·" for token in ids]


def read_text(subject, file=None):
    """Steps, s, w and losses of each token of a text, or of the start of the validation text.

    Returns:
        dict of run, K, tau, and tokens: dicts of text, bytes, steps, loss (hard-stopped), s, w, and ce, the
        losses by depth with all steps run; the first token has no prediction: None. And the means of steps
        and loss.

    Raises:
        UserError: a text of less than two tokens. FileNotFoundError.
    """
    val, tokenizer, T = subject.val, subject.tokenizer, subject.model.config.block_size
    ids = tokenizer.encode(file.read_bytes()) if file else val.tokens[:1025].tolist()
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens; it takes 2 to predict one from another")
    if len(ids) > LONGEST:
        print(f"note: of {len(ids):,} tokens the first {LONGEST:,} are shown")
    ids = ids[:LONGEST]
    lines = tokenizer.name == "lookup"  # whose windows are lines
    rows, firsts = overlapping(torch.tensor(ids), T, T if lines else max(T // 2, 1))
    part = replace(subject, windows=rows.to(subject.windows.device))
    values = dict(zip(("s", "w", "ce", "loss", "steps"), [*measure(part), *decoded(part)], strict=True))
    T, tokens = rows.size(1) - 1, [{"steps": None, "loss": None}]
    for window, first in enumerate(firsts):
        for i in range(window * T + first, (window + 1) * T):
            tokens.append({name: value[i].tolist() for name, value in values.items()})
    for token, text, known in zip(ids, readable(tokenizer, ids), tokens, strict=True):
        known |= {"text": text, "bytes": show_token(tokenizer.decode([token]))}
    means = {key: fmean(token[key] for token in tokens[1:]) for key in ("steps", "loss")}
    K = subject.model.config.ponder_steps
    return {"run": str(subject.path), "K": K, "tau": subject.tau, "tokens": tokens, **means}


@strict_dataclass
class Heatmap(Study):
    """A text with each token shaded by its steps, or by its loss: an HTML page by itself."""

    text: Path | None = None  # a text file; by default the beginning of the validation text

    def draw(self):
        write_page(self.out / "heatmap.html", "heatmap.html", **read_text(self.subject, self.text))


# -- The report of a run ---------------------------------------------------------------------------


def paper_figures(subject, reference=None):
    """The figures of analyze.py that a model has -> {name: a function that makes its rows}. reference: the
    losses of another model, which are a second difficulty."""
    model, windows, tau = subject.model, subject.windows, subject.tau
    found = {
        "buckets": lambda: analyze.buckets(model, windows, tau, reference),
        "shift": lambda: analyze.shift(model, windows, tau, reference),
        "tokens": lambda: analyze.tokens(model, windows, subject.tokenizer, tau),
        "tau": lambda: analyze.tau_curve(model, windows, {*analyze.TAUS, tau}),
    }
    return {"converge": lambda: analyze.converge(model, windows)} | found if model.iterates else found


def reference_losses(subject, place):
    """The losses (n,) of the model in `place` on a subject's windows. UserError: it cannot read them."""
    model = load(place).to(subject.windows.device)
    digest = load_tokenizer(place / "tokenizer.json").digest
    if digest != subject.tokenizer.digest or model.config.block_size < subject.windows.size(1) - 1:
        raise UserError(f"--reference {place} has another tokenizer than {subject.path}, or a shorter window")
    return decoded(replace(subject, model=model))[0]


def loss_rows(path, config, shape):
    """The final evaluation and what a token costs, {what: value}; {} of an unfinished run."""
    if not (path / "results.json").is_file():
        return {}
    results, rows = read_results(path), {}
    for what, key in {"as trained": "trained", "at the fixed point": "fixed", "hard-stopped": "hard"}.items():
        rows[f"loss {what}, nats a token"] = f"{results[key]['loss']:.4f}"
    rows["unigram entropy, nats a token"] = f"{results['unigram_entropy']:.4f}"
    rows[f"executed steps at tau = {config.tau:g}"] = f"{results['hard']['steps']:.3f}"
    spent = vars(cost(shape, results["hard"]["steps"])).items()
    return rows | {name.replace("_", " "): f"{value:,.4g}" for name, value in spent}


@strict_dataclass
class Report(Heatmap):
    """The figures of analyze.py, the depth map and the settings of one run, on one page."""

    windows: Count = 256  # validation windows to measure
    # another trained model on the same text: its losses are a second difficulty
    reference: Given | None = None

    def draw(self):
        config, shape, corpus = read_run(self.path)
        losses = self.reference and reference_losses(self.subject, find_model(self.reference))
        tables = {}
        for name, measured in paper_figures(self.subject, losses).items():
            print(f"--- {name}", flush=True)
            file = self.out / f"{name}.csv"
            tables[name] = measured()
            write_csv(file, tables[name])
            drawn = getattr(analyze, f"draw_{name}")(tables[name])
            write_whole(file.with_suffix(".png"), lambda part, drawn=drawn: drawn.savefig(part, format="png"))
        super().draw()
        write_page(
            self.out / "index.html",
            "report.html",
            run=self.path,
            shape=shape,
            corpus=corpus,
            losses=loss_rows(self.path, config, shape),
            tables=tables,
            windows=len(self.subject.windows),
            tau=self.subject.tau,
            settings=json.dumps(asdict(config) | asdict(shape), indent=2),
        )
