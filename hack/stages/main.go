// SPDX-License-Identifier: Apache-2.0

// Command stages runs the stages of the tests, and what else is run seldom:
//
//	go run ./hack/stages [-n] [-v] [NAME...]
//
// Without a name it lists them. Of each part of a stage it keeps what it printed and its events
// (those of go test -json) in ${RESULTS:-bin/results}, as STAGE.PART.log and .json. At the end it
// says what failed, and how many tests passed and failed.
package main

import (
	"cmp"
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
)

func main() {
	dry := flag.Bool("n", false, "print the commands and run none")
	verbose := flag.Bool("v", false, "show what checks print while they run")
	flag.Parse()
	if err := enter(); err != nil {
		fmt.Fprintln(os.Stderr, "stages:", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r := &runner{ctx: ctx, out: os.Stdout, dry: *dry, verbose: *verbose, results: cmp.Or(os.Getenv("RESULTS"), "bin/results")}
	if flag.NArg() == 0 {
		list(os.Stdout)
		return
	}
	if err := r.do(flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "stages:", err)
		stop()
		os.Exit(1)
	}
}

// enter makes the repository the working directory, and sets one set of flags for all builds, so
// that each package is compiled once.
func enter() error {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/fairlead/fairlead").Output()
	if err != nil {
		return fmt.Errorf("find the repository: %w", err)
	}
	setDefaults(map[string]string{"CGO_ENABLED": "0", "GOFLAGS": "-trimpath"})
	return os.Chdir(strings.TrimSpace(string(out)))
}

// setDefaults sets variables of the environment that are not set.
func setDefaults(values map[string]string) {
	for name, value := range values {
		if _, ok := os.LookupEnv(name); !ok {
			_ = os.Setenv(name, value) // fails for no valid name
		}
	}
}

// list writes the names of all stages.
func list(w io.Writer) {
	for _, name := range slices.Sorted(maps.Keys(groups())) {
		fmt.Fprintf(w, "%-18s %s\n", name, groups()[name].about)
	}
	for _, s := range stages() {
		fmt.Fprintf(w, "%-18s %s\n", s.name, s.about)
	}
}

// runner runs stages.
type runner struct {
	ctx     context.Context //nolint:containedctx // of the program
	out     io.Writer
	dry     bool
	verbose bool
	results string // directory
}

// outcome is how a stage ended.
type outcome struct {
	ran  bool
	err  error
	took time.Duration
}

// do runs a group of stages, or stages one after the other.
func (r *runner) do(names []string) error {
	lanes := [][]string{names}
	group, isGroup := groups()[names[0]]
	if isGroup && len(names) == 1 {
		lanes = group.lanes
		setDefaults(group.env)
		if !r.dry {
			if err := errors.Join(os.RemoveAll(r.results), r.plain(group.needs)); err != nil {
				return err
			}
		}
	}
	known := make(map[string]stage)
	for _, s := range stages() {
		known[s.name] = s
	}
	all := slices.Concat(lanes...)
	if r.dry {
		lanes = [][]string{all}
	}
	for _, name := range all {
		if _, ok := known[name]; !ok {
			return fmt.Errorf("no stage %q: go run ./hack/stages lists them", name)
		}
	}
	outcomes, guard := make(map[string]outcome), sync.Mutex{}
	var wg sync.WaitGroup
	for _, lane := range lanes {
		wg.Go(func() {
			for _, name := range lane {
				o := r.stage(known[name])
				guard.Lock()
				outcomes[name] = o
				guard.Unlock()
			}
		})
	}
	wg.Wait()
	if r.dry {
		return nil
	}
	if isGroup {
		r.slowest()
	}
	fmt.Fprintln(r.out, "\n== result")
	if sum(r.out, r.results, all, outcomes) > 0 {
		return errors.New("not all passed")
	}
	return nil
}

// stage runs all parts of a stage, also after one that failed.
func (r *runner) stage(s stage) outcome {
	if r.ctx.Err() != nil {
		return outcome{}
	}
	fmt.Fprintf(r.out, "\n== %s\n", s.name)
	began := time.Now()
	if s.root && os.Geteuid() != 0 && !r.dry {
		return outcome{ran: true, err: errors.New("needs root: run it with sudo")}
	}
	var errs []error
	if errs = append(errs, r.forget(s.name), r.plain(s.needs)); errors.Join(errs...) == nil {
		for _, p := range s.parts() {
			errs = append(errs, r.part(p, strings.TrimSuffix(s.name+"."+p.name, ".")))
		}
	}
	return outcome{ran: true, err: errors.Join(errs...), took: time.Since(began)}
}

// forget removes the results of an earlier run.
func (r *runner) forget(name string) (err error) {
	if r.dry {
		return nil
	}
	files, _ := filepath.Glob(filepath.Join(r.results, name+".*")) // the pattern is valid
	for _, f := range files {
		err = errors.Join(err, os.Remove(f))
	}
	return err
}

// plain runs commands whose result is not kept, each a line.
func (r *runner) plain(commands []string) error {
	for _, c := range commands {
		if r.dry {
			fmt.Fprintln(r.out, c)
			continue
		}
		cmd := r.command(part{args: strings.Fields(c)})
		cmd.Stdout, cmd.Stderr = r.out, os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
	}
	return nil
}

func (r *runner) command(p part) *exec.Cmd {
	cmd := exec.CommandContext(r.ctx, p.args[0], p.args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	cmd.Env = append(os.Environ(), p.env...)
	return cmd
}

// part runs a part and keeps its result under a name.
func (r *runner) part(p part, name string) error {
	if r.dry {
		fmt.Fprintln(r.out, p)
		return nil
	}
	if err := os.MkdirAll(r.results, 0o755); err != nil {
		return err
	}
	base := filepath.Join(r.results, name)
	log, err := os.Create(base + ".log")
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	if p.events {
		return r.tests(p, base+".json", log)
	}
	return r.check(p, name, base, log)
}

// tests runs what prints events of go test -json, and shows them as gotestsum does.
func (r *runner) tests(p part, events string, log io.Writer) error {
	tool := filepath.Join(cacheDir(), "bin/gotestsum")
	if _, err := os.Stat(tool); err != nil {
		if err := r.plain([]string{"hack/provision.sh gotestsum"}); err != nil {
			return err
		}
	}
	p.args = slices.Concat([]string{tool, "--format", cmp.Or(os.Getenv("FORMAT"), "pkgname"), "--format-hide-empty-pkg",
		"--format-icons", "text", "--jsonfile", events, "--raw-command", "--"}, p.args)
	cmd := r.command(p)
	cmd.Stdout = io.MultiWriter(r.out, log)
	cmd.Stderr = cmd.Stdout
	return cmd.Run()
}

// check runs any other command. Of one that succeeds, only the lines that begin with "note: " are shown.
func (r *runner) check(p part, name, base string, log *os.File) error {
	cmd := r.command(p)
	cmd.Stdout = log
	if r.verbose {
		cmd.Stdout = io.MultiWriter(r.out, log)
	}
	cmd.Stderr = cmd.Stdout
	began, action, word := time.Now(), "pass", "ok"
	err := cmd.Run()
	if err != nil {
		action, word = "fail", "FAIL"
	}
	text, readErr := os.ReadFile(base + ".log")
	for line := range strings.Lines(string(text)) {
		if !r.verbose && (err != nil || strings.HasPrefix(line, "note: ")) {
			fmt.Fprint(r.out, line)
		}
	}
	seconds := int(time.Since(began).Seconds())
	fmt.Fprintf(r.out, "%-4s  %s (%ds)\n", word, name, seconds)
	events := fmt.Sprintf(`{"Action":%q,"Package":"check","Test":%q,"Elapsed":%d}`+"\n"+`{"Action":%[1]q,"Package":"check"}`+"\n", action, name, seconds)
	return errors.Join(err, readErr, os.WriteFile(base+".json", []byte(events), 0o644))
}

// slowest shows the tests that took longest.
func (r *runner) slowest() {
	fmt.Fprintln(r.out, "\n== slowest tests")
	files, _ := filepath.Glob(filepath.Join(r.results, "*.json")) // the pattern is valid
	var readers []io.Reader
	for _, name := range files {
		if f, err := os.Open(name); err == nil {
			defer func() { _ = f.Close() }()
			readers = append(readers, f)
		}
	}
	cmd := r.command(part{args: []string{filepath.Join(cacheDir(), "bin/gotestsum"), "tool", "slowest", "--num", "15", "--threshold", "5s"}})
	cmd.Stdin, cmd.Stdout, cmd.Stderr = io.MultiReader(readers...), r.out, os.Stderr
	_ = cmd.Run() // says what failed
}

// cacheDir is where hack/provision.sh keeps what it builds.
func cacheDir() string {
	if dir := os.Getenv("FAIRLEAD_CACHE"); dir != "" {
		return dir
	}
	dir, _ := os.UserCacheDir() // an error of the script
	return filepath.Join(dir, "fairlead")
}

// String is the command for a shell.
func (p part) String() string {
	words := slices.Concat(p.env, p.args)
	for i, w := range words {
		if w == "" || strings.ContainsAny(w, " \t'\"$|*?()[]{}<>&;^") {
			words[i] = strconv.Quote(w)
			if !strings.ContainsAny(w, "'") {
				words[i] = "'" + w + "'"
			}
		}
	}
	return strings.Join(words, " ")
}
