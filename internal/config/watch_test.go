// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// change is one call of onChange.
type change struct {
	cfg Agent
	err error
}

// watched runs Watch on an agent's file until the test ends.
type watched struct {
	t       *testing.T
	changes chan change
	hup     chan os.Signal
}

func watch(t *testing.T, path string, load func() (Agent, error)) *watched {
	t.Helper()
	if load == nil {
		load = func() (Agent, error) { return LoadAgent(path, nil, nil) }
	}
	current, err := load()
	if err != nil {
		t.Fatal(err)
	}
	w := &watched{t, make(chan change), make(chan os.Signal)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Watch(ctx, current, w.hup, load, func(c Agent, err error) {
			select {
			case w.changes <- change{c, err}:
			case <-ctx.Done():
			}
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

// until reads changes until one is right: a file that is written in two steps
// may be seen in between.
func (w *watched) until(what string, right func(change) bool) {
	w.t.Helper()
	limit := time.After(time.Minute)
	var last change
	for {
		select {
		case last = <-w.changes:
			if right(last) {
				return
			}
		case <-limit:
			w.t.Fatalf("%s: not seen; the last was %v, %v", what, last.cfg.HoldDown, last.err)
		}
	}
}

func (w *watched) untilHoldDown(d time.Duration) {
	w.t.Helper()
	w.until("holdDown "+d.String(), func(c change) bool { return c.err == nil && c.cfg.HoldDown == d })
}

func (w *watched) untilError(text string) {
	w.t.Helper()
	w.until(text, func(c change) bool { return c.err != nil && strings.Contains(c.err.Error(), text) })
}

func TestWatchWrites(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "agent.yaml"), "holdDown: 1s\n")
	w := watch(t, path, nil)
	write(t, path, "holdDown: 2s\n")
	w.untilHoldDown(2 * time.Second)

	write(t, path, "holdDown: wrong\n")
	w.untilError(`agent.yaml:1:11: holdDown: "wrong"`)
	write(t, path, "holdDown: 2s\n") // back to what stands: said too, as the error was
	w.untilHoldDown(2 * time.Second)

	// By a rename over the file.
	if err := os.Rename(write(t, path+".new", "holdDown: 3s\n"), path); err != nil {
		t.Fatal(err)
	}
	w.untilHoldDown(3 * time.Second)

	// The watch outlives the file that was renamed over.
	write(t, path, "holdDown: 4s\n")
	w.untilHoldDown(4 * time.Second)
}

func TestWatchEmptied(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "agent.yaml"), "holdDown: 1s\n")
	w := watch(t, path, nil)
	write(t, path, "")
	w.untilError("empty or removed")
	write(t, path, "holdDown: 2s\n")
	w.untilHoldDown(2 * time.Second)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	w.untilError("empty or removed")
	write(t, path, "")
	w.hup <- os.Interrupt // any signal: it is meant
	w.untilHoldDown(DefaultAgent().HoldDown)
}

func TestWatchHup(t *testing.T) {
	path := write(t, filepath.Join(t.TempDir(), "agent.yaml"), "holdDown: 1s\n")
	w := watch(t, path, nil)
	w.hup <- os.Interrupt
	w.untilHoldDown(time.Second)
}

// As Kubernetes projects a volume: the file is a link through ..data, a link
// that is replaced.
func TestWatchSymlinkSwap(t *testing.T) {
	dir := t.TempDir()
	project := func(version, text string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, version), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, version, "agent.yaml"), text)
		if err := os.Symlink(version, filepath.Join(dir, "..tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	project("..1", "holdDown: 1s\n")
	path := filepath.Join(dir, "agent.yaml")
	if err := os.Symlink(filepath.Join("..data", "agent.yaml"), path); err != nil {
		t.Fatal(err)
	}
	w := watch(t, path, nil)
	project("..2", "holdDown: 2s\n")
	w.untilHoldDown(2 * time.Second)
	if err := os.RemoveAll(filepath.Join(dir, "..1")); err != nil {
		t.Fatal(err)
	}
	project("..3", "holdDown: 3s\n")
	w.untilHoldDown(3 * time.Second)
}

func TestWatchRulesFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	more := write(t, filepath.Join(t.TempDir(), "rules.yaml"), "rules: []")
	write(t, path, "holdDown: 1s\n")
	w := watch(t, path, nil)
	write(t, path, "rulesFile: "+more+"\n")
	w.until("rules file", func(c change) bool { return c.err == nil && c.cfg.RulesFile == more })
	write(t, more, "rules: [{action: deny}]")
	w.until("a rule", func(c change) bool { return c.err == nil && c.cfg.Rules.Len() == 1 })
	write(t, more, "rules: [{action: den}]")
	w.untilError(`want allow or deny`)
	write(t, more, "rules: [{action: deny}, {action: allow}]")
	w.until("two rules", func(c change) bool { return c.err == nil && c.cfg.Rules.Len() == 2 })
}

// A change of the policy is one of the configuration, whatever is in it.
func TestWatchPolicy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	policy := filepath.Join(t.TempDir(), "policy", "policy.yaml")
	write(t, path, "cluster: {inventory: true, policy: "+policy+"}\n")
	w := watch(t, path, nil)
	changed := func(c change) bool { return c.err == nil && c.cfg.Cluster.Policy == policy }
	if err := os.Mkdir(filepath.Dir(policy), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"rules: []", "rules: {}", "rules: [{action: allow}]"} {
		write(t, policy, text)
		w.until(text, changed)
	}
	write(t, policy, "")
	w.until("empty", changed)
	if err := os.Remove(policy); err != nil {
		t.Fatal(err)
	}
	w.until("removed", changed)
	// The rest of the configuration does not wait for it.
	write(t, path, "holdDown: 3s\ncluster: {inventory: true, policy: "+policy+"}\n")
	w.untilHoldDown(3 * time.Second)
}

// The default file may come later, even its directory.
func TestWatchMissingDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "etc", "fairlead")
	path := filepath.Join(dir, "agent.yaml")
	w := watch(t, path, func() (Agent, error) {
		c := DefaultAgent()
		l := newLoader(&c, &c.Common, c.fields(), nil, nil)
		err := l.load("", path)
		return c, err
	})
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, path, "holdDown: 1s\n")
	w.untilHoldDown(time.Second)
}
