#!/usr/bin/env bash
# Does depth follow difficulty where the difficulty is known? One layer, K = 0 to 4.
#     bash runs/hops.sh      BUDGETS="3 1" PENALIZED=2: these alone, no table
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

train() { # name, K, lambda
  local uniform=$(printf '0 %.0s' $(seq 0 "$2")) # the router starts undecided
  # A lookup needs no latent of another token, so that no refinement is needed, either.
  once out/hops "$1" 0 --preset tiny --data hops --ponder-steps "$2" --num-hidden-layers 1 \
    --hidden-size 128 --intermediate-size 344 --num-attention-heads 4 --head-dim 32 --iters 0 0 \
    --learning-rate 3e-3 --steps "${STEPS:-7000}" --eval-every 1000 --log-every 100 \
    --router-offset $uniform --penalty-weight "$3" --precision bfloat16
}

for K in ${BUDGETS:-0 1 2 3 4}; do
  train "K$K" "$K" 0
done
for K in ${PENALIZED:-1 2}; do
  train "K$K-penalty" "$K" 0.5
done

if [ -z "${BUDGETS:-}" ]; then
  "${PYTHON:-python}" analyze.py hops --runs out/hops/K*-0
fi
