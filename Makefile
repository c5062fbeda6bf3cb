# Two commands matter to a newcomer: `make demo` and `make test`. Both make their own environment first.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Set in many containers. Every process would compile the sources, every worker of pytest the tests.
unexport PYTHONDONTWRITEBYTECODE

stage = @printf '\n=== %s ===\n' '$(1)'
timed = @$(BIN)/python tools/stages.py run '$(1)'

.DEFAULT_GOAL := help
.PHONY: help setup servers demo test begin checks static parts engines lint docs kernels compiled unit tiers vllm sglang coverage compat faults soak-damage soak-kills soak-redis soak-requests simulation mutations clean
.NOTPARALLEL:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: ## make the environment in VENV (.venv), a CPU build of vLLM included; a few minutes, then under a second
	@$(PYTHON) tools/setup_env.py --venv '$(VENV)'

servers: setup ## the real servers that tests of tiers start (Redis, memcached): installed where it may, else named
	$(call timed,installing servers) $(BIN)/python -m kvhold_lab.servers.programs

demo: setup ## see what a held KV cache saves, on this machine
	@$(BIN)/kvhold demo

test: MEASURE = --measure
test: begin checks parts engines ## everything that must hold: lint, types, docs, simulation, unit tests, tests with real servers, a real vLLM, SGLang's interfaces; coverage
	$(call stage,coverage without vLLM)
	@$(BIN)/python tools/report_coverage.py parts sglang
	$(call stage,seconds of the stages)
	@$(BIN)/python tools/stages.py report

begin:
	@rm -f build/stages.tsv

# $(call beside,A,B): make A, and B meanwhile, whose output comes at the end.
beside = @log=$$(mktemp); $(MAKE) --no-print-directory MEASURE=$(MEASURE) $(2) >$$log 2>&1 & other=$$!; \
	$(MAKE) --no-print-directory $(1); first=$$?; \
	wait $$other; other=$$?; cat $$log; rm $$log; \
	exit $$((first ? first : other))

# Installing the servers waits for the network and the disk.
checks: setup
	$(call beside,static simulation,servers)

static: setup # mypy has one core, the documentation and then the compilers have the other
	$(call beside,lint,docs kernels compiled)

# Engines wait for each other and for their nodes, so cores are free.
engines: setup servers
	$(call beside,vllm,sglang)

# Workers and their child processes fill the cores; more threads of torch would wait for each other.
parts unit tiers: export OMP_NUM_THREADS = 1

parts: setup servers ## the tests without vLLM and SGLang: `unit` and `tiers` at once, because those of tiers mostly wait
	$(call stage,pytest: units, real servers and long tests)
	$(call timed,parts) $(BIN)/python tools/run_tests.py $(MEASURE) parts -m 'not vllm and not sglang' -n 4 --dist loadfile

lint: setup ## style, types, and who may import whom
	$(call stage,ruff check)
	$(call timed,ruff check) $(BIN)/ruff check .
	$(call stage,ruff format)
	$(call timed,ruff format) $(BIN)/ruff format --check .
	$(call stage,mypy --strict)
	$(call timed,mypy) $(BIN)/mypy
	$(call stage,import-linter)
	$(call timed,import-linter) env COLUMNS=160 $(BIN)/lint-imports --no-logo

# Not with --quiet: that hides warnings from --strict, too.
docs: setup ## build the documentation into site/
	$(call stage,mkdocs)
	$(call timed,mkdocs) env NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

kernels: setup
	$(call stage,kernels)
	$(call timed,kernels) $(BIN)/python tools/compile_kernels.py

compiled: setup # bytecode of the tests and their libraries: otherwise each worker makes it for itself
	$(call stage,compiling the tests)
	$(call timed,compiling the tests) $(BIN)/python -m pytest --collect-only -qqq -p no:xdist -p no:cacheprovider -m 'not vllm and not sglang' >/dev/null

unit: kernels ## the tests that need no server and no vLLM; under three minutes
	$(call stage,pytest: units)
	$(call timed,units) $(BIN)/python tools/run_tests.py $(MEASURE) units -m 'not vllm and not sglang and not server and not slow' -n 2 --dist loadfile

simulation: setup ## 2,000 histories of the whole in virtual time: does one break a rule?; a minute
	$(call stage,simulation)
	$(call timed,simulation of 2000 seeds) $(BIN)/kvhold bench soak simulation --seeds 2000

tiers: setup servers ## the tests with real servers, and the long ones; four at a time, because they wait more than they compute
	$(call stage,pytest: real servers and long tests)
	$(call timed,servers) $(BIN)/python tools/run_tests.py $(MEASURE) servers -m '(server or slow) and not vllm and not sglang' -n 4 --dist loadfile

vllm: setup servers ## the tests with a real vLLM: three at a time, because they wait, too; then those that want all cores
	$(call stage,pytest: with vLLM)
	$(call timed,vllm) $(BIN)/python tools/run_tests.py vllm -m 'vllm and not alone' -n 3 --dist loadfile
	$(call stage,pytest: with vLLM, one after the other)
	$(call timed,vllm alone) $(BIN)/python tools/run_tests.py 'vllm, alone' -m 'vllm and alone'

sglang: setup ## the tests with a real SGLang's classes, on the CPU; its server needs a GPU
	$(call stage,pytest: with SGLang)
	$(call timed,sglang) $(BIN)/python tools/run_tests.py $(MEASURE) sglang -m sglang tests/sglang

coverage: setup ## the lines of a package that some tests miss: make coverage TESTS=tests/cache/test_state.py PART=cache
	@$(BIN)/python tools/run_tests.py --measure part -q $(TESTS)
	@$(BIN)/python tools/report_coverage.py part --part $(PART)

compat: ## `kvhold verify` with each served release of vLLM, in environments of their own; half an hour
	@$(PYTHON) tools/compat.py --folder .compat

faults: setup servers ## each tier, each way in which it can fail, as one table; some minutes
	@$(BIN)/kvhold bench faults

soak-damage: setup ## 100,000 damaged frames: is each one noticed?; half a minute
	@$(BIN)/kvhold bench soak damage

soak-kills: setup ## a node killed 1,000 times: does what was acknowledged come back?; half an hour
	@$(BIN)/kvhold bench soak kills

soak-redis: setup servers ## a real vLLM over a Redis that dies every minute; half an hour
	@$(BIN)/kvhold bench soak redis

soak-requests: setup ## 10,000 random requests of two vLLM engines: is every token that of an engine without kvhold?; a quarter of an hour
	@$(BIN)/kvhold bench soak requests

mutations: setup ## does the simulation find each of the ways in which its patches break the code?; some minutes
	@$(BIN)/kvhold bench soak simulation --mutations --seeds 20000

clean: ## remove what building and testing left, but not the environment
	rm -rf build dist site .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find benchmarks docs examples lab src tests tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
