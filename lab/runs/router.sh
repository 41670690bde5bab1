#!/usr/bin/env bash
# How fast has the router to learn, so that it decides? Its learning rate, where it starts, a price on steps; by
# Jacobi iteration and on the grid, beside as many learning rates of what always thinks. 1,000 steps.
# What is finished is skipped. On one core a run on the grid takes 1 to 4 minutes. price.csv and pairs.csv have
# results.json of these and of frontier.sh by seed (the price of 0.03 also with SEEDS="1 2").
#     bash lab/runs/router.sh          PARTS="rates grid", SEEDS=1 or both: these runs, no table
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh

train() { # name, flags
  once out/router "$1" "$seed" --preset tiny "${@:2}"
}
grid() { # name, flags: beside those of layers.sh
  once out/layers "$1" "$seed" --preset tiny --steps 1000 --eval-every 1000 --eval-windows 512 "${@:2}"
}

for part in ${PARTS:-rates grid tries others}; do
  case $part in
    rates | grid) seeds="0 1 2" ;;
    *) seeds=0 ;;
  esac
  for seed in ${SEEDS:-$seeds}; do
    case $part in
      rates) for m in 1 10 30; do train "m$m" --router-rate $m; done ;;
      grid) for m in 1 10 30; do grid "rate-$m" --method grid --ponder-steps 3 --router-rate $m; done ;;
      tries)
        for rate in 2e-3 6e-3 8e-3; do
          grid "plain-3-$rate" --method vanilla --num-hidden-layers 3 --learning-rate $rate
          for K in 1 2 3; do
            grid "always-$K-$rate" --method grid-fixed --ponder-steps $K --learning-rate $rate
          done
        done
        ;;
      others)
        train m3-flat --router-rate 3 --router-offset 0 0 0 0
        train m10-R2 --router-rate 10 --refinements 2 2
        for price in 0.003 0.01 0.03; do
          train "m3-price-$price" --router-rate 3 --step-price $price
        done
        for m in 3 12; do train "m$m-slow" --router-rate $m --learning-rate 1e-3; done
        ;;
    esac
  done
done

if [ -z "${PARTS:-}${SEEDS:-}" ]; then
  analyze() { "${PYTHON:-python}" -m lab analyze "$@"; }
  bash lab/runs/frontier.sh
  analyze choose --runs out/router/*-? out/frontier/ponderlm3-[012] --out out/analyze/router
  bash lab/runs/layers.sh
  analyze choose --runs out/layers/{rate-*,decides-3}-[012] --out out/analyze/router-grid
  analyze choose --runs out/layers/{always,plain-3}*-0 --out out/analyze/tries-grid
  analyze frontier --runs out/layers/{plain-3,always-?,decides-3}-? --out out/analyze/grid
fi
