#!/usr/bin/env bash
# What each part of PonderLM-3 is good for: it is missing, or as the paper prints it, or the penalty acts. On one
# core a run takes 8 to 16 minutes.
#     bash lab/runs/ablations.sh      SEEDS=1: the runs of one seed, no table
. "$(dirname "$0")/once.sh"
ROUTER_RATE=3 # the default

SCALE=${SCALE:-tiny}
RUNS=out/ablations/$SCALE

train() { # name, flags
  once "$RUNS" "$1" "$seed" --preset "$SCALE" "${@:2}"
}

for seed in ${SEEDS:-0 1 2}; do
  train as-it-is
  train no-mask --method ablation-mask
  train no-integration --method ablation-integration
  train uniform --method ablation-router
  train printed-mask-index --method ablation-index
  train penalty-token --penalty token
done

[ -z "${SEEDS:-}" ] || exit 0 # a table is of all
lab analyze compare --choose 256 --runs "$RUNS"/*-[0-9] --out out/ablations
