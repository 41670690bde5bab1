#!/usr/bin/env bash
# What do extra steps leave behind that a model takes early in its training only (a pondering warm-up), and which
# difference is noise?
#     bash lab/runs/warmup.sh          PARTS="grid noise", SEEDS=1, ROWS="none by-token" or all: these, no table
# All of a seed's rows are trained before the next seed's; a run takes 1 to 4 minutes on one core of an EPYC with
# AVX-512 on the grid, 3 to 9 by Jacobi, four times as long in the part longer.
. "$(dirname "$0")/once.sh"
ROUTER_RATE=3
export OMP_NUM_THREADS=1 # the number of threads may change the rounding, and so the model

run() { # folder, name, flags
  [[ " ${ROWS:-$2} " = *" $2 "* ]] || return 0
  once "out/warmup/$1" "$2" "$seed" --preset tiny --steps 4000 --eval-every 1000 --log-every 100 --device cpu "${@:3}"
}
control_rows() { # folder, flags: always one step, shared depth and PonderLM-3
  run "$1" always-1 --method grid-fixed --ponder-steps 1 "${@:2}"
  run "$1" shared-depth --method shared-grid "${@:2}"
  run "$1" by-token --method grid "${@:2}"
}

for part in ${PARTS:-grid noise precision jacobi embedding longer wide}; do
  case $part in grid) seeds="0 1 2 3 4" ;; precision | jacobi | longer) seeds="0 1 2" ;; *) seeds="0 1" ;; esac
  for seed in ${SEEDS:-$seeds}; do
    case $part in
      grid)
        run grid none --method vanilla
        run grid none-8e-3 --method vanilla --learning-rate 8e-3 # the best of three, by the table choice below
        run grid none-longer --method vanilla --steps 5800 # as many passes as the next row
        run grid warmup-300 --method warmup --stage 300
        run grid lowered-300 --method lowered --stage 300
        control_rows grid
        run grid always-3 --method grid-fixed --ponder-steps 3
        [ "$seed" = 0 ] || continue
        run grid none-2e-3 --method vanilla --learning-rate 2e-3
        for stage in 100 600; do run grid warmup-$stage --method warmup --stage $stage; done
        ;;
      noise) # the same again, rounded otherwise; one thread in float32 is the part grid
        OMP_NUM_THREADS=2 control_rows noise/two-threads
        PRECISION=bfloat16 control_rows noise/bfloat16
        ;;
      precision) # a quarter of the training, since bfloat16 is slow on most CPUs
        control_rows precision/float32 --steps 1000
        PRECISION=bfloat16 control_rows precision/bfloat16 --steps 1000
        ;;
      jacobi) # R as tiny has it
        for K in 1 2 3; do run jacobi always-$K --method ponderlm2 --ponder-steps $K --refinements 1 1; done
        run jacobi always-1-R2 --method ponderlm2 --ponder-steps 1 --refinements 2 2 # nearer to its fixed point
        run jacobi shared-depth --method shared
        run jacobi by-token --method ponderlm3
        run jacobi warmup-300 --method warmup-jacobi --stage 300 --refinements 1 1
        ;;
      embedding) run grid warmup-embedding-300 --method warmup --stage 300 --fed-back embedding ;;
      longer)
        for row in "none vanilla" "warmup-300 warmup --stage 300" "always-1 grid-fixed --ponder-steps 1"; do
          set -- $row
          run longer "$1" --method "${@:2}" --data pysource --steps 16000 --eval-every 4000
        done
        ;;
      wide)
        for row in "none vanilla" "warmup-300 warmup --stage 300" "always-1 grid-fixed --ponder-steps 1"; do
          set -- $row
          run wide "$1" --method "${@:2}" --hidden-size 192 --intermediate-size 512 --num-attention-heads 4 \
            --learning-rate 2e-3
        done
        ;;
    esac
  done
done

[ -z "${PARTS:-}${SEEDS:-}${ROWS:-}" ] || exit 0 # a table is of all
table() { lab analyze compare --out "out/analyze/warmup-$1" --runs "${@:2}"; }
lab analyze compare --choose 2048 --out out/analyze/warmup-choice --runs out/warmup/grid/{none,none-?e-3,warmup-?00}-0
table grid out/warmup/grid/*-[0-9]
table noise out/warmup/{grid,noise/*}/{always-1,shared-depth,by-token}-[01]
table precision out/warmup/precision/*/*-[0-9]
table jacobi out/warmup/jacobi/*-[0-9] out/warmup/grid/none-[0-2]
lab analyze within --out out/analyze/warmup-within --runs out/warmup/grid/{none,warmup-300,always-1}-[0-9]
for part in longer wide; do table $part out/warmup/$part/*-[0-9]; done
