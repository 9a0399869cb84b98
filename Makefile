# SPDX-License-Identifier: Apache-2.0

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# One set of flags for builds, tests and linter, so that each package is compiled once.
export CGO_ENABLED := $(or $(CGO_ENABLED),0)
export GOFLAGS ?= -trimpath

# All build tags of tests: hack/stages says what each selects.
TAGS := root,vm,boot,engines,wine
# Packages with tests that import neither network, processes nor system calls, nor do their tests.
pure = go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{join .Imports " "}} {{join .TestImports " "}} {{join .XTestImports " "}}{{end}}' ./... | \
	grep -vE ' (net|net/http|os/exec|syscall|golang.org/x/sys/unix|[^ ]*/netlink)( |$$)' | cut -d ' ' -f 1

.PHONY: help
help: ## List the targets; "go run ./hack/stages" lists what else can be run
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: quick
quick: ## Check format, vet, and test the packages without I/O: a minute; needs nothing but Go
	@bad=$$(gofmt -l cmd internal test hack *.go); [ -z "$$bad" ] || { printf 'not formatted, run gofmt -w:\n%s\n' "$$bad" >&2; exit 1; }
	@for module in . test; do (cd $$module; go vet -tags $(TAGS) ./...; go test $$([ $$module = . ] || echo -count=1) $$($(pure))); done

.PHONY: build
build: ## Build bin/fairlead for this machine; needs nothing but Go
	go build -tags grpcnotrace -ldflags '-s -w' -o bin/ ./cmd/...

.PHONY: demo
demo: build ## Show fairlead at work on this machine, in a network namespace (root)
	@[ "$$(id -u)" = 0 ] || { echo "demo: needs root: run 'sudo make demo'" >&2; exit 1; }
	@exec bin/fairlead demo

.PHONY: test
test: ## Run what CI runs; installs what it needs (root; Debian 12): 15 minutes
	@go run ./hack/stages test

.PHONY: test-all
test-all: ## Run everything: each engine in each mode, all tests in each kernel, chaos, installations, Wine, fuzzing
	@go run ./hack/stages test-all

.PHONY: lint
lint: ## Check style, import rules, modules and that the host side builds everywhere
	@go run ./hack/stages lint

.PHONY: kernels
kernels: ## Test on all kernels that Debian has, and one like WSL's, and write the tables of docs/kernels.md
	@go run ./hack/stages -v kernels

.PHONY: chaos
chaos: ## Break agent, host, engines and link at random for MINUTES (3) from SEED (1), and check what stays (root)
	@go run ./hack/stages -v chaos

.PHONY: bench
bench: ## Measure and write docs/benchmarks (root; RUNS (3) of 20 minutes; BEFORE: a commit to measure in turns)
	@go run ./hack/stages -v bench

.PHONY: docs
docs: ## Write the documents that are generated from code
	go test -count 1 ./internal/config ./internal/guest/run -update
	go -C test test -count 1 ./documents -run Metrics -update
	go run ./hack/notices

.PHONY: release
release: ## Build archives, packages, image, SBOM and checksums of VERSION (default: this commit's tag) in dist/
	@go -C hack/release run . -out "$(CURDIR)/dist" $(if $(VERSION),-version $(VERSION))
