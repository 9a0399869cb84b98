// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// stage is what can be run by its name.
type stage struct {
	name, about string
	root        bool     // it needs root
	needs       []string // commands that install what it needs, each a line
	parts       func() []part
}

// part is a command of a stage.
type part struct {
	name   string   // empty if the stage has no other
	events bool     // it prints the events of go test -json
	env    []string // beside that of this program
	args   []string
}

// group is stages that run side by side, each lane in its order: none of them keeps two
// processors busy by itself.
type group struct {
	about string
	needs []string
	lanes [][]string
	env   map[string]string // defaults
}

func groups() map[string]group {
	first := []string{"lint", "generate-check", "test-unit", "test-root", "test-browser"}
	// Lanes that run side by side are slow: tests wait as long as in CI.
	const limit = "2m"
	return map[string]group{
		"test": {
			about: "what CI runs (root; Debian 12): 15 minutes",
			needs: []string{"hack/provision.sh all"},
			lanes: [][]string{append(slices.Clone(first), "test-engines-smoke"), {"test-vm-smoke"}},
			// Rounds of what tests repeat, fewer than in all.
			env: map[string]string{"FAIRLEAD_LIMIT": limit, "FAIRLEAD_STARTS": "20", "FAIRLEAD_SOCKET_OPERATIONS": "125"},
		},
		"test-all": {
			about: "everything: each engine in each mode, all tests in each kernel, chaos, installations, Wine, fuzzing",
			needs: []string{"hack/provision.sh all boot wine"},
			lanes: [][]string{append(first, "chaos"), {"test-vm", "test-install"}, {"test-engines", "test-cluster", "test-wine", "supply-chain", "fuzz"}},
			env: map[string]string{
				"FAIRLEAD_LIMIT": limit, "FAIRLEAD_RULESETS": "200", "FAIRLEAD_ORDER_BATCHES": "20000", "FAIRLEAD_PODMAN_RESTARTS": "50",
				"FAIRLEAD_MODEL_OPERATIONS": "1000000", "FAIRLEAD_PUBLISH_CYCLES": "1000", "FAIRLEAD_PUBLISH_FLOOD": "50000",
				// For each method of attaching: 10,000 in all on this kernel, and on the emulated ones.
				"FAIRLEAD_SOCKET_OPERATIONS": "2500", "VM_SOCKET_OPERATIONS": "1700",
			},
		},
	}
}

const engines = "hack/provision-engines.sh"

// What each build tag selects: root, tests that need root on this kernel; vm, tests for the
// machines of test/vm; boot, tests for those of them that boot a Debian or a guest; engines, tests
// that need what hack/provision*.sh installs; wine, tests that run fairlead.exe.
func stages() []stage {
	return []stage{
		{"lint", "check style, import rules, modules, known vulnerabilities, and that the host side builds everywhere", false, []string{"hack/provision.sh lint"}, lint},
		{"generate-check", "check that the committed BPF objects are up to date", false, []string{"hack/provision.sh generate"}, func() []part {
			return []part{check("", "hack/generate-check.sh")}
		}},
		{"generate", "generate the BPF objects with the pinned compiler", false, []string{"hack/provision.sh generate"}, func() []part {
			return []part{check("", "bash", "-ec", "rm -f internal/guest/kernel/bpf/*_bpfel.{go,o}; exec go generate ./...")}
		}},
		{"test-unit", "tests that need neither root nor another kernel, with the race detector", false, nil, unit},
		{"test-root", "tests that make namespaces, rules and BPF programs on this kernel (root)", true, nil, func() []part {
			works := tests("bench", "test", "-tags", "root", "-run", "^$", "-bench", ".", "-skip", "PostgreSQL|Redis", "-benchtime", "1x", "./bench")
			works.env = []string{"FAIRLEAD_BENCH=short"}
			return append(inBoth("", func(m string) []string {
				return slices.Concat([]string{"-tags", "root", "-p", "1", "-count", "1", "-timeout", "60m"}, tagged(m, "root"))
			}), works)
		}},
		{"test-browser", "the page in Chromium, and dashboard and alerts in Prometheus (root)", true, []string{"hack/provision.sh browser"}, func() []part {
			return []part{tests("", "test", "-tags", "engines", "-count", "1", "-timeout", "30m", "./observe")}
		}},
		{"test-engines", "real Docker, containerd and Kubernetes (root; builds them once, 10 minutes)", true, []string{engines}, func() []part {
			return []part{tests("", "test", "-tags", "engines", "-p", "1", "-count", "1", "-timeout", "60m", "./engines")}
		}},
		{"test-engines-smoke", "one port of each engine in each of its modes (root)", true, []string{engines}, func() []part {
			return []part{tests("", "test", "-tags", "engines", "-run", "^TestReach", "-count", "1", "-timeout", "20m", "./engines")}
		}},
		{"test-cluster", "the DaemonSet in a real cluster of one node (root; builds it once, 10 minutes)", true, []string{engines + " kube cluster"}, func() []part {
			return []part{tests("", "test", "-tags", "engines", "-count", "1", "-timeout", "30m", "./cluster")}
		}},
		{"test-moby", "the next Docker with its nftables back end (root; builds it once, 5 minutes)", true, []string{engines + " packages moby"}, func() []part {
			p := tests("", "test", "-tags", "engines", "-run", "Docker", "-count", "1", "-timeout", "30m", "./engines")
			p.env = []string{"FAIRLEAD_DOCKERD=" + filepath.Join(cacheDir(), "bin/moby")}
			return []part{p}
		}},
		{"test-wine", "tests of the host side, built for Windows, under Debian's Wine", false, []string{"hack/provision.sh wine"}, wine},
		{"test-vm", "the tests for other kernels in emulated machines (KERNELS, METHODS): 30 minutes", false, nil, machines},
		{"test-vm-smoke", "tests that depend on the kernel, and three end-to-end tests, in emulated machines", false, nil, func() []part {
			return []part{vm("", full("-smoke", "TestPortAppearsCarriesAndVanishes,TestRuleOnlyPort,TestUDP", "./...")...)}
		}},
		{"test-kernels", "end-to-end tests in emulated machines of 5.10 to the newest kernel (KERNELS)", false, []string{"hack/provision.sh vm"}, func() []part {
			return kernels("5.10,6.1,6.12,sid", "-expect")
		}},
		{"kernels", "write the tables of docs/kernels.md: test-kernels, and a kernel like WSL's (40 minutes to build it)", false, []string{"hack/provision.sh vm wsl"}, func() []part {
			return append([]part{check("wsl", "hack/kernel-wsl/build.sh", "all")}, kernels("5.10,6.1,6.12,sid,wsl", "-report")...)
		}},
		{"kernel-wsl", "build a kernel like WSL's for test-vm (KERNELS=wsl); STEP=config only makes its configuration", false, []string{"hack/provision.sh wsl"}, func() []part {
			return []part{check("", "hack/kernel-wsl/build.sh", variable("STEP", "all"))}
		}},
		{"test-arm64", "tests of sockets and NAT, and end-to-end tests, on emulated arm64; REPORT=docs/kernels.md writes the tables", false, []string{"hack/provision.sh arm64"}, arm64},
		{"test-arm64-smoke", "a few end-to-end tests on emulated arm64", false, []string{"hack/provision.sh arm64"}, func() []part {
			return []part{vm("", "-arch", "arm64", "-kernel", "6.12", "-run", arm64Smoke, "./test/e2e")}
		}},
		{"test-install", "install, start, upgrade and remove fairlead in machines that boot systemd and OpenRC: 5 minutes", false, []string{"hack/provision.sh boot"}, func() []part {
			return []part{
				vm("systemd", "-timeout", "30m", "-kernel", "6.1", "-system", "systemd", "-tags", "boot", "-run", "^TestSystemd", "./test/install"),
				vm("openrc", "-timeout", "30m", "-kernel", "6.12", "-system", "openrc", "-tags", "boot", "-run", "^TestOpenRC", "./test/install"),
			}
		}},
		// No part of test-all, as KVM in an emulated processor is not reliable: with two processors a
		// guest was given an interrupt twice and its kernel died, with one a run hung before it passed.
		{"test-nested", "link a host peer by vsock with guests in machines within its emulated machine: 5 minutes", false, []string{"hack/provision.sh vm"}, func() []part {
			return []part{vm("", "-kernel", "6.12", "-accel", "tcg", "-cpus", "1", "-memory", "2048", "-timeout", "9m", "-env", "FAIRLEAD_LIMIT=3m", "-tags", "boot", "./test/nested")}
		}},
		{"chaos", "break agent, host, engines and link at random for MINUTES (3) from SEED (1), and check what stays (root; KERNEL: emulated; RUNS, REPORT)", true, []string{"hack/provision.sh base"}, chaos},
		{"bench", "measure fairlead and write docs/benchmarks (root; RUNS (3) of 20 minutes; BEFORE: a commit to measure in turns; BENCH)", true,
			[]string{"hack/provision.sh base", engines + " databases"}, func() []part { return []part{check("", "hack/bench.sh")} }},
		{"bench-micro", "the benchmarks of packages that match BENCH (root)", true, nil, func() []part {
			return []part{tests("", ".", slices.Concat([]string{"-tags", "root", "-run", "^$", "-bench", variable("BENCH", "."), "-benchmem", "-p", "1", "-timeout", "60m"},
				having(".", benchmark))...)}
		}},
		// The API server is built with optimisation, unlike that of the tests, which takes three times longer.
		{"fleet", "measure the inventories of AGENTS (500) with a real API server, built once, and write docs/fleet.md (root; 8 minutes)", true,
			[]string{engines + " packages apiserver"}, func() []part {
				return []part{check("", "go", "-C", "test", "run", "./fleet/inventories", "-agents", variable("AGENTS", "500"), "-report", "docs/fleet.md",
					"-apiserver", variable("APISERVER", filepath.Join(cacheDir(), "bin/optimised/kube-apiserver")))}
			}},
		// Licences are checked by the tests of hack/notices, and vulnerabilities by lint.
		{"supply-chain", "check the bill of materials, and that two builds elsewhere are equal: 5 minutes", false, nil, func() []part {
			return []part{check("sbom", "go", "-C", "hack/release", "test", "-count", "1", "."), check("reproduce", "hack/reproduce.sh")}
		}},
		{"fuzz", "fuzz every decoder for FUZZTIME (5s) each, or for MINUTES in all", false, nil, fuzz},
		{"vulncheck", "look for known vulnerabilities, if their database is reachable", false, nil, func() []part {
			return []part{check("", "hack/vulncheck.sh")}
		}},
		{"man", "write the manual pages to bin/man", false, []string{"go build -tags grpcnotrace -o bin/ ./cmd/fairlead"}, func() []part {
			return []part{check("", "bin/fairlead", "man", "bin/man")}
		}},
	}
}

func variable(name, other string) string { return cmp.Or(os.Getenv(name), other) }

// check is a part that is one check.
func check(name string, args ...string) part { return part{name: name, args: args} }

// tests is a part that runs go test in a module.
func tests(name, module string, args ...string) part {
	return part{name: name, events: true, args: slices.Concat([]string{"go", "-C", module, "test", "-json"}, args)}
}

// inBoth is a part for each module.
func inBoth(name string, args func(module string) []string) []part {
	if name != "" {
		name += "-"
	}
	return []part{tests(name+"internal", ".", args(".")...), tests(name+"test", "test", args("test")...)}
}

// Systems that the host side is built for beside linux/amd64 and windows/amd64, which the linter sees.
var (
	hostSystems  = []string{"linux/arm64", "windows/arm64", "darwin/arm64"}
	hostPackages = []string{"./internal/host/...", "./cmd/fairlead"}
)

func lint() []part {
	linter := filepath.Join(cacheDir(), "bin/golangci-lint")
	windows := check("windows", append([]string{linter, "run"}, hostPackages...)...)
	windows.env = []string{"GOOS=windows"}
	parts := []part{
		check("modules", "hack/modules.sh"),
		check("linux", linter, "run", "./..."),
		check("test", "env", "-C", "test", linter, "run", "./..."),
		check("vulnerabilities", "hack/vulncheck.sh"),
		windows,
	}
	for _, s := range hostSystems {
		parts = append(parts, check(strings.ReplaceAll(s, "/", "-"), append([]string{"hack/vet-deps.sh", s}, hostPackages...)...))
	}
	return parts
}

func unit() []part {
	parts := inBoth("race", func(module string) []string {
		args := []string{"-race", "-timeout", "20m", "./..."}
		if module == "test" { // a cached result knows nothing of the files of the other module
			args = append([]string{"-count", "1"}, args...)
		}
		return args
	})
	for i := range parts {
		parts[i].env = []string{"CGO_ENABLED=1"}
	}
	return append(parts, tests("model", "test", "-count", "1", "-timeout", "60m", "./model"))
}

// wine runs what wine 8 can run: it has neither unix sockets nor the UDP of Go 1.26, and its
// files cannot be removed the way os.RemoveAll does it.
func wine() []part {
	dir, _ := os.Getwd() // it was entered
	exec := filepath.Join(dir, "hack/wine.sh")
	parts := []part{
		tests("cli", "test", "-count", "1", "-tags", "wine", "./wine"),
		tests("packages", ".", "-p", "1", "-exec", exec, "./internal/config/rules", "./internal/link/wire", "./internal/port/table", "./internal/link/hvsock"),
		tests("host", ".", "-p", "1", "-exec", exec, "-run", "OwnerTables|IPHelper|ProcessName|Reserved|Lsof|NonsenseAt|PublishesEvery|WithoutTheToken", "./internal/host"),
	}
	for i := range parts[1:] {
		parts[i+1].env = []string{"GOOS=windows", "GOARCH=amd64"}
	}
	return parts
}

// vm is a part that runs tests in emulated machines.
func vm(name string, args ...string) part {
	return part{name: name, events: true, args: slices.Concat([]string{"go", "-C", "test", "run", "./vm", "-json"}, args)}
}

// full is arguments for all that the tag vm adds, in the usual kernels. What end-to-end tests
// repeat is done fewer times where the processor is emulated. tp_btf is what the machine itself has.
func full(args ...string) []string {
	own := []string{"-expect", "docs/kernels.md", "-kernel", variable("KERNELS", "6.1,6.12"), "-methods", variable("METHODS", "fentry,kprobe")}
	for _, e := range []string{
		"FAIRLEAD_STARTS=2", "FAIRLEAD_WAKEUPS=500", "FAIRLEAD_SHORT=500", "FAIRLEAD_STORMS=2", "FAIRLEAD_ORDER_BATCHES=100", "FAIRLEAD_REFILL=500",
		"FAIRLEAD_SOCKET_OPERATIONS=" + variable("VM_SOCKET_OPERATIONS", "50"),
	} {
		own = append(own, "-env", e)
	}
	return append(own, args...)
}

// machines also runs the tests in which cgroups count with cgroup v1, beside v2 and alone.
func machines() []part {
	const cgroups = "^(TestMethods|TestServerTakesPlaceholderPort|TestDistributionsShareANetwork|TestProcessCgroupComesWithEvent)$"
	return []part{
		tests("rig", "test", "-tags", "engines", "-timeout", "60m", "./vm"),
		vm("machines", full("-test-timeout", "3h", "./...")...),
		vm("hybrid", full("-cgroup", "hybrid", "-run", cgroups+"|^TestProcessAttributedByCgroup$", "./internal/guest/agent", "./test/e2e")...),
		vm("legacy", full("-cgroup", "legacy", "-run", cgroups, "./internal/guest/agent", "./test/e2e")...),
	}
}

// End-to-end tests that run in each kernel, and on another processor.
const (
	kernelSmoke = "^(TestMethods|TestPortAppearsCarriesAndVanishes|TestUDP|TestRuleOnlyPort|TestVsock|TestPlaceholderServesWhatReachesIt|TestPlaceholderForUDP|TestServerTakesPlaceholderPort|TestWorkWithFewCapabilities|TestLimitOfLockedMemory|TestKindsOfListeners|TestDoctorTriesEvents)$"
	arm64Smoke  = "^(TestMethods|TestPortAppearsCarriesAndVanishes|TestUDP|TestRuleOnlyPort|TestDoctorTriesEvents)$"
)

func kernels(versions, report string) []part {
	return []part{
		check("fetch", "hack/provision.sh", "kernels"),
		vm("machines", "-kernel", variable("KERNELS", versions), "-run", kernelSmoke, report, "docs/kernels.md", "./test/e2e"),
	}
}

func arm64() []part {
	sockets := []string{"./internal/guest/agent/selftest", "./internal/guest/cgroup", "./internal/guest/kernel", "./internal/guest/observer", "./internal/guest/sink/listener/...",
		"./internal/guest/source/...", "./test/nat", "./test/sockets", "./test/vm/selftest"}
	var parts []part
	for _, k := range []struct{ kernel, methods string }{{"6.12", "fentry,kprobe"}, {"6.1", "kprobe"}} {
		args := full("-arch", "arm64", "-kernel", k.kernel, "-methods", k.methods, "-test-timeout", "3h")
		parts = append(parts, vm(k.kernel, append(args, sockets...)...))
	}
	report := []string{"-expect", "docs/kernels.md"}
	if file := os.Getenv("REPORT"); file != "" {
		report = []string{"-report", file}
	}
	return append(parts, vm("e2e", slices.Concat([]string{"-arch", "arm64", "-kernel", variable("KERNELS", "6.1,6.12"), "-run", kernelSmoke}, report, []string{"./test/e2e"})...))
}

// chaos has a list of seeds in SEED; RUNS is a directory with the results of several runs, all of
// which REPORT shows. With KERNEL it needs no engines.
func chaos() []part {
	args := []string{"go", "-C", "test", "run", "./chaos", "-seed", variable("SEED", "1"), "-minutes", variable("MINUTES", "3")}
	var parts []part
	for _, f := range [][2]string{{"KERNEL", "-kernel"}, {"RUNS", "-results"}, {"REPORT", "-report"}} {
		if v := os.Getenv(f[0]); v != "" {
			args = append(args, f[1], v)
		}
	}
	if os.Getenv("KERNEL") != "" {
		parts = append(parts, check("provision", "hack/provision.sh", "vm"))
	}
	return append(parts, check("run", args...))
}

// fuzz is a part for each target. The time of all is divided among them.
func fuzz() []part {
	var parts []part
	for _, module := range []string{".", "test"} {
		for _, dir := range having(module, fuzzer) {
			dir = filepath.Join(module, dir)
			for _, name := range found(dir, fuzzer) {
				shown := strings.ReplaceAll(strings.TrimPrefix(dir, "internal/"), "/", ".")
				parts = append(parts, check(shown+"."+name, "hack/fuzz.sh", dir, name))
			}
		}
	}
	each := variable("FUZZTIME", "5s")
	if minutes, err := strconv.Atoi(os.Getenv("MINUTES")); err == nil {
		each = fmt.Sprint(max(1, minutes*60/len(parts)), "s")
	}
	for i := range parts {
		parts[i].args = append(parts[i].args, each)
	}
	return parts
}

var (
	benchmark = regexp.MustCompile(`(?m)^func (Benchmark\w+)\(`)
	fuzzer    = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)
)

// tagged returns the packages of a module with a test file that has a build tag.
func tagged(module, tag string) []string {
	return having(module, regexp.MustCompile(`(?m)^//go:build.*\b`+tag+`\b`))
}

// having returns the packages of a module with a test file that matches, as go test takes them.
func having(module string, pattern *regexp.Regexp) (dirs []string) {
	roots := map[string][]string{".": {"cmd", "internal"}, "test": {"test"}}[module]
	for _, root := range roots {
		_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error { // what cannot be read has none
			if err != nil || !d.IsDir() || len(found(path, pattern)) == 0 {
				return err
			}
			inside, err := filepath.Rel(module, path)
			dirs = append(dirs, "./"+inside)
			return err
		})
	}
	return dirs
}

// found returns what a pattern finds in the test files of a directory, the groups if it has any.
func found(dir string, pattern *regexp.Regexp) (names []string) {
	files, _ := filepath.Glob(filepath.Join(dir, "*_test.go")) // the pattern is valid
	for _, file := range files {
		text, _ := os.ReadFile(file) // as above
		for _, m := range pattern.FindAllStringSubmatch(string(text), -1) {
			names = append(names, m[len(m)-1])
		}
	}
	return names
}
