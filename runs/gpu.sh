#!/usr/bin/env bash
# What to run first on a GPU, in parts of less than ten minutes and without a network. What they
# print is the report; a test that fails ends with an error.
#     bash runs/gpu.sh a    is it right? the forms of attention, the equivalence tests on the GPU
#     bash runs/gpu.sh b    is it good? `small` beside a model without pondering, on the same tokens
#     bash runs/gpu.sh c    is it fast? attention and training steps against plain ones
#     bash runs/gpu.sh d    does it save? early exit, CUDA graphs and prompts, of part b's model
#     TRY=1 bash runs/gpu.sh a b c d      do they run? At toy sizes on a CPU, in a minute or two
# DATA is a prepared corpus, or one is made of the source of Python's packages; STEPS those of b.
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

python=${PYTHON:-python}
out=${OUT:-out/gpu}
device=(--device cuda)
presets="small 70m 410m"
tests=(tests/method tests/kernels tests/engine -n 4)
test_device=cuda
toy_training=() toy_evaluation=() toy_attention=() toy_step=() toy_decoding=()
if [ -n "${TRY:-}" ]; then
  DATA=docs/tour.md
  device=(--device cpu)
  presets=tiny
  tests=(tests/method/test_golden.py)
  test_device=pretended
  toy_training=(--preset tiny --steps 4 --batch-size 2 --eval-windows 2)
  toy_evaluation=(--windows 3)
  toy_attention=(--lengths 64 --widths 56 --repeats 1)
  toy_step=(--windows 1 --R 1 --repeats 1 --no-compile)
  toy_decoding=(--batch-sizes 1 --prompts 8 --new-tokens 4 --repeats 1)
fi

for part in "${@:?which part: a, b, c or d}"; do
  case $part in
    a)
      PONDERLM_TEST_DEVICE=$test_device "$python" -m pytest -q "${tests[@]}" ;;
    b)
      for method in ponderlm3 vanilla; do
        once "$out" "$method" 0 --preset small --method "$method" --data "${DATA:-pysource}" \
          --steps "${STEPS:-600}" "${device[@]}" "${toy_training[@]}"
        "$python" -m evaluation --run "$out/$method-0" --windows 300 "${device[@]}" "${toy_evaluation[@]}"
      done ;;
    c)
      "$python" -m bench attention --repeats 3 "${device[@]}" "${toy_attention[@]}"
      for preset in $presets; do
        "$python" -m bench train --preset "$preset" --compile --repeats 3 "${device[@]}" "${toy_step[@]}"
      done ;;
    d)
      "$python" -m bench decode --run "$out/ponderlm3-0" --precision bfloat16 --prompts 512 \
        --repeats 2 "${device[@]}" "${toy_decoding[@]}" ;;
    *) echo "$part: which part: a, b, c or d"; exit 2 ;;
  esac
done
