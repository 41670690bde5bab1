# For the other scripts: train a run unless it is finished; an interrupted one goes on.
#     once FOLDER NAME SEED FLAGS..
# The numbers on the pages are of a router that learns as fast as the rest, unless they say otherwise; those of
# before 2026-11-27 of one whose weights decay, too.
once() {
  local run="$1/$2-$3"
  [ -f "$run/results.json" ] && return
  echo "== $run"
  if [ -f "$run/train.json" ]; then
    "${PYTHON:-python}" -m lab train --resume --out "$1" --name "$2-$3"
  else
    "${PYTHON:-python}" -m lab train --out "$1" --name "$2-$3" --seed "$3" \
      --router-rate "${ROUTER_RATE:-1}" "${@:4}"
  fi
}
