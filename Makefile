# Needs python3.11 and make. Every target creates the virtual environment when it is missing and
# installs again when pyproject.toml or constraints.txt is newer than the last installation.
#
#   make demo [KILLS=random] [SEED=7]   the demonstration
#   make two-hosts                      two processes on one PostgreSQL, one is killed
#   make check                          everything CI runs
#   make test [ARGS="-k lease"]         the tests alone; WORKERS=0 runs them in one process
#   make spec                           which statements of the specification are covered
#   make bench [ARGS=...]               the benchmarks; never part of check
#   make bench-peers [ARGS=...]         DBOS, LangGraph and Absurd beside ours, in an environment of their own
#   make simulate [SEED=7 | SEEDS=200 | MUTANT=fence]
#                                       whole worlds under faults; SEED plays one, MUTANT plants a bug,
#                                       AGENT=agentscope plays them with real agents
#   make weather [SEED=7]               the tests as on a busy machine: what waits for too little fails
#   make recover                        the tests with a recovery in every Step, on all stores
#   make faults                         every operation of stores, disk and connection fails once
#   make matrix                         every crash combination, on the oldest and newest AgentScope
#   make docs                           write the generated files again and run the docs' code
#   make format                         format and fix what can be fixed
#   make venv                           the environment alone
#   make servers                        PostgreSQL 15 and PgBouncer for the tests, if they are missing
#
# AGENTSCOPE=2.0.8 uses that release, in an environment of its own.

PYTHON ?= python3.11
WORKERS ?= 2
ARGS ?=
AGENTSCOPE ?=
OLDEST_AGENTSCOPE := 2.0.8

VENV ?= $(if $(AGENTSCOPE),build/venv-agentscope-$(AGENTSCOPE),.venv)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
CONSTRAINTS := $(if $(AGENTSCOPE),$(VENV)/constraints.txt,constraints.txt)

# What the demonstration needs is a part of what development needs.
DEV := $(VENV)/.installed-dev
DEMO := $(if $(wildcard $(DEV)),$(DEV),$(VENV)/.installed-demo)
TEST := $(if $(AGENTSCOPE),$(VENV)/.installed-test,$(DEV))

PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal
CODE := $(wildcard src tests tools benchmarks examples)
REPORT := build/spec-report.json
# Which tests a recovery in every Step cannot change, as the last `make test` saw: tests/plugins/recovery_plugin.py.
SWITCH := build/switch$(if $(AGENTSCOPE),-$(AGENTSCOPE)).json
comma := ,
# A program in tools/ named gen_*.py owns a generated file: --write renews it, --check compares.
GENERATORS := tools/public_api.py $(wildcard tools/gen_*.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv servers demo two-hosts check format-check lint types generated test test-oldest wheel spec bench bench-peers
.PHONY: simulate weather recover test-recover faults matrix docs format

help:
	@sed -n '4,21p' Makefile | cut -c5-

$(PY):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is needed; another name: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Another AgentScope may need another mcp: 2.0.8 stops below 2.0.
$(VENV)/constraints.txt: constraints.txt | $(PY)
	sed -e 's/^agentscope==.*/agentscope==$(AGENTSCOPE)/' -e '/^mcp==/d' constraints.txt > $@

$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(PY)
	$(PIP) install --constraint $(CONSTRAINTS) --editable '.[$(if $(filter test,$*),agentscope$(comma)test,$*)]'
	@touch $@

venv: $(DEV)

servers: $(TEST)
	@$(PY) tools/servers.py

demo: $(DEMO)
	$(PY) examples/demo/run.py $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))

two-hosts: $(DEV)
	$(PY) examples/integrated/two_hosts/run.py $(if $(DATABASE),--database $(DATABASE))

check: format-check lint types generated test test-recover test-oldest wheel
	@echo "check: all passed"

format-check: $(DEV)
	$(PY) -m ruff format --check $(CODE)

lint: $(DEV)
	$(PY) -m ruff check $(CODE)

types: $(DEV)
	$(PY) -m basedpyright --pythonpath $(PY)

generated: $(DEV)
	@set -e; for tool in $(GENERATORS); do echo "$$tool --check"; $(PY) $$tool --check; done

test: $(TEST) servers
	$(PYTEST) --spec-report=$(REPORT) --note-switch=$(SWITCH) $(ARGS)

# The adapter is what meets AgentScope, so it is what runs again on the oldest release supported.
test-oldest:
ifneq ($(wildcard tests/adapters/agentscope),)
	$(MAKE) test AGENTSCOPE=$(OLDEST_AGENTSCOPE) REPORT=build/spec-report-oldest.json ARGS=tests/adapters/agentscope
else
	@echo "test-oldest: there is no tests/adapters/agentscope yet"
endif

wheel: $(DEV)
	$(PY) tools/wheel_check.py

spec: $(DEV) servers
	@rm -f $(REPORT)
	-$(PYTEST) -q --spec-report=$(REPORT) $(ARGS)
	$(PY) tools/spec_coverage.py $(REPORT)

bench: $(DEV) servers
	$(PY) -m benchmarks $(ARGS)

PEERS := build/venv-peers
$(PEERS)/.installed: benchmarks/peers/requirements.txt benchmarks/peers/constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install \
		--constraint benchmarks/peers/constraints.txt --requirement benchmarks/peers/requirements.txt
	@touch $@

bench-peers: $(DEV) servers $(PEERS)/.installed
	$(PY) -m benchmarks.peers $(ARGS)

# Without SEED or MUTANT every planted bug must be found as well. SEEDS=10000 takes hours.
simulate: $(DEV)
	$(PY) -m tests.simulation --report build/simulation-report $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(MUTANT),--mutant $(MUTANT),$(if $(SEED),,--mutants)) $(if $(STORE),--store $(STORE)) $(if $(AGENT),--agent $(AGENT)) \
		$(if $(JOBS),--jobs $(JOBS))

weather: $(TEST) servers
	$(PYTEST) --weather=$(or $(SEED),1) --timeout 900 -m "not matrix" $(ARGS)

# Each Run is dropped after each Step and taken over: docs/faults.md. What counts Runs is left out, and listed.
recover: $(DEV) servers
	DURABLE_RECOVER_EVERY_STEP=1 $(PYTEST) -m "not matrix" $(ARGS)

# All that can end otherwise for it. Where `make test` did not run before, on these sources, that is everything.
test-recover: $(DEV) servers
	DURABLE_RECOVER_EVERY_STEP=1 $(PYTEST) -q -m "not matrix" --where-switch=$(SWITCH) $(ARGS)

faults: $(DEV) servers
	DURABLE_MATRIX=all $(PYTEST) tests/faults --timeout 0 $(ARGS)

# DURABLE_MATRIX=all makes the crash tests run every pair instead of a seeded sample. The results are kept in build/.
matrix: $(DEV) servers
	DURABLE_MATRIX=all $(PYTEST) -m matrix --timeout 0 --junit-xml=build/matrix-newest.xml $(ARGS)
	DURABLE_MATRIX=all $(MAKE) test AGENTSCOPE=$(OLDEST_AGENTSCOPE) REPORT=build/spec-report-oldest.json \
		ARGS="-m matrix --timeout 0 --junit-xml=build/matrix-oldest.xml $(ARGS)"

docs: $(DEV)
	@set -e; for tool in $(GENERATORS); do echo "$$tool --write"; $(PY) $$tool --write; done
	$(PY) -m pytest tests/docs $(ARGS)

format: $(DEV)
	$(PY) -m ruff check --fix-only --exit-zero $(CODE)
	$(PY) -m ruff format $(CODE)
