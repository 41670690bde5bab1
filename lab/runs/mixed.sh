#!/usr/bin/env bash
# One model for two kinds of text: docstrings, and puzzles whose difficulty differs. One layer on the grid, in stages:
# questions of 1 and 2 lookups, then 3, and so on to 6.
#     bash lab/runs/mixed.sh      MODELS="by-token", SEEDS=1 or both: these alone, no table
# What is finished is skipped. One core of an EPYC with AVX-512: 15 to 20 minutes a model and seed.
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh
ROUTER_RATE=3 OUT=out/mixed

text() { # folder, flags
  [ -f "data/$1/meta.json" ] || "${PYTHON:-python}" -m lab corpus mixed --folder "data/$1" "${@:2}"
}

train() { # name, text, flags
  once $OUT "$1" "$seed" --preset tiny --data "data/mixed-K$2" --num-hidden-layers 1 --hidden-size 128 \
    --intermediate-size 344 --num-attention-heads 4 --head-dim 32 --batch-size 16 --eval-every 1000 --log-every 100 \
    "${@:3}"
}

grow() { # name, most K, flags of the first stage, of the others
  local K steps
  train "$1-learns" 1 --ponder-steps 1 --learning-rate 3e-3 --steps 6000 $3
  train "$1-K1" 1 --init-from "$OUT/$1-learns-$seed" --learning-rate 3e-3 --steps 600 $4
  for K in 2 3 4 5; do
    steps=$((K < $2 ? K : $2))
    train "$1-K$K" $K --init-from "$OUT/$1-K$((K - 1))-$seed" --ponder-steps $steps --learning-rate 1.5e-3 \
      --steps 1000 $4
  done
  train "$1" 5 --init-from "$OUT/$1-K5-$seed" --learning-rate 3e-3 --steps 2000 $4
}

for K in 1 2 3 4 5; do # questions of 1 to K + 1 lookups
  text mixed-K$K --lines 50000 --lookups $(seq 1 $((K + 1)))
done
text mixed-Kall --lines 20000 --seed 1 # to measure with

free="--penalty-weight 0 --router-offset 0 0" price="--penalty-weight 0 --step-price 0.05"
for seed in ${SEEDS:-0 1 2}; do
  for model in ${MODELS:-by-token one-for-all always-1 always-5}; do
    case $model in
      by-token) grow by-token 5 "--method grid $free" "$price" ;;
      one-for-all) grow one-for-all 5 "--method shared-grid $free" "$price" ;;
      always-*) grow "$model" "${model#always-}" "--method grid-fixed" "" ;;
    esac
  done
done

if [ -z "${MODELS:-}${SEEDS:-}" ]; then
  "${PYTHON:-python}" -m lab analyze mixed --runs $OUT/{by-token,one-for-all,always-1,always-5}-[0-9] \
    --data data/mixed-Kall --tau 1e-4
fi
