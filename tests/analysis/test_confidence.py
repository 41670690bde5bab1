"""Stopping by confidence: against the decoder that goes slot by slot, and the command."""

import pytest
import torch
from conftest import small_model

import analyze
from analysis.comparing import read_runs
from analysis.confidence import TAU, confidence_rows, stop_by
from interop import load
from runtime import UserError
from training.config import validation_windows
from training.validation import evaluate

CPU = torch.device("cpu")


@torch.no_grad()
def decode(model, tokens, rule, c):
    """Slot by slot: logits (T, V) and steps (T,)."""
    cache, K, found = model.new_cache(), model.config.ponder_steps, []
    for t, token in enumerate(tokens):
        x, positions = model.place(int(token), t)
        h_hat, before, s, log_w = 0, None, None, torch.zeros(1, 1, K + 1).double()
        for k in range(K + 1):
            h = model.model(x, positions, log_w[..., k] if model.has_router else None, cache=cache)
            if not k:
                s, log_w = model.router(h)
            h_hat = h_hat + s[..., k : k + 1] * h if model.has_router else h
            logits = model.lm_head(h_hat)[0, 0]
            if rule == "probability":
                sure = logits.softmax(-1).max() >= c
            else:
                sure = k > 0 and (h - before).norm() / h.norm() <= c
            if sure:
                break
            x = before = h
        found.append((logits, k))
    return torch.stack([logits for logits, _ in found]), [k for _, k in found]


@pytest.mark.parametrize("method", ["ponderlm2", "ponderlm3"])
@pytest.mark.parametrize("rule,c", [("probability", 0.1), ("change", 0.15)])
def test_equals_decoding(method, rule, c):
    """Catches a step too many or too few, a key that should not be there, another state's
    prediction: logits to 1e-9 in float64."""
    model = small_model(seed=3, method=method, ponder_steps=3)
    idx = torch.randint(31, (1, 14), generator=torch.Generator().manual_seed(1))
    expected, steps = decode(model, idx[0], rule, c)
    assert len(set(steps)) > 1  # otherwise nothing is told apart
    with torch.no_grad():
        out = stop_by(model, rule, c)(idx, R=60, tau=TAU)
    assert out.steps[0].tolist() == steps
    assert (out.logits[0] - expected).abs().max() < 1e-9


def test_rows(trained):
    """Catches a rule that stays in the model behind it, and the router's tau elsewhere."""
    runs = read_runs([str(trained / name) for name in ("ponder", "ponderlm2")])
    thresholds = {"probability": (0.0, 1.1), "change": (0.0,), "router": (0.97,)}
    frame = confidence_rows(runs, thresholds, 256, CPU).set_index(["method", "rule", "c"])
    _, _, val = validation_windows(runs[0].path)
    for run in runs:
        fixed = evaluate(load(run.path), val, 8, CPU)
        rows = frame.loc[run.method.title]
        assert rows.loc["probability", 0.0].steps == 0
        for never in (("probability", 1.1), ("change", 0.0)):
            assert rows.loc[never].steps == 2
            assert rows.loc[never].loss == pytest.approx(fixed["loss"], abs=1e-6)
    hard = evaluate(load(runs[0].path), val, 8, CPU, tau=0.97)
    assert frame.loc["PonderLM-3", "router", 0.97].loss == pytest.approx(hard["loss"])
    assert ("PonderLM-2", "router", 0.97) not in frame.index


def test_refused(trained):
    with pytest.raises(UserError, match="plain: method vanilla; give PonderLM-2"):
        confidence_rows(read_runs([str(trained / "plain")]), {}, 256, CPU)


def test_command(trained, tmp_path):
    """Catches a table or figure that is not redrawn the same."""
    runs, out = [str(trained / "ponder"), str(trained / "ponderlm2")], str(tmp_path / "out")
    flags = ["--taus", "0.1", "--probabilities", "0.5", "--changes", "0.5"]
    analyze.main(["confidence", "--runs", *runs, "--out", out, *flags])
    names = [tmp_path / "out" / f"confidence.{end}" for end in ("csv", "md", "png")]
    before = [file.read_bytes() for file in names]
    analyze.main(["confidence", "--redraw", "--out", out])
    assert before == [file.read_bytes() for file in names]
