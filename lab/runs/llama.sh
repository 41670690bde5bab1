#!/usr/bin/env bash
# Does a Llama gain by thinking? It goes on for as many tokens with it and without.
#     bash lab/runs/llama.sh      SEEDS="1": these alone, no table
. "$(dirname "$0")/once.sh"

out=out/llama
once $out plain 0 --preset tiny --method vanilla --embed-scale 1
if [ ! -f $out/hugging-face/tokenizer_config.json ]; then # which is written last
  rm -rf $out/hugging-face
  lab convert $out/plain-0 --to $out/hugging-face
fi

train() { # name, seed, flags
  once $out "$1" "$2" --preset tiny --init-from $out/hugging-face "${@:3}"
}

for seed in ${SEEDS:-1 2 3 4 5}; do
  train longer "$seed" --method vanilla
  train grid1 "$seed" --method grid --ponder-steps 1 --penalty-weight 0
  train grid3 "$seed" --method grid --ponder-steps 3 --penalty-weight 0
  train jacobi3 "$seed" --penalty-weight 0
done

[ -z "${SEEDS:-}" ] || exit 0 # a table is of all
lab analyze compare --runs $out/*-[0-9] --taus 0.1 --out $out/report
