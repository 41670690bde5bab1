# What the other scripts share: they stop at the first error, run at the root of the project, and train only what is
# not finished. The numbers on the pages are those of a router that learns as fast as the other weights, unless a
# page says otherwise; before 2026-11-27 the weights of the router decayed, too. The precision is named, since
# --precision auto is bfloat16 on one CPU and float32 on another, where the same seed gives another model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python}

lab() { "$PYTHON" -m lab "$@"; }

once() { # folder, name, seed, flags: train a run; an interrupted one goes on
  local run="$1/$2-$3"
  [ -f "$run/results.json" ] && return
  echo "== $run"
  if [ -f "$run/train.json" ]; then
    lab train --resume --out "$1" --name "$2-$3"
  else
    lab train --out "$1" --name "$2-$3" --seed "$3" --router-rate "${ROUTER_RATE:-1}" \
      --precision "${PRECISION:-float32}" "${@:4}"
  fi
}
