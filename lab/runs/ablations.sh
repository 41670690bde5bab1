#!/usr/bin/env bash
# What is each part of PonderLM-3 good for? Trains `tiny` as it is, with one part missing (log w in attention, the
# mixture, the router), with the mask index as the paper prints it, and with a penalty that acts; three seeds.
#     bash lab/runs/ablations.sh      SEEDS=1: only the runs of this seed, without the table
# Time: 8 to 16 minutes per run on one core; 18 runs.
# Writes: runs to out/ablations/tiny, the table and its CSV to out/ablations.
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
