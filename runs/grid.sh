#!/usr/bin/env bash
# What training costs: the grid (baselines/grid.py) beside Jacobi iteration, loops and no thinking,
# at equal text and at equal slots. Runs with one seed have the same first weights and batches. What
# is finished is skipped.
#     bash runs/grid.sh              PARTS="slots text", SEEDS=1 or both: these runs, no figures
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

train() { # folder, name, flags
  once "out/$1" "$2" "$seed" --preset tiny --threads 1 --eval-every 1000 "${@:3}"
}

vanilla() { train "$1" vanilla --method vanilla --steps 14000 "${@:2}"; }
grid() { train "$1" grid-"$2" --method grid --ponder-steps "$2" --steps "$3" "${@:4}"; }

for part in ${PARTS:-slots text short}; do
  for seed in ${SEEDS:-0 1 2 3 4}; do
    case $part in
      slots) # as many as 1000 steps of PonderLM-3 with K = 3 run: 14 for each token that they read
        vanilla slots
        grid slots 1 7000
        [ "$seed" -gt 2 ] && continue
        grid slots 3 3500
        train slots looped-3 --method looped --steps 3500
        grid slots 2 4667
        train slots grid-fixed-1 --method grid-fixed --ponder-steps 1 --steps 7000
        train slots last-pass --backprop-passes 1 --steps 1900
        train slots ponderlm3-3
        ;;
      text) # 1000 steps
        for K in 1 2 3; do
          grid text $K 1000
          train text grid-fixed-$K --method grid-fixed --ponder-steps $K
          train text ponderlm3-$K --ponder-steps $K
        done
        ;;
      short) # Shakespeare's million bytes, read seven times by vanilla
        [ "$seed" -gt 2 ] && continue
        vanilla short --data shakespeare
        grid short 1 7000 --data shakespeare
        ;;
      rivals)
        for method in ouro adaponder adaptivecot; do train text $method-3 --method $method; done
        ;;
    esac
  done
done
