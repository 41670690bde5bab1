#!/usr/bin/env bash
# Does a Llama gain from extra steps? Trains a vanilla `tiny`, converts it to Hugging Face's form, and continues its
# training for as many tokens again, without extra steps, on the grid (K = 1, 3) and by Jacobi iteration; five seeds.
#     bash lab/runs/llama.sh      SEEDS="1": only the runs of this seed, without the table
# Time: 1,000 steps take 1 to 2 minutes on one core without extra steps, 3 to 6 on the grid with K = 3
# (docs/figures/layers.csv); 21 runs.
# Writes: runs and the converted model to out/llama, the table and its CSV to out/llama/report.
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
