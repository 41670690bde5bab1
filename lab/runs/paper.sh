#!/usr/bin/env bash
# The paper's sizes on the Pile, for those who have the hardware: trains 70M parameters on 15 B tokens or 410M on 10 B,
# by four methods, and runs the benchmarks of the paper's table. A part that is done is skipped, and one that was
# interrupted is resumed.
#     SIZE=70m GPUS=8 bash lab/runs/paper.sh      SIZE=410m METHODS="ponderlm3 ponderlm2"
#     TRY=1 bash lab/runs/paper.sh                does it run? Two layers, training steps of one short window, on a CPU
# Time: not measured, since nobody has run it; python -m lab bench memory --preset 70m computes hours by formula.
# Writes: the corpus to data/pile-<size>, runs, converted models and results of tasks to out/paper/<size>.
. "$(dirname "$0")/once.sh"

SIZE=${SIZE:-70m}
RUNS=out/paper/$SIZE
declare -A TOKENS=([70m]=15e9 [410m]=10e9)

if [ -n "${TRY:-}" ]; then
  for SIZE in 70m 410m; do
    run=out/try/$SIZE-$(date +%s)
    lab train --preset "$SIZE" --num-hidden-layers 2 --data docs/tour.md --tokenizer bytes \
      --block-size 64 --steps 2 --batch-size 1 --micro-batch-size 1 --recompute --eval-windows 1 --log-every 1 \
      --device cpu --precision float32 --out out/try --name "${run##*/}"
    lab convert "$run" --to "$run-hf" --transformers
  done
  echo "left out: the Pile, the other methods, several processes, the benchmarks of lm_eval"
  exit
fi

[ -d "data/pile-$SIZE" ] || lab corpus prepare monology/pile-uncopyrighted --tokenizer gpt2 \
  --tokens "${TOKENS[$SIZE]}" --to "data/pile-$SIZE"
for method in ${METHODS:-ponderlm3 ponderlm2 looped vanilla}; do
  run=$RUNS/$method
  if [ ! -f "$run/results.json" ]; then
    how=(--preset "$SIZE" --method "$method" --data "data/pile-$SIZE" --precision bfloat16)
    [ -f "$run/train.json" ] && how=(--resume)
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="${GPUS:-1}" -m lab train \
      "${how[@]}" --out "$RUNS" --name "$method"
  fi
  [ -d "$run-hf" ] || lab convert "$run" --to "$run-hf" --transformers
  for shots in 0 5; do
    [ -d "$run/tasks-$shots" ] || "$PYTHON" -m lm_eval run --model hf --num_fewshot $shots \
      --model_args "pretrained=$run-hf,trust_remote_code=True" --output_path "$run/tasks-$shots" --tasks \
      lambada_openai,arc_easy,lambada_standard,arc_challenge,winogrande,piqa,hellaswag,sciq,race
  done
done
