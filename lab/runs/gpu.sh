#!/usr/bin/env bash
# What to run on a GPU: four parts, each meant to take less than ten minutes, none of which needs a network. They
# print a report with the goals that are met and those that are not; a test that fails ends with an error.
#     bash lab/runs/gpu.sh a    is it right? equivalence tests on the GPU, forms of attention, and float64
#     bash lab/runs/gpu.sh b    is it good? `python train.py` as it stands, a vanilla model, and the grid (K = 1, 3)
#     bash lab/runs/gpu.sh c    is it fast? attention and training steps against plain ones
#     bash lab/runs/gpu.sh d    does it save time? early exit, CUDA graphs and prompts, with the model of part b
#     TRY=1 bash lab/runs/gpu.sh a b c d      does it run? At toy sizes on a CPU, in a minute or two
# If there is not time for all of it, leave out what follows `python train.py` and `sample.py` in part b first, then part d.
# Part b writes to out/gpu/recompiles.txt how often torch compiled a graph anew, which should be never, and to
# out/gpu/bench/profile-small-cuda.json how long compiling takes, how many graphs there are, and where the time of a
# compiled training step goes.
# DATA: a prepared corpus; by default one is made from the source of Python's packages. STEPS: training steps of the
# vanilla model and the grid. MODEL: directory of a Llama with its tokenizer (SmolLM2-135M), which part d decodes, too.
# Writes: runs to out/gpu, results of benchmarks to out/gpu/bench. OUT names another folder.
. "$(dirname "$0")/once.sh"
ROUTER_RATE=3 # the default
PRECISION=bfloat16

out=${OUT:-out/gpu} data=${DATA:-pysource} text=pydocs
device=(--device cuda) test_device=cuda
tests=(tests/root tests/lab/test_kernels.py tests/engine tests/methods -n 4)
presets="small 70m 410m"
toy_profile=(--compile) toy_training=() toy_evaluation=() toy_attention=(--widths 56 64 120 128) toy_step=(--compile) toy_decoding=()
if [ -n "${TRY:-}" ]; then
  out=${OUT:-out/try/gpu} data=docs/tour.md text=docs/tour.md presets=tiny
  device=(--device cpu) test_device=pretended
  tests=(tests/root/test_golden.py)
  toy_training=(--preset tiny --steps 4 --batch-size 2 --block-size 64 --eval-windows 2)
  toy_evaluation=(--windows 3)
  toy_attention=(--lengths 64 --widths 56 --repeats 1)
  toy_step=(--windows 1 --R 1 --repeats 1)
  toy_profile=("${toy_step[@]}")
  toy_decoding=(--batch-sizes 1 --prompts 8 --new-tokens 4 --repeats 1)
fi

train() { # name, flags
  once "$out" "$1" 0 --preset small --data "$data" --steps "${STEPS:-1500}" "${@:2}" "${device[@]}" "${toy_training[@]}"
}
score() { # runs
  for run in "$@"; do
    lab evaluate --run "$run" --corpus "$data" --windows 300 "${device[@]}" "${toy_evaluation[@]}"
  done
}
bench() { # kind, flags
  lab bench "$1" --out "$out/bench" "${device[@]}" "${@:2}"
}
goals() { # flags
  lab bench goals --out "$out/bench" "$@"
}
decode() { # run, the text that it was trained on
  bench decoding --run "$1" --data "$2" --precision bfloat16 --prompts 512 --repeats 2 "${toy_decoding[@]}"
}

for part in "${@:?which part: a, b, c or d}"; do
  case $part in
    a) PONDERLM_TEST_DEVICE=$test_device "$PYTHON" -m pytest -q "${tests[@]}" ;;
    b) mkdir -p "$out"
       [ -f "$out/small/results.json" ] ||
         TORCH_LOGS=recompiles "$PYTHON" train.py --data "$data" --out "$out" --name small "${device[@]}" \
           "${toy_training[@]}" 2> >(tee "$out/recompiles.txt" >&2)
       bench profile --preset "${presets%% *}" "${toy_profile[@]}"
       "$PYTHON" sample.py --run "$out/small" --tau 1e-4 --max-new-tokens "${NEW:-500}" "${device[@]}"
       train vanilla --method vanilla
       for K in 1 3; do train grid-$K --method grid --ponder-steps $K; done
       score "$out"/{small,vanilla-0,grid-1-0,grid-3-0}
       goals --run "$out/small" ;;
    c) bench attention --repeats 3 "${toy_attention[@]}"
       for preset in $presets; do bench step --preset "$preset" --repeats 3 "${toy_step[@]}"; done
       goals ;;
    d) decode "$out/small" "$data"
       if [ -n "${MODEL:-}" ]; then
         once "$out" taught 0 --preset tiny --init-from "$MODEL" --data $text --ponder-steps 1 --refinements 0 0 \
           --steps 20 --batch-size 4 --block-size 128 "${device[@]}" "${toy_training[@]}"
         decode "$out/taught-0" $text
       else
         echo "left out: decoding of a Llama, which MODEL would name"
       fi
       goals ;;
    *) echo "$part: which part: a, b, c or d"; exit 2 ;;
  esac
  echo "== part $part ran to its end"
done
[ -z "${TRY:-}" ] || echo "left out: a GPU, CUDA graphs, presets beyond tiny; no number here is one"
