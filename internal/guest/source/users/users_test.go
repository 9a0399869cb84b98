// SPDX-License-Identifier: Apache-2.0

package users

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// runtimeDir makes a runtime directory that this user owns, as that of a user with a number.
func runtimeDir(t *testing.T) (dir string, uid uint32) {
	t.Helper()
	uid = uint32(os.Getuid())
	dir = filepath.Join(t.TempDir(), strconv.Itoa(int(uid)))
	if err := os.MkdirAll(filepath.Join(dir, "podman"), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir, uid
}

// serve answers at a socket until the test ends.
func serve(t *testing.T, path string, h http.Handler) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	stop = sync.OnceFunc(enginetest.Serve(func() error { return srv.Serve(l) }, func() { _ = srv.Close() }))
	t.Cleanup(stop)
	return stop
}

// A socket is connected to only if it, and the directories to it, are the user's own and no
// links, and if the user listens.
func TestAccess(t *testing.T) {
	dir, uid := runtimeDir(t)
	serve(t, filepath.Join(dir, "docker.sock"), http.NotFoundHandler())
	serve(t, filepath.Join(dir, "podman", "podman.sock"), http.NotFoundHandler())
	for _, err := range []error{
		os.Symlink("docker.sock", filepath.Join(dir, "link.sock")), os.Symlink("podman", filepath.Join(dir, "linked")),
		os.WriteFile(filepath.Join(dir, "file"), nil, 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	dialer := engine.NewDialer(t.Context())
	for _, c := range []struct {
		rel, want string
		user      uint32
	}{
		{"docker.sock", "", uid},
		{"podman/podman.sock", "", uid},
		{"link.sock", "is no socket", uid},
		{"linked/podman.sock", "is no directory", uid},
		{"file", "is no socket", uid},
		{"podman", "is no socket", uid},
		{"docker.sock", "belongs to user", uid + 1},
	} {
		a := access{dir, c.rel, c.user}
		conn, err := a.Dial(t.Context(), dialer.DialContext)
		if err == nil {
			_ = conn.Close()
		}
		if got := fmt.Sprint(err); (err == nil) != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s of %d: %v, want %q", c.rel, c.user, err, c.want)
		}
		if err != nil && !errors.Is(err, engine.ErrRefused) {
			t.Errorf("%s: %v is taken for an engine", c.rel, err)
		}
	}
	if err := (access{dir, "none/x.sock", uid}).Check(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an absent socket: %v", err)
	}
}

// Of files only regular ones are read that are the user's own, and not large.
func TestReadFile(t *testing.T) {
	dir, uid := runtimeDir(t)
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, err := range []error{
		os.WriteFile(at("small"), []byte("text"), 0o600), os.WriteFile(at("large"), make([]byte, maxFile+1), 0o600),
		os.Symlink("small", at("link")), syscall.Mkfifo(at("fifo"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		path, want string
		user       uint32
	}{
		{at("small"), "", uid},
		{at("link"), "", uid},
		{at("small"), "want a regular file", uid + 1},
		{at("large"), "want a regular file", uid},
		{at("fifo"), "want a regular file", uid}, // and it is not waited for
		{dir, "want a regular file", uid},
		{"/dev/null", "want a regular file", uid},
	} {
		b, err := access{dir, "x", c.user}.ReadFile(c.path)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || err == nil && string(b) != "text" {
			t.Errorf("%s of %d: %q, %v, want %q", c.path, c.user, b, err, c.want)
		}
	}
	if _, err := (access{dir, "x", uid}).ReadFile(at("none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an absent file: %v", err)
	}
}

// A user listens at a socket that was given away.
func TestAccessChecksWhoListens(t *testing.T) {
	if os.Getuid() != 0 {
		return // only root can give it away
	}
	const uid = 12345
	base := t.TempDir()
	dir := filepath.Join(base, "12345")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	serve(t, filepath.Join(dir, "docker.sock"), http.NotFoundHandler()) // root listens
	if err := errors.Join(os.Chown(dir, uid, -1), os.Chown(filepath.Join(dir, "docker.sock"), uid, -1)); err != nil {
		t.Fatal(err)
	}
	_, err := access{dir, "docker.sock", uid}.Dial(t.Context(), engine.NewDialer(t.Context()).DialContext)
	if err == nil || !strings.Contains(err.Error(), "user 0 listens") {
		t.Errorf("Dial = %v", err)
	}
}

// What a user's engine may send is read slowly after the first megabytes.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const first, lasts = 256 << 10, 10 * time.Second
		a, b := net.Pipe()
		go func() {
			for _, err := a.Write(make([]byte, 64<<10)); err == nil; _, err = a.Write(make([]byte, 64<<10)) {
			}
		}()
		p, got := &paced{Conn: b, left: first, at: time.Now()}, 0
		for began, buf := time.Now(), make([]byte, 64<<10); time.Since(began) < lasts; {
			n, err := p.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			got += n
		}
		if most := first + int(lasts/time.Second)*rate; got < most/2 || got > most+(64<<10) {
			t.Errorf("%d bytes in %v, want some %d", got, lasts, most)
		}
		_ = errors.Join(a.Close(), b.Close())
	})
}

// asUser runs f as a user, on a thread of its own.
func asUser(t *testing.T, uid uint32, f func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// userEngine serves a user's Docker until the test ends, and returns the directory of all
// users' runtime directories and the user.
func userEngine(t *testing.T, h http.Handler) (base string, uid uint32) {
	t.Helper()
	base = t.TempDir()
	if uid = uint32(os.Getuid()); uid == 0 {
		uid = 12345
	}
	for p := base; p != "/" && os.Getuid() == 0; p = filepath.Dir(p) {
		fi, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode().Perm()&0o11 == 0 { // the user may pass through
			if err := os.Chmod(p, fi.Mode()|0o11); err != nil {
				t.Fatal(err)
			}
		}
	}
	dir := filepath.Join(base, strconv.Itoa(int(uid)))
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, int(uid), -1)); err != nil {
		t.Fatal(err)
	}
	asUser(t, uid, func() error { serve(t, filepath.Join(dir, "docker.sock"), h); return nil })
	return base, uid
}

const container = `{"Id":"w","Names":["/web"],"Labels":{"fairlead.expose":"all"},"State":"running","Ports":[{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":8080,"Type":"tcp"}],` +
	`"NetworkSettings":{"Networks":{"bridge":{"IPAddress":"172.17.0.2"}}}}`

const inspected = `{"Id":"w","Name":"/web","State":{"Running":true,"Pid":1},"Config":{"Labels":{"fairlead.expose":"all"}},` +
	`"NetworkSettings":{"Ports":{"80/tcp":[{"HostIp":"0.0.0.0","HostPort":"8080"}]},"Networks":{"bridge":{"IPAddress":"172.17.0.2"}}}}`

// api is a Docker with one container; other answers first, if it returns true.
func api(other func(w http.ResponseWriter, r *http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Api-Version", "1.41")
		switch p := r.URL.Path; {
		case other(w, r):
		case strings.HasSuffix(p, "/_ping"):
		case strings.HasSuffix(p, "/info"):
			_, _ = fmt.Fprint(w, `{"ServerVersion":"20.10.24","SecurityOptions":["name=rootless"]}`)
		case strings.HasSuffix(p, "/version"):
			_, _ = fmt.Fprint(w, `{"Components":[{"Name":"Engine"}]}`)
		case strings.HasSuffix(p, "/events"):
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		case strings.HasSuffix(p, "/containers/json"):
			_, _ = fmt.Fprint(w, "["+container+"]")
		default:
			_, _ = fmt.Fprint(w, inspected)
		}
	})
}

// A user's engine is found, names its containers, and is forgotten when its user has
// logged out.
func TestEngineOfAUser(t *testing.T) {
	base, uid := userEngine(t, api(func(w http.ResponseWriter, r *http.Request) bool {
		resting := strings.HasSuffix(r.URL.Path, "/containers/json") && r.URL.Query().Get("all") != ""
		if resting { // no rule waits for a user's engine, so that containers that do not run do not count
			_, _ = fmt.Fprint(w, "[", strings.Repeat(" ", 2*maxBody), "]")
		}
		return resting
	}))
	s, f := run(t, base)
	named := func(want bool) {
		t.Helper()
		enginetest.Eventually(t, func() error {
			o, ok := s.Holders().Holder(uid, claimOf(8080, "0.0.0.0", "").key)
			if ok != want || ok && (o.Name != "web" || o.Labels != nil || o.Held.Engine != "docker") {
				return fmt.Errorf("%+v, %v, want %v", o, ok, want)
			}
			return nil
		})
	}
	named(true)
	is(t, f, "named", func(f *enginetest.Feed) bool {
		return f.Err == nil && strings.HasPrefix(f.MethodName, "docker 20.10.24")
	})
	if f.Lock(); len(f.Set) > 0 {
		t.Errorf("it declares %v", f.Set)
	}
	f.Unlock()
	if err := os.RemoveAll(filepath.Join(base, strconv.Itoa(int(uid)))); err != nil {
		t.Fatal(err)
	}
	named(false)
	is(t, f, "logged out", func(f *enginetest.Feed) bool { return f.Err == nil && f.MethodName == "no user's engine" })
}

// An engine that does harm makes its own names stale.
func TestHostileEngine(t *testing.T) {
	endless := func(w http.ResponseWriter, r *http.Request, text string) bool {
		for r.Context().Err() == nil {
			if _, err := fmt.Fprint(w, strings.Repeat(text, 64<<10)); err != nil {
				break
			}
		}
		return true
	}
	for _, c := range []struct {
		name, want string
		other      func(w http.ResponseWriter, r *http.Request) bool
	}{
		{"hangs", "no answer within", func(_ http.ResponseWriter, r *http.Request) bool { <-r.Context().Done(); return true }},
		{"endless list", "the answer is larger than 2 MiB", func(w http.ResponseWriter, r *http.Request) bool {
			return strings.HasSuffix(r.URL.Path, "/containers/json") && endless(w, r, " ")
		}},
		{"endless event", "an event is larger than 128 KiB", func(w http.ResponseWriter, r *http.Request) bool {
			return strings.HasSuffix(r.URL.Path, "/events") && endless(w, r, " ")
		}},
		{"many containers", "300 containers run", func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, "/containers/json") {
				return false
			}
			var all []string
			for i := range 300 {
				all = append(all, strings.Replace(container, `"w"`, strconv.Quote(strconv.Itoa(i)), 1))
			}
			_, _ = fmt.Fprint(w, "["+strings.Join(all, ",")+"]")
			return true
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			base, _ := userEngine(t, api(c.other))
			_, f := run(t, base)
			is(t, f, c.name, func(f *enginetest.Feed) bool { return f.Err != nil && strings.Contains(f.Err.Error(), c.want) })
		})
	}
}

// run runs the source for the users' runtime directories in dir.
func run(t *testing.T, dir string) (*Source, *enginetest.Feed) {
	t.Helper()
	s, err := New(Options{
		Dir: dir, Timeout: 500 * time.Millisecond, Logger: slog.New(slog.DiscardHandler), Signs: func(uint32) schedule.Signal { return schedule.NewSignal() },
		Retry: engine.Retry{MinDelay: 5 * time.Millisecond, MaxDelay: 20 * time.Millisecond, Grace: 100 * time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s, enginetest.Run(t, s)
}

func is(t *testing.T, f *enginetest.Feed, what string, ok func(*enginetest.Feed) bool) {
	t.Helper()
	enginetest.Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		if !ok(f) {
			return fmt.Errorf("%s: method %q, stale %v, warnings %q", what, f.MethodName, f.Err, f.Warnings)
		}
		return nil
	})
}

// Without a user's engine the source is live, and says so.
func TestNobody(t *testing.T) {
	_, f := run(t, filepath.Join(t.TempDir(), "none"))
	is(t, f, "live", func(f *enginetest.Feed) bool {
		return f.Replaced > 0 && f.Err == nil && f.MethodName == "no user's engine"
	})
}

func claimOf(n uint16, address, id string) claim {
	return claim{
		port.Key{Protocol: port.TCP, Address: netip.MustParseAddr(address), Port: n},
		port.Owner{Kind: port.OwnerContainer, ID: id, Name: id},
	}
}

// A claim is for its user's port, at its address or at the wildcard of either family.
func TestClaims(t *testing.T) {
	var tab table
	var changed []port.Slot
	tab.Notify(func(s []port.Slot) { changed = append(changed, s...) })
	any4, lo := claimOf(80, "0.0.0.0", "any"), claimOf(81, "127.0.0.1", "lo")
	tab.change(7, nil, []claim{any4, lo})
	if len(changed) != 2 {
		t.Errorf("%d ports changed, want 2", len(changed))
	}
	for _, c := range []struct {
		user uint32
		n    uint16
		at   string
		want string
	}{
		{7, 80, "0.0.0.0", "any"}, {7, 80, "::", "any"}, {7, 80, "127.0.0.1", ""}, {7, 81, "127.0.0.1", "lo"}, {7, 81, "0.0.0.0", ""},
		{8, 80, "0.0.0.0", ""}, {0, 80, "0.0.0.0", ""}, {7, 82, "0.0.0.0", ""},
	} {
		o, ok := tab.Holder(c.user, claimOf(c.n, c.at, "").key)
		if ok != (c.want != "") || o.Name != c.want {
			t.Errorf("%d at %s of user %d: %+v, want %q", c.n, c.at, c.user, o, c.want)
		}
	}
	tab.change(7, []claim{any4, lo}, nil)
	if len(tab.byUser) > 0 {
		t.Errorf("%v is left", tab.byUser)
	}
}

// Of a container nothing is kept but its name and ports, and no more than some.
func TestBound(t *testing.T) {
	o := engine.Object{ID: "x", Fact: engine.Fact{ID: "x", Path: "/x"}}
	for i := range maxPorts + 1 {
		o.Bindings = append(o.Bindings, port.Binding{
			Key: claimOf(uint16(i+1), "0.0.0.0", "").key, Dial: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:22")},
			Owner: port.Owner{Kind: port.OwnerContainer, ID: "x", Name: strings.Repeat("é", maxName), Labels: map[string]string{"fairlead.expose": "all"}},
		})
	}
	got := bound(o)
	if len(got.Bindings) != maxPorts || len(got.Warnings) != 1 || got.Fact.Path != "" {
		t.Errorf("%d ports, %q, %+v", len(got.Bindings), got.Warnings, got.Fact)
	}
	if b := got.Bindings[0]; b.Dial != nil || b.Owner.Labels != nil || len(b.Owner.Name) > maxName || b.Owner.Name[:2] != "é" {
		t.Errorf("kept %+v", b)
	}

	service := claimOf(80, "0.0.0.0", "")
	got = bound(engine.Object{ID: "service/x", Bindings: []port.Binding{{Key: service.key, Owner: port.Owner{Kind: port.OwnerService, ID: "x", Name: "web"}}}})
	if len(got.Bindings) > 0 {
		t.Errorf("kept of a service: %+v", got.Bindings)
	}
}

// What an engine of a user reports is held until it is withdrawn, also while the engine is
// away; the most that is held is bounded.
func TestView(t *testing.T) {
	var tab table
	said := 0
	v := &view{table: &tab, user: 7, held: port.Held{Engine: "docker", User: "alice"}, said: func() { said++ }}
	binding := func(i int) port.Binding {
		c := claimOf(uint16(i+1), "0.0.0.0", "w")
		return port.Binding{Key: c.key, Owner: c.owner, Origin: port.Origin{ID: strconv.Itoa(i)}}
	}
	named := func(n uint16) bool { _, ok := tab.Holder(7, claimOf(n, "0.0.0.0", "").key); return ok }
	v.Replace([]port.Binding{binding(0), binding(1)})
	v.Apply(port.Change{Drop: []port.Origin{{ID: "0"}}, Put: []port.Binding{binding(2)}})
	if named(1) || !named(2) || !named(3) {
		t.Errorf("named: %v %v %v", named(1), named(2), named(3))
	}
	v.Stale(errors.New("gone"))
	if st, present := v.shown(); !present || st.stale != "gone" || !named(2) {
		t.Errorf("%+v, present %v, named %v; want it stale and kept", st, present, named(2))
	}
	o, _ := tab.Holder(7, binding(1).Key)
	if o.Held == nil || *o.Held != (port.Held{Engine: "docker", User: "alice"}) {
		t.Errorf("held %+v", o.Held)
	}
	var many []port.Binding
	for i := range maxAllPorts + 10 {
		many = append(many, binding(i))
	}
	v.Replace(many)
	v.Apply(port.Change{Put: []port.Binding{binding(maxAllPorts + 20)}})
	if len(v.claims) != maxAllPorts {
		t.Errorf("%d claims are kept, want %d", len(v.claims), maxAllPorts)
	}
	v.end()
	if len(tab.byUser) > 0 || said == 0 {
		t.Errorf("%d users are left, said %d times", len(tab.byUser), said)
	}
}

// Directories that are no user's are passed over, and so is root's.
func TestUsers(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"0", "7", "1000", "01", "x", "-1", "4294967296"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	s, err := New(Options{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for euid, want := range map[uint32][]uint32{1000: {1000}, 8: nil, 0: {7, 1000}} {
		if s.euid = euid; !slices.Equal(s.users(), want) {
			t.Errorf("users are %v for %d, want %v", s.users(), euid, want)
		}
	}
	s.euid = 0
	for i := range maxUsers {
		if err := os.Mkdir(filepath.Join(dir, strconv.Itoa(2000+i)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if got := s.users(); len(got) != maxUsers || !s.full {
		t.Errorf("%d users, full %v", len(got), s.full)
	}
}
