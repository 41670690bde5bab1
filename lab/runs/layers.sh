#!/usr/bin/env bash
# How many layers is a step of thinking worth? Plain models of 3 to 8 layers, and thinking ones of 3 on the grid,
# which always take one, two or three steps or decide; 1,000 steps of the same text, five pairs. On one core about 20
# minutes a seed.
#     bash lab/runs/layers.sh          SEEDS=1: these runs, no table
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh

train() { # name, flags
  once out/layers "$1" "$seed" --preset tiny --steps 1000 --eval-every 1000 --eval-windows 512 "${@:2}"
}

for seed in ${SEEDS:-0 1 2 3 4}; do
  for n in 3 4 5 6 8; do train "plain-$n" --method vanilla --num-hidden-layers "$n"; done
  for K in 1 2 3; do train "always-$K" --method grid-fixed --ponder-steps "$K"; done
  ROUTER_RATE=3 train decides-3 --method grid --ponder-steps 3
done

[ -n "${SEEDS:-}" ] || "${PYTHON:-python}" -m lab analyze layers \
  --runs out/layers/{plain-?,always-?,decides-3}-[0-9]
