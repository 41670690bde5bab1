#!/usr/bin/env bash
# What might bring PonderLM-3 to the Pareto frontier at a small scale; the numbers are in LOG.md.
#     bash runs/remedies.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

SCALE=${SCALE:-tiny}

train() { # name, flags
  once "out/remedies/$SCALE" "$1" "$seed" --preset "$SCALE" --precision bfloat16 "${@:2}"
}

for seed in 0 1; do
  train no-penalty-3 --penalty-weight 0
  train refine-3 --iters 2 2
  train deep-start-3 --router-offset 0 4 8 12 --penalty-weight 0.2
done

seed=0 # twice the training
train long-vanilla-0 --method vanilla --steps 2000
train long-ponderlm2-2 --method ponderlm2 --ponder-steps 2 --iters 2 2 --steps 2000
train long-ponderlm2-3 --method ponderlm2 --iters 2 2 --steps 2000
train long-ponderlm3-3 --steps 2000

"${PYTHON:-python}" analyze.py pareto --runs "out/remedies/$SCALE"/*-[0-9] --out out/remedies
