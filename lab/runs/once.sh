# For the other scripts: train a run unless it is finished; an interrupted one goes on.
#     once FOLDER NAME SEED FLAGS..
once() {
  local run="$1/$2-$3"
  [ -f "$run/results.json" ] && return
  echo "== $run"
  if [ -f "$run/train.json" ]; then
    "${PYTHON:-python}" -m lab train --resume --out "$1" --name "$2-$3"
  else
    "${PYTHON:-python}" -m lab train --out "$1" --name "$2-$3" --seed "$3" "${@:4}"
  fi
}
