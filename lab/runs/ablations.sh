#!/usr/bin/env bash
# What each part of PonderLM-3 is good for: the part is missing, or as the paper prints it.
#     bash lab/runs/ablations.sh      SEEDS=1: the runs of one seed, no table
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh

SCALE=${SCALE:-tiny}
RUNS=out/ablations/$SCALE

train() { # name, flags
  once "$RUNS" "$1" "$seed" --preset "$SCALE" --penalty token "${@:2}"
}

for seed in ${SEEDS:-0 1 2}; do
  train as-it-is
  train no-mask --method ablation-mask
  train no-integration --method ablation-integration
  train uniform --method ablation-router
  train printed-mask-index --method ablation-index
  train printed-penalty --penalty printed
  train no-penalty --penalty-weight 0
done

if [ -z "${SEEDS:-}" ]; then
  "${PYTHON:-python}" -m lab analyze pareto --runs "$RUNS"/*-[0-9] --out out/ablations
fi
