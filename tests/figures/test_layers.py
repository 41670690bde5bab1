"""A step's worth in layers: what is measured of a run, and what is read off between two depths."""

import pandas as pd
import pytest
from lab_helpers import records
from safetensors.torch import load_file

from common import UserError, read_json
from lab.figures.layers import Layers, layer_rows, summary, with_worth
from lab.figures.runs import read_runs


def test_rows(trained, tmp_path):
    """Catches loss and steps of another way of running, and parameters that are counted twice."""
    runs = [str(trained / "ponder"), str(trained / "plain")]
    data = str(trained.parent / "text.txt")
    Layers(runs=tuple(runs), data=data, out=tmp_path).draw()
    rows = records(pd.read_csv(tmp_path / "layers.csv"))
    assert [(r["model"], r["layers"], r["K"]) for r in rows] == [("decides", 1, 2), ("plain", 1, 0)]
    for row, run in zip(rows, runs, strict=True):
        hard = read_json(f"{run}/results.json")["hard"]
        assert (row["loss"], row["steps"]) == pytest.approx((hard["loss"], hard["steps"]))
        weights = load_file(f"{run}/model.safetensors").values()
        assert row["parameters"] == sum(map(len, (x.flatten() for x in weights)))
        assert row["training"] > 0 < row["decoding"]
    assert (tmp_path / "layers.png").stat().st_size > 5000
    with pytest.raises(UserError, match="other"):
        layer_rows(read_runs([*runs, trained / "other"]), data)


def test_worth(capsys):
    """Catches layers of another seed, a deeper model that is worse, and a step beyond the deepest."""
    plain = [
        ("plain", n, 0, seed, loss + seed) for seed in (0, 1) for n, loss in ((3, 5.0), (4, 4.0), (6, 3.0))
    ]
    plain += [("plain", 5, 0, 1, 9.0)]  # of no use: 4 layers do more
    thinks = [("always", 3, 1, 0, 4.5), ("always", 3, 1, 1, 4.5), ("always", 3, 2, 0, 2.0)]
    columns = ["model", "layers", "K", "seed", "loss"]
    frame = pd.DataFrame([*plain, *thinks, ("always", 3, 3, 2, 1.0)], columns=columns)
    frame = frame.assign(steps=1.0, parameters=7, training=1.0, decoding=1.0)
    frame = with_worth(frame)
    worth = frame.worth
    assert worth[frame.model == "plain"].tolist()[:6] == [0] * 6
    assert worth[frame.model == "always"].tolist()[:3] == pytest.approx([0.5, 2.0, 3.0])
    assert worth.isna().tolist() == [False] * 10 + [True]  # a seed without plain models
    cells = {row["model"]: row for row in summary(frame).to_dict("records")}
    half = 12.706 * 1.5 / 2  # two seeds: t of one degree of freedom, deviation 1.5 / sqrt(2)
    assert cells["always, K = 1, 3 layers"]["layers worth"] == f"1.25 ± {half:.2f}"
    alone = with_worth(pd.concat([frame, frame[frame.K == 1].iloc[:1].assign(seed=9)]))  # no plain models
    known = {row["model"]: row for row in summary(alone).to_dict("records")}
    assert known["always, K = 1, 3 layers"]["layers worth"] == f"1.25 ± {half:.2f}"
    assert cells["always, K = 2, 3 layers"]["layers worth"] == "≥ 3.00"
    assert cells["plain, 4 layers"]["layers worth"] == ""
    worse = with_worth(pd.concat([frame, frame[frame.K == 2].iloc[:1].assign(K=9, loss=7.0)]))
    known = {row["model"]: row for row in summary(worse).to_dict("records")}
    assert known["always, K = 9, 3 layers"]["layers worth"] == "≤ 0.00"  # worse than the shallowest plain one
    both = with_worth(pd.concat([worse, worse[worse.K == 9].assign(seed=1, loss=2.0)]))
    known = {row["model"]: row for row in summary(both).to_dict("records")}
    assert known["always, K = 9, 3 layers"]["layers worth"].startswith("≈ ")  # cut at both ends
    one = with_worth(frame[(frame.seed == 0) & (frame.layers == 3)])  # plain models of one depth
    assert [row["layers worth"] for row in summary(one).to_dict("records")] == ["", "-", "-"]
