// SPDX-License-Identifier: Apache-2.0

// Vm runs tests under other kernels than this machine's. It builds the tests that
// the tag vm adds, packs them into an initramfs with the tools they need, boots each
// kernel in a machine of QEMU, and reports as go test does. It needs no root.
//
//	go -C test run ./vm [flags] [packages]
//
// Packages and files are relative to the repository: ./... are those of both modules.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/test/kit/program"
)

type options struct {
	arch        string
	kernels     string
	methods     string
	tags        string
	smoke       string
	run         string
	bench       string
	env         []string
	accel       string
	system      string
	cgroup      string
	memory      int
	cpus        int
	timeout     time.Duration
	testTimeout time.Duration
	verbose     bool
	json        bool
	report      string
	expect      string
	patterns    []string
}

// systems are what can be booted from a disk that hack/provision.sh made, with the kinds
// of files of a release that their tests install.
var systems = map[string]string{"systemd": "archive,deb,rpm", "openrc": "archive,apk"}

// minMemory is what a machine needs to boot, in MiB.
const minMemory = 512

// defaultCPUs is how many processors a machine has, so that what runs at the same time does.
const defaultCPUs = 2

func (o options) validate() error {
	switch {
	case o.kernels == "":
		return errors.New("-kernel is empty: want for example 6.1,6.12")
	case o.memory < minMemory:
		return fmt.Errorf("-memory %d: want at least %d MiB", o.memory, minMemory)
	case o.cpus < 1:
		return fmt.Errorf("-cpus %d: want at least 1", o.cpus)
	case o.timeout <= 0 || o.testTimeout <= 0:
		return errors.New("-timeout and -test-timeout: want more than 0")
	case !slices.Contains([]string{"", "legacy", "hybrid"}, o.cgroup):
		return fmt.Errorf("-cgroup %q: want legacy or hybrid", o.cgroup)
	case o.report != "" && o.expect != "":
		return errors.New("-report and -expect: want one of them")
	case o.accel != "auto" && o.accel != "kvm" && o.accel != "tcg":
		return fmt.Errorf("-accel %q: want auto, kvm or tcg", o.accel)
	}
	if o.system != "" && systems[o.system] == "" {
		return fmt.Errorf("-system %q: want one of %q", o.system, slices.Sorted(maps.Keys(systems)))
	}
	arch, err := findArchitecture(o.arch)
	if err != nil {
		return err
	}
	if !arch.native() && (o.system != "" || o.accel == "kvm") {
		return fmt.Errorf("-system and -accel kvm: not for %s", o.arch)
	}
	for _, e := range o.env {
		if !strings.Contains(e, "=") {
			return fmt.Errorf("-env %q: want NAME=value", e)
		}
	}
	return nil
}

func main() {
	var o options
	flag.StringVar(&o.arch, "arch", architectures()[0].name, "processor of the machines: amd64 or arm64")
	flag.StringVar(&o.kernels, "kernel", "6.1,6.12", "kernel versions, run side by side")
	flag.StringVar(&o.methods, "methods", "fentry,kprobe,tp_btf", "run packages that read "+methodsVariable+" once for each of these")
	flag.StringVar(&o.tags, "tags", "vm", "build tags; only tests that they add are run")
	flag.StringVar(&o.smoke, "smoke", "", "comma-separated `names`: of the tests that also run outside, under tag root, run only these, and packages that depend on the kernel")
	flag.StringVar(&o.run, "run", "", "run only tests that match, instead of all that the tags add")
	flag.StringVar(&o.bench, "bench", "", "run the benchmarks that match, and no tests")
	flag.Func("env", "`NAME=value` for the environment of the tests; may be repeated", func(s string) error {
		o.env = append(o.env, s)
		return nil
	})
	flag.StringVar(&o.accel, "accel", "auto", "kvm, tcg (emulation), or auto: kvm if a machine boots under it")
	flag.StringVar(&o.system, "system", "", "boot a Debian with this init, systemd or openrc, and run the tests in it")
	flag.StringVar(&o.cgroup, "cgroup", "", "mount cgroups of version 1 (legacy), or of both (hybrid), instead of version 2")
	flag.IntVar(&o.memory, "memory", 1024, "MiB of each machine, beside what the file system takes")
	flag.IntVar(&o.cpus, "cpus", defaultCPUs, "processors of each machine")
	flag.DurationVar(&o.timeout, "timeout", 4*time.Hour, "limit for each machine")
	flag.DurationVar(&o.testTimeout, "test-timeout", time.Hour, "limit for each test binary")
	flag.BoolVar(&o.verbose, "v", false, "show the console")
	flag.BoolVar(&o.json, "json", false, "print the events of go test -json instead of text")
	flag.StringVar(&o.report, "report", "", "write methods and results of each kernel to this `file`, between its marks")
	flag.StringVar(&o.expect, "expect", "", "fail if a method is another one than this `file` of an earlier -report has")
	flag.Parse()
	o.patterns = flag.Args()
	if len(o.patterns) == 0 {
		o.patterns = []string{"./..."}
	}
	if err := o.validate(); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(2)
	}
	if err := program.EnterRoot(); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	failed, err := run(ctx, os.Stdout, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
	}
	if err != nil || failed {
		os.Exit(1)
	}
}

// run does everything and reports whether anything failed.
func run(ctx context.Context, out io.Writer, o options) (failed bool, err error) {
	cache, err := cacheDir()
	if err != nil {
		return true, err
	}
	arch, err := findArchitecture(o.arch)
	if err != nil {
		return true, err
	}
	suites, err := findSuites(ctx, o.arch, o.tags, o.smoke, o.patterns)
	if err != nil {
		return true, err
	}
	if o.bench != "" {
		suites = withBenchmarks(suites)
	}
	if len(suites) == 0 {
		return true, fmt.Errorf("no tests with tags %s in %s", o.tags, strings.Join(o.patterns, " "))
	}
	work, err := os.MkdirTemp("", "fairlead-vm-")
	if err != nil {
		return true, err
	}
	defer os.RemoveAll(work)

	versions := strings.Split(o.kernels, ",")
	accel, accelErr := emulated(arch), error(nil)
	var probe sync.WaitGroup
	probe.Go(func() { accel, accelErr = chooseAccelerator(ctx, o, arch, cache, work, versions[0]) })
	r := &reporter{out: out, json: o.json}
	if o.report != "" || o.expect != "" {
		r.matrix = new(matrix)
	}
	jobs := buildJobs(ctx, o, arch, suites, work, r)
	probe.Wait()
	if accelErr != nil {
		return true, accelErr
	}
	if len(jobs) == 0 {
		return true, fmt.Errorf("none of %d packages could be built", len(suites))
	}
	var machines sync.WaitGroup
	for _, version := range versions {
		machines.Go(func() {
			if err := runKernel(ctx, o, arch, cache, work, version, accel, jobs, r); err != nil {
				r.check(version+"/machine", "prepare", 0, err)
			}
		})
	}
	machines.Wait()
	if o.report != "" {
		if err = r.matrix.complete(versions, arch); err == nil {
			err = r.matrix.write(o.report, o.arch)
		}
		if err != nil {
			err = fmt.Errorf("%s is as it was: %w", o.report, err)
		}
	}
	if o.expect != "" {
		err = r.matrix.compare(o.expect, o.arch, os.Stderr)
	}
	return r.anyFailed() || err != nil, err
}

func withBenchmarks(suites []suite) []suite {
	var some []suite
	for _, s := range suites {
		if s.Benchmarks {
			some = append(some, s)
		}
	}
	return some
}

// buildJobs builds the suites below work/test, which becomes /test in the guest. Other files of
// the guest are laid below work/root.
func buildJobs(ctx context.Context, o options, arch architecture, suites []suite, work string, r *reporter) []job {
	var first, jobs []job
	buildProgram := sync.OnceValue(func() error {
		return goBuild(ctx, o.arch, []string{"build", "-tags=grpcnotrace"}, filepath.Join(work, "test", "fairlead"), binaryDir)
	})
	buildRun := sync.OnceValue(func() error {
		return goBuild(ctx, o.arch, []string{"build"}, filepath.Join(work, "test", "fairlead-run"), binaryDir+"-run")
	})
	buildPackages := sync.OnceValue(func() error { return packages(ctx, filepath.Join(work, "test", "packages"), systems[o.system]) })
	layNested := sync.OnceValue(func() error { return stageNested(filepath.Join(work, "root"), arch) })
	for i, s := range suites {
		if len(s.Tests) == 0 && o.bench == "" {
			continue
		}
		name := strings.TrimPrefix(s.Package, "github.com/fairlead/fairlead/")
		dir := filepath.Join(work, "test", strconv.Itoa(i))
		env := o.env
		if s.Binary {
			if err := buildProgram(); err != nil {
				r.check("build", name, 0, err)
				continue
			}
			env = append([]string{program.Variable + "=/test/fairlead"}, env...)
		}
		if s.Run {
			if err := buildRun(); err != nil {
				r.check("build", name, 0, err)
				continue
			}
			env = append([]string{program.RunVariable + "=/test/fairlead-run"}, env...)
		}
		if s.Packages {
			if err := buildPackages(); err != nil {
				r.check("build", name, 0, err)
				continue
			}
			env = append([]string{packagesVariable + "=/test/packages"}, env...)
		}
		if s.Nested {
			if err := layNested(); err != nil {
				r.check("build", name, 0, err)
				continue
			}
			env = append([]string{nestedVariable + "=/" + nestedDir}, env...)
		}
		if err := goBuild(ctx, o.arch, []string{"test", "-c", "-tags=" + o.tags}, filepath.Join(dir, "run.test"), s.Dir); err != nil {
			r.check("build", name, 0, err)
			continue
		}
		if err := copyData(dir, s.Dir); err != nil {
			r.check("build", name, 0, err)
			continue
		}
		j := job{
			name: name,
			dir:  "/test/" + strconv.Itoa(i),
			args: []string{"-test.v=test2json", "-test.timeout=" + o.testTimeout.String()},
			env:  env,
		}
		switch fresh, others := divide(s.Tests); {
		case o.bench != "":
			j.args = append(j.args, "-test.run=^$", "-test.bench="+o.bench)
		case o.run != "":
			j.args = append(j.args, "-test.run="+o.run)
		default:
			if len(fresh) > 0 {
				once := j
				once.name += "@fresh"
				once.args = append(slices.Clone(j.args), "-test.run="+filter(fresh))
				first = append(first, once)
			}
			if len(others) == 0 {
				continue
			}
			j.args = append(j.args, "-test.run="+filter(others))
		}
		if !s.Methods || o.methods == "" {
			jobs = append(jobs, j)
			continue
		}
		for method := range strings.SplitSeq(o.methods, ",") {
			once := j
			once.name += "@" + method
			once.env = append([]string{methodsVariable + "=" + method}, j.env...)
			jobs = append(jobs, once)
		}
	}
	return append(first, jobs...)
}

// packages builds files of a release, of these kinds, in two versions, the later one in the second
// of the directories old and new of dir.
func packages(ctx context.Context, dir, kinds string) error {
	for name, version := range map[string]string{"old": "v0.1.0", "new": "v0.1.1"} {
		cmd := exec.CommandContext(ctx, "go", "-C", "hack/release", "run", ".", "-out", filepath.Join(dir, name),
			"-version", version, "-systems", "linux/amd64", "-kinds", kinds)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build packages: %w: %s", err, out)
		}
	}
	return nil
}

// copyData copies a package's testdata, if it has any, beside its binary.
func copyData(dst, src string) error {
	err := os.CopyFS(filepath.Join(dst, "testdata"), os.DirFS(filepath.Join(src, "testdata")))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func runKernel(ctx context.Context, o options, arch architecture, cache, work, version string, accel accelerator, jobs []job, r *reporter) error {
	k, err := findKernel(cache, version, arch)
	if err != nil {
		return err
	}
	if r.matrix != nil {
		r.matrix.begin(k)
	}
	base, err := baseImage(ctx, cache, k)
	if err != nil {
		return err
	}
	initrd := filepath.Join(work, version+".cpio")
	if err := appendImage(initrd, base, work, k, script(k, jobs)); err != nil {
		return fmt.Errorf("pack tests: %w", err)
	}
	info, err := os.Stat(initrd)
	if err != nil {
		return err
	}
	disk := ""
	if o.system != "" {
		if disk, err = findSystem(cache, o.system); err != nil {
			return err
		}
	}
	m := machine{
		kernel: k, initrd: initrd, system: o.system, cgroup: o.cgroup, disk: disk, accel: accel, jobs: jobs, report: r, timeout: o.timeout,
		// The archive and what is unpacked from it exist at the same time.
		memory:  o.memory + 2*int(info.Size()>>20),
		cpus:    o.cpus,
		console: &console{},
	}
	if o.verbose {
		m.console.live = os.Stderr
	}
	m.run(ctx)
	return nil
}

// appendImage writes base followed by an archive of work/test, the run script and, if there is
// work/root, what a machine within the machine needs.
func appendImage(name, base, work string, k kernel, script []byte) error {
	return writeFile(name, func(w io.Writer) error {
		b, err := os.Open(base)
		if err != nil {
			return err
		}
		defer b.Close()
		if _, err := io.Copy(w, b); err != nil {
			return err
		}
		a := archive{w: w}
		if err := a.tree(filepath.Join(work, "test"), work); err != nil {
			return err
		}
		if err := a.entry("test/run.sh", modeFile|0o644, int64(len(script)), bytes.NewReader(script)); err != nil {
			return err
		}
		if err := a.nested(filepath.Join(work, "root"), k, base); err != nil {
			return err
		}
		return a.end()
	})
}

// cacheDir is where hack/provision.sh keeps kernels.
func cacheDir() (string, error) {
	if dir := os.Getenv("FAIRLEAD_CACHE"); dir != "" {
		return dir, nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find cache directory: %w: set FAIRLEAD_CACHE", err)
	}
	return filepath.Join(dir, "fairlead"), nil
}
