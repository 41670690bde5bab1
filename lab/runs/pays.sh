#!/usr/bin/env bash
# What pays: thinking, annealing or deciding? On the grid and by Jacobi iteration, by pairs of seeds; at another
# learning rate, and longer on whole Python sources, with one seed.
#     bash lab/runs/pays.sh          PARTS="grid jacobi", SEEDS=1 or both: these runs, no table
# One core of an EPYC with AVX-512: a run takes 2 to 4 minutes on the grid, 9 by Jacobi.
. "$(dirname "$0")/once.sh"
ROUTER_RATE=3

run() { # folder, name, flags
  once "out/pays/$1" "$2" "$seed" --preset tiny --steps 4000 --eval-every 1000 --log-every 100 "${@:3}"
}

for part in ${PARTS:-grid jacobi rates longer}; do
  case $part in grid) seeds="0 1 2 3 4" ;; jacobi) seeds="0 1 2" ;; *) seeds=0 ;; esac
  for seed in ${SEEDS:-$seeds}; do
    case $part in
      grid)
        run grid none --method vanilla
        for K in 1 2 3; do run grid always-$K --method grid-fixed --ponder-steps $K; done
        run grid by-token --method grid
        run grid shared-depth --method shared-grid
        run grid lowered --method lowered --ponder-steps 3 --stage 1333
        ;;
      jacobi)
        run jacobi none --method vanilla
        run jacobi always-1 --method ponderlm2 --ponder-steps 1 --refinements 2 2
        run jacobi by-token
        run jacobi shared-depth --method shared
        ;;
      rates)
        run rates none-6e-3 --method vanilla --learning-rate 6e-3
        run rates always-1-6e-3 --method grid-fixed --ponder-steps 1 --learning-rate 6e-3
        run rates by-token-6e-3 --method grid --learning-rate 6e-3
        run rates shared-depth-6e-3 --method shared-grid --learning-rate 6e-3
        ;;
      longer)
        for method in grid shared-grid; do
          run longer $method --method $method --data pysource --steps 16000 --eval-every 2000
        done
        ;;
    esac
  done
done

[ -z "${PARTS:-}${SEEDS:-}" ] || exit 0 # a table is of all
for part in grid jacobi rates longer; do
  lab analyze compare --swap --runs out/pays/$part/*-[0-9] --out out/analyze/pays-$part
done
lab analyze layers --runs out/pays/grid/{none,always-[123],by-token}-0 --out out/analyze/pays-ms
