PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses auto
OLDEST_GLUON := 3.6.0
TRITON_VERSIONS ?= 3.4.0 3.6.0 3.9.0
TRANSFORMERS := transformers-$(shell sed -n 's/^transformers==//p' constraints.txt)
LAYERS ?= mlstm_exp gated_delta_net

.PHONY: demo test common-tests kernels lint docs triton-versions clean
.PRECIOUS: $(VENV)/triton-%

demo: $(VENV)/train  ## train a small language model on this Python's own standard library, about two minutes
	$(BIN)/tfla demo

test: $(VENV)/dev  ## everything that runs without a GPU
	$(PYTEST) --dist loadfile -m "not compiles and not gpu"
	TRITON_INTERPRET=1 $(PYTEST) -m interpreter

common-tests: $(VENV)/$(TRANSFORMERS).tar.gz  ## transformers' common tests of models on this library's model, with mixers LAYERS
	$(BIN)/python tests/integrations/transformers/common_model_tests.py $< --layers $(LAYERS)

kernels: $(VENV)/dev $(VENV)/triton-$(OLDEST_GLUON)  ## every kernel compiles for every supported GPU and fits it, without a GPU
	$(BIN)/python -m pytest -m compiles  # each test has a process for each core
	PYTHONPATH=$(abspath $(VENV)/triton-$(OLDEST_GLUON)) $(BIN)/python -m pytest -m compiles tests/backends/test_hopper_compiles.py

triton-versions: $(TRITON_VERSIONS:%=triton-%)  ## what tests Triton kernels without a GPU, with other versions of Triton

triton-%: $(VENV)/dev $(VENV)/triton-%
	PYTHONPATH=$(abspath $(VENV)/triton-$*) $(BIN)/python -m pytest tests/backends/test_triton_compiles.py tests/backends/test_hopper_compiles.py
	PYTHONPATH=$(abspath $(VENV)/triton-$*) TRITON_INTERPRET=1 $(PYTEST) -m interpreter

lint: $(VENV)/dev  ## formatting, lint, spelling, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/docs  ## the pages of docs/ as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable ".[$*]"
	@touch $@

$(VENV)/$(TRANSFORMERS).tar.gz: | $(VENV)/dev  # the installed package has no tests
	$(BIN)/python -m pip download --quiet --no-deps --no-binary transformers --dest $(VENV) $(TRANSFORMERS:transformers-%=transformers==%)

$(VENV)/triton-%: | $(VENV)/dev  # goes before what is installed in the venv; interpreters before 3.7 need an older NumPy
	rm -rf $@.new
	$(BIN)/python -m pip install --quiet --no-deps --target $@.new triton==$* $(if $(filter 3.4.% 3.5.% 3.6.%,$*),numpy==2.2.6)
	mv $@.new $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
