#!/usr/bin/env bash
# How much could be gained on text by deciding which tokens take a step, and can a router be trained to choose
# between no step and one? Trains `tiny` on the grid for 4,000 steps, one seed: models that are good at every depth
# (any), and models whose depths are drawn at first and which pay a price per step later (tries).
#     bash lab/runs/depth.sh          PARTS="any tries", SEEDS=1 or both: only these runs, without the tables
# Time: 3 to 6 minutes per run on one core of an EPYC with AVX-512.
# Writes: runs to out/depth, tables and CSVs to out/analyze.
. "$(dirname "$0")/once.sh"

run() { # name, flags
  once out/depth "$1" "$seed" --preset tiny --steps 4000 --eval-every 1000 --log-every 100 "${@:2}"
}

try() { # name, K, price, flags
  run "$1" --ponder-steps "$2" --router-offset $(printf '0 %.0s' $(seq 0 "$2")) --by-probability 1 \
    --step-price "$3" --price-from 0.5 --drawn-until 2000 "${@:4}"
}

for part in ${PARTS:-any tries}; do
  for seed in ${SEEDS:-0}; do
    case $part in
      any)
        ROUTER_RATE=3
        run any-3 --method drawn --drawn 1
        run any-1 --method drawn --drawn 1 --ponder-steps 1
        run any-3-bpe --method drawn --drawn 1 --tokenizer bpe --vocab-size 4096
        ;;
      tries)
        ROUTER_RATE=10
        for price in 0.01 0.02 0.05; do try half-1-$price 1 $price --method drawn; done
        for price in 0.05 0.07; do try half-3-$price 3 $price --method drawn; done
        ROUTER_RATE=3
        for price in 0.03 0.1; do try deep-1-$price 1 $price --method drawn --router-offset 0 6; done
        ROUTER_RATE=10
        try fade-1 1 0.05 --method drawn --drawn 1 --drawn-until 4000 --price-from 0.25
        try entropy-1 1 0.05 --method drawn --drawn 0 --entropy 0.05
        try shared-0 1 0 --method drawn-shared # shared depth, which ends at one step
        try shared-0.1 1 0.1 --method drawn-shared # with either price
        ;;
    esac
  done
done

[ -z "${PARTS:-}${SEEDS:-}" ] || exit 0 # a table is of all
lab analyze depth --runs out/depth/any-[13]-[0-9]
lab analyze depth --runs out/depth/any-3-bpe-[0-9] --out out/analyze/depth-bpe
lab analyze compare --runs out/depth/{half,deep,fade,entropy,shared}-*-[0-9] --out out/analyze/tries
