#!/usr/bin/env bash
# PonderLM-3, as train.py has it, beside PonderLM-2 with the better of two R (by other text), at equal steps. Runs
# with one seed have the same batches. What is finished is skipped. On one core the runs of a seed take 50 minutes.
#     bash lab/runs/frontier.sh          SEEDS=1: the runs of one seed, no figure
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh
ROUTER_RATE=3

train() { # name, flags
  once out/frontier "$1" "$seed" --preset tiny "${@:2}"
}
ponderlm2() { # K, R
  train ponderlm2-"$1" --method ponderlm2 --ponder-steps "$1" --refinements "$2" "$2"
}

for seed in ${SEEDS:-0 1 2 3 4}; do
  train vanilla --method vanilla
  ponderlm2 1 2
  ponderlm2 2 3
  ponderlm2 3 3
  train ponderlm3
done

if [ -z "${SEEDS:-}" ]; then
  "${PYTHON:-python}" -m lab analyze frontier --runs out/frontier/*-? --taus 1e-4 0.01 0.03 0.1 0.3
fi
