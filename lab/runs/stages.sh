# What the scripts of the lookup task share: how models are grown, from short questions to long ones.
. "$(dirname "${BASH_SOURCE[0]}")/once.sh"
ROUTER_RATE=3 FIRST=3000 LATER=500 # steps of the first stage and of each later one

corpus() { # folder, flags: prepare it unless it is there
  [ -f "data/$1/meta.json" ] || lab corpus lookup --folder "data/$1" "${@:2}"
}

train() { # name, text, flags
  once $OUT "$1" "$seed" --preset tiny --data "data/$2" --hidden-size 128 \
    --intermediate-size 344 --num-attention-heads 4 --head-dim 32 --batch-size 16 --eval-every $LATER \
    --log-every 100 "${@:3}"
}

grow() { # name, text, the last stage, the most K, flags of the first stage, of the others
  local stage
  train "$1-learns" "$2-K1" --num-hidden-layers 1 --ponder-steps 1 --learning-rate 3e-3 --steps $FIRST $5
  train "$1-K1" "$2-K1" --init-from "$OUT/$1-learns-$seed" --learning-rate 3e-3 --steps $((LATER * 3 / 5)) $6
  for stage in $(seq 2 "$3"); do
    train "$1-K$stage" "$2-K$stage" --init-from "$OUT/$1-K$((stage - 1))-$seed" \
      --ponder-steps $((stage < $4 ? stage : $4)) --learning-rate 1.5e-3 --steps $LATER $6
  done
  train "$1" "$2-K$3" --init-from "$OUT/$1-K$3-$seed" --learning-rate 3e-3 --steps $((LATER * 2)) $6
}

# Of a router: undecided at first, then each step costs something.
free="--penalty-weight 0 --router-offset 0 0" price="--penalty-weight 0 --step-price 0.05"
