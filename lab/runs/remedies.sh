#!/usr/bin/env bash
# What might bring PonderLM-3 to the Pareto frontier at a small scale.
#     bash lab/runs/remedies.sh      after pareto.sh; SEEDS=1: the runs of one seed, no table
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh

SCALE=${SCALE:-tiny}
RUNS=out/remedies/$SCALE

train() { # name, flags
  once "$RUNS" "$1" "$seed" --preset "$SCALE" "${@:2}"
}

for seed in ${SEEDS:-0 1 2}; do
  train no-penalty-3 --penalty-weight 0
  train refine-3 --penalty token --refinements 2 2

  [ "$seed" = 0 ] || continue # twice the training; and as many training forwards as PonderLM-3
  train long-vanilla-0 --method vanilla --steps 2000
  train long-ponderlm2-2 --method ponderlm2 --ponder-steps 2 --refinements 2 2 --steps 2000
  train long-ponderlm3-3 --penalty token --steps 2000
  train equal-vanilla-0 --method vanilla --steps 14000 --eval-every 1000
done

if [ -z "${SEEDS:-}" ]; then
  OTHERS=out/pareto/$SCALE # from lab/runs/pareto.sh
  "${PYTHON:-python}" -m lab analyze pareto --out out/remedies --taus 0.01 0.1 --runs "$RUNS"/no-penalty-3-[0-9] \
    "$OTHERS"/vanilla-0-[0-9] "$OTHERS"/looped-[1-3]-[0-9] "$OTHERS"/ponderlm2-[1-3]-[0-9] "$OTHERS"/ponderlm3-[13]-[0-9]
fi
