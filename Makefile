PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test

demo: .venv/installed
	$(BIN)/python sample.py --run models/docstrings --prompt "Return the" --show-steps --seed 1
	$(BIN)/python train.py --preset tiny
	$(BIN)/python sample.py --tau 1e-4 --show-steps

test: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r requirements.txt
	touch $@

.venv/installed-test: requirements.txt lab/requirements.txt tests/requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r tests/requirements.txt
	touch .venv/installed $@
