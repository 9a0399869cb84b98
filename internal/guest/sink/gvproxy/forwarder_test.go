// SPDX-License-Identifier: Apache-2.0

package gvproxy

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/ports"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// forwarder imitates the API of gvisor-tap-vsock, without opening ports; test/e2e runs
// the real one.
type forwarder struct {
	t       *testing.T
	address string

	mu      sync.Mutex
	server  *http.Server
	done    chan struct{}
	entries map[string]forward // by protocol/local
	calls   []string           // what changed, or was to
	lists   int                // how often all was listed

	refuse map[string]string // protocol/local: the error of its listen
	answer func(w http.ResponseWriter, r *http.Request) bool
	after  func(path string) // after a call was answered
}

func newForwarder(t *testing.T) *forwarder {
	t.Helper()
	// It is restarted at the same address.
	f := &forwarder{t: t, address: fmt.Sprintf("127.0.0.1:%d", ports.Free(t)), refuse: make(map[string]string)}
	f.start()
	t.Cleanup(f.stop)
	return f
}

// start starts it without any entry.
func (f *forwarder) start() {
	l, err := net.Listen("tcp", f.address)
	if err != nil {
		f.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/services/forwarder/", f.handle)
	s := &http.Server{Handler: mux}
	done := make(chan struct{})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.server, f.done, f.entries = s, done, make(map[string]forward)
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
}

// stop ends it as the end of its process does.
func (f *forwarder) stop() {
	f.mu.Lock()
	s, done := f.server, f.done
	f.mu.Unlock()
	_ = s.Close()
	<-done
}

func (f *forwarder) url() string { return "http://" + f.address + "?guest=192.168.127.2" }

func (f *forwarder) handle(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	answer, after := f.answer, f.after
	f.mu.Unlock()
	if answer != nil && answer(w, r) {
		return
	}
	_, path, _ := strings.Cut(r.URL.Path, "/services/forwarder/")
	f.serve(w, r, path)
	if after != nil {
		after(path)
	}
}

func (f *forwarder) serve(w http.ResponseWriter, r *http.Request, path string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if path == "all" {
		all := []forward{}
		for _, e := range f.entries {
			all = append(all, e)
		}
		_ = json.NewEncoder(w).Encode(all)
		f.lists++
		return
	}
	var e forward
	if err := json.NewDecoder(r.Body).Decode(&e); err != nil || r.Method != http.MethodPost {
		f.t.Errorf("%s %s: %v", r.Method, path, err)
		http.Error(w, "bad", http.StatusBadRequest)
		return
	}
	if e.Protocol == "" {
		f.t.Errorf("%s of %s names no protocol", path, e.Local)
		e.Protocol = "tcp"
	}
	key := e.Protocol + "/" + e.Local
	f.calls = append(f.calls, path+" "+key)
	_, there := f.entries[key]
	switch {
	case path == "expose" && there:
		http.Error(w, "proxy already running", http.StatusInternalServerError)
	case path == "expose" && f.refuse[key] != "":
		http.Error(w, "listen tcp "+e.Local+": "+f.refuse[key], http.StatusInternalServerError)
	case path == "expose":
		f.entries[key] = e
	case path == "unexpose" && !there:
		http.Error(w, "proxy not found", http.StatusInternalServerError)
	case path == "unexpose":
		delete(f.entries, key)
	}
}

// add adds an entry of another program.
func (f *forwarder) add(protocol, local, remote string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.entries[protocol+"/"+local] = forward{local, remote, protocol}
}

func (f *forwarder) set(g func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g()
}

func (f *forwarder) state() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := []string{}
	for k, e := range f.entries {
		all = append(all, k+" to "+e.Remote)
	}
	slices.Sort(all)
	return all
}

func (f *forwarder) changes() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.calls)
}

func (f *forwarder) want(want ...string) {
	f.t.Helper()
	wait.Until(f.t, fmt.Sprintf("the peer has %q", want), func() error {
		if got := f.state(); !slices.Equal(got, want) {
			return fmt.Errorf("it has %q", got)
		}
		return nil
	})
}

// hang does not answer until the client gives up.
func hang(_ http.ResponseWriter, r *http.Request) bool {
	_, _ = io.Copy(io.Discard, r.Body) // only then is the client's end seen
	select {
	case <-r.Context().Done():
	case <-time.After(time.Minute):
	}
	return true
}
