# For the scripts of the lookup task: what is finished is skipped (once.sh).
#     task FOLDER LINES SEED FLAGS..                   lines of the task
#     grow NAME TEXT K STEPS FIRST OTHERS [TIMES]      a model that learns one thinking step after the other, on
#         data/TEXT-K1, -K2 .. -K: first for STEPS with the flags FIRST, then with OTHERS, in stages that are
#         TIMES as long; $OUT, $seed, $rate (peak of the learning rate) and $layers say the rest
. lab/runs/once.sh

task() {
  [ -f "data/$1/meta.json" ] ||
    "${PYTHON:-python}" -m lab corpus lookup --folder "data/$1" --lines "$2" --seed "$3" "${@:4}"
}

stage() { # name, text, flags
  once $OUT "$1" "$seed" --preset tiny --data "data/$2" --num-hidden-layers "${layers:-1}" --hidden-size 128 \
    --intermediate-size 344 --num-attention-heads 4 --head-dim 32 --batch-size 16 --eval-every 500 --log-every 100 \
    "${@:3}"
}

thinks() { [[ $1 = plain* ]] || echo "--ponder-steps $2"; }

grow() {
  local K from times=${7:-1} half
  half=$(awk "BEGIN { print $rate / 2 }")
  stage "$1-learns" "$2-K1" $(thinks "$1" 1) --learning-rate "$rate" --steps "$4" $5
  stage "$1-K1" "$2-K1" --init-from "$OUT/$1-learns-$seed" --learning-rate "$rate" --steps 300 $6
  from=$1-K1
  for K in $(seq 2 "$3"); do
    stage "$1-x$times-K$K" "$2-K$K" --init-from "$OUT/$from-$seed" $(thinks "$1" "$K") --learning-rate "$half" \
      --steps $((500 * times)) $6
    from=$1-x$times-K$K
  done
  stage "$1-x$times" "$2-K$3" --init-from "$OUT/$from-$seed" --learning-rate "$rate" --steps $((1000 * times)) $6
}
