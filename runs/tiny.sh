#!/usr/bin/env bash
# PonderLM-3 beside PonderLM-2 and no pondering: 3 seeds of each, skipping those that are done.
#     bash runs/tiny.sh      SEEDS=1: the runs of one seed, no table
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

train() { # name, flags
  once out/tiny "$1" "$seed" --preset tiny "${@:2}"
}

for seed in ${SEEDS:-0 1 2}; do
  train no-pondering --method vanilla
  train ponderlm2 --method ponderlm2 --refinements 2 2
  train ponderlm3
  train ponderlm3-token --penalty token
done

if [ -z "${SEEDS:-}" ]; then
  "${PYTHON:-python}" analyze.py pareto --runs out/tiny/*-[0-9] --out out/tiny
fi
