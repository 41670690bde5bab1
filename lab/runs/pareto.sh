#!/usr/bin/env bash
# Every method at budgets of 1 to 4 extra steps: same data, tokens, optimiser, schedule, seeds.
#     bash lab/runs/pareto.sh                  tiny, on a CPU
#     SCALE=small bash lab/runs/pareto.sh      one GPU; SCALE=70m is the paper's
#     SEEDS=1 bash lab/runs/pareto.sh          the runs of one seed, no figures: two shells share the work
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
