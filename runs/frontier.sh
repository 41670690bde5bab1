#!/usr/bin/env bash
# Every method at the same executed steps: five paired seeds, with the same first weights of the
# backbone and the same batches. What is finished is skipped.
#     bash runs/frontier.sh          SEEDS=1: the runs of one seed, no figures
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

RUNS=out/frontier

train() { # name, flags
  once $RUNS "$1" "$seed" --preset tiny --precision bfloat16 "${@:2}"
}

for seed in ${SEEDS:-0 1 2 3 4}; do
  train vanilla --method vanilla
  for K in 1 2 3 4; do
    R=$((K > 3 ? 3 : 2)) # refinements: the fixed point is then at most 0.005 nats worse
    train ponderlm2-$K --method ponderlm2 --ponder-steps $K --iters $R $R
    train looped-$K --method looped --ponder-steps $K
  done
  for K in 2 3 4; do train ponderlm3-$K --ponder-steps $K; done
  for price in 0.003 0.01 0.03; do train mean-$price --penalty mean --penalty-weight $price; done
  train ouro-3 --method ouro
  train adaponder-3 --method adaponder
  train adaptivecot-3 --method adaptivecot
  train last-pass-3 --backprop-passes 1
  train long-vanilla --method vanilla --steps 4000
  for K in 1 2 3; do train long-ponderlm2-$K --method ponderlm2 --ponder-steps $K --iters 2 2 --steps 4000; done
  train long-ponderlm3-3 --steps 4000
done

if [ -z "${SEEDS:-}" ]; then
  frontier() { "${PYTHON:-python}" analyze.py frontier "$@"; }
  frontier --runs $RUNS/{vanilla,ponderlm2,looped,ponderlm3,mean,ouro,adaponder,adaptivecot}-*
  frontier --runs $RUNS/long-* --out out/analyze/long
fi
