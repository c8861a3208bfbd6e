# Each target first installs what it needs into a virtual environment.
# ARGS adds flags: make demo ARGS="--epochs 1", make test ARGS="-k loss_scale".
VENV ?= .venv
PYTHON := $(VENV)/bin/python
# Keep bytecode, outside of the tree, even where the environment forbids it. Without it,
# each process compiles JAX again for 2 s, and the tests take 15 s longer to collect.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode
ON_CPU := JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile

demo: $(VENV)/.examples ## train a CNN on handwritten digits at O2, beside O0
	$(PYTHON) examples/digits.py $(or $(ARGS),--init-scale 1e12 --beside O0)

# Run files in the order of their names. By default, files with many tests run first, and
# files with long tests run last.
PYTEST = $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Tests whose digits could differ with the instructions of the CPU.
NUMERIC = tests/optimizers tests/scaling tests/state tests/fp16_utils tests/checkpoint \
	tests/docs/test_docs.py jamp pallas_kernels

test: $(VENV)/.test ## run the fast tests and the doctests
	$(PYTEST) -m "not slow and not h200" $(ARGS)

test-rest: $(VENV)/h200 ## run the tests that `make test` leaves out
	$(PYTEST) -m "slow or h200" $(ARGS)

test-isa: $(VENV)/.test ## run numeric tests with AVX512, and with all instructions of the CPU
	XLA_FLAGS=--xla_cpu_max_isa=AVX512 $(PYTEST) -m "not h200" $(NUMERIC) $(ARGS)
	XLA_FLAGS=--xla_cpu_max_isa= $(PYTEST) -m "not h200" $(NUMERIC) $(ARGS)

test-all: test test-rest test-isa ## also run the slow tests

# Each takes from minutes to hours; the first failure ends the run.
nightly: sweep fuzz soak budgets tpu test-isa test-next ## run all checks that .ci/run leaves out

test-next: ## run autocast's tests on JAX's newest pre-release, in .venv-next
	$(MAKE) --no-print-directory VENV=$(VENV)-next $(VENV)-next/.suite
	$(VENV)-next/bin/python -m pip install --quiet --upgrade --pre jax
	JAMP_UNTESTED_JAX=1 $(VENV)-next/bin/python -m pytest -n 2 --dist loadfile tests/autocast $(ARGS)

sweep: $(VENV)/.test ## check autocast on all functions of JAX
	JAMP_SWEEP=1 $(PYTHON) -m pytest -n 2 tests/autocast/test_sweep.py tests/autocast/test_torch.py $(ARGS)

fuzz: $(VENV)/.test ## check 20,000 random programs, from SEED on, and other properties
	JAMP_FUZZ=$(or $(SEED),0) $(PYTHON) -m pytest -n 2 tests/autocast/test_fuzz.py tests/core/test_properties.py $(ARGS)

soak: $(VENV)/.test ## train for 20,000 steps with random overflows, and check that nothing grows
	JAMP_SOAK=20000 $(PYTHON) -m pytest -s tests/state/test_soak.py $(ARGS)

budgets: $(VENV)/h200 ## compare the bytes of 15 architectures with half by hand
	JAMP_BUDGETS=1 $(PYTHON) -m pytest tests/project/test_lean.py tests/project/test_fp8.py \
		tests/optimizers/test_optimizer_bytes.py $(ARGS)

tpu: $(VENV)/tpu ## compare the bytes of programs that are compiled for a TPU v5e
	JAMP_TPU=1 $(PYTHON) -m pytest tests/project/test_lean.py -k tpu $(ARGS)

peers: $(VENV)/.peers $(VENV)/.test ## run jmp, DynamicScale, torch and Qwix through the same cases
	$(ON_CPU) $(PYTHON) -m benchmarks.peers

lint: $(VENV)/.test ## check format, style and types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

bench: $(VENV)/.test ## time training and optimizer steps on the CPU
	$(ON_CPU) $(PYTHON) -m pytest benchmarks $(ARGS)

# If python3 has JAX for GPUs and everything that the tests import, use it, because a lent
# machine may have no network. Otherwise, create the environment as usual.
HAS_ALL := python3 -c 'import importlib.util as u; names = "flax hypothesis jax_cuda13_plugin \
	jaxtyping matplotlib optax orbax PIL pytest pytest_benchmark".split(); raise SystemExit(not all(map(u.find_spec, names)))'
RESULTS ?= benchmarks/results

# benchmarks/README.md has the commands for a lent machine.
gpu: ## time and test on a GPU, in under 8 minutes
	@$(HAS_ALL) || $(MAKE) --no-print-directory $(VENV)/.test $(VENV)/.cuda
	python=$$($(HAS_ALL) && echo python3 || echo $(PYTHON)) && \
	$$python -m benchmarks.gpu --results $(RESULTS) $(ARGS)

dist: $(VENV)/.dist ## build wheel and sdist, and test them in an empty environment
	rm -rf dist && $(PYTHON) -m build
	.ci/test_dist

docs: $(VENV)/.docs ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict $(ARGS)

# A stamp file per extra: pip installs it once, and again when pyproject.toml changes. It
# does not compile, because a program imports only a few of these modules.
$(VENV)/.%: $(VENV)/pyvenv.cfg pyproject.toml
	$(PYTHON) -m pip install --quiet --no-compile --editable '.[$*]'
	@touch $@

# XLA's compilers for absent devices are in separate folders, which tests/support knows.
# In JAX's own environment, each program would look for a GPU and miss cuDNN.
ON_LINUX = ; sys_platform == "linux"
JAX = $(shell $(PYTHON) -c 'import jax; print(jax.__version__)')
$(VENV)/h200: NEEDS = 'jax-cuda13-plugin==$(JAX) $(ON_LINUX)' 'nvidia-cuda-nvcc $(ON_LINUX)'
$(VENV)/tpu: NEEDS = 'libtpu $(ON_LINUX)'
$(VENV)/h200 $(VENV)/tpu: $(VENV)/.test
	rm -rf $@ && mkdir $@
	$(PYTHON) -m pip install --quiet --upgrade --target $@ $(NEEDS)
	@touch $@

# Create it again if its Python is gone, for example after an upgrade.
$(VENV)/pyvenv.cfg: $(shell test -x $(PYTHON) || echo FORCE)
	python=$$(sh .ci/find_python) && "$$python" -m venv --clear $(VENV)
FORCE:

.PHONY: help demo test test-rest test-isa test-all nightly test-next sweep fuzz soak budgets tpu peers lint bench gpu dist docs
.NOTPARALLEL:
.DELETE_ON_ERROR:
