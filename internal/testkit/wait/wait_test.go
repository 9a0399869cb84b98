// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestLimit(t *testing.T) {
	for _, tt := range []struct {
		variable, ci string
		want         time.Duration
	}{
		{"", "", limit},
		{"", "true", limitCI},
		{"10m", "true", 10 * time.Minute},
		{"nonsense", "", limit},
	} {
		t.Setenv(Variable, tt.variable)
		t.Setenv("CI", tt.ci)
		if got := Limit(); got != tt.want {
			t.Errorf("%+v: got %v", tt, got)
		}
	}
}

// failing is a test that stops where it fails.
type failing struct {
	testing.TB
	message string
}

func (f *failing) Helper() {}

func (f *failing) Fatalf(_ string, args ...any) {
	f.message, _ = args[0].(string)
	panic(f)
}

// failure returns what f fails with, or "".
func failure(f func(t testing.TB)) (message string) {
	t := &failing{}
	defer func() {
		if p := recover(); p != nil && p != t {
			panic(p)
		}
		message = t.message
	}()
	f(t)
	return ""
}

func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		left := 3
		Until(t, "zero", func() error {
			if left--; left > 0 {
				return errors.New("more")
			}
			return nil
		})
		start := time.Now()
		got := failure(func(t testing.TB) {
			Within(t, time.Minute, "never", func() error { return errors.New("no") })
		})
		if took := time.Since(start); !strings.Contains(got, "never") || took < time.Minute || took > time.Minute+time.Second {
			t.Errorf("failed with %q after %v", got, took)
		}
	})
}

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := make(chan int)
		go func() {
			time.Sleep(time.Second)
			c <- 7
		}()
		if got := For(t, "seven", c); got != 7 {
			t.Errorf("got %d", got)
		}
		if got := failure(func(t testing.TB) { For(t, "another", c) }); got != "another" {
			t.Errorf("failed with %q", got)
		}
	})
}
