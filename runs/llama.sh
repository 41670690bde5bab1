#!/usr/bin/env bash
# Does a Llama gain by pondering? It goes on for as many tokens with it and without.
#     bash runs/llama.sh      SEEDS="1": these alone, no table
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

out=out/llama
once $out plain 0 --preset tiny --method vanilla --embed-scale 1
if [ ! -f $out/hugging-face/tokenizer.json ]; then # which is written last
  rm -rf $out/hugging-face
  "${PYTHON:-python}" -m interop $out/plain-0 --to $out/hugging-face
fi

train() { # name, seed, flags
  once $out "$1" "$2" --preset tiny --init-from $out/hugging-face "${@:3}"
}

for seed in ${SEEDS:-1 2 3}; do
  train longer "$seed" --method vanilla
  train taught "$seed" --penalty-weight 0
  [ "$seed" = 1 ] || continue
  train penalty "$seed" --penalty token
  train length-as-it-is "$seed" --penalty-weight 0 --feedback-scale 1
  train at-once "$seed" --penalty-weight 0 --ponder-warmup 0
  train ponderlm2 "$seed" --method ponderlm2 --refinements 1 1
  train stays-shallow "$seed" --penalty-weight 0 --ponder-warmup 0 --router-offset 0 -5 -10 -15
done

if [ -z "${SEEDS:-}" ]; then
  "${PYTHON:-python}" analyze.py pareto --runs $out/*-[0-9] --taus 0.1 --out $out/report
fi
