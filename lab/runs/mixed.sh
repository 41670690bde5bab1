#!/usr/bin/env bash
# One model for two kinds of text: docstrings, and puzzles of different difficulty. Trains models of one layer on the
# grid in stages: questions of 1 and 2 lookups, then 3, and so on to 6; three seeds.
#     bash lab/runs/mixed.sh      MODELS="by-token", SEEDS=1 or both: only these runs, without the table
# Time: 15 to 20 minutes per model and seed on one core of an EPYC with AVX-512.
# Writes: corpora to data/mixed-*, runs to out/mixed, the table and its CSV to out/analyze.
. "$(dirname "$0")/stages.sh"
OUT=out/mixed FIRST=6000 LATER=1000

for K in 1 2 3 4 5; do # questions of 1 to K + 1 lookups
  corpus mixed-K$K --prose --lines 50000 --lookups $(seq 1 $((K + 1)))
done
corpus mixed-Kall --prose --lines 20000 --seed 1 # to measure with

for seed in ${SEEDS:-0 1 2}; do
  for model in ${MODELS:-by-token shared-depth always-1 always-5}; do
    case $model in
      by-token) grow by-token mixed 5 5 "$free --method grid" "$price" ;;
      shared-depth) grow shared-depth mixed 5 5 "$free --method shared-grid" "$price" ;;
      always-*) grow "$model" mixed 5 "${model#always-}" "--method grid-fixed" "" ;;
    esac
  done
done

[ -z "${MODELS:-}${SEEDS:-}" ] || exit 0 # a table is of all
lab analyze mixed --runs $OUT/{by-token,shared-depth,always-1,always-5}-[0-9] --data data/mixed-Kall --tau 1e-4
