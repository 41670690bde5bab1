#!/usr/bin/env bash
# PonderLM-3 beside every method at equal steps. Runs with one seed have the same batches. What is
# finished is skipped.
#     bash lab/runs/frontier.sh          PARTS="pairs size", SEEDS=1 or both: these runs, no figures
# `pairs` and `more` have the settings that were chosen by text held apart.
set -euo pipefail
cd "$(dirname "$0")/../.."
. lab/runs/once.sh

train() { # folder, name, flags
  once "out/$1" "$2" "$seed" --preset tiny "${@:3}"
}

ponderlm2() { # folder, K, R, flags
  train "$1" ponderlm2-"$2" --method ponderlm2 --ponder-steps "$2" --refinements "$3" "$3" "${@:4}"
}

beside() { # folder, K's of PonderLM-2, flags: PonderLM-3 and what it is compared with by pairs
  train "$1" vanilla --method vanilla "${@:3}"
  for K in $2; do ponderlm2 "$1" "$K" 2 "${@:3}"; done
  train "$1" ponderlm3-3 "${@:3}"
}

chosen() { # K = 3 and PonderLM-2 with the settings that were chosen
  train frontier vanilla --method vanilla
  ponderlm2 frontier 1 2
  for K in 2 3; do ponderlm2 frontier "$K" 3; done
  train frontier ponderlm3-3 --router-offset 0 4 8 12
}

# Eight times the parameters of tiny.
large=(--hidden-size 256 --intermediate-size 512 --num-hidden-layers 4 --num-attention-heads 4)
large+=(--head-dim 56 --learning-rate 2e-3 --eval-windows 256)

for part in ${PARTS:-pairs more long others size}; do
  case $part in
    more) seeds="5 6 7 8 9" ;;
    pairs | long) seeds="0 1 2 3 4" ;;
    *) seeds=0 ;;
  esac
  for seed in ${SEEDS:-$seeds}; do
    case $part in
      pairs)
        chosen
        ponderlm2 frontier 4 3
        for K in 2 4; do train frontier ponderlm3-"$K" --ponder-steps "$K"; done
        for K in 1 2 3 4; do train frontier looped-"$K" --method looped --ponder-steps "$K"; done
        ;;
      more) chosen ;;
      long) beside long "1 2 3" --steps 4000 ;;
      others)
        for price in 0.003 0.01 0.03; do
          train frontier ponderlm3-3-mean-$price --penalty mean --penalty-weight $price
        done
        ;;
      size) beside size "1 2" "${large[@]}" ;;
    esac
  done
done

if [ -z "${PARTS:-}${SEEDS:-}" ]; then
  analyze() { "${PYTHON:-python}" -m lab analyze "$@"; }
  analyze frontier --runs out/frontier/{vanilla,ponderlm2-?,ponderlm3-?}-? \
    --taus 1e-4 0.01 0.03 0.1 0.2 0.3 0.5
  analyze frontier --runs out/frontier/*-0 --out out/analyze/others
  analyze frontier --runs out/long/* --taus 1e-4 0.01 0.03 0.1 0.3 --out out/analyze/long
  analyze frontier --runs out/size/*-0 --out out/analyze/size
fi
