# Needs Python >= 3.10 and make; sets up all else by itself. `make help` lists the targets.

# The first Python that is new enough and can make a virtualenv; or name one: make PYTHON=/path/to/python3
CANDIDATES := python3.11 python3.12 python3.13 python3.10 python3 python
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))
ifndef PYTHON
PYTHON := $(shell for p in $(CANDIDATES); do $$p -c '$(USABLE)' >/dev/null 2>&1 && echo $$p && break; done)
endif

VENV ?= .venv
RUN := $(VENV)/bin/python
DEMO_ARGS ?=
PYTEST_ARGS ?=
MATRIX ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint format reference test-vllm test-agl test-reported test-agl1 test-matrix venv venv-demo python clean distclean

help:
	@echo 'make demo         the main job end to end, on a real llama.cpp server (DEMO_ARGS=...)'
	@echo 'make test         lint, types, import layers and the test suite (PYTEST_ARGS=...)'
	@echo 'make lint         only the checks that run no test'
	@echo 'make format       rewrite the code in the house style'
	@echo 'make reference    write docs/reference.md anew, from the docstrings'
	@echo 'make test-vllm    against a real vLLM on the CPU; the first time installs 3.4 GB'
	@echo 'make test-agl     against the real Agent Lightning 0.3 and 0.1.2 (Python 3.11); the first time installs 2.5 GB'
	@echo 'make test-reported  the training run that this project was made for, small, without and with ctxguard (4 minutes)'
	@echo 'make test-agl1    against the real Agent Lightning 1.0 (Python 3.12, and 3.11 for what needs torch)'
	@echo 'make test-matrix  every openai line, LiteLLM, LangChain, OpenAI Agents, the built wheel (MATRIX="openai-1 ...")'
	@echo 'make clean        remove the virtualenv and what tools left here'
	@echo 'make distclean    and the big virtualenvs in the cache'

python:
	@test -n '$(PYTHON)' || { echo 'No Python >= 3.10 with venv found (looked for: $(CANDIDATES)).' >&2; \
	  echo 'Install one (on Debian and its kin also python3-venv), or name it: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c '$(USABLE)' || { echo '$(PYTHON) is not a Python >= 3.10 that can make a virtualenv (on Debian and' \
	  'its kin: install python3-venv).' >&2; exit 1; }

venv: python
	@$(PYTHON) scripts/venvs.py project '$(VENV)' dev >/dev/null

venv-demo: python
	@$(PYTHON) scripts/venvs.py project '$(VENV)' demo >/dev/null

demo: venv-demo
	@$(RUN) -m examples.demo $(DEMO_ARGS)

lint: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m mypy tests/typing/api.py
	$(RUN) -c 'from importlinter.cli import lint_imports_command as main; main(["--no-cache"])'

format: venv
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

reference: venv
	$(RUN) docs/make_reference.py

test: lint
	$(RUN) -m pytest $(PYTEST_ARGS)

test-vllm: python
	python=$$($(PYTHON) scripts/venvs.py cached vllm) && PYTHONPATH='$(CURDIR)' HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
	  $$python -m pytest $(or $(PYTEST_ARGS),tests/vllm)

# Python 3.11: Agent Lightning 0.x and verl with the CPU build of torch; tests/agl on 0.3, tests/agl_legacy on 0.1.2,
# which lies in a folder of its own. The vLLM that the agents talk to runs in its own environment.
AGL_ENV := PYTHONPATH='$(CURDIR)' LITELLM_LOCAL_MODEL_COST_MAP=True HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

# Files of tests: these mostly wait for something to start or to be given up. The reported run keeps both cores busy.
TWO_AT_ONCE := -n 2 --dist loadfile --no-loadscope-reorder
REPORTED := tests/agl/test_reported_run.py

test-agl: python
	py311=$$($(PYTHON) scripts/find_python.py 3.11) && agl=$$($$py311 scripts/venvs.py cached agl) \
	  && vllm=$$($$py311 scripts/venvs.py cached vllm) \
	  && apart=$$(dirname $$(dirname $$agl))/apart \
	  && $(AGL_ENV) CTXGUARD_VLLM_PYTHON=$$vllm $$agl -m pytest $(or $(PYTEST_ARGS),$(TWO_AT_ONCE) tests/agl --ignore=$(REPORTED)) \
	  && { test -n '$(PYTEST_ARGS)' || $(AGL_ENV) PYTHONPATH=$$apart/agentlightning-0.1.2:'$(CURDIR)' $$agl -m pytest -n 2 tests/agl_legacy; }

test-reported: python
	@$(MAKE) --no-print-directory test-agl PYTEST_ARGS='$(or $(PYTEST_ARGS),$(REPORTED))'

# tests/agl1 on 3.12; tests/agl1_trainer, which needs torch, on 3.11 with 1.0.2's modules from a folder of their own.
test-agl1: python
	py311=$$($(PYTHON) scripts/find_python.py 3.11) && py312=$$($(PYTHON) scripts/find_python.py 3.12) \
	  && agl=$$($$py311 scripts/venvs.py cached agl) && agl1=$$($$py312 scripts/venvs.py cached agl1) \
	  && vllm=$$($$py311 scripts/venvs.py cached vllm) && apart=$$(dirname $$(dirname $$agl))/apart \
	  && $(AGL_ENV) CTXGUARD_VLLM_PYTHON=$$vllm $$agl1 -m pytest $(or $(PYTEST_ARGS),tests/agl1) \
	  && $(AGL_ENV) PYTHONPATH='$(CURDIR)':$$apart/agentlightning-1.0.2:$$apart/verl-0.8.0 CTXGUARD_AGL1_PYTHON=$$agl1 \
	  CTXGUARD_VLLM_PYTHON=$$vllm $$agl -m pytest $(or $(PYTEST_ARGS),tests/agl1_trainer)

test-matrix: python
	$(PYTHON) scripts/matrix.py $(MATRIX) $(if $(PYTEST_ARGS),-- $(PYTEST_ARGS))

clean:
	rm -rf '$(VENV)' '$(VENV).lock' '$(VENV).log' build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean python
	@$(PYTHON) -c 'import sys; sys.path.insert(0, "scripts"); import shutil, venvs; root = venvs.cache_root(); print("removing", root); shutil.rmtree(root, ignore_errors=True)'
