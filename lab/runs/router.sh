#!/usr/bin/env bash
# How fast has the router to learn, so that it decides? Its learning rate, where it starts, a price on steps;
# by Jacobi iteration (1,000 steps) and on the grid (3,500). What is finished is skipped.
#     bash lab/runs/router.sh          PARTS="rates grid", SEEDS=1 or both: these runs, no table
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh

train() { # name, flags
  once out/router "$1" "$seed" --preset tiny "${@:2}"
}
grid() { # name, flags
  train "grid-$1" --method grid --steps 3500 "${@:2}"
}

for part in ${PARTS:-rates rivals grid others}; do
  [ "$part" = others ] && seeds=0 || seeds="0 1 2"
  for seed in ${SEEDS:-$seeds}; do
    case $part in
      rates) for m in 1 3 10 30; do train "m$m" --router-rate $m; done ;;
      grid) for m in 1 3 10 30; do grid "m$m" --router-rate $m; done ;;
      rivals)
        train vanilla --method vanilla
        for K in 1 2 3; do train "fixed-$K" --method ponderlm2 --ponder-steps $K; done
        ;;
      others)
        train m10-flat --router-rate 10 --router-offset 0 0 0 0
        train m10-R2 --router-rate 10 --refinements 2 2
        for m in 3 10; do train "m$m-price" --router-rate $m --penalty mean --penalty-weight 0.01; done
        ;;
    esac
  done
done

if [ -z "${PARTS:-}${SEEDS:-}" ]; then
  "${PYTHON:-python}" -m lab analyze choose --runs out/router/[!g]*-? --out out/analyze/router
  "${PYTHON:-python}" -m lab analyze choose --runs out/router/grid-*-? --out out/analyze/router-grid
fi
