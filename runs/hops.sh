#!/usr/bin/env bash
# Does depth follow difficulty where the difficulty is known? One layer, K = 0 to 4.
#     bash runs/hops.sh      BUDGETS="3 1": these alone, no table
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

for K in ${BUDGETS:-0 1 2 3 4}; do
  uniform=$(printf '0 %.0s' $(seq 0 "$K")) # the router starts undecided
  # A lookup needs no latent of another token, so that no refinement is needed, either.
  once out/hops "K$K" 0 --preset tiny --data hops --ponder-steps "$K" --num-hidden-layers 1 \
    --hidden-size 128 --intermediate-size 344 --num-attention-heads 4 --head-dim 32 --iters 0 0 \
    --learning-rate 3e-3 --steps "${STEPS:-7000}" --eval-every 1000 --log-every 100 \
    --router-offset $uniform --penalty-weight 0 --precision bfloat16
done

if [ -z "${BUDGETS:-}" ]; then
  "${PYTHON:-python}" analyze.py hops --runs out/hops/K[0-9]-0
fi
