// SPDX-License-Identifier: Apache-2.0

package loglevel

import (
	"bytes"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// allows returns whether lines of a component are logged.
func allows(t *testing.T, v *Levels, component string, l slog.Level) bool {
	var b bytes.Buffer
	h := v.Handler(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug}))
	slog.New(h).With("source", component).Log(t.Context(), l, "x")
	return b.Len() > 0
}

func TestLevelsOfComponentsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, log := New(slog.LevelWarn), slog.New(slog.DiscardHandler)
		set := func(level string, lasts time.Duration, components ...string) {
			t.Helper()
			if err := v.Set(Request{level, components, lasts}, log); err != nil {
				t.Fatal(err)
			}
		}
		expect := func(after time.Duration, component string, want slog.Level) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			for _, l := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
				if got := allows(t, v, component, l); got != (l >= want) {
					t.Fatalf("%s: %v is logged: %v, want the level %v", component, l, got, want)
				}
			}
		}
		set("debug", 10*time.Minute, "nat", "docker")
		set("error", time.Hour, "kube")
		expect(0, "nat", slog.LevelDebug)
		expect(0, "docker", slog.LevelDebug)
		expect(0, "kube", slog.LevelError)
		expect(0, "socket", slog.LevelWarn)
		set("info", 20*time.Minute, "nat") // counts anew
		expect(11*time.Minute, "docker", slog.LevelWarn)
		expect(0, "nat", slog.LevelInfo)
		set("error", 0)
		expect(0, "nat", slog.LevelInfo)
		expect(10*time.Minute, "nat", slog.LevelError)
		expect(time.Hour, "kube", slog.LevelError)

		set("error", time.Hour, "nat")
		set("warn", 0)
		expect(0, "socket", slog.LevelWarn)
		if s := v.State(); len(s.Temporary) != 1 || s.Temporary[0].Component != "nat" {
			t.Errorf("%+v", s)
		}
		v.Stop() // no timer is left
		expect(0, "nat", slog.LevelWarn)
	})
}

func TestWholeGoesBackToWhatIsPermanent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, log := New(slog.LevelInfo), slog.New(slog.DiscardHandler)
		for _, r := range []Request{{"debug", nil, 10 * time.Minute}, {"error", nil, 20 * time.Minute}} {
			if err := v.Set(r, log); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(11 * time.Minute)
		synctest.Wait()
		if v.Level() != slog.LevelError {
			t.Errorf("the first timer ended the second level: %v", v.Level())
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if v.Level() != slog.LevelInfo {
			t.Errorf("%v", v.Level())
		}
	})
}

func TestBadRequests(t *testing.T) {
	var v Levels
	for _, c := range []struct {
		r    Request
		want string
	}{
		{Request{"loud", nil, 0}, "want debug, info, warn or error"},
		{Request{"", nil, 0}, "want debug"},
		{Request{"INFO+3", nil, 0}, "want debug"},
		{Request{"debug", nil, time.Millisecond}, "1s to 24h"},
		{Request{"debug", nil, -time.Hour}, "1s to 24h"},
		{Request{"debug", nil, 25 * time.Hour}, "1s to 24h"},
		{Request{"debug", []string{"nat"}, 0}, "1s to 24h"},
		{Request{"debug", []string{"nat", "nosuch"}, time.Hour}, `component "nosuch": want one of agent,`},
		{Request{"debug", []string{""}, time.Hour}, `component ""`},
	} {
		err := v.Set(c.r, slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.r, err, c.want)
		}
	}
	if s := v.State(); s.Level != "info" || len(s.Temporary) != 0 {
		t.Errorf("a refused request changed %+v", s)
	}
}

// A line belongs to the package that logs it. This one is loglevel.
func TestLinesAreOfTheirPackage(t *testing.T) {
	v := New(slog.LevelInfo)
	defer v.Stop()
	var b bytes.Buffer
	log := slog.New(v.Handler(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug})))
	set := func(level string, components ...string) {
		t.Helper()
		if err := v.Set(Request{level, components, time.Hour}, slog.New(slog.DiscardHandler)); err != nil {
			t.Fatal(err)
		}
	}
	set("debug", "nat")
	log.Debug("one")
	set("debug", "loglevel")
	log.WithGroup("g").Debug("two")
	set("error", "loglevel")
	log.Warn("three")
	set("debug", "kube")
	log.Debug("four", "source", "kube")
	if out := b.String(); strings.Contains(out, "msg=one") || !strings.Contains(out, "msg=two g.component=loglevel") ||
		strings.Contains(out, "msg=three") || !strings.Contains(out, "msg=four") {
		t.Errorf("%s", out)
	}
	for path, want := range map[string]string{"guest/source/nat/watch": "nat", "host": "host", "host/hostpeer": "hostpeer", "link/wss": "link", "guest/source": "", "": ""} {
		if got := componentOf(path); got != want {
			t.Errorf("%q is of %q, want %q", path, got, want)
		}
	}
}

// A component's level counts before that of the package that logs for it, also where it is
// the level of the whole.
func TestOwnLevelThatEqualsThatOfTheWhole(t *testing.T) {
	v := New(slog.LevelInfo)
	defer v.Stop()
	var b bytes.Buffer
	log := slog.New(v.Handler(slog.NewTextHandler(&b, nil)))
	for _, r := range []Request{{"error", []string{"loglevel"}, time.Hour}, {"info", []string{"docker"}, time.Hour}} {
		if err := v.Set(r, slog.New(slog.DiscardHandler)); err != nil {
			t.Fatal(err)
		}
	}
	log.Info("one", "source", "docker")
	log.With("source", "docker").Info("two")
	log.Info("three", "source", "containerd")
	if out := b.String(); !strings.Contains(out, "msg=one") || !strings.Contains(out, "msg=two") || strings.Contains(out, "msg=three") {
		t.Errorf("%s", out)
	}
}

// Each package that logs is of a component, and each component logs.
func TestAllComponentsAreListed(t *testing.T) {
	call := regexp.MustCompile(`[lL]og(ger)?\.(Debug|Info|Warn|Error|Log)\(`)
	found := map[string]bool{"docker": true, "podman": true, "containerd": true} // they log by internal/guest/source/engine, with the attribute source
	root := "../.."
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if call.Match(text) {
			folder, _ := filepath.Rel(root, filepath.Dir(path))
			c := componentOf(filepath.ToSlash(folder))
			if c == "" {
				t.Errorf("%s logs and is of no component", folder)
			}
			found[c] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range Components() {
		if !found[c] {
			t.Errorf("%s is among the components and does not log", c)
		}
	}
	if !slices.IsSorted(Components()) {
		t.Error("the components are not sorted")
	}
}
