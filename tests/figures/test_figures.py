"""What is measured of one run; saved numbers and the tables that are made of them."""

import pandas as pd
import pytest
from lab_helpers import ROOT, small_model

import analyze
from common import UserError
from lab.figures.comparing import Compare
from lab.figures.depth import Depth
from lab.figures.difficulty import Difficulty, gains, shifts
from lab.figures.layers import Layers
from lab.figures.lookup import Kinds, Lookup, Worth
from lab.figures.mixed import Mixed
from lab.figures.subject import decoded_tokens, open_subject
from lab.figures.tables import save, tabulate
from lab.figures.where import Where
from lab.figures.within import Within


def test_difficulty(trained, tmp_path, subject):
    """Catches a reference that sorts nothing or is another model's, and gains unlike the root's figure."""
    one = subject(small_model(seed=2), windows=4)
    ce, _ = analyze.losses_by_depth(one.model, one.windows, one.tau)
    for ours, root in ((gains, analyze.buckets), (shifts, analyze.shift)):
        assert ours(one, ce[:, 0]) == root(one.model, one.windows, one.tau)
        assert ours(one, -ce[:, 0]) != ours(one, ce[:, 0])
    text = str(trained.parent / "text.txt")
    with pytest.raises(UserError, match="not the text"):
        open_subject(trained / "ponder", 8, data=str(trained.parent / "other.txt"))
    given = dict(run=str(trained / "ponder"), data=text, windows=8, out=tmp_path)
    Difficulty(str(trained / "plain"), **given).draw()
    rows = pd.read_csv(tmp_path / "buckets-by-reference.csv")
    plain = open_subject(trained / "plain", 8, data=text)
    assert rows.difficulty.mean() == pytest.approx(decoded_tokens(plain)[0].mean().item(), abs=0.02)
    assert (tmp_path / "shift-by-reference.png").stat().st_size > 5000
    for reference, run, message in (("lookup-0", "ponder", "--reference"), ("ponder", "plain", "vanilla")):
        with pytest.raises(UserError, match=message):
            Difficulty(str(trained / reference), **given | {"run": str(trained / run)}).draw()


def test_numbers_survive_their_file(tmp_path):
    """Catches digits that are lost, and nothing as 0."""
    frame = pd.DataFrame([{"x": 1 / 3, "y": 1.0}, {"x": 2 / 3, "y": None}])
    save(tmp_path, "a", frame, tabulate(frame, {"x": "x:.2f", "y": "y:g"}))
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "a.csv"), frame, check_exact=True)
    shown = "| x | y |\n| --- | --- |\n| 0.33 | 1 |\n| 0.67 | - |\n"
    assert (tmp_path / "a.md").read_text() == shown


PUBLISHED = {
    Compare: ["depth-tries", "pays-grid", "pays-jacobi", "pays-longer", "pays-rates"],
    Depth: ["depth", "depth-bpe"],
    Kinds: ["lookup-kinds"],
    Layers: ["layers", "layers-long", "layers-wide", "pays-ms"],
    Lookup: ["lookup", "lookup-long", "lookup-rivals"],
    Mixed: ["mixed"],
    Where: ["where", "where-long"],
    Within: ["warmup-within"],
    Worth: ["worth"],
}
PUBLISHED[Compare] += ["warmup", "warmup-repeat", "deciding", "warmup-choice", "warmup-noise"]
PUBLISHED[Compare] += ["warmup-jacobi", "warmup-longer", "warmup-precision", "warmup-wide"]
PUBLISHED[Compare] += ["price", "price-long", "price-small", "price-tau"]


@pytest.mark.parametrize(
    "figure, file", [(figure, file) for figure in PUBLISHED for file in PUBLISHED[figure]]
)
def test_published(figure, file, tmp_path):
    """Catches numbers of a page that today's code does not know, or loses when it draws them again."""
    kept, name = ROOT / f"docs/figures/{file}.csv", figure.__name__.lower()
    figure(runs=(str(kept),), out=tmp_path).draw()
    assert (tmp_path / f"{name}.csv").read_bytes() == kept.read_bytes()
    assert (tmp_path / f"{name}.md").stat().st_size > 100
    assert figure.sheet is None or (tmp_path / f"{name}.png").stat().st_size > 5000
    (bad := tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    for path in (bad, tmp_path / "none.csv"):
        with pytest.raises(UserError, match=path.name):
            figure(runs=(str(path),), out=tmp_path).draw()
    with pytest.raises(UserError, match="one CSV"):
        figure(runs=(str(kept), str(bad)), out=tmp_path).draw()
