#!/usr/bin/env bash
# How many layers is an extra step worth? Trains plain models of 3 to 8 layers, and models of 3 layers on the grid
# that always take one, two or three steps, or decide; on the same text, by pairs of seeds.
#     bash lab/runs/layers.sh          PARTS="tiny wide", SEEDS=1 or both: only these runs, without the tables
# Time per seed on one core: 20 minutes for `tiny`, 17 for `wide` (twice the width), 30 for `long` (four times the
# training steps).
# Writes: runs to out/layers, out/layers-wide and out/layers-long, tables and CSVs to out/analyze.
. "$(dirname "$0")/once.sh"

train() { # name, flags
  once "$folder" "$1" "$seed" --preset tiny --eval-every 4000 --eval-windows 512 "${size[@]}" "${@:2}"
}
plain() { for n in "$@"; do train "plain-$n" --method vanilla --num-hidden-layers "$n"; done; }
always() { for K in "$@"; do train "always-$K" --method grid-fixed --ponder-steps "$K"; done; }
decides() { ROUTER_RATE=3 train decides-3 --method grid --ponder-steps 3; }

for part in ${PARTS:-tiny wide long}; do
  folder=out/layers-$part size=(--steps 1000) seeds="0 1 2"
  case $part in
    tiny) folder=out/layers seeds="0 1 2 3 4" ;;
    wide) # at half the learning rate
      size+=(--hidden-size 192 --intermediate-size 512 --num-attention-heads 4 --learning-rate 2e-3) ;;
    long) size=(--steps 4000) seeds="0 1" ;;
  esac
  for seed in ${SEEDS:-$seeds}; do
    case $part in
      tiny) plain 3 4 5 6 8; always 1 2 3; decides ;;
      wide) plain 3 4 6; always 1 2 ;;
      long) plain 3 4 6; always 1; if [ "$seed" = 0 ]; then decides; fi ;;
    esac
  done
done

[ -z "${PARTS:-}${SEEDS:-}" ] || exit 0 # a table is of all
for part in "" -wide -long; do
  lab analyze layers --runs out/layers$part/{plain-?,always-?,decides-?}-? \
    --out out/analyze/layers$part
done
