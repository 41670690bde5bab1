PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test

demo: .venv/installed
	@echo "demo: generate a text with the included model, train the preset tiny for about 2 minutes, generate again"
	$(BIN)/python sample.py --run models/docstrings --prompt "Return the" --show-steps --seed 1
	$(BIN)/python train.py --preset tiny
	$(BIN)/python sample.py --tau 1e-4 --show-steps

test: .venv/installed-test
	@echo "test: run all tests but the slow ones, which takes 2 to 5 minutes on 2 cores"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

.venv/installed: requirements.txt
	@echo "installing requirements.txt into .venv, which takes 1 to 5 minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r requirements.txt
	touch $@

.venv/installed-test: requirements.txt lab/requirements.txt tests/requirements.txt
	@echo "installing tests/requirements.txt into .venv, which takes 2 to 10 minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r tests/requirements.txt
	touch .venv/installed $@
