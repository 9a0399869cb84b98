// SPDX-License-Identifier: Apache-2.0

// Command release builds everything that a release of fairlead consists of:
// archives, packages, a container image, a bill of materials for each program,
// and their checksums. It needs the Go module cache and nothing from the network,
// and gives the same bytes for the same commit.
//
//	go -C hack/release run . -version v1.2.3 -out DIR
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// system is one that fairlead is released for.
type system struct{ os, arch string }

func (s system) String() string { return s.os + "/" + s.arch }

var systems = []system{ // in the order in which they are built
	{"linux", "amd64"}, {"linux", "arm64"}, {"windows", "amd64"}, {"windows", "arm64"}, {"darwin", "arm64"},
}

// kinds are the kinds of files that are made for a system.
var kinds = []string{"archive", "sbom", "deb", "rpm", "apk", "image"}

// release is what is built.
type release struct {
	repo    string // root of the repository
	out     string // where the files go
	work    string // scratch
	version string // with its v: v1.2.3
	time    time.Time
	kinds   []string // of files to make
	// licences are those of the modules, by PATH@VERSION.
	licences map[string][]string
	files    []string // made so far, by name in out
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

var versionForm = regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`)

func run(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	version := flags.String("version", "", "the version, such as v1.2.3 (default: the tag of this commit)")
	out := flags.String("out", "dist", "directory for the files, made anew")
	only := flags.String("systems", "", "build only these, such as linux/amd64,windows/amd64")
	some := flags.String("kinds", strings.Join(kinds, ","), "make only these kinds of files")
	if err := flags.Parse(args); err != nil {
		return err
	}
	r := &release{out: *out, version: *version, kinds: strings.Split(*some, ",")}
	for _, kind := range r.kinds {
		if !slices.Contains(kinds, kind) {
			return fmt.Errorf("kind %q: want one of %q", kind, kinds)
		}
	}
	if r.out, err = filepath.Abs(r.out); err != nil {
		return err
	}
	if r.repo, err = output(ctx, ".", "git", "rev-parse", "--show-toplevel"); err != nil {
		return err
	}
	if r.version == "" {
		if r.version, err = output(ctx, r.repo, "git", "describe", "--tags", "--exact-match"); err != nil {
			return fmt.Errorf("this commit has no tag: name a version, as in `make release VERSION=v0.1.0`: %w", err)
		}
	}
	if !versionForm.MatchString(r.version) {
		return fmt.Errorf("version %q: want one such as v1.2.3 or v1.2.3-rc.1", r.version)
	}
	chosen, err := choose(*only)
	if err != nil {
		return err
	}
	seconds, err := output(ctx, r.repo, "git", "log", "-1", "--format=%ct")
	if err != nil {
		return err
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return err
	}
	r.time = time.Unix(unix, 0).UTC()
	if r.work, err = os.MkdirTemp("", "fairlead-release-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.work)) }()
	if err := os.RemoveAll(r.out); err != nil {
		return err
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	if err := r.documents(ctx); err != nil {
		return err
	}
	if r.licences, err = r.modules(ctx); err != nil {
		return err
	}
	for _, s := range chosen {
		if err := r.build(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return r.sums()
}

func choose(only string) ([]system, error) {
	if only == "" {
		return systems, nil
	}
	var out []system
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(systems, func(s system) bool { return s.String() == name })
		if i < 0 {
			return nil, fmt.Errorf("system %q: want one of %v", name, systems)
		}
		out = append(out, systems[i])
	}
	return out, nil
}

// output runs a command and returns what it prints, without space around it.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(out)), nil
}

// compile builds a command of cmd/ for a system.
func (r *release) compile(ctx context.Context, s system, command, to string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-tags", "grpcnotrace", "-trimpath", "-buildvcs=false",
		"-ldflags", "-s -w -buildid= -X github.com/fairlead/fairlead/internal/status/version.release="+r.version, "-o", to, "./cmd/"+command)
	cmd.Dir = r.repo
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOOS="+s.os, "GOARCH="+s.arch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w: %s", err, out)
	}
	return r.stamp(to)
}

// stamp gives a file the time of the commit, as packages keep it.
func (r *release) stamp(path string) error { return os.Chtimes(path, r.time, r.time) }

// documents makes the manual pages and completions, by a build for this machine.
func (r *release) documents(ctx context.Context) error {
	self := filepath.Join(r.work, "fairlead")
	cmd := exec.CommandContext(ctx, "go", "build", "-tags", "grpcnotrace", "-trimpath", "-buildvcs=false",
		"-ldflags", "-X github.com/fairlead/fairlead/internal/status/version.release="+r.version, "-o", self, "./cmd/fairlead")
	cmd.Dir = r.repo
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w: %s", err, out)
	}
	if _, err := output(ctx, r.work, self, "man", filepath.Join(r.work, "man")); err != nil {
		return err
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		text, err := output(ctx, r.work, self, "completion", shell)
		if err != nil {
			return err
		}
		if err := r.write(filepath.Join("completion", shell), text+"\n"); err != nil {
			return err
		}
	}
	notices, err := output(ctx, r.work, self, "version", "--licenses")
	if err != nil {
		return err
	}
	return r.write("NOTICES", notices+"\n")
}

// write makes a file below the scratch directory.
func (r *release) write(name, text string) error {
	path := filepath.Join(r.work, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return err
	}
	return r.stamp(path)
}

// build makes everything for one system.
func (r *release) build(ctx context.Context, s system) error {
	program := filepath.Join(r.work, s.os+"-"+s.arch, "fairlead")
	if s.os == "windows" {
		program += ".exe"
	}
	if err := r.compile(ctx, s, "fairlead", program); err != nil {
		return err
	}
	runner := filepath.Join(filepath.Dir(program), "fairlead-run")
	if s.os == "linux" {
		if err := r.compile(ctx, s, "fairlead-run", runner); err != nil {
			return err
		}
	}
	steps := []struct {
		kind  string
		linux bool // made for Linux alone
		make  func() error
	}{
		{"archive", false, func() error { return r.archive(s, program) }},
		{"sbom", false, func() error { return r.materials(s, program, ".cdx.json") }},
		{"sbom", true, func() error { return r.materials(s, runner, "_run.cdx.json") }},
		{"deb", true, func() error { return r.pack(s, program, form{"deb", true}) }},
		{"deb", true, func() error { return r.packRun(s, runner, form{"deb", true}) }},
		{"rpm", true, func() error { return r.pack(s, program, form{"rpm", true}) }},
		{"rpm", true, func() error { return r.packRun(s, runner, form{"rpm", true}) }},
		{"apk", true, func() error { return r.pack(s, program, form{"apk", false}) }},
		{"image", true, func() error { return r.image(s, program) }},
	}
	for _, step := range steps {
		if step.linux && s.os != "linux" || !slices.Contains(r.kinds, step.kind) {
			continue
		}
		if err := step.make(); err != nil {
			return fmt.Errorf("%s: %w", step.kind, err)
		}
	}
	return nil
}

// name is what a file of the release for a system is called.
func (r *release) name(s system, suffix string) string {
	return fmt.Sprintf("fairlead_%s_%s_%s%s", strings.TrimPrefix(r.version, "v"), s.os, s.arch, suffix)
}

// create makes a file of the release; fill writes it.
func (r *release) create(name string, fill func(io.Writer) error) error {
	f, err := os.Create(filepath.Join(r.out, name))
	if err != nil {
		return err
	}
	if err := errors.Join(fill(f), f.Close()); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	r.files = append(r.files, name)
	info, err := os.Stat(filepath.Join(r.out, name))
	if err != nil {
		return err
	}
	fmt.Printf("%-48s %6.1f MB\n", name, float64(info.Size())/1e6)
	return nil
}

// sums writes the checksums of all files.
func (r *release) sums() error {
	slices.Sort(r.files)
	return r.create("SHA256SUMS", func(w io.Writer) error {
		for _, name := range r.files {
			f, err := os.Open(filepath.Join(r.out, name))
			if err != nil {
				return err
			}
			h := sha256.New()
			_, err = io.Copy(h, f)
			if err := errors.Join(err, f.Close()); err != nil {
				return err
			}
			fmt.Fprintf(w, "%x  %s\n", h.Sum(nil), name)
		}
		return nil
	})
}
