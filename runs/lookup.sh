#!/usr/bin/env bash
# Does depth follow difficulty where the difficulty is known? One layer, K = 0 to 4.
#     bash runs/lookup.sh      RUNS="3 1 long", SEED=1 or both: these alone, no table
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

OUT=out/lookup
[ ! -d out/hops ] || OUT=out/hops # runs that were made when the task had that name

train() { # name, K, flags
  local how=(--method vanilla)
  if [ "$2" != 0 ]; then # The router starts undecided. A lookup needs no latent of another token, so R = 0.
    how=(--ponder-steps "$2" --iters 0 0 --penalty-weight 0 --router-offset $(printf '0 %.0s' $(seq 0 "$2")))
  fi
  once $OUT "$1" "${SEED:-0}" --preset tiny --data data/lookup "${how[@]}" --num-hidden-layers 1 \
    --hidden-size 128 --intermediate-size 344 --num-attention-heads 4 --head-dim 32 \
    --learning-rate 3e-3 --steps 7000 --eval-every 1000 --log-every 100 --precision bfloat16 "${@:3}"
}

[ -f data/lookup/meta.json ] || "${PYTHON:-python}" -m corpus lookup
for run in ${RUNS:-0 1 2 3 4 long}; do
  case $run in
    long) train K1-long 1 --steps 14000 ;;
    1) for s in ${SEED:-0 1}; do SEED=$s train K1 1; done ;;
    *) train "K$run" "$run" ;;
  esac
done

if [ -z "${RUNS:-}${SEED:-}" ]; then
  "${PYTHON:-python}" analyze.py lookup --tau 0.1 --runs $OUT/K*
fi
