# SPDX-License-Identifier: Apache-2.0

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CACHE := $(or $(FAIRLEAD_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fairlead)
LINT := $(CACHE)/bin/golangci-lint
export RESULTS := $(CURDIR)/bin/results
# Run one part of a stage and keep its result: "test" reads events of go test -json.
TEST := hack/stage.sh test
CHECK := hack/stage.sh check
FUZZTIME ?= 5s
KERNELS ?= 6.1,6.12
# tp_btf is what the machine itself has.
METHODS ?= fentry,kprobe
BENCH ?= .

# Stages run in two lanes side by side, each in its order, as neither keeps two
# processors busy by itself.
STAGES := lint generate-check test-unit test-root test-browser test-engines-smoke
STAGES_VM := test-vm-smoke
STAGES_ALL := lint generate-check test-unit test-root test-browser test-chaos
STAGES_VM_ALL := test-vm test-install
STAGES_ENGINES_ALL := test-engines test-cluster test-wine supply-chain fuzz
# End-to-end tests that the smoke test runs in each machine.
VM_SMOKE := TestPortAppearsCarriesAndVanishes,TestRuleOnlyPort,TestUDP
# Rounds of what the end-to-end tests repeat, fewer where the processor is emulated.
VM := go run ./test/vm -json -expect docs/kernels.md -kernel '$(KERNELS)' -methods '$(METHODS)' \
	-env FAIRLEAD_STARTS=2 -env FAIRLEAD_WAKEUPS=500 -env FAIRLEAD_SHORT=500 \
	-env FAIRLEAD_STORMS=2 -env FAIRLEAD_ORDER_BATCHES=100 -env FAIRLEAD_REFILL=500 -env FAIRLEAD_SOCKET_OPERATIONS=$(or $(VM_SOCKET_OPERATIONS),50)

VM_INSTALL := go run ./test/vm -json -timeout 30m

# What each build tag selects: root, tests that need root on this kernel; vm, tests for the
# machines of test/vm; boot, tests for those of them that boot a Debian or a guest; engines, tests that
# need what hack/provision*.sh installs; wine, tests that run fairlead.exe.
TAGS := root,vm,boot,engines,wine
# Systems that the host side is built for beside linux/amd64 and windows/amd64, which the
# linter sees.
HOST_SYSTEMS := linux/arm64 windows/arm64 darwin/arm64
HOST_PACKAGES := ./internal/host/... ./cmd/fairlead
# What wine 8 can run: it has neither unix sockets nor the UDP of Go 1.26, and its
# files cannot be removed the way os.RemoveAll does it.
WINE_PACKAGES := ./internal/rules ./internal/wire ./internal/table ./internal/hvsock
WINE_HOST := OwnerTables|IPHelper|ProcessName|Reserved|Lsof|NonsenseAt|PublishesEvery|WithoutTheToken

# One set of flags for builds, tests and linter, so that each package is compiled once.
export CGO_ENABLED := $(or $(CGO_ENABLED),0)
export GOFLAGS ?= -trimpath

# Packages with a test file that has build tag $(1).
tagged = $(or $(shell grep -rlE '^//go:build.*\b$(1)\b' --include='*_test.go' cmd internal test | xargs -r dirname | sort -u | sed 's|^|./|'),\
	$(error no test file has build tag $(1)))
# Packages with tests that import neither network, processes nor system calls, nor do their tests.
pure = $(shell go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{join .Imports " "}} {{join .TestImports " "}} {{join .XTestImports " "}}{{end}}' ./... | \
	grep -vE ' (net|net/http|os/exec|syscall|golang.org/x/sys/unix|[^ ]*/netlink)( |$$)' | cut -d ' ' -f 1)
need_root = @[ "$$(id -u)" = 0 ] || { echo "$@: needs root: run 'sudo make $@'" >&2; exit 1; }

.PHONY: quick
quick: ## Check format, vet, and test the packages without I/O: a minute; needs nothing but Go
	@bad=$$(gofmt -l cmd internal test hack *.go); [ -z "$$bad" ] || { printf 'not formatted, run gofmt -w:\n%s\n' "$$bad" >&2; exit 1; }
	@go vet -tags $(TAGS) ./...
	@go test $(pure)

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/fairlead for this machine; needs nothing but Go
	go build -tags grpcnotrace -ldflags '-s -w' -o bin/ ./cmd/...

.PHONY: demo
demo: build ## Show fairlead at work on this machine, in a network namespace (root)
	$(need_root)
	@exec bin/fairlead demo

# Lanes that run side by side are slow: tests wait as long as in CI.
test test-all: export FAIRLEAD_LIMIT ?= 2m
# Rounds of what tests repeat: fewer than in "make test-all".
test: export FAIRLEAD_STARTS ?= 20
test: export FAIRLEAD_SOCKET_OPERATIONS ?= 125
.PHONY: test
test: ## Run what CI runs; installs what it needs (root; Debian 12): 15 minutes
	@hack/provision.sh all
	@$(call run_stages,$(STAGES),$(STAGES_VM))

test-all: export FAIRLEAD_RULESETS ?= 400
test-all: export FAIRLEAD_ORDER_BATCHES ?= 20000
test-all: export FAIRLEAD_PODMAN_RESTARTS ?= 50
test-all: export FAIRLEAD_MODEL_OPERATIONS ?= 1000000
test-all: export FAIRLEAD_PUBLISH_CYCLES ?= 1000
test-all: export FAIRLEAD_PUBLISH_FLOOD ?= 50000
# For each method of attaching: 10,000 in all on this kernel, and on the emulated ones.
test-all: export FAIRLEAD_SOCKET_OPERATIONS ?= 2500
test-all: export VM_SOCKET_OPERATIONS ?= 1700
.PHONY: test-all
test-all: ## Run everything: each engine in each mode, all tests in each kernel, chaos, installations, Wine, fuzzing
	@hack/provision.sh all boot wine
	@$(call run_stages,$(STAGES_ALL),$(STAGES_VM_ALL),$(STAGES_ENGINES_ALL))

# Runs up to three lists of stages side by side, and shows the slowest tests and the sum.
run_stages = rm -rf '$(RESULTS)'; mkdir -p '$(RESULTS)'; \
	$(MAKE) --no-print-directory -j3 lane-1 lane-2 lane-3 LANE_1='$(1)' LANE_2='$(2)' LANE_3='$(3)' || true; \
	printf '\n== slowest tests\n'; cat '$(RESULTS)'/*.json | $(CACHE)/bin/gotestsum tool slowest --num 15 --threshold 5s || true; \
	printf '\n== result\n'; go run ./test/sum '$(RESULTS)' $(1) $(2) $(3)

lane-1: LANE = $(LANE_1)
lane-2: LANE = $(LANE_2)
lane-3: LANE = $(LANE_3)
.PHONY: lane-1 lane-2 lane-3
lane-1 lane-2 lane-3:
	@for stage in $(LANE); do \
		printf '\n== %s\n' "$$stage"; start=$$SECONDS rc=0; \
		$(MAKE) --no-print-directory "$$stage" </dev/null || rc=$$?; \
		echo "$$rc $$((SECONDS - start))" >"$(RESULTS)/$$stage.exit"; \
	done

.PHONY: lint
lint: ## Check style, import rules and that the host side builds everywhere
	@[ -x "$(LINT)" ] || hack/provision.sh lint
	@rc=0; $(CHECK) lint.linux $(LINT) run ./... || rc=1; \
	$(CHECK) lint.vulnerabilities hack/vulncheck.sh || rc=1; \
	$(CHECK) lint.windows env GOOS=windows $(LINT) run $(HOST_PACKAGES) || rc=1; \
	printf '%s\n' $(HOST_SYSTEMS) | xargs -P 3 -I{} sh -c \
		'$(CHECK) "lint.$$(echo {} | tr / -)" hack/vet-deps.sh {} $(HOST_PACKAGES)' || rc=1; exit $$rc

.PHONY: test-unit
test-unit: ## Run the tests that need neither root nor another kernel, with the race detector
	@rc=0; $(TEST) test-unit.race env CGO_ENABLED=1 go test -json -race -timeout 20m ./... || rc=1; \
	$(TEST) test-unit.model go test -json -count 1 -timeout 60m ./test/model || rc=1; exit $$rc

.PHONY: test-root
test-root: ## Run the tests that make namespaces, rules and BPF programs on this kernel (root)
	$(need_root)
	@$(TEST) test-root go test -json -tags root -p 1 -count 1 -timeout 60m $(call tagged,root)

# Tests in which cgroups count, which "make test-vm" runs again with cgroup v1 beside v2 and alone.
CGROUP_TESTS := ^(TestMethods|TestServerTakesPlaceholderPort|TestDistributionsShareANetwork|TestProcessCgroupComesWithEvent)$$
.PHONY: test-vm
test-vm: ## Run the tests for other kernels in emulated machines (KERNELS, METHODS): 30 minutes
	@rc=0; $(TEST) test-vm.rig go test -json -tags engines -timeout 60m ./test/vm || rc=1; \
	$(TEST) test-vm.machines $(VM) -test-timeout 3h ./... || rc=1; \
	$(TEST) test-vm.hybrid $(VM) -cgroup hybrid -run '$(CGROUP_TESTS)|^TestProcessAttributedByCgroup$$' ./internal/agent ./test/e2e || rc=1; \
	$(TEST) test-vm.legacy $(VM) -cgroup legacy -run '$(CGROUP_TESTS)' ./internal/agent ./test/e2e || rc=1; exit $$rc

.PHONY: test-vm-smoke
test-vm-smoke: ## Run tests that depend on the kernel, and three end-to-end tests, in emulated machines
	@$(TEST) test-vm-smoke $(VM) -smoke $(VM_SMOKE) ./...

# End-to-end tests that "make test-kernels" runs in each kernel.
KERNEL_SMOKE := ^(TestMethods|TestPortAppearsCarriesAndVanishes|TestUDP|TestRuleOnlyPort|TestVsock|TestPlaceholderServesWhatReachesIt|TestPlaceholderForUDP|TestServerTakesPlaceholderPort|TestWorkWithFewCapabilities|TestLimitOfLockedMemory|TestKindsOfListeners|TestDoctorTriesEvents)$$
KERNELS_MATRIX ?= 5.10,6.1,6.12,sid
.PHONY: test-kernels
test-kernels: ## Run end-to-end tests in emulated machines of 5.10 to the newest kernel (KERNELS_MATRIX); REPORT=docs/kernels.md writes the tables
	@hack/provision.sh vm
	@rc=0; hack/provision.sh kernels || rc=1; \
	$(TEST) test-kernels go run ./test/vm -json -kernel '$(KERNELS_MATRIX)' -run '$(KERNEL_SMOKE)' $(if $(REPORT),-report $(REPORT),-expect docs/kernels.md) ./test/e2e || rc=1; exit $$rc

.PHONY: kernels
kernels: kernel-wsl ## Write the tables of docs/kernels.md: test-kernels with REPORT, and a kernel like WSL's
	@$(MAKE) --no-print-directory test-kernels KERNELS_MATRIX='$(KERNELS_MATRIX),wsl' REPORT=docs/kernels.md

# Tests of sockets and NAT, which "make test-arm64" runs whole, and the kernels with the methods that they have.
ARM64_PACKAGES := ./internal/agent/selftest ./internal/cgroup ./internal/kernel ./internal/observer ./internal/sink/listener/... \
	./internal/source/... ./test/nat ./test/sockets ./test/vm/selftest
ARM64_KERNELS ?= 6.12:fentry,kprobe 6.1:kprobe
ARM64_SMOKE := ^(TestMethods|TestPortAppearsCarriesAndVanishes|TestUDP|TestRuleOnlyPort|TestDoctorTriesEvents)$$
.PHONY: test-arm64
test-arm64: ## Run the tests of sockets and NAT, and end-to-end tests, on emulated arm64 (ARM64_KERNELS); REPORT=docs/kernels.md writes the tables
	@hack/provision.sh arm64
	@rc=0; for k in $(ARM64_KERNELS); do \
		$(TEST) "test-arm64.$${k%%:*}" $(VM) -arch arm64 -kernel "$${k%%:*}" -methods "$${k#*:}" -test-timeout 3h $(ARM64_PACKAGES) || rc=1; done; \
	$(TEST) test-arm64.e2e go run ./test/vm -json -arch arm64 -kernel '$(KERNELS)' -run '$(KERNEL_SMOKE)' $(if $(REPORT),-report $(REPORT),-expect docs/kernels.md) ./test/e2e || rc=1; exit $$rc

.PHONY: test-arm64-smoke
test-arm64-smoke: ## Run a few end-to-end tests on emulated arm64
	@hack/provision.sh arm64
	@$(TEST) test-arm64-smoke go run ./test/vm -json -arch arm64 -kernel 6.12 -run '$(ARM64_SMOKE)' ./test/e2e

.PHONY: kernel-wsl
kernel-wsl: ## Build a kernel like WSL's for test/vm (make test-vm KERNELS=wsl): 40 minutes; STEP=config only makes its configuration
	@hack/provision.sh wsl
	@hack/kernel-wsl/build.sh $(or $(STEP),all)

.PHONY: test-install
test-install: ## Install, start, upgrade and remove fairlead in machines that boot systemd and OpenRC: 5 minutes
	@hack/provision.sh boot
	@rc=0; $(TEST) test-install.systemd $(VM_INSTALL) -kernel 6.1 -system systemd -tags boot -run "^TestSystemd" ./test/install || rc=1; \
	$(TEST) test-install.openrc $(VM_INSTALL) -kernel 6.12 -system openrc -tags boot -run "^TestOpenRC" ./test/install || rc=1; exit $$rc

# Not a stage of test-all, as KVM in an emulated processor is not reliable: with two processors a
# guest was given an interrupt twice and its kernel died, with one a run hung before it passed.
.PHONY: test-nested
test-nested: ## Link a host peer by vsock with guests in machines within its emulated machine: 5 minutes
	@hack/provision.sh vm
	@$(TEST) test-nested go run ./test/vm -json -kernel 6.12 -accel tcg -cpus 1 -memory 2048 -timeout 9m -env FAIRLEAD_LIMIT=3m -tags boot ./test/nested

.PHONY: test-browser
test-browser: ## Test the page in Chromium, and dashboard and alerts in Prometheus (root)
	$(need_root)
	@hack/provision.sh browser
	@$(TEST) test-browser go test -json -tags engines -count 1 -timeout 30m ./test/observe

.PHONY: test-engines
test-engines: ## Run against real Docker, containerd and Kubernetes (root; builds them once, 10 minutes)
	$(need_root)
	@hack/provision-engines.sh
	@$(TEST) test-engines go test -json -tags engines -p 1 -count 1 -timeout 60m $(filter-out ./test/cluster ./test/observe ./test/vm,$(call tagged,engines))

.PHONY: test-engines-smoke
test-engines-smoke: ## Reach one port of each engine in each of its modes (root)
	$(need_root)
	@hack/provision-engines.sh
	@$(TEST) test-engines-smoke go test -json -tags engines -run '^TestReach' -count 1 -timeout 20m ./test/engines

.PHONY: test-cluster
test-cluster: ## Run the DaemonSet in a real cluster of one node (root; builds it once, 10 minutes)
	$(need_root)
	@hack/provision-engines.sh kube cluster
	@$(TEST) test-cluster go test -json -tags engines -count 1 -timeout 30m ./test/cluster

.PHONY: test-moby
test-moby: ## Run against the next Docker with its nftables back end (root; builds it once, 5 minutes)
	$(need_root)
	@hack/provision-engines.sh packages moby
	@FAIRLEAD_DOCKERD=$(CACHE)/bin/moby $(TEST) test-moby go test -json -tags engines -run Docker -count 1 -timeout 30m ./test/engines

.PHONY: test-wine
test-wine: ## Run tests of the host side, built for Windows, under Debian's Wine
	@hack/provision.sh wine
	@rc=0; set -f; $(TEST) test-wine.cli go test -json -count 1 -tags wine ./test/wine || rc=1; \
	export GOOS=windows GOARCH=amd64; \
	$(TEST) test-wine.packages go test -json -p 1 -exec "$$PWD/hack/wine.sh" $(WINE_PACKAGES) || rc=1; \
	$(TEST) test-wine.host go test -json -p 1 -exec "$$PWD/hack/wine.sh" -run '$(WINE_HOST)' ./internal/host || rc=1; exit $$rc

# Empty, for chaos: seed 1, 3 minutes, and this kernel with the engines that are installed. SEED may be a
# list; RUNS is a directory with the results of several runs, all of which REPORT shows.
SEED ?=
MINUTES ?=
.PHONY: chaos
chaos: ## Break agent, host, engines and link at random for MINUTES from SEED, and check what stays (root; KERNEL: emulated)
	$(need_root)
	@hack/provision.sh base $(if $(KERNEL),vm)
	@go run ./test/chaos -seed $(or $(SEED),1) -minutes $(or $(MINUTES),3) $(if $(KERNEL),-kernel $(KERNEL)) \
		$(if $(RUNS),-results $(RUNS)) $(if $(REPORT),-report $(REPORT))

.PHONY: test-chaos
test-chaos: ## Run "make chaos" as a stage (root)
	$(need_root)
	@$(CHECK) test-chaos $(MAKE) --no-print-directory chaos

.PHONY: bench
bench: ## Measure fairlead against polling and write docs/benchmarks (root; RUNS (3) of 30 minutes; BEFORE: a commit to measure once, first)
	$(need_root)
	@hack/provision.sh base vm
	@hack/provision-engines.sh packages kube
	@$(if $(BEFORE),hack/bench-before.sh $(BEFORE) docs/benchmarks/before.txt)
	@go run ./test/bench -runs $(or $(RUNS),3) -before docs/benchmarks/before.txt -report docs/benchmarks -out docs/benchmarks/results.txt

# The API server is built with optimisation, unlike that of the tests, which takes three times longer.
.PHONY: fleet
fleet: ## Measure the inventories of AGENTS nodes (500) with a real API server, built once, and write docs/fleet.md (root; 8 minutes; APISERVER: another one)
	$(need_root)
	@hack/provision-engines.sh packages $(if $(APISERVER),,apiserver)
	@go run ./test/fleet/inventories -agents $(or $(AGENTS),500) -report docs/fleet.md \
		-apiserver $(or $(APISERVER),$(CACHE)/bin/optimised/kube-apiserver)

.PHONY: bench-quick
bench-quick: ## Measure latency, a burst, NAT rules and flows as ratios (root; 2 minutes)
	$(need_root)
	@go run ./test/bench -scale quick -only latency,burst,nat,flows

.PHONY: bench-micro
bench-micro: ## Run the Go benchmarks that match BENCH (root)
	$(need_root)
	@go test -tags root -run '^$$' -bench '$(BENCH)' -benchmem -p 1 -timeout 60m \
		$$(grep -rl '^func Benchmark' --include='*_test.go' . | xargs -r dirname | sort -u)

.PHONY: vulncheck
vulncheck: ## Look for known vulnerabilities, if their database is reachable
	@$(CHECK) vulncheck hack/vulncheck.sh

# Licences are checked by the tests of hack/notices, and vulnerabilities by "make lint".
.PHONY: supply-chain
supply-chain: ## Check the bill of materials, and that two builds elsewhere are equal: 5 minutes
	@rc=0; $(CHECK) supply-chain.sbom go -C hack/release test -count 1 . || rc=1; \
	$(CHECK) supply-chain.reproduce hack/reproduce.sh || rc=1; exit $$rc

.PHONY: fuzz
fuzz: ## Fuzz every decoder for FUZZTIME each, or for MINUTES in all
	@FUZZTIME='$(FUZZTIME)' MINUTES='$(MINUTES)' hack/fuzz.sh

.PHONY: generate
generate: ## Generate the BPF objects with the pinned compiler
	@command -v clang-14 >/dev/null || hack/provision.sh generate
	rm -f internal/kernel/bpf/*_bpfel.go internal/kernel/bpf/*_bpfel.o
	go generate ./...

.PHONY: generate-check
generate-check: ## Check that the committed BPF objects are up to date
	@command -v clang-14 >/dev/null || hack/provision.sh generate
	@$(CHECK) generate-check hack/generate-check.sh

.PHONY: man
man: build ## Write the manual pages to bin/man
	bin/fairlead man bin/man

.PHONY: docs
docs: ## Write the documents that are generated from code
	go test -count 1 ./internal/metrics ./internal/config ./internal/run -update
	go run ./hack/notices

.PHONY: release
release: ## Build archives, packages, image, SBOM and checksums of VERSION (default: this commit's tag) in dist/
	@go -C hack/release run . -out "$(CURDIR)/dist" $(if $(VERSION),-version $(VERSION))

.PHONY: clean
clean: ## Remove what was built here; the cache of kernels and tools stays
	rm -rf bin dist
