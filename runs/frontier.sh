#!/usr/bin/env bash
# PonderLM-3 beside every method at equal steps, and at equal cost of training. Runs with one seed
# have the same first weights of the backbone and the same batches. What is finished is skipped.
#     bash runs/frontier.sh          PARTS="pairs size", SEEDS=1 or both: these runs, no figures
# `pairs` and `more` have the settings that were chosen by text held apart, `choice` the others.
set -euo pipefail
cd "$(dirname "$0")/.."
. runs/once.sh

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

for part in ${PARTS:-pairs more choice long others cost size}; do
  case $part in
    more) seeds="5 6 7 8 9" ;;
    pairs | choice | long) seeds="0 1 2 3 4" ;;
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
      choice)
        train choice ponderlm3-3
        ponderlm2 choice 1 3
        for K in 2 3; do ponderlm2 choice "$K" 2; done
        ;;
      long) beside long "1 2 3" --steps 4000 ;;
      others)
        for method in ouro adaponder adaptivecot; do train frontier $method-3 --method $method; done
        for price in 0.003 0.01 0.03; do
          train frontier ponderlm3-3-mean-$price --penalty mean --penalty-weight $price
        done
        ;;
      cost) # the slots of 1000 steps of PonderLM-3 with K = 3, spent in other ways
        train cost vanilla-14000 --method vanilla --steps 14000
        train cost looped-3500 --method looped --steps 3500
        train cost last-pass-1900 --backprop-passes 1 --steps 1900
        train grown 1 --ponder-steps 1 --steps 500
        train grown 2 --init-from "out/grown/1-$seed" --ponder-steps 2 --steps 500
        train cost grown --init-from "out/grown/2-$seed" --ponder-steps 3 --steps 500
        train cost vanilla-12600 --method vanilla --steps 12600
        train cost taught --init-from "out/cost/vanilla-12600-$seed" --ponder-steps 3 --steps 100
        train cost taught-slowly --init-from "out/cost/vanilla-12600-$seed" --ponder-steps 3 \
          --steps 100 --learning-rate 4e-4
        ;;
      size) beside size "1 2" "${large[@]}" ;;
    esac
  done
done

if [ -z "${PARTS:-}${SEEDS:-}" ]; then
  analyze() { "${PYTHON:-python}" analyze.py "$@"; }
  analyze frontier --runs out/frontier/{vanilla,ponderlm2-?,ponderlm3-?}-? \
    --taus 1e-4 0.01 0.03 0.1 0.2 0.3 0.5
  analyze frontier --runs out/frontier/*-0 --out out/analyze/others
  analyze frontier --runs out/long/* --taus 1e-4 0.01 0.03 0.1 0.3 --out out/analyze/long
  analyze frontier --runs out/size/*-0 --out out/analyze/size
  analyze pareto --runs out/frontier/{vanilla,ponderlm2-?,ponderlm3-3,looped-?}-0 out/cost/*-0
fi
