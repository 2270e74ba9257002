PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/train  ## train a small language model on this Python's own standard library, about two minutes
	$(BIN)/tfla demo

test: $(VENV)/dev  ## everything that runs without a GPU
	$(BIN)/python -m pytest

lint: $(VENV)/dev  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
