#!/usr/bin/env bash
# The README's table of the tiny preset: 3 seeds of each model, skipping those that are done.
#     bash runs/tiny.sh
set -euo pipefail
cd "$(dirname "$0")/.."

. runs/once.sh

train() { # name, flags
  for seed in 0 1 2; do
    once out/tiny "$1" "$seed" --preset tiny --precision bfloat16 "${@:2}"
  done
}

train no-pondering --method vanilla
train ponderlm2 --method ponderlm2 --iters 2 2
train ponderlm3-no-penalty --penalty-weight 0
train ponderlm3

"${PYTHON:-python}" - <<'TABLE'
import json
import statistics as st
from pathlib import Path

print(f"{'mean ± std over seeds':22}{'R':>3}{'as trained':>17}{'fixed point':>17}{'hard-stopped':>17}"
      f"{'s permuted':>17}{'steps':>14}")
for name in ("no-pondering", "ponderlm2", "ponderlm3-no-penalty", "ponderlm3"):
    rows = [json.loads(f.read_text()) for f in Path("out/tiny").glob(f"{name}-[0-9]/results.json")]
    cells = [[r[key]["loss"] for r in rows] for key in ("trained", "fixed", "hard", "permuted")]
    cells.append([r["hard"]["steps"] for r in rows])
    cells = [f"{st.mean(c):.4f} ± {st.stdev(c):.4f}" for c in cells]
    print(f"{name:22}{rows[0]['iters']:3}" + "".join(f"{c:>17}" for c in cells))
TABLE
