#!/usr/bin/env bash
# What should a step cost, and from when on? Trains PonderLM-3 with prices of different form (on executed steps, on
# probability, on half of each) and size, with different learning rates and starting points of the router.
#     bash lab/runs/price.sh          PARTS="tiny long small", SEEDS=1 or both: only these runs, without the tables
# Time per run on one core of an EPYC with AVX-512: 2 minutes, for `small` 5 to 20.
# Writes: runs to out/price, tables and CSVs to out/analyze.
. "$(dirname "$0")/once.sh"

flags_of() { # form-price[-flat][-from share] -> flags
  local form price from flat
  IFS=- read -r form price from flat <<< "$1"
  case $form in
    executed) echo "--method ponderlm3" ;;
    half) echo "--method ablation-price --by-probability 0.5" ;;
    probability) echo "--method ablation-price" ;;
  esac
  echo "--step-price $price --price-from ${from:-0}"
  [ -z "${flat:-}" ] || echo "--router-offset 0 0 0 0"
}

run() { # folder, router's rate, name, flags
  ROUTER_RATE=$2 once "out/price/$1" "$3-rate$2" "$seed" $(flags_of "$3") "${@:4}"
}

for part in ${PARTS:-tiny long small}; do
  for seed in ${SEEDS:-0}; do
    case $part in
      tiny)
        for form in executed-0 executed-0.01 executed-0.03 executed-0.1 half-0.03 probability-0.03; do
          run tiny 3 $form --preset tiny
        done
        for form in executed-0.03 half-0.03 executed-0.03-0.2 half-0.03-0.2 executed-0.03-0.2-flat \
          executed-0.01-0.2-flat; do
          run tiny 10 $form --preset tiny
        done
        ;;
      long) # the three with the lowest loss, beside out/pays/jacobi/by-token-$seed
        long="--preset tiny --steps 4000 --eval-every 1000 --log-every 100"
        run long 3 executed-0.01 $long
        run long 3 probability-0.03 $long
        run long 10 executed-0.03-0.2-flat $long
        ;;
      small)
        for method in grid ponderlm3; do
          for price in 0 0.03 0.1; do
            ROUTER_RATE=3 once out/price/small "$method-$price" "$seed" --preset small --method $method --steps 1000 \
              --batch-size 8 --hidden-size 192 --intermediate-size 512 --num-hidden-layers 2 --num-attention-heads 4 \
              --head-dim 48 --block-size 128 --eval-every 500 --eval-windows 256 --step-price "$price"
          done
        done
        ;;
    esac
  done
done

[ -z "${PARTS:-}${SEEDS:-}" ] || exit 0 # a table is of all
compare() { lab analyze compare --out "out/analyze/price-$1" --runs "${@:2}"; }
compare tiny out/price/tiny/*-[0-9] --swap --choose 512
compare small out/price/small/*-[0-9] --swap
compare long out/price/long/*-[0-9] out/pays/jacobi/by-token-0 --swap # of pays.sh
compare tau out/price/tiny/executed-{0,0.01,0.1}-rate3-0 --taus 1e-6 1e-5 1e-3 0.01 0.03 0.1 0.3 --over tau
