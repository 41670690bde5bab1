#!/usr/bin/env bash
# What are extra steps worth on puzzles? Trains models without extra steps, models that always take them and models
# that decide, in the same stages: questions of 1 and 2 lookups, then 3, and so on to 6.
#     bash lab/runs/worth.sh      MODELS="decides plain-6", SEEDS=1 or both: only these runs, without the table
#     TIMES=4 MODELS=plain-6 SEEDS=0 bash lab/runs/worth.sh      with later stages that are four times as long
# A first stage after which fewer than 95 of 100 questions of two lookups are answered is continued, to at most twice
# its training steps. For models without extra steps two learning rates are tried, and the one with the lower loss
# after the first stage of seed 0 is kept.
# Time per seed on one core of an EPYC without AVX-512: decides 27 minutes, always 30, plain-1 10, plain-6 50, with
# TIMES=4 100.
# Writes: corpora to data/lookup-*, runs to out/worth, the table, the figure and the CSV to out/analyze.
. "$(dirname "$0")/stages.sh"
OUT=out/worth/stages LAST=5

for K in $(seq 1 $LAST); do # questions of 1 to K + 1 lookups
  corpus lookup-K$K --lines 50000 --seed 0 --lookups $(seq 1 $((K + 1)))
done
corpus lookup-all --lines 20000 --seed 1

answers() { # run: does it answer 95 of 100 questions of two lookups?
  lab analyze lookup --runs "$1" --data data/lookup-K1 --out "$1/report" > /dev/null
  "$PYTHON" - "$1/report/lookup.csv" << 'END'
import sys, pandas
rows = pandas.read_csv(sys.argv[1]).set_index("lookups")
sys.exit(int(rows.accuracy[2] < 0.95))
END
}

grow() { # name, layers, peak of the learning rate, flags of the first stage, of the others, their times
  local name=$1 rate=$3 times=${6:-1} K before=()
  for try in 1 2; do
    train "$name-learns-$try" lookup-K1 --num-hidden-layers "$2" --learning-rate "$rate" --steps 3000 \
      $(steps 1) $4 "${before[@]}"
    before=(--init-from "$OUT/$name-learns-$try-$seed")
    answers "$OUT/$name-learns-$try-$seed" && break
  done
  train "$name-K1" lookup-K1 "${before[@]}" --learning-rate "$rate" --steps 300 $5
  before=$name-K1
  [ "$times" = 1 ] || name=$name-x$times
  for K in $(seq 2 $LAST); do
    train "$name-K$K" "lookup-K$K" --init-from "$OUT/$before-$seed" \
      $(steps "$K") --learning-rate "$(half "$rate")" --steps $((500 * times)) $5
    before=$name-K$K
  done
  OUT=out/worth train "$name" lookup-K$LAST --init-from "$OUT/$before-$seed" --learning-rate "$rate" \
    --steps $((1000 * times)) $5
}

better() { # name, layers, flags: the peak with the lower loss after the first stage
  local seed=0 rate
  for rate in 3e-3 1e-3; do
    train "$1-$rate-learns-1" lookup-K1 --num-hidden-layers "$2" --learning-rate $rate --steps 3000 $3 >&2
  done
  "$PYTHON" - "$OUT/$1" << 'END'
import json, sys
loss = {x: json.load(open(f"{sys.argv[1]}-{x}-learns-1-0/results.json"))["hard"]["loss"] for x in ("3e-3", "1e-3")}
print(min(loss, key=loss.get))
END
}
half() { awk "BEGIN { print $1 / 2 }"; }
steps() { [[ $name = plain* ]] || echo "--ponder-steps $1"; }

for seed in ${SEEDS:-0 1 2}; do
  for model in ${MODELS:-decides always plain-1 plain-6}; do
    case $model in
      decides) grow decides 1 3e-3 "$free --method grid" "$price" ;;
      always) grow always 1 3e-3 "--method grid-fixed" "" ;;
      plain-*)
        rate=$(better "$model" "${model#plain-}" "--method vanilla")
        grow "$model-$rate" "${model#plain-}" "$rate" "--method vanilla" "--method vanilla" "${TIMES:-1}" ;;
    esac
  done
done

[ -z "${MODELS:-}${SEEDS:-}" ] || exit 0 # a table is of all
lab worth --runs out/worth/*-[0-9] --data data/lookup-all
