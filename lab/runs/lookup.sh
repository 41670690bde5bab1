#!/usr/bin/env bash
# Does depth follow difficulty, where the difficulty is known? Trains models of one layer on the grid that learn one
# step after the other, while each step of a token costs 0.05 nats (grown), and models to compare them with.
#     bash lab/runs/lookup.sh      RUNS="grown once", SEEDS=1 or both: only these runs, without the tables
# Time: half an hour on one core for a model that is grown.
# Writes: corpora to data/lookup-* and data/long-*, runs to out/lookup, figures, tables and CSVs to out/analyze.
. "$(dirname "$0")/stages.sh"
OUT=out/lookup

for K in 1 2 3 4 5; do # questions of 1 to K + 1 lookups
  corpus lookup-K$K --lines 50000 --seed 0 --lookups $(seq 1 $((K + 1)))
  corpus long-K$K --lines 50000 --seed 0 --longest 10 --lookups $(seq 1 $((K + 1)))
done
corpus lookup-all --lines 20000 --seed 1
corpus long-all --lines 20000 --seed 1 --longest 10

for seed in ${SEEDS:-0 1 2 3 4}; do
  for run in ${RUNS:-grown long fixed looped once vanilla capped warmup}; do
    case $run in grown) seeds=5 ;; capped | warmup) seeds=2 ;; *) seeds=3 ;; esac
    [ -n "${SEEDS:-}" ] || [ "$seed" -lt $seeds ] || continue
    case $run in
      grown) grow grown lookup 5 5 "$free --method grid" "$price" ;;
      long) FIRST=8000 grow grown-long long 5 5 "$free --method grid" "$price" ;;
      fixed) grow fixed lookup 3 3 "--method grid-fixed" "" ;;
      looped) grow looped lookup 3 3 "--method looped" "" ;;
      once) # as much text as a rival that is grown
        train once lookup-K3 --method grid --num-hidden-layers 1 --ponder-steps 3 --penalty-weight 0 \
          --router-offset 0 0 0 0 --learning-rate 3e-3 --steps 5300
        ;;
      capped) # fewer steps than the questions need, and all questions read
        for most in 1 3; do grow "capped-$most" lookup 5 $most "$free --method grid" "$price"; done
        ;;
      warmup) # does a model keep what it did with a step, once there is none?
        shallow() { train "$1" lookup-K1 --num-hidden-layers 1 --learning-rate 3e-3 --steps 5300 --method "${@:2}"; }
        shallow shallow-none vanilla
        shallow shallow-warmup warmup --ponder-steps 1 --stage 3000
        shallow shallow-always grid-fixed --ponder-steps 1
        ;;
      vanilla) train vanilla lookup-K3 --method vanilla --num-hidden-layers 4 --learning-rate 3e-3 --steps 5300 ;;
    esac
  done
done

[ -z "${RUNS:-}${SEEDS:-}" ] || exit 0 # a table is of all
asked() { lab analyze lookup --data "data/$1-all" --tau "$2" --runs "${@:3}"; }
asked lookup 1e-4 $OUT/grown-K[13]-? $OUT/grown-?
asked lookup 1e-4 $OUT/capped-[13]-? --out out/analyze/capped
asked lookup 1e-4 $OUT/shallow-* --out out/analyze/shallow
asked lookup 0.1 $OUT/{grown-K3,fixed,looped,once,vanilla}-? --out out/analyze/rivals
asked long 0 $OUT/grown-long-? --most 5 7 9 11 --out out/analyze/long
