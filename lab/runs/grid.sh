#!/usr/bin/env bash
# What does training cost? Trains `tiny` on the grid (lab/methods/grid.py), by Jacobi iteration, with loops and without
# extra steps: as many slots for each (slots, half), and as much text for each (text). Runs of one seed have the same
# batches, and the same first weights if both have a router for as many steps, or neither has one.
#     bash lab/runs/grid.sh              PARTS="slots text", SEEDS=1 or both: only these runs, without the figures
# Time: 1,000 steps of the grid with K = 3 take 3 to 6 minutes on one core, those of a vanilla model 1 to 2
# (docs/figures/layers.csv); `slots` has runs of 3,500 and 14,000.
# Writes: runs to out/slots, out/half and out/text, figures, tables and CSVs to out/analyze.
. "$(dirname "$0")/once.sh"

train() { # folder, name, flags
  once "out/$1" "$2" "$seed" --preset tiny --eval-every 1000 "${@:3}"
}

grid() { train "$1" grid-"$2" --method grid --ponder-steps "$2" --steps "$3" "${@:4}"; }

pairs() { [ -n "${SEEDS:-}" ] || [ "$seed" -lt "$1" ]; }

for part in ${PARTS:-slots half text}; do
  for seed in ${SEEDS:-0 1 2 3 4}; do
    case $part in
      slots) # as many as 1000 steps of PonderLM-3 with K = 3 run: 14 for each token that they read
        train slots vanilla --method vanilla --steps 14000
        grid slots 1 7000
        pairs 3 || continue
        grid slots 2 4667
        grid slots 3 3500
        train slots grid-fixed-1 --method grid-fixed --ponder-steps 1 --steps 7000
        train slots looped-3 --method looped --steps 3500
        # PonderLM-3 itself is trained below
        ;;
      half) # as much as the grid with K = 1 reads there
        train half vanilla --method vanilla --steps 7000
        ;;
      text) # as much as these 1000 steps read
        for K in 1 2 3; do
          grid text $K 1000
          train text ponderlm3-$K --ponder-steps $K
        done
        for method in grid-fixed ponderlm2; do train text $method-3 --method $method; done
        pairs 3 || continue
        train text ouro-3 --method ouro
        ;;
    esac
  done
done

[ -z "${PARTS:-}${SEEDS:-}" ] || exit 0 # a table is of all
analyze() { lab analyze compare --over slots --runs "${@:2}" --out "out/analyze/$1"; }
analyze slots out/slots/* out/text/ponderlm3-3-[012]
analyze half out/half/* out/slots/grid-1-*
analyze text out/text/*
