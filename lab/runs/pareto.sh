#!/usr/bin/env bash
# Loss against compute: trains every method at budgets of 1 to 4 extra steps, with the same data, tokens, optimiser,
# schedule and three seeds.
#     bash lab/runs/pareto.sh                  `tiny`, on a CPU
#     SCALE=small bash lab/runs/pareto.sh      on one GPU; SCALE=70m is the paper's size
#     SEEDS=1 bash lab/runs/pareto.sh          only the runs of this seed, without figures: two shells share the work
# Time: it goes by the slots per training token (the column training_forwards of docs/figures/pareto.csv): 1,000 steps
# of `tiny` take 1 to 2 minutes on one core with one slot, 3 to 6 with four (docs/figures/layers.csv).
# Writes: runs to out/pareto/<scale>, figures, tables and CSVs to out/analyze.
. "$(dirname "$0")/once.sh"

SCALE=${SCALE:-tiny}
RUNS=out/pareto/$SCALE
SQRT_D=$("$PYTHON" -c "from train import preset_settings; print(preset_settings('$SCALE')[1].hidden_size ** 0.5)")

train() { # name, flags
  once "$RUNS" "$1" "$seed" --preset "$SCALE" --step-price 0 "${@:2}" # as in the paper
}

for seed in ${SEEDS:-0 1 2}; do
  train vanilla-0 --method vanilla
  for K in 1 2 3 4; do
    train looped-$K --method looped --ponder-steps $K
    R=$((K > 3 ? 3 : 2)) # refinements: the fixed point is then at most 0.005 nats worse
    train ponderlm2-$K --method ponderlm2 --ponder-steps $K --refinements $R $R
    train ponderlm3-$K --penalty token --ponder-steps $K
  done
  train ponderlm3-5 --penalty token --ponder-steps 5

  # sqrt(D) is the scale of embeddings in their own code
  train pause-3 --method pause
  train pause-sqrtD-3 --method pause --embed-scale "$SQRT_D"
  train ponderlm1-3 --method ponderlm1
  train ponderlm1-sqrtD-3 --method ponderlm1 --embed-scale "$SQRT_D"
  train ponderlm1-no-accumulation-3 --method ponderlm1 --no-accumulate
  train ouro-3 --method ouro
  train grid-3 --method grid
  train grid-fixed-3 --method grid-fixed
  train mor-expert-3 --method mor-expert
  train mor-token-3 --method mor-token
done

[ -z "${SEEDS:-}" ] || exit 0 # a table is of all
lab analyze compare --runs "$RUNS"/*-[0-9] --taus 0.01 0.1
