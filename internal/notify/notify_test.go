// SPDX-License-Identifier: Apache-2.0

package notify

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode"

	"github.com/fairlead/fairlead/test/kit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// desktop keeps what is shown, and may hang or fail.
type desktop struct {
	mu    sync.Mutex
	shown []string
	hangs bool
	err   error
	fails []error // as the notifier reports them
}

func (d *desktop) show(ctx context.Context, title, text string) error {
	d.mu.Lock()
	d.shown = append(d.shown, title+"|"+strings.ReplaceAll(text, "\n", "|"))
	hangs, err := d.hangs, d.err
	d.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return err
}

func (d *desktop) failed(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fails = append(d.fails, err)
}

// set makes it hang or fail from now on.
func (d *desktop) set(hangs bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hangs, d.err = hangs, err
}

func (d *desktop) failures() []error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.fails)
}

func (d *desktop) take() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	shown := d.shown
	d.shown = nil
	return shown
}

// run runs a notifier in a bubble until the test ends.
func run(t *testing.T, d *desktop) *Notifier {
	n := New(d.show, d.failed)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); n.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return n
}

func open(n int) Change { return Change{Opened, fmt.Sprintf("%d/tcp", n)} }

// A burst gives one notification, and the next one comes after a pause, with all until then.
func TestBurstIsOneNotification(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d desktop
		n := run(t, &d)
		want := func(when string, after time.Duration, shown ...string) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			if got := d.take(); !slices.Equal(got, shown) {
				t.Errorf("%s: %q, want %q", when, got, shown)
			}
		}
		n.Tell("1", open(1))
		want("at once", gather-1, []string{}...)
		want("soon", 2, "fairlead: a port opened|1/tcp")
		for i := range 6 {
			n.Tell(fmt.Sprint(i), open(i))
			n.Tell(fmt.Sprint(i), Change{Conflict, fmt.Sprintf("%d/tcp is in use", i)})
		}
		n.Tell("7", open(7))
		n.Tell("8", open(8))
		n.Forget("8")
		n.Forget("9")
		want("in the pause", pause-time.Second, []string{}...)
		want("after it", 2*time.Second, "fairlead: a port opened, 6 ports are in use|0/tcp is in use|1/tcp is in use|2/tcp is in use|3/tcp is in use|and 3 more: fairlead ls")
		for i := range maxKept + 10 {
			n.Tell(fmt.Sprint(i), open(i))
		}
		want("many", time.Minute, fmt.Sprintf("fairlead: %d ports opened|0/tcp|1/tcp|2/tcp|3/tcp|and %d more: fairlead ls", maxKept, maxKept+10-maxNamed))
		n.Tell("1", open(1))
		n.Forget("1")
		want("what is over", time.Minute, []string{}...)
	})
}

// A desktop that hangs or fails is reported, and what is told meanwhile does not wait.
func TestDesktopThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := desktop{hangs: true}
		n := run(t, &d)
		n.Tell("1", open(1))
		time.Sleep(gather + 1)
		began := time.Now()
		n.Tell("2", open(2))
		n.Forget("2")
		if since := time.Since(began); since > 0 {
			t.Errorf("to tell takes %s", since)
		}
		time.Sleep(limit + 1)
		synctest.Wait()
		if fails := d.failures(); len(fails) != 1 || !errors.Is(fails[0], context.DeadlineExceeded) {
			t.Errorf("%v", fails)
		}
		d.set(false, errors.New("no desktop"))
		n.Tell("3", open(3))
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := d.take(); len(d.failures()) != 2 || len(got) != 2 {
			t.Errorf("%v, %q", d.failures(), got)
		}
	})
}

// No name of a guest is markup, an escape, a second line or endless.
func TestHostileNames(t *testing.T) {
	for _, name := range []string{
		`<img src="http://192.0.2.1/x">`, "a\nb", "\x1b]0;x\a", `\n\033[2J`, "\u202egnp.exe", "\xff\xfe", `&lt;b&gt;`, "$(reboot)`reboot`;'\"", "-e", strings.Repeat("x", 10_000), "",
	} {
		_, text := describe([]Change{{Opened, name}}, 0)
		if strings.ContainsAny(text, "<>&\\\n") || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) || len([]rune(text)) > maxText+1 || text == "" {
			t.Errorf("%.40q becomes %.200q", name, text)
		}
	}
	if got := plain("80/tcp of web (dev) at 127.0.0.1:80"); got != "80/tcp of web (dev) at 127.0.0.1:80" {
		t.Error(got)
	}
}

func FuzzPlain(f *testing.F) {
	f.Add("web")
	f.Add("<b>\\n\u202e\xff")
	f.Fuzz(func(t *testing.T, s string) {
		got := plain(s)
		if got == "" || strings.ContainsAny(got, "<>&\\\n") || strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%q becomes %q", s, got)
		}
	})
}
