"""Settings are chosen by text that is not reported."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import flags

from data import open_corpus
from lab.figures.choose import Choose
from lab.interop import load
from lab.train import read_run
from model import UserError


@torch.no_grad()
def test_choose(trained, tmp_path):
    """Catches windows that are reported as well, another text or tau, and settings told apart by nothing."""
    text = str(trained.parent / "text.txt")
    runs = [trained / "ponder", trained / "tau"]  # which differ in tau, and in their steps
    Choose(flags(runs), out=tmp_path, windows=4, data=text).draw()
    rows = pd.read_csv(tmp_path / "choose.csv").set_index("method")
    assert list(rows.choose) == sorted(rows.choose)
    val = open_corpus(text, "bytes").val
    order = np.random.default_rng((0, 0)).permutation((len(val) - 1) // 16)
    for path in runs:
        config, *_ = read_run(path)
        windows = torch.from_numpy(np.stack([val[16 * i : 16 * i + 17] for i in order[8:12]]).astype(int))
        out = load(path)(windows[:, :-1], windows[:, 1:], tau=config.tau)
        (name,) = [name for name in rows.index if ("tau" in name) == (config.tau != 1e-4)]
        assert rows.choose[name] == pytest.approx(out.loss.item(), rel=1e-5)
        assert rows.choose_steps[name] == pytest.approx(out.steps.float().mean().item(), rel=1e-5)
    with pytest.raises(UserError, match=r"8 of .* windows are reported"):
        Choose(flags(runs), windows=10**6, data=text).draw()
