#!/usr/bin/env bash
# Does depth follow difficulty where the difficulty is known? One layer, learned one step at a time.
#     bash runs/lookup.sh      RUNS="grown once", SEEDS=1 or both: these alone, no table
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

OUT=out/lookup

task() { # folder, lines, seed, lookups: each equally often
  [ -f "data/$1/meta.json" ] ||
    "${PYTHON:-python}" -m corpus lookup --folder "data/$1" --lines "$2" --seed "$3" --lookups "${@:4}"
}

train() { # name, seed, text, flags
  once $OUT "$1" "$2" --preset tiny --data "data/$3" --num-hidden-layers 1 --hidden-size 128 \
    --intermediate-size 344 --num-attention-heads 4 --head-dim 32 --batch-size 16 \
    --eval-every 500 --log-every 100 "${@:4}"
}

finish() { # name, seed, K: 500 steps more; in ours each step of a token now costs 0.1 nats
  local price=
  [ "$1" != grown ] || price="--penalty mean --penalty-weight 0.1"
  train "$1-K$3" "$2" "lookup-K$3" --init-from "$OUT/$1-learns-K$3-$2" --refinements 1 1 \
    --learning-rate 3e-3 --steps 500 $price
}

grow() { # name, seed, the last K, flags of the first stage
  train "$1-learns-K1" "$2" lookup-K1 --ponder-steps 1 --refinements 0 0 --learning-rate 3e-3 --steps 3000 \
    "${@:4}"
  finish "$1" "$2" 1
  local K from=$1-K1 more=
  [ "$1" != grown ] || more="--penalty-weight 0 --ponder-warmup 0" # and the copied row counts at once
  for K in $(seq 2 "$3"); do
    train "$1-learns-K$K" "$2" "lookup-K$K" --init-from "$OUT/$from-$2" --ponder-steps "$K" \
      --refinements 1 1 --learning-rate 1.5e-3 --steps 500 $more
    from=$1-learns-K$K
  done
}

for K in 1 2 3 4 5; do task lookup-K$K 50000 0 $(seq 1 $((K + 1))); done
task lookup-all 20000 1 1 2 3 4 5 6

free=(--penalty-weight 0 --router-offset 0 0) # no step costs anything, the router is undecided
long=(--learning-rate 3e-3 --steps 5000) # as much text as K = 3 has seen when it is grown
for seed in ${SEEDS:-0 1 2}; do
  for run in ${RUNS:-grown once ponderlm2 looped vanilla}; do
    case $run in
      grown)
        grow grown "$seed" 5 "${free[@]}"
        for K in 2 3 4 5; do finish grown "$seed" "$K"; done
        ;;
      once) train once-K3 "$seed" lookup-K3 --ponder-steps 3 --refinements 1 1 "${free[@]}" 0 0 "${long[@]}" ;;
      ponderlm2 | looped)
        grow "$run" "$seed" 3 --method "$run"
        finish "$run" "$seed" 3
        ;;
      vanilla) train vanilla-L4 "$seed" lookup-K3 --method vanilla --num-hidden-layers 4 "${long[@]}" ;;
    esac
  done
done

if [ -z "${RUNS:-}${SEEDS:-}" ]; then
  asked() { "${PYTHON:-python}" analyze.py lookup --tau 0.1 --data data/lookup-all "$@"; }
  asked --runs $OUT/grown-K*
  asked --runs $OUT/{grown,once,ponderlm2,looped}-K3-? $OUT/vanilla-L4-? --out out/analyze/rivals
fi
