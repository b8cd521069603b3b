# `make help` lists the goals. A fresh machine needs Python >= 3.10, Rust and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools
CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR
unexport VIRTUAL_ENV
# The build backend wraps maturin's with a check for Rust; silence maturin's warning about a foreign backend.
export MATURIN_NO_MISSING_BUILD_BACKEND_WARNING := 1
# Tests keep overflow checks and assertions, but thousands of simulated schedules want some speed. Without optimization
# across the units of a crate, and with line numbers as the only debug information, they compile in four fifths of the time.
export CARGO_PROFILE_TEST_OPT_LEVEL := 1
export CARGO_PROFILE_TEST_LTO := off
export CARGO_PROFILE_TEST_DEBUG := line-tables-only

# Four rails that every machine has: four addresses of its loopback interface.
DEMO_RAILS := CROSSRAIL_TLS=tcp CROSSRAIL_NET_DEVICES=127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4

COMMA := ,
say = @printf '\n== %s\n' "$(1)"

.DELETE_ON_ERROR:
.PHONY: help build demo wheels clean check test lint fmt nightly bench bench-gpu test-gpu \
	lint-rust lint-python check-aarch64 test-rust test-fuzz test-python test-pages pages pins rust \
	bench-gpu-experts bench-gpu-nccl gpu-pack rust-calculates rust-waits rust-rest \
	models tsan miri emulate-many meeting deny engines gevent fuzz fuzz-rust fuzz-python fabric-seeds chaos chaos-ranks chaos-together growth soak simulate \
	site test-release release release-check release-roots install-c c-library memory-c cost-c

help:
	@echo "Build and try"
	@echo "  make build      virtual environment in $(VENV), tools, the extension and the command crossrail"
	@echo "  make demo       build, then info and the main benches on this machine"
	@echo "  make install-c  the C library, its headers, pkg-config and CMake files: PREFIX=/usr/local DESTDIR= LIBDIR=lib"
	@echo "  make wheels     wheels for x86-64 and aarch64, for every Python from 3.10, into dist"
	@echo "  make site       the documentation with the reference of Python and Rust, into target/site"
	@echo "  make clean      remove what was built"
	@echo "Check"
	@echo "  make check      what a change touches, in about a minute: SINCE=main"
	@echo "  make test       everything CI runs: lint, Rust tests, fuzz corpora, Python tests, test bed"
	@echo "  make lint       format, lints and types; the rules of the layout are those of cargo xtask help"
	@echo "  make fmt        format Rust and Python"
	@echo "  make nightly    what takes longer, three hours at most, resumable: NIGHTLY_OPTIONS=\"--only fuzz,chaos --page FILE\""
	@echo "  make release-check  everything of a release but the upload: builds it into dist, installs and tries it"
	@echo "Measure, and what needs GPUs"
	@echo "  make bench      the benchmark against the peers, into benches/results"
	@echo "  make bench-gpu  GPU memory against its peers, into benches/results/gpu"
	@echo "  make test-gpu   tests on GPUs"
	@echo "Parts of these, and their settings: CONTRIBUTING.md"

$(TOOLS): requirements-dev.txt
	$(call say,tools: $(VENV) from requirements-dev.txt)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed, this is " + sys.version) if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	@touch $@

rust:
	@command -v cargo >/dev/null || { cat packaging/missing_rust.txt >&2; exit 1; }

# Pins versions and hashes of all development packages, for every supported Python.
PINNED := requirements-dev.txt packaging/requirements-site.txt packaging/requirements-release.txt
pins: $(TOOLS)
	$(call say,pins: $(PINNED) from packaging/*.in)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	@for file in $(PINNED); do \
		UV_CUSTOM_COMPILE_COMMAND="make pins" $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-annotate \
			--python-version 3.10 packaging/$$(basename $$file .txt).in --output-file $$file || exit 1; \
	done

# What only some goals need, installed once: $(VENV)/.site, $(VENV)/.release.
$(VENV)/.%: packaging/requirements-%.txt $(TOOLS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

build: rust $(TOOLS)
	$(call say,build: extension and command)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --locked
	@# Where PYTHONDONTWRITEBYTECODE is set, every process would otherwise compile all the sources that it imports.
	$(BIN)/python -m compileall -q python
	$(BIN)/python packaging/nccl_plugin.py

demo: build
	$(call say,devices and transports of this machine)
	$(BIN)/crossrail info
	$(call say,latency over shared memory)
	CROSSRAIL_TLS=shm $(BIN)/crossrail bench latency --sizes 1:4K
	$(call say,latency over TCP)
	CROSSRAIL_TLS=tcp $(BIN)/crossrail bench latency --sizes 1:4K
	$(call say,bandwidth over shared memory)
	CROSSRAIL_TLS=shm $(BIN)/crossrail bench bandwidth --sizes 4K:16M
	$(call say,bandwidth over TCP)
	CROSSRAIL_TLS=tcp $(BIN)/crossrail bench bandwidth --sizes 4K:16M
	$(call say,one transfer of 64 MiB over four rails)
	$(DEMO_RAILS) $(BIN)/crossrail bench p2p --size 64M
	$(call say,dispatch and combine between four ranks)
	$(BIN)/crossrail bench ep --num-processes 4
	$(call say,an elastic plan: four ranks, eight, six)
	$(BIN)/crossrail bench ep --plan tests/data/plans/grow_and_shrink.json --tokens 64 --hidden 2048
	$(call say,an elastic plan: one of four ranks is killed and replaced)
	$(BIN)/crossrail bench ep --plan tests/data/plans/killed_and_replaced.json --tokens 64 --hidden 2048

# Rust and Python in parallel, so that one compiles while the other waits. Their tests run one after the other, because
# many measure time, or would wait for a process that starves on two cores. The last line is that of the Python tests.
NOT_AT_ONCE := flock --close $(CARGO_TARGET_DIR)/.tests

# What the working tree changes beyond SINCE (HEAD), in about a minute. Uses the extension that was built last.
SINCE ?=
check: $(TOOLS)
	@$(BIN)/python tests/check.py $(SINCE)

test: $(TOOLS)
	@$(PYTHON) tests/side_by_side.py "$(MAKE) lint-rust test-rust" "$(MAKE) lint-python test-python"

lint: lint-rust lint-python

lint-rust: check-aarch64
	$(call say,lint: rustfmt)
	cargo fmt --all --check
	$(call say,lint: clippy)
	cargo clippy --quiet --locked --workspace --all-targets --features crossrail/simulated-gpu -- -D warnings
	@# Programs with test = false are not among all targets.
	cargo clippy --quiet --locked --workspace --test 'gpu*' --features crossrail/simulated-gpu -- -D warnings
	$(call say,lint: rooms and pages (cargo xtask lint))
	cargo run --quiet --locked --profile test --package xtask -- lint
	cargo run --quiet --locked --profile test --package xtask -- unsafe

lint-python: build
	$(call say,lint: ruff)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(call say,lint: mypy)
	$(BIN)/mypy
	$(call say,lint: stubs against the extension)
	$(BIN)/python -m mypy.stubtest crossrail._native

# With the fuzz targets on their corpora; without the test programs that need a GPU, which have test = false. Of the
# examples, only those that tests run are built; clippy looks at all.
TESTED := --locked --workspace --exclude crossrail-python --features crossrail/simulated-gpu

test-rust: $(TOOLS)
	$(call say,test: Rust)
	cargo build --quiet --profile test $(TESTED) --example two_processes --example hotpath
	cargo test --quiet $(TESTED) --lib --bins --tests --no-run
	@$(MAKE) --no-print-directory --jobs --output-sync=target $(LANES)
	cargo test --quiet $(TESTED) --doc

# Three lanes of test programs (tests/lanes.py), each printing its output when it is done. CPU-bound tests fill the time
# that the others, and Python's tests, leave idle; the other two lanes share one lock.
LANES := rust-calculates rust-waits rust-rest
rust-waits rust-rest: private TURN := flock --close --shared $(CARGO_TARGET_DIR)/.tests
$(LANES):
	$(TURN) cargo test --quiet $(TESTED) --lib --bins --tests \
		--config "target.'cfg(all())'.runner = ['$(PYTHON)', '$(CURDIR)/tests/lanes.py', '$(@:rust-%=%)']"

test-fuzz:
	$(call say,test: fuzz targets on their corpora and seeded mutations of them)
	cargo test --quiet --locked --package crossrail-fuzz

# What `make test` leaves out, part by part: its budgets and the page of results are in tests/nightly.py. CI runs it
# every night; on two cores it takes three hours at most, and an interrupted run resumes.
nightly: build
	$(call say,nightly: everything that takes longer)
	$(BIN)/python tests/nightly.py $(NIGHTLY_OPTIONS)

# Leak tests over a program's lifetime: `growth` counts bytes per kind of object, `soak` watches the whole process as
# the system sees it. SOAK_JSON: file for the figures, rewritten every minute.
GROWTH_SECONDS ?= 1030
SOAK_SECONDS ?= 7200

growth: rust
	$(call say,growth: leaks of every kind of object, $(GROWTH_SECONDS) s each)
	CROSSRAIL_TEST_SOAK=$(GROWTH_SECONDS) cargo test --quiet --locked --package crossrail-ep-host --test growth -- \
		--nocapture --test-threads 1

soak: build
	$(call say,soak: full workload, $(SOAK_SECONDS) s)
	$(BIN)/python tests/python/soak.py --seconds $(SOAK_SECONDS) $(if $(SOAK_JSON),--json $(SOAK_JSON))

# Not part of `make test`: it compiles everything once more.
models: rust
	$(call say,models: locks and shared memory in every order that the memory model allows)
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/loom CARGO_PROFILE_TEST_OPT_LEVEL=2 \
		cargo test --quiet --locked --package crossrail-locks --package crossrail-shm --package crossrail-transport \
		--lib models

# Cost of a meeting of 256 and 1,024 ranks, simulated: the store's, and each rank's requests, messages, time and memory.
meeting:
	$(call say,meeting: 256 and 1024 ranks)
	cargo test --quiet --locked --package crossrail-control --lib crowd -- --nocapture
	cargo test --quiet --locked --package crossrail-ep --lib whatever_their_number -- --nocapture
	cargo test --quiet --locked --package crossrail-ep-cuda --lib memory_of_many_ranks -- --nocapture

# More ranks than a word has bits; `make test` has the others.
emulate-many: rust
	$(call say,emulator: 128 ranks)
	cargo test --quiet --locked --package crossrail-emulator --test emulated -- --ignored sixteen_nodes
	cargo test --quiet --locked --package crossrail-ep-cuda --lib -- --ignored sixteen_nodes

# A pinned nightly compiler: the release's has no interpreter. Of the rings, one mapping that both ends share, and the tests
# that an interpreter finishes in minutes.
NIGHTLY ?= nightly-2026-05-20
TSAN_CRATES ?= locks shm tcp transport ep-host control
MIRI = CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/miri CARGO_PROFILE_TEST_OPT_LEVEL=0 MIRIFLAGS=-Zmiri-disable-isolation \
	cargo +$(NIGHTLY) miri test --quiet --locked

# What `make nightly` shows instead of a failure.
toolchain = rustup --quiet toolchain install $(NIGHTLY) --profile minimal $(1) || \
	{ echo "not run: no toolchain ($(NIGHTLY), which rustup could not install)"; exit 1; }

miri: rust
	$(call say,miri: undefined behaviour)
	$(call toolchain,--component rust-src --component miri)
	$(MIRI) --package crossrail-proto --package crossrail-types --lib
	$(MIRI) --package crossrail-shm --lib -- ring::tests::a_ ring::tests::every_

# The standard library is instrumented as well, so everything is compiled once more. Both ends of a ring map it at
# different addresses, which the sanitizer takes for different memory: the models cover those races. No suppressions are
# needed. Skipped: two tests that count memory and threads, which the sanitizer inflates, and one that starts threads in
# a forked child, which it does not support. UCX must not hook mmap. TSAN_CRATES=engine is slow, and its timing tests
# fail.
tsan: rust
	$(call say,tsan: data races between threads)
	$(call toolchain,--component rust-src)
	UCX_MEM_MMAP_HOOK_MODE=none RUSTFLAGS=-Zsanitizer=thread TSAN_OPTIONS="halt_on_error=0 die_after_fork=0 history_size=4" \
		CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/tsan CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_PROFILE_DEV_DEBUG=line-tables-only \
		cargo +$(NIGHTLY) test --quiet --locked --no-fail-fast -Zbuild-std --target $(shell uname -m)-unknown-linux-gnu \
		$(patsubst %,--package %,$(patsubst crossrail-engine,crossrail,$(addprefix crossrail-,$(TSAN_CRATES)))) \
		--lib --tests -- --skip clients_that_take_no_answers_do_not_use_up_the_memory --skip nothing_is_left \
		--skip a_forked_child_uses_locks_of_its_own

# If the advisory database cannot be reached, everything else is checked, and the last line says so.
DENY ?= advisories bans licenses sources
DENY_VERSION := 0.20.2
ADVISORIES := https://github.com/RustSec/advisory-db

deny: rust
	$(call say,deny: $(DENY))
	cargo install --quiet --locked --version $(DENY_VERSION) --root $(CARGO_TARGET_DIR)/tools cargo-deny
	@checks="$(DENY)" without=; \
	if ! GIT_TERMINAL_PROMPT=0 timeout 30 git ls-remote --exit-code $(ADVISORIES) HEAD >/dev/null 2>&1; then \
		checks="$(filter-out advisories,$(DENY))" without="$(filter advisories,$(DENY))"; \
	fi; \
	PATH=$(CARGO_TARGET_DIR)/tools/bin:$$PATH cargo deny --locked check $$checks && \
	echo "checked: $$checks$${without:+; advisories not: $(ADVISORIES) cannot be reached}"

# The published engines' own Python, which is installed into target/engines.
engines: build
	$(call say,engines: vLLM's and SGLang's own connections over the modules nixl and mooncake)
	$(BIN)/python -m pytest --quiet tests/engines

GEVENT_VERSION := 26.9.0
GEVENT := $(CARGO_TARGET_DIR)/gevent-$(GEVENT_VERSION)
gevent: build
	$(call say,gevent: blocking calls that it has replaced)
	@test -d $(GEVENT) || \
		{ $(BIN)/python -m pip install --quiet --target $(GEVENT).new gevent==$(GEVENT_VERSION) && mv $(GEVENT).new $(GEVENT); } || \
		{ echo "not run: gevent $(GEVENT_VERSION) could not be fetched"; exit 1; }
	PYTHONPATH=$(GEVENT) $(BIN)/python -m pytest --quiet tests/gevent

# A new seed each time; it is printed, and FUZZ_SEED=N replays it. No link-time optimization: it takes longer than it
# saves.
FUZZ_SECONDS ?= 600
FUZZ_SEED ?= $(shell date +%s)

# All targets at once, each in a thread of its own.
fuzz: build
	@$(PYTHON) tests/side_by_side.py "$(MAKE) fuzz-rust FUZZ_SEED=$(FUZZ_SEED)" "$(MAKE) fuzz-python FUZZ_SEED=$(FUZZ_SEED)"

fuzz-rust: rust
	$(call say,fuzz: $(FUZZ_SECONDS) s from seed $(FUZZ_SEED))
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SEED=$(FUZZ_SEED) CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
		CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/fuzz cargo test --quiet --release --locked --package crossrail-fuzz \
		--test replay -- --nocapture --test-threads 16

fuzz-python: $(TOOLS)
	FUZZ_SECONDS=$$(($(FUZZ_SECONDS) / 6)) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest --quiet tests/python/test_reader_fuzz.py

# One-sided writes over a libfabric that does its worst, which is compiled from tests/fabric; a failing seed is printed.
FABRIC_SEEDS ?= 10000
FABRIC_SEED ?= $(shell date +%s)

fabric-seeds: rust
	$(call say,fabric: $(FABRIC_SEEDS) seeds from $(FABRIC_SEED))
	FABRIC_SEEDS=$(FABRIC_SEEDS) FABRIC_SEED=$(FABRIC_SEED) CARGO_PROFILE_TEST_OPT_LEVEL=2 cargo test --quiet --locked \
		--package crossrail-fabric --test hostile -- --nocapture every_seed

# One more than two processors, because the worker with the test beds mostly waits. On a constantly loaded machine use
# two: with more, tests exceed their timeouts.
TEST_WORKERS ?= 3

# The C library of the tests, with what test-rust compiles.
c-library: $(TOOLS)
	$(call say,C library: target/c-library)
	$(BIN)/python packaging/c_library.py --as-tested --prefix $(CARGO_TARGET_DIR)/c-library

# Not part of `make test`: valgrind takes a minute for each.
memory-c: c-library
	$(call say,C library: valgrind and sanitizers)
	$(BIN)/python tests/capi/memory.py

# Not part of `make test`: the library as it is released compiles everything once more.
cost-c: build
	$(call say,C library: instructions beside those of Rust)
	$(BIN)/python benches/instructions.py --from-c

test-python: build c-library
	$(call say,test: Python and test bed)
	@# A thread of OpenBLAS spins for as long as all of a short process's other imports take. With bytecode that is kept,
	@# every worker collects the tests in a third of the time.
	OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(NOT_AT_ONCE) $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS)

# Random faults on rails between network namespaces (root, iproute2), of this seed or a fresh one. CI has six seconds.
CHAOS_SECONDS ?= 120
chaos-ranks: build
	$(call say,chaos: ranks are killed and stopped and lose the store)
	$(BIN)/python tests/python/rank_chaos.py --seconds $(CHAOS_SECONDS) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))
	$(call say,chaos: ranks are killed and replaced)
	$(BIN)/python tests/python/rank_chaos.py --mode replaced --seconds $(CHAOS_SECONDS) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

simulate:
	$(call say,simulation: views of ranks)
	SIM_RUNS=$(or $(SIM_RUNS),5000) cargo test --locked --release -p crossrail-ep --test view

CHAOS = $(BIN)/python tests/testbed/chaos.py --seconds $(CHAOS_SECONDS) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

chaos: build
	$(call say,chaos: faults on all rails but one)
	$(CHAOS)
	$(call say,chaos: one rail works for one second in ten)
	$(CHAOS) --mode windows

# The full workload under faults, in each of these constrained environments in turn (root, iproute2, etcd).
SURROUNDINGS ?= plain clocks disk descriptors exhausted memory seccomp users ipv6
chaos-together: build
	$(call say,chaos: messages, experts and control on two nodes)
	@for surrounding in $(SURROUNDINGS); do \
		$(BIN)/python tests/testbed/together.py --seconds $(CHAOS_SECONDS) --surrounding $$surrounding \
			$(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) || exit 1; \
	done

# Need a GPU, and fail where there is none; `make test` compiles all kernels without one. With GPU_PACK=.gpu they run
# what benches/gpu/pack.sh made on another machine, and need no Rust. OUT=DIR: where the log and the results go.
GPU_PACK ?=
GPU_PYTHON ?= $(if $(GPU_PACK),$(PYTHON),$(BIN)/python)
GPU_SITE := $(CARGO_TARGET_DIR)/gpu-site
GPU_RUN = --pack $(or $(GPU_PACK),.gpu) --site $(GPU_SITE)

gpu-pack: $(if $(GPU_PACK),,build)
ifeq ($(GPU_PACK),)
	$(call say,pack: what the GPU machine runs)
	benches/gpu/pack.sh $(PACK_OPTIONS)
endif
	@rm -rf $(GPU_SITE) && mkdir -p $(GPU_SITE)
	@$(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-index --target $(GPU_SITE) \
		$(or $(GPU_PACK),.gpu)/wheel/*.whl
	@for peer in nixl deepep deepep-v2 nccl-ep engines; do pack=$(or $(GPU_PACK),.gpu)/$$peer.tar.xz; \
		if [ -e $$pack ]; then tar -xf $$pack -C $(GPU_SITE); fi; done

# DEEPEP_TESTS=DIR[:DIR]: folders with DeepEP's own tests, which run on crossrail.deep_ep unchanged.
test-gpu: export DEEPEP_TESTS := $(DEEPEP_TESTS)
test-gpu: gpu-pack
	$(call say,test: GPU)
	$(GPU_PYTHON) tests/gpu/run.py $(GPU_RUN) --out $(or $(OUT),$(CARGO_TARGET_DIR)/gpu) $(GPU_OPTIONS)

# Some five minutes each; with GPU_OPTIONS="--quick --rounds 1" two at most.
GPU_BENCH = PYTHONPATH=$(GPU_SITE) $(GPU_PYTHON) benches/gpu/run.py $(GPU_RUN) --out $(or $(OUT),benches/results/gpu)

bench-gpu-nccl: PACK_OPTIONS = --nccl-ep
bench-gpu-nccl: gpu-pack
	$(call say,bench: NCCL over its sockets and over Crossrail; its device API over Crossrail)
	$(GPU_BENCH) --only collectives --name collectives $(GPU_OPTIONS)

bench-gpu: PACK_OPTIONS = --nixl --deepep
bench-gpu-experts: PACK_OPTIONS = --deepep --deepep-v2
bench-gpu: gpu-pack
	$(call say,bench: GPU memory against its peers)
	$(GPU_BENCH) --only p2p $(GPU_OPTIONS)

bench-gpu-experts: gpu-pack
	$(call say,bench: dispatch and combine in GPU memory against their peers)
	$(GPU_BENCH) --only experts $(GPU_OPTIONS)

# Below PREFIX, in front of which packagers put DESTDIR; LIBDIR as lib/x86_64-linux-gnu.
PREFIX ?= /usr/local
DESTDIR ?=
LIBDIR ?= lib

install-c: rust
	$(call say,C library: $(DESTDIR)$(PREFIX))
	$(PYTHON) packaging/c_library.py --prefix $(PREFIX) --destdir "$(DESTDIR)" --libdir $(LIBDIR)

# The wheel of every machine and Python: one per architecture, by the stable ABI, linked by zig against an old glibc.
# Reproducible: the same bytes from any folder and home directory.
WHEEL_TARGETS := x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu

wheels: rust $(TOOLS)
	$(call say,wheels: $(WHEEL_TARGETS) into dist)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement packaging/requirements-wheels.txt
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python packaging/release.py wheels --complete \
		--targets $(subst $(eval ) ,$(COMMA),$(WHEEL_TARGETS))

# Type-checks only: there is no linker for the other architecture. Reports when its standard library is not available.
check-aarch64: rust
	$(call say,check: aarch64)
	@if rustup --quiet target add aarch64-unknown-linux-gnu; then \
		cargo check --quiet --locked --package crossrail-python --package crossrail-nccl-plugin --target aarch64-unknown-linux-gnu; \
	else echo "not checked: rustup has no standard library for aarch64 here"; fi

bench: build
	$(call say,bench: against the peers into benches/results)
	$(BIN)/python benches/run.py
	@$(MAKE) --no-print-directory pages

MAN_PAGE := packaging/data/data/share/man/man1/crossrail.1

pages: build
	$(call say,pages: their tables and charts from benches/results)
	$(BIN)/python -m crossrail_tools.cli.doctor.page >docs/doctor.md
	$(BIN)/python -m crossrail_tools.cli.manual markdown >docs/command.md
	$(BIN)/python -m crossrail_tools.cli.manual man >$(MAN_PAGE)
	$(BIN)/python benches/gpu/table.py docs/performance.md docs/performance-experts.md docs/design/trust.md
	$(BIN)/python benches/pages.py

# Nothing is fetched once the packages are there. The crates are those that programs use.
SITE := $(CARGO_TARGET_DIR)/site
SITE_CRATES := crossrail crossrail-types crossrail-transport crossrail-control crossrail-ep crossrail-ep-host crossrail-ep-cuda

site: build $(VENV)/.site
	$(call say,site: $(SITE)/docs/site/index.html)
	rm -rf $(SITE)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --doctree-dir $(CARGO_TARGET_DIR)/site-trees \
		--conf-dir docs/site . $(SITE)
	cargo doc --quiet --locked --no-deps $(addprefix --package ,$(SITE_CRATES))
	cp -r $(CARGO_TARGET_DIR)/doc $(SITE)/rust
	$(BIN)/python docs/site/check.py $(SITE)

# Left out of `make test`, like the next: validators of manifests and workflows are large.
test-release: build $(VENV)/.release
	$(call say,test: manifests and workflows by the validators of their kinds)
	$(BIN)/python -m pytest --quiet tests/release

# A release as .github/workflows/release.yml makes it. What this machine cannot make is reported as not done; with
# RELEASE_OPTIONS=--complete that is an error.
RELEASE_OPTIONS ?=
release: build $(VENV)/.release
	$(call say,release: into dist)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement packaging/requirements-wheels.txt
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python packaging/release.py make $(RELEASE_OPTIONS)

release-check: release test-release
	$(call say,release: install each artefact and try it)
	$(BIN)/python packaging/release.py check $(if $(wildcard $(RELEASE_ROOTS)),--roots $(RELEASE_ROOTS)) $(RELEASE_OPTIONS)

# Pythons of other versions and machines, in which release-check tries the wheels that are for them.
RELEASE_ROOTS ?= $(CARGO_TARGET_DIR)/release-roots
release-roots: $(TOOLS)
	$(call say,release: roots into $(RELEASE_ROOTS))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement packaging/requirements-wheels.txt
	$(BIN)/python packaging/roots.py $(RELEASE_ROOTS)

# Left out of `make test`: Chromium is two dozen packages, more than everything else that the tests install.
test-pages: build
	$(call say,test: pages in a browser)
	$(BIN)/python benches/pages.py
	$(BIN)/python -m pytest tests/pages

fmt: $(TOOLS)
	cargo fmt --all
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) target dist
	find python tests benches -name __pycache__ -prune -exec rm -rf {} +
	rm -f python/crossrail/*.so
