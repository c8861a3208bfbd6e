# Each target does its own set-up: a virtual environment and the extras that it needs.
# ARGS adds flags: make demo ARGS="--epochs 1", make test ARGS="-k loss_scale".
VENV ?= .venv
PYTHON := $(VENV)/bin/python
ON_CPU := JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile

demo: $(VENV)/.examples ## train a CNN on handwritten digits at O2, beside O0
	$(PYTHON) examples/digits.py $(or $(ARGS),--init-scale 1e12 --beside O0)

# In the order of their names: with the files of many tests first, long ones came last.
test: $(VENV)/h200 ## run the tests and the doctests
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-next: ## the same for autocast on JAX's newest pre-release, in .venv-next
	$(MAKE) --no-print-directory VENV=$(VENV)-next $(VENV)-next/.suite
	$(VENV)-next/bin/python -m pip install --quiet --upgrade --pre jax
	JAMP_UNTESTED_JAX=1 $(VENV)-next/bin/python -m pytest -n 2 --dist loadfile tests/autocast $(ARGS)

sweep: $(VENV)/.test ## hold autocast to all functions of JAX, and to random programs
	JAMP_SWEEP=1 $(PYTHON) -m pytest -n 2 -m sweep tests $(ARGS)

fuzz: $(VENV)/.test ## hold autocast to 30,000 random programs, from SEED on; other properties too
	JAMP_FUZZ=$(or $(SEED),0) $(PYTHON) -m pytest -n 2 tests/autocast/test_fuzz.py tests/core/test_properties.py $(ARGS)

soak: $(VENV)/.test ## train for 20,000 steps with random overflows: does anything grow?
	JAMP_SOAK=20000 $(PYTHON) -m pytest -s tests/state/test_soak.py $(ARGS)

noise: $(VENV)/.test ## do pages and doctests print digits that rounding moves?
	JAMP_NOISE=1 $(PYTHON) -m pytest -n 2 tests/docs/test_docs.py jamp pallas_kernels $(ARGS)

budgets: $(VENV)/h200 ## hold fourteen architectures to the bytes of half by hand
	JAMP_BUDGETS=1 $(PYTHON) -m pytest -m budgets tests $(ARGS)

mutate: $(VENV)/h200 ## change modules at random: do their tests see it?
	$(ON_CPU) JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTHON) -m tests.mutate $(ARGS)

tpu: $(VENV)/tpu ## the same for a TPU v5e, compiled without one
	JAMP_TPU=1 $(PYTHON) -m pytest -m tpu tests/project/test_lean.py $(ARGS)

lint: $(VENV)/.test ## check format, style and types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

bench: $(VENV)/.test ## time training and optimizer steps on the CPU
	$(ON_CPU) $(PYTHON) -m pytest benchmarks $(ARGS)

# Where python3 has JAX for GPUs and all that the tests import, it runs jamp from here: a
# lent machine may have no network. Elsewhere the environment is made as usual.
HAS_ALL := python3 -c 'import importlib.util as u; names = "flax hypothesis jax_cuda13_plugin \
	jaxtyping matplotlib optax orbax PIL pytest pytest_benchmark".split(); raise SystemExit(not all(map(u.find_spec, names)))'
RESULTS ?= benchmarks/results

# benchmarks/README.md has the calls for a machine that is lent.
gpu: ## time and test on a GPU, in under 8 minutes
	@$(HAS_ALL) || $(MAKE) --no-print-directory $(VENV)/.test $(VENV)/.cuda
	python=$$($(HAS_ALL) && echo python3 || echo $(PYTHON)) && \
	$$python -m benchmarks.gpu --results $(RESULTS) $(ARGS)

dist: $(VENV)/.dist ## build wheel and sdist, and test them in an empty environment
	rm -rf dist && $(PYTHON) -m build
	.ci/test_dist

docs: $(VENV)/.docs ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict $(ARGS)

# One stamp file per extra: it is installed once, and again when pyproject.toml changes.
# Without compiling: Python compiles the few of all those modules that are imported.
$(VENV)/.%: $(VENV)/pyvenv.cfg pyproject.toml
	$(PYTHON) -m pip install --quiet --no-compile --editable '.[$*]'
	@touch $@

# XLA's compilers for devices that are not here lie in folders that tests/compilers.py
# knows: beside JAX, each program would look for a GPU and say that cuDNN is missing.
ON_LINUX = ; sys_platform == "linux"
JAX = $(shell $(PYTHON) -c 'import jax; print(jax.__version__)')
$(VENV)/h200: NEEDS = 'jax-cuda13-plugin==$(JAX) $(ON_LINUX)' 'nvidia-cuda-nvcc $(ON_LINUX)'
$(VENV)/tpu: NEEDS = 'libtpu $(ON_LINUX)'
$(VENV)/h200 $(VENV)/tpu: $(VENV)/.test
	rm -rf $@ && mkdir $@
	$(PYTHON) -m pip install --quiet --upgrade --target $@ $(NEEDS)
	@touch $@

# Made again where its Python has gone, as after an upgrade.
$(VENV)/pyvenv.cfg: $(shell test -x $(PYTHON) || echo FORCE)
	python=$$(sh .ci/find_python) && "$$python" -m venv --clear $(VENV)
FORCE:

.PHONY: help demo test test-next sweep fuzz soak noise budgets mutate tpu lint bench gpu dist docs
.NOTPARALLEL:
.DELETE_ON_ERROR:
