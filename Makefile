# `make demo` and `make test` do everything from a fresh clone; they need Python 3.11+ and a C++ compiler.
.PHONY: demo test test-all test-clients check venv clean

demo: venv
	.venv/bin/python scripts/demo.py

test: venv
	scripts/check

# With the slow tests that `make test` leaves out.
test-all: venv
	scripts/check --all

# LangChain, LiteLLM, LlamaIndex, the AI SDK, OpenAI's client for JavaScript, Chromium: needs npm and Chromium.
test-clients: venv
	PYTHONPATH=.:tests/support .venv/bin/python tests/clients/run.py

# `test` without looking at the environment first.
check:
	scripts/check

venv:
	@scripts/venv

clean:
	rm -rf .venv demo artifacts build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
