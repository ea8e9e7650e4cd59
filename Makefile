# make demo: from nothing to the comparison. make test: everything CI runs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_PROMPT ?= Repeat the following text word for word, then say in one sentence what it is about. \
The lighthouse keeper climbed the stairs every evening at six. The lighthouse keeper lit the lamp, \
wrote the weather in the log, and watched the ships until midnight.

.PHONY: demo test check check-native clean

demo: $(READY)
	$(BIN)/slipstream generate --compare --max-tokens 96 "$(DEMO_PROMPT)"

test: check
	$(BIN)/pytest -m model

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not model" -n auto --maxprocesses 4

# The native step's own tests, plain and under the address and undefined-behaviour sanitizers;
# needs a C++ compiler. The step itself is held against torch by tests/runtimes/test_native.py.
check-native:
	$(MAKE) -C native test sanitize BUILD=../build/native

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
