# SPDX-License-Identifier: Apache-2.0

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CACHE := $(or $(FAIRLEAD_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fairlead)
LINT := $(CACHE)/bin/golangci-lint
RUN := go run ./test/run
FUZZTIME ?= 10s
KERNELS ?= 6.1,6.12
# tp_btf is what the machine itself has.
METHODS ?= fentry,kprobe
BENCH ?= .
# Rounds of what the end-to-end tests repeat, fewer where the processor is emulated.
VM_ROUNDS := -env FAIRLEAD_STARTS=2 -env FAIRLEAD_WAKEUPS=500 -env FAIRLEAD_SHORT=500 \
	-env FAIRLEAD_STORMS=2 -env FAIRLEAD_REFILL=500

# Stages of "make test": two lanes side by side, each in its order, as neither keeps two
# processors busy by itself.
STAGES_HERE := lint generate-check test-unit test-root test-browser test-engines
STAGES_VM := test-vm
# Systems that the host side is built for beside linux/amd64, which the linter sees.
HOST_SYSTEMS := linux/arm64 windows/amd64 windows/arm64 darwin/arm64
# What wine 8 can run: it has neither unix sockets nor the UDP of Go 1.26, and its
# files cannot be removed the way os.RemoveAll does it.
WINE_PACKAGES := ./internal/rules ./internal/wire ./internal/table ./internal/hvsock
WINE_HOST := OwnerTables|IPHelper|ProcessName|Reserved|Lsof|NonsenseAt|PublishesEvery|WithoutTheToken
HOST_PACKAGES := $(wildcard ./internal/host ./cmd/fairlead)

# One set of flags for builds, tests and linter, so that each package is compiled once.
export CGO_ENABLED ?= 0
export GOFLAGS ?= -trimpath

# Packages with a test file that has build tag $(1).
tagged = $(shell grep -rlE '^//go:build.*\b$(1)\b' --include='*_test.go' . | xargs -r dirname | sort -u)
need_root = @[ "$$(id -u)" = 0 ] || { echo "$@: needs root: run 'sudo make $@'" >&2; exit 1; }

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/fairlead for this machine; needs nothing but Go
	go build -ldflags '-s -w' -o bin/ ./cmd/...

.PHONY: demo
demo: build ## Show the whole path on this machine, in a network namespace (root)
	$(need_root)
	@exec bin/fairlead demo

.PHONY: test
test: ## Run everything, installing what it needs (root; Debian 12)
	@hack/provision.sh all
	@export FAIRLEAD_TALLY=$$(mktemp); trap 'rm -f "$$FAIRLEAD_TALLY"' EXIT; \
	$(MAKE) --no-print-directory -k -j lane-here lane-vm; \
	printf '\n'; $(RUN) sum "$$FAIRLEAD_TALLY"

lane-here: STAGES := $(STAGES_HERE)
lane-vm: STAGES := $(STAGES_VM)
.PHONY: lane-here lane-vm
lane-here lane-vm:
	@for stage in $(STAGES); do \
		printf '\n== %s\n' "$$stage"; \
		$(MAKE) --no-print-directory "$$stage" </dev/null || \
			grep -q "^[0-9]* [1-9][0-9]* $$stage" "$$FAIRLEAD_TALLY" || echo "0 1 $$stage" >>"$$FAIRLEAD_TALLY"; \
	done

.PHONY: lint
lint: ## Check style, import rules and that the host side builds everywhere
	@[ -x "$(LINT)" ] || hack/provision.sh lint
	@rc=0; $(RUN) check lint $(LINT) run ./... || rc=1; \
	for system in $(HOST_SYSTEMS); do \
		$(RUN) check "lint-$${system/\//-}" env CGO_ENABLED=0 GOOS="$${system%/*}" GOARCH="$${system#*/}" hack/vet-deps.sh $(HOST_PACKAGES) || rc=1; \
	done; exit $$rc

.PHONY: test-unit
test-unit: ## Run the tests that need neither root nor another kernel, with the race detector
	@$(RUN) test test-unit env CGO_ENABLED=1 go test -json -race -timeout 60m ./...

.PHONY: test-root
test-root: ## Run the tests that make namespaces, rules and BPF programs on this kernel (root)
	$(need_root)
	@$(RUN) test test-root go test -json -tags root -p 1 -count 1 -timeout 60m $(or $(call tagged,root),$(error no test file has build tag root))

.PHONY: test-vm
test-vm: ## Run root and VM tests under emulated kernels (KERNELS, METHODS)
	@rc=0; $(RUN) test test-vm-rig go test -json -tags engines -timeout 60m ./test/vm || rc=1; \
	go run ./test/vm -kernel '$(KERNELS)' -methods '$(METHODS)' $(VM_ROUNDS) ./... || rc=1; exit $$rc

.PHONY: test-browser
test-browser: ## Look at the page in Chromium and run dashboard and alerts in Prometheus (root)
	$(need_root)
	@hack/provision.sh browser
	@$(RUN) test test-browser go test -json -tags engines -count 1 -timeout 60m ./test/observe

.PHONY: test-engines
test-engines: ## Run against real Docker, containerd and Kubernetes (root; builds them once, 10 minutes)
	$(need_root)
	@hack/provision-engines.sh
	@$(RUN) test test-engines go test -json -tags engines -p 1 -count 1 -timeout 60m $(filter-out ./test/observe ./test/vm,$(call tagged,engines))

.PHONY: test-moby
test-moby: ## Run against the next Docker with its nftables back end (root; builds it once, 5 minutes)
	$(need_root)
	@hack/provision-engines.sh packages moby
	@FAIRLEAD_DOCKERD=$(CACHE)/bin/moby $(RUN) test test-moby go test -json -tags engines -run Docker -count 1 -timeout 30m ./test/engines

.PHONY: test-wine
test-wine: ## Run tests of the host side, built for Windows, under Debian's wine (not part of test)
	@hack/provision.sh wine
	@rc=0; for what in "$(WINE_PACKAGES)" "-run $(WINE_HOST) ./internal/host"; do \
		set -f; $(RUN) test test-wine env CGO_ENABLED=0 GOOS=windows GOARCH=amd64 go test -json -p 1 -exec "$$PWD/hack/wine.sh" $$what || rc=1; \
	done; exit $$rc

.PHONY: bench
bench: ## Measure fairlead against polling and write docs/benchmarks (root; 20 minutes)
	$(need_root)
	@hack/provision.sh base vm bench
	@hack/provision-engines.sh packages kube
	@go run ./test/bench -report docs/benchmarks -json docs/benchmarks/results.jsonl

.PHONY: bench-micro
bench-micro: ## Run the Go benchmarks that match BENCH (root)
	$(need_root)
	@go test -tags root -run '^$$' -bench '$(BENCH)' -benchmem -p 1 -timeout 60m \
		$$(grep -rl '^func Benchmark' --include='*_test.go' . | xargs -r dirname | sort -u)

.PHONY: fuzz
fuzz: ## Fuzz every decoder for FUZZTIME each
	@grep -rHoE '^func Fuzz[A-Za-z0-9_]*' --include='*_test.go' . | sort | while IFS=: read -r file func; do \
		printf '\n== %s %s\n' "$$(dirname "$$file")" "$${func#func }"; \
		go test -run '^$$' -fuzz "^$${func#func }\$$" -fuzztime $(FUZZTIME) "$$(dirname "$$file")"; \
	done

.PHONY: generate
generate: ## Generate the BPF objects with the pinned compiler
	@command -v clang-14 >/dev/null || hack/provision.sh generate
	rm -f internal/kernel/bpf/*_bpfel.go internal/kernel/bpf/*_bpfel.o
	go generate ./...

.PHONY: generate-check
generate-check: ## Check that what "make generate" makes is what is committed
	@command -v clang-14 >/dev/null || hack/provision.sh generate
	@$(RUN) check generate-check hack/generate-check.sh

.PHONY: man
man: build ## Write the manual pages to bin/man
	bin/fairlead man bin/man

.PHONY: docs
docs: ## Write the documents that are made from code
	go test -count 1 ./internal/metrics ./internal/config -update
	go run ./hack/notices

.PHONY: clean
clean: ## Remove what was built here; the cache of kernels and tools stays
	rm -rf bin
