// SPDX-License-Identifier: Apache-2.0

package hvsock

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"
)

const (
	idA = "e0e16197-dd56-4a10-9195-5ee7a155a838"
	idB = "90db8b89-0d35-4f79-8ce9-49ea0ac8b7cd"
)

func mustGUID(t *testing.T, s string) GUID {
	t.Helper()
	g, err := ParseGUID(s)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestGUIDRoundTrip(t *testing.T) {
	for _, s := range []string{idA, "{" + idB + "}", strings.ToUpper(idA)} {
		want := strings.ToLower(strings.Trim(s, "{}"))
		if got := mustGUID(t, s).String(); got != want {
			t.Errorf("%s is %s", s, got)
		}
	}
	for _, s := range []string{"", "{", "{" + idA, idA + "}", idA[1:], strings.ReplaceAll(idA, "-", ""), strings.Replace(idA, "e", "g", 1), "e0e1-6197dd56-4a10-9195-5ee7a155a838"} {
		if g, err := ParseGUID(s); err == nil {
			t.Errorf("%q is %s", s, g)
		}
	}
}

func TestServiceID(t *testing.T) {
	for port, want := range map[uint32]string{
		1023: "000003ff-facb-11e6-bd58-64006a7986d3", 0xfffffffe: "fffffffe-facb-11e6-bd58-64006a7986d3",
	} {
		if got := ServiceID(port).String(); got != want {
			t.Errorf("service of %d is %s, want %s", port, got, want)
		}
	}
}

func utf16le(s string) []byte {
	b := []byte{0xff, 0xfe}
	for _, u := range utf16.Encode([]rune(s)) {
		b = append(b, byte(u), byte(u>>8))
	}
	return b
}

func TestLines(t *testing.T) {
	want := []string{"Ubuntu", "Größe 24.04"}
	text := "Ubuntu\r\n\r\n Größe 24.04\r\n"
	for name, out := range map[string][]byte{
		"UTF-16": utf16le(text), "without mark": utf16le(text)[2:], "UTF-8": []byte("\ufeff" + text),
	} {
		if got := Lines(out); !slices.Equal(got, want) {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := Lines(nil); got != nil {
		t.Errorf("of nothing: %q", got)
	}
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("a\r\nb"))
	f.Add(utf16le("a\nb"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, l := range Lines(b) {
			if l == "" || l != strings.TrimSpace(l) || strings.ContainsRune(l, '\n') {
				t.Errorf("line %q of %q", l, b)
			}
		}
	})
}

// fakeWindows is a Windows with its machines.
type fakeWindows struct {
	machines  []GUID
	listErr   error
	wsl       func(args string) ([]byte, error)
	asked     []string
	refuses   map[GUID]error
	connected []string
}

func (w *fakeWindows) Machines(context.Context) ([]GUID, error) { return w.machines, w.listErr }

func (w *fakeWindows) WSL(_ context.Context, args ...string) ([]byte, error) {
	w.asked = append(w.asked, strings.Join(args, " "))
	return w.wsl(strings.Join(args, " "))
}

func (w *fakeWindows) Connect(_ context.Context, machine, service GUID) (net.Conn, error) {
	if err := w.refuses[machine]; err != nil {
		return nil, err
	}
	w.connected = append(w.connected, machine.String()+" "+service.String())
	a, b := net.Pipe()
	_ = b.Close()
	return a, nil
}

// runs is a wsl.exe with one distribution, in machine id.
func runs(id string) func(string) ([]byte, error) {
	return func(args string) ([]byte, error) {
		switch args {
		case "--list --running --quiet":
			return utf16le("Ubuntu\r\n"), nil
		case "--distribution Ubuntu --exec /bin/wslinfo --vm-id":
			return []byte(id + "\n"), nil
		}
		return nil, errors.New("unexpected: " + args)
	}
}

func dial(t *testing.T, d *Dialer) error {
	t.Helper()
	c, _, err := d.Dial(t.Context())
	if err == nil {
		_ = c.Close()
	}
	return err
}

func newDialer(t *testing.T, w *fakeWindows, machine string) *Dialer {
	t.Helper()
	d, err := NewDialer(w, machine, 1023)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestFixedMachine(t *testing.T) {
	w := &fakeWindows{}
	if err := dial(t, newDialer(t, w, idB)); err != nil {
		t.Fatal(err)
	}
	if want := []string{idB + " 000003ff-facb-11e6-bd58-64006a7986d3"}; !slices.Equal(w.connected, want) {
		t.Errorf("connected to %q, want %q", w.connected, want)
	}
	if len(w.asked) > 0 {
		t.Errorf("asked %q", w.asked)
	}
	if _, err := NewDialer(w, "ubuntu", 1); err == nil || !strings.Contains(err.Error(), `"wsl"`) {
		t.Errorf("a name for a machine: %v", err)
	}
}

func TestWSLMachineIsFoundAfterRestart(t *testing.T) {
	w := &fakeWindows{machines: []GUID{mustGUID(t, idB), mustGUID(t, idA)}, wsl: runs(idA)}
	d := newDialer(t, w, WSL)
	for range 3 {
		if err := dial(t, d); err != nil {
			t.Fatal(err)
		}
	}
	if len(w.asked) != 2 {
		t.Errorf("asked %q: want once for what has not changed", w.asked)
	}
	// The machine is restarted: another id.
	w.machines, w.wsl = []GUID{mustGUID(t, idB)}, runs(idB)
	if err := dial(t, d); err != nil {
		t.Fatal(err)
	}
	if got := w.connected; len(got) != 4 || !strings.HasPrefix(got[2], idA) || !strings.HasPrefix(got[3], idB) {
		t.Errorf("connected to %q", got)
	}
}

// A host that keeps starting WSL would keep it from ever shutting down.
func TestWSLIsNeverStarted(t *testing.T) {
	w := &fakeWindows{wsl: func(string) ([]byte, error) { return nil, errors.New("asked") }}
	if err := dial(t, newDialer(t, w, WSL)); !errors.Is(err, ErrNotRunning) || len(w.asked) > 0 {
		t.Errorf("without a machine: %v, asked %q", err, w.asked)
	}
	// Another machine runs, WSL does not; its text and exit status say so.
	w = &fakeWindows{machines: []GUID{mustGUID(t, idB)}, wsl: func(string) ([]byte, error) {
		return utf16le("There are no running distributions.\r\n"), errors.New("exit status 0xffffffff")
	}}
	if err := dial(t, newDialer(t, w, WSL)); !errors.Is(err, ErrNotRunning) || len(w.asked) != 1 {
		t.Errorf("without WSL: %v, asked %q", err, w.asked)
	}
	w.wsl = func(string) ([]byte, error) { return nil, nil }
	if err := dial(t, newDialer(t, w, WSL)); !errors.Is(err, ErrNotRunning) {
		t.Errorf("without a word: %v", err)
	}
}

// A distribution without wslinfo (too old, or not a common one) prints nothing of
// the machine: what runs is tried, and the token proves which it is.
func TestAllMachinesAreTriedWithoutWSLInfo(t *testing.T) {
	w := &fakeWindows{machines: []GUID{mustGUID(t, idB), mustGUID(t, idA)}, refuses: map[GUID]error{mustGUID(t, idB): errors.New("refused")}}
	w.wsl = func(args string) ([]byte, error) {
		switch {
		case strings.HasPrefix(args, "--list"):
			return []byte("docker-desktop\nold\n"), nil
		case strings.Contains(args, "docker-desktop"):
			return nil, errors.New("exit status 127")
		}
		return []byte("wsl1\n"), nil
	}
	d := newDialer(t, w, WSL)
	if err := dial(t, d); err != nil {
		t.Fatal(err)
	}
	if len(w.connected) != 1 || !strings.HasPrefix(w.connected[0], idA) {
		t.Errorf("connected to %q", w.connected)
	}
	w.refuses[mustGUID(t, idA)] = errors.New("gone")
	if err := dial(t, d); err == nil || !strings.Contains(err.Error(), idA) || !strings.Contains(err.Error(), "gone") {
		t.Errorf("error %v: want it to name what was tried", err)
	}
}

func TestSecondDistributionIsAsked(t *testing.T) {
	w := &fakeWindows{machines: []GUID{mustGUID(t, idA)}}
	w.wsl = func(args string) ([]byte, error) {
		switch {
		case strings.HasPrefix(args, "--list"):
			return []byte("docker-desktop\nUbuntu\n"), nil
		case strings.Contains(args, "Ubuntu"):
			return []byte("{" + idA + "}\n"), nil
		}
		return nil, errors.New("exit status 127")
	}
	if err := dial(t, newDialer(t, w, WSL)); err != nil || len(w.connected) != 1 {
		t.Errorf("%v, connected to %q", err, w.connected)
	}
}

// Not being allowed to list machines is not the same as there being none.
func TestFailedListIsAnError(t *testing.T) {
	denied := errors.New("access denied")
	w := &fakeWindows{listErr: denied, wsl: runs(idA)}
	if err := dial(t, newDialer(t, w, WSL)); err != nil {
		t.Errorf("WSL knows, and yet: %v", err)
	}
	w.wsl = func(string) ([]byte, error) { return nil, errors.New("no wsl.exe") }
	err := dial(t, newDialer(t, w, WSL))
	if !errors.Is(err, denied) || errors.Is(err, ErrNotRunning) {
		t.Errorf("error %v", err)
	}
}

// Again connects to the same machine without looking for it, even where it was
// found by trying.
func TestRedialSameMachine(t *testing.T) {
	w := &fakeWindows{
		machines: []GUID{mustGUID(t, idB), mustGUID(t, idA)}, refuses: map[GUID]error{mustGUID(t, idB): errors.New("nobody listens")},
		wsl: func(string) ([]byte, error) { return nil, errors.New("too old") },
	}
	first, again, err := newDialer(t, w, WSL).Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	asked := len(w.asked)
	w.refuses = nil
	second, err := again(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, _ = first.Close(), second.Close()
	if len(w.connected) != 2 || w.connected[0] != w.connected[1] || !strings.HasPrefix(w.connected[1], idA) {
		t.Errorf("connected to %q", w.connected)
	}
	if len(w.asked) != asked {
		t.Errorf("asked %q", w.asked)
	}
}

func TestDialEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	w := &fakeWindows{machines: []GUID{mustGUID(t, idA), mustGUID(t, idB)}}
	w.wsl = func(string) ([]byte, error) { cancel(); return nil, ctx.Err() }
	if _, _, err := newDialer(t, w, WSL).Dial(ctx); !errors.Is(err, context.Canceled) || len(w.connected) > 0 {
		t.Errorf("%v, connected to %q", err, w.connected)
	}
}
