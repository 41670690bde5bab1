#!/usr/bin/env bash
# Does depth follow difficulty where the difficulty is known? One layer on the grid learns one step
# after the other, and each step of a token costs 0.05 nats.
#     bash lab/runs/lookup.sh      RUNS="grown once", SEEDS=1 or both: these alone, no table
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh

OUT=out/lookup ROUTER_RATE=3

task() { # folder, lines, seed, flags
  [ -f "data/$1/meta.json" ] ||
    "${PYTHON:-python}" -m lab corpus lookup --folder "data/$1" --lines "$2" --seed "$3" "${@:4}"
}

train() { # name, text, flags
  once $OUT "$1" "$seed" --preset tiny --data "data/$2" --num-hidden-layers 1 \
    --hidden-size 128 --intermediate-size 344 --num-attention-heads 4 --head-dim 32 --batch-size 16 \
    --eval-every 500 --log-every 100 "${@:3}"
}

grow() { # name, text, the last K, steps of the first stage, flags
  local K free= price=
  if [[ $1 = grown* ]]; then # has a router: undecided at first, then each step costs something
    free="--penalty-weight 0 --router-offset 0 0"
    price="--penalty-weight 0 --step-price 0.05"
  fi
  train "$1-learns" "$2-K1" --ponder-steps 1 --learning-rate 3e-3 --steps "$4" $free "${@:5}"
  train "$1-K1" "$2-K1" --init-from "$OUT/$1-learns-$seed" --learning-rate 3e-3 --steps 300 $price
  for K in $(seq 2 "$3"); do
    train "$1-K$K" "$2-K$K" --init-from "$OUT/$1-K$((K - 1))-$seed" --ponder-steps "$K" \
      --learning-rate 1.5e-3 --steps 500 $price
  done
  train "$1" "$2-K$3" --init-from "$OUT/$1-K$3-$seed" --learning-rate 3e-3 --steps 1000 $price
}

for K in 1 2 3 4 5; do # questions of 1 to K + 1 lookups
  task lookup-K$K 50000 0 --lookups $(seq 1 $((K + 1)))
  task long-K$K 50000 0 --longest 10 --lookups $(seq 1 $((K + 1)))
done
task lookup-all 20000 1
task long-all 20000 1 --longest 10

for seed in ${SEEDS:-0 1 2 3 4}; do
  for run in ${RUNS:-grown long fixed looped once vanilla}; do
    [ $run = grown ] || [ -n "${SEEDS:-}" ] || [ "$seed" -lt 3 ] || continue
    case $run in
      grown) grow grown lookup 5 3000 --method grid ;;
      long) grow grown-long long 5 8000 --method grid ;;
      fixed) grow fixed lookup 3 3000 --method grid-fixed ;;
      looped) grow looped lookup 3 3000 --method looped ;;
      once) # as much text as a rival that is grown
        train once lookup-K3 --method grid --ponder-steps 3 --penalty-weight 0 --router-offset 0 0 0 0 \
          --learning-rate 3e-3 --steps 5300
        ;;
      vanilla) train vanilla lookup-K3 --method vanilla --num-hidden-layers 4 --learning-rate 3e-3 --steps 5300 ;;
    esac
  done
done

if [ -z "${RUNS:-}${SEEDS:-}" ]; then
  asked() { "${PYTHON:-python}" -m lab analyze lookup --data "data/$1-all" --tau "$2" --runs "${@:3}"; }
  asked lookup 1e-4 $OUT/grown-K[13]-? $OUT/grown-?
  asked lookup 0.1 $OUT/{grown-K3,fixed,looped,once,vanilla}-? --out out/analyze/rivals
  asked long 0 $OUT/grown-long-? --most 5 7 9 11 --out out/analyze/long
fi
