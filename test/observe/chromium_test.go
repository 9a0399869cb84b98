// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package observe

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// chromium is a headless Chromium, driven over the DevTools protocol through a
// pair of pipes: JSON messages that end with a zero byte.
type chromium struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader

	mu      sync.Mutex
	last    int
	waiting map[int]chan reply
	tabs    map[string]*tab // by session
	closed  error
}

type reply struct {
	Result json.RawMessage
	Error  *struct{ Message string }
}

// newChromium starts the browser in the namespace; it ends with the test.
func newChromium(t *testing.T, in *netns.Space) *chromium {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatalf("%v: run hack/provision.sh browser", err)
	}
	profile, err := os.MkdirTemp("", "fairlead-chromium-")
	if err != nil {
		t.Fatal(err)
	}
	// Registered first, so it runs last: the browser may still write as it ends.
	t.Cleanup(func() {
		wait.Within(t, limit(), "the profile goes", func() error { return os.RemoveAll(profile) })
	})
	theirs, ours, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
		"--force-color-profile=srgb", "--remote-debugging-pipe", "--user-data-dir="+profile, "about:blank")
	cmd.Env = append(os.Environ(), "HOME="+profile, "LANG=C.UTF-8")
	cmd.ExtraFiles = []*os.File{theirs, write} // 3 and 4
	start(t, in, cmd)
	_ = theirs.Close()
	_ = write.Close()
	c := &chromium{t: t, in: ours, out: bufio.NewReader(read), waiting: map[int]chan reply{}, tabs: map[string]*tab{}}
	go c.read()
	t.Cleanup(func() {
		_, _ = c.call(context.Background(), "", "Browser.close", nil)
		_ = ours.Close()
	})
	return c
}

func (c *chromium) read() {
	for {
		b, err := c.out.ReadBytes(0)
		if err != nil {
			c.mu.Lock()
			c.closed = fmt.Errorf("chromium ended: %w", err)
			for _, w := range c.waiting {
				close(w)
			}
			c.waiting = nil
			c.mu.Unlock()
			return
		}
		var m struct {
			ID        int
			Method    string
			SessionID string
			Params    json.RawMessage
			reply
		}
		if json.Unmarshal(b[:len(b)-1], &m) != nil {
			continue
		}
		c.mu.Lock()
		w, tab := c.waiting[m.ID], c.tabs[m.SessionID]
		delete(c.waiting, m.ID)
		c.mu.Unlock()
		switch {
		case w != nil:
			w <- m.reply
		case tab != nil:
			tab.note(m.Method, m.Params)
		}
	}
}

func (c *chromium) call(ctx context.Context, session, method string, params any) (json.RawMessage, error) {
	w := make(chan reply, 1)
	c.mu.Lock()
	if c.closed != nil {
		c.mu.Unlock()
		return nil, c.closed
	}
	c.last++
	m := map[string]any{"id": c.last, "method": method}
	if params != nil {
		m["params"] = params
	}
	if session != "" {
		m["sessionId"] = session
	}
	b, err := json.Marshal(m)
	if err == nil {
		c.waiting[c.last] = w
		_, err = c.in.Write(append(b, 0))
	}
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit())
	defer cancel()
	select {
	case r, ok := <-w:
		switch {
		case !ok:
			return nil, errors.New(method + ": chromium ended")
		case r.Error != nil:
			return nil, fmt.Errorf("%s: %s", method, r.Error.Message)
		}
		return r.Result, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%s: %w", method, ctx.Err())
	}
}

// tab is one page.
type tab struct {
	t       *testing.T
	c       *chromium
	session string

	mu     sync.Mutex
	errors []string // what the console shows as warning or error
}

// open opens a tab of the size at url.
func (c *chromium) open(t *testing.T, url string, width, height int) *tab {
	t.Helper()
	p := &tab{t: t, c: c}
	var target struct {
		TargetID string `json:"targetId"`
	}
	p.into(&target, "", "Target.createTarget", map[string]any{"url": "about:blank"})
	var at struct{ SessionID string }
	p.into(&at, "", "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true})
	p.session = at.SessionID
	c.mu.Lock()
	c.tabs[p.session] = p
	c.mu.Unlock()
	for _, domain := range []string{"Page.enable", "Runtime.enable", "Log.enable"} {
		p.do(domain, nil)
	}
	p.do("Emulation.setScrollbarsHidden", map[string]any{"hidden": true})
	p.size(width, height)
	p.visit(url)
	t.Cleanup(func() {
		if _, err := c.call(context.Background(), "", "Target.closeTarget", target); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *tab) into(to any, session, method string, params any) {
	p.t.Helper()
	b, err := p.c.call(p.t.Context(), session, method, params)
	if err != nil {
		p.t.Fatal(err)
	}
	if to != nil {
		if err := json.Unmarshal(b, to); err != nil {
			p.t.Fatal(err)
		}
	}
}

func (p *tab) do(method string, params any) { p.t.Helper(); p.into(nil, p.session, method, params) }

func (p *tab) visit(url string) { p.t.Helper(); p.do("Page.navigate", map[string]any{"url": url}) }

func (p *tab) size(width, height int) {
	p.t.Helper()
	p.do("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false})
}

// prefer sets the color scheme that the system prefers: "dark" or "light".
func (p *tab) prefer(scheme string) {
	p.t.Helper()
	p.do("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}})
}

// note records what appears in the console.
func (p *tab) note(method string, params json.RawMessage) {
	var said string
	switch method {
	case "Runtime.exceptionThrown":
		said = string(params)
	case "Runtime.consoleAPICalled":
		var m struct{ Type string }
		if json.Unmarshal(params, &m) == nil && (m.Type == "error" || m.Type == "warning" || m.Type == "assert") {
			said = string(params)
		}
	case "Log.entryAdded":
		var m struct {
			Entry struct{ Level, Text, URL string }
		}
		if json.Unmarshal(params, &m) == nil && (m.Entry.Level == "error" || m.Entry.Level == "warning") {
			said = m.Entry.Text + " " + m.Entry.URL
		}
	}
	if said == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.errors = append(p.errors, said)
}

// noConsole fails if the console shows anything but what is expected.
func (p *tab) noConsole(expected ...string) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
next:
	for _, said := range p.errors {
		for _, e := range expected {
			if strings.Contains(said, e) {
				continue next
			}
		}
		p.t.Errorf("console: %s", said)
	}
}

// eval runs an expression in the page, awaits it, and returns its value.
func (p *tab) eval(expression string) any {
	p.t.Helper()
	v, err := p.try(expression)
	if err != nil {
		p.t.Fatal(err)
	}
	return v
}

func (p *tab) try(expression string) (any, error) {
	b, err := p.c.call(p.t.Context(), p.session, "Runtime.evaluate", map[string]any{
		"expression": expression, "awaitPromise": true, "returnByValue": true, "userGesture": true,
	})
	if err != nil {
		return nil, err
	}
	var r struct {
		Result           struct{ Value any }
		ExceptionDetails *struct{ Exception struct{ Description string } }
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, err
	}
	if r.ExceptionDetails != nil {
		return nil, fmt.Errorf("%s: %s", expression, r.ExceptionDetails.Exception.Description)
	}
	return r.Result.Value, nil
}

// wait waits until an expression has the value.
func (p *tab) wait(what, expression string, want any) {
	p.t.Helper()
	wait.Within(p.t, limit(), what, func() error {
		got, err := p.try(expression)
		if err != nil {
			return err
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("%s is %v, want %v", expression, got, want)
		}
		return nil
	})
}

// key presses a key as a keyboard does.
func (p *tab) key(name string) {
	p.t.Helper()
	codes := map[string]int{"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38}
	down := map[string]any{"type": "rawKeyDown", "key": name, "windowsVirtualKeyCode": codes[name]}
	switch {
	case len(name) == 1:
		down["type"], down["text"] = "keyDown", name
	case name == "Enter":
		down["type"], down["text"] = "keyDown", "\r"
	}
	p.do("Input.dispatchKeyEvent", down)
	p.do("Input.dispatchKeyEvent", map[string]any{"type": "keyUp", "key": name, "windowsVirtualKeyCode": codes[name]})
}

func (p *tab) write(text string) {
	p.t.Helper()
	p.do("Input.insertText", map[string]any{"text": text})
}

// click clicks in the middle of the first element that matches, once it exists and does
// not move. It clicks again if the page reports that another element was hit.
func (p *tab) click(selector string) {
	p.t.Helper()
	var at []any
	wait.Within(p.t, limit(), "to click at "+selector, func() error {
		v, err := p.try(fmt.Sprintf(`(() => {
			const find = () => document.querySelector(%q);
			const e = find();
			if (!e) return null;
			e.scrollIntoView({block: 'nearest'});
			const r = e.getBoundingClientRect();
			const [x, y] = [r.x + r.width / 2, r.y + r.height / 2];
			window.struck = false;
			document.addEventListener('click', (c) => { window.struck = !!find()?.contains(c.target); }, {once: true, capture: true});
			const hit = document.elementFromPoint(x, y);
			return [x, y, e.contains(hit) || 'below ' + hit?.outerHTML.slice(0, 80)];
		})()`, selector))
		if err != nil {
			return err
		}
		before := at
		if at, _ = v.([]any); at == nil || at[2] != true || !slices.Equal(at, before) {
			return fmt.Errorf("it is at %v and was at %v", at, before)
		}
		for _, kind := range []string{"mouseMoved", "mousePressed", "mouseReleased"} {
			p.do("Input.dispatchMouseEvent", map[string]any{"type": kind, "x": at[0], "y": at[1], "button": "left", "clickCount": 1})
		}
		if struck, err := p.try(`window.struck`); err != nil || struck != true {
			return errors.Join(errors.New("another element was in its place"), err)
		}
		return nil
	})
}

// shoot saves a screenshot as an artefact of the test.
func (p *tab) shoot(name string) {
	p.t.Helper()
	var shot struct{ Data string }
	// A tab that another one hides draws nothing.
	p.do("Page.bringToFront", nil)
	p.into(&shot, p.session, "Page.captureScreenshot", map[string]any{"format": "png"})
	b, err := base64.StdEncoding.DecodeString(shot.Data)
	if err != nil {
		p.t.Fatal(err)
	}
	dir := os.Getenv("FAIRLEAD_ARTIFACTS")
	if dir == "" {
		dir = filepath.Join(os.TempDir(), "fairlead-artifacts")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), b, 0o644); err != nil {
		p.t.Fatal(err)
	}
}
