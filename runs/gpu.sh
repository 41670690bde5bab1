#!/usr/bin/env bash
# The acceptance run on one GPU, in four parts of less than ten minutes: a, is it right? b, is it
# good? c, is it fast? d, does it save? Each ends with a table and with 1 where a requirement fails.
#     bash runs/gpu.sh a [OUT]        the results go to OUT (out/gpu) as they come
#     TRY=1 bash runs/gpu.sh a        does it run? In seconds, at toy sizes on a CPU
# It needs no network. Beside the packages of requirements.txt (as wheels where there is no index:
# tyro, docstring-parser, typeguard, pydantic and rustbpe are often missing) it takes pytest,
# pytest-xdist, hypothesis and transformers. DATA=FOLDER is a prepared corpus that is brought along;
# without it one is made of the source of Python's packages, by rustbpe. RUNS=FOLDER keeps it, and
# the models: part d takes part b's. PYTHON=python3 is the Python that has torch.
set -euo pipefail
cd "$(dirname "$0")/.."

exec "${PYTHON:-python}" -m bench acceptance "${1:?which part: a, b, c or d}" \
  --out "${2:-${OUT:-out/gpu}}" ${RUNS:+--runs "$RUNS"} ${DATA:+--data "$DATA"} ${TRY:+--toy}
