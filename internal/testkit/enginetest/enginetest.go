// SPDX-License-Identifier: Apache-2.0

// Package enginetest is what the tests of the engine sources share: a feed that
// records, and waiting for what it records.
package enginetest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// Serve runs serve in the background. The function that it returns calls stop
// and waits for serve: a server that is stopped before it has begun to serve
// closes its listener late, and removes the socket of the next server with it.
func Serve(serve func() error, stop func()) func() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = serve() // it always ends with an error
	}()
	return func() {
		stop()
		<-done
	}
}

// Feed records what a source reports. Its lock guards its fields.
type Feed struct {
	sync.Mutex
	Set        map[string]port.Binding // by origin id
	Moved      []string                // keys that came ("+") or went ("-"), in order
	Replaced   int                     // calls of Replace
	Applied    int                     // calls of Apply
	Stales     int                     // calls of Stale
	Err        error                   // why the source is stale, nil if it is not
	Warnings   []string
	MethodName string
	Lack       port.Lack
}

var _ registry.Feed = (*Feed)(nil)

// Replace implements registry.Feed.
func (f *Feed) Replace(set []port.Binding) {
	f.Lock()
	defer f.Unlock()
	old := f.Set
	f.Set = make(map[string]port.Binding, len(set))
	for _, b := range set {
		if _, ok := old[b.Origin.ID]; !ok {
			f.Moved = append(f.Moved, "+"+b.Key.String())
		}
		f.Set[b.Origin.ID] = b
	}
	for id, b := range old {
		if _, ok := f.Set[id]; !ok {
			f.Moved = append(f.Moved, "-"+b.Key.String())
		}
	}
	f.Err = nil
	f.Replaced++
}

// Apply implements registry.Feed.
func (f *Feed) Apply(c port.Change) {
	f.Lock()
	defer f.Unlock()
	f.Applied++
	if f.Set == nil {
		f.Set = make(map[string]port.Binding)
	}
	for _, o := range c.Drop {
		f.Moved = append(f.Moved, "-"+f.Set[o.ID].Key.String())
		delete(f.Set, o.ID)
	}
	for _, b := range c.Put {
		if _, ok := f.Set[b.Origin.ID]; !ok {
			f.Moved = append(f.Moved, "+"+b.Key.String())
		}
		f.Set[b.Origin.ID] = b
	}
}

// Stale implements registry.Feed.
func (f *Feed) Stale(err error) {
	f.Lock()
	defer f.Unlock()
	f.Err = err
	f.Stales++
}

// Method implements registry.Feed.
func (f *Feed) Method(name string) { f.Lock(); defer f.Unlock(); f.MethodName = name }

// Lacks implements registry.Feed.
func (f *Feed) Lacks(lack port.Lack, why string) {
	f.Lock()
	defer f.Unlock()
	f.Lack, f.MethodName = lack, why
}

// Warn implements registry.Feed.
func (f *Feed) Warn(texts []string) { f.Lock(); defer f.Unlock(); f.Warnings = texts }

// Keys returns the keys of the set, sorted.
func (f *Feed) Keys() []string {
	f.Lock()
	defer f.Unlock()
	keys := []string{}
	for _, b := range f.Set {
		keys = append(keys, b.Key.String())
	}
	slices.Sort(keys)
	return keys
}

// Removed returns the keys that went, in order.
func (f *Feed) Removed() (keys []string) {
	f.Lock()
	defer f.Unlock()
	for _, k := range f.Moved {
		if k, gone := strings.CutPrefix(k, "-"); gone {
			keys = append(keys, k)
		}
	}
	return keys
}

// Sets returns how many complete sets were reported.
func (f *Feed) Sets() int { f.Lock(); defer f.Unlock(); return f.Replaced }

// Find returns the binding with a key, or the zero binding.
func (f *Feed) Find(key string) port.Binding {
	f.Lock()
	defer f.Unlock()
	for _, b := range f.Set {
		if b.Key.String() == key {
			return b
		}
	}
	return port.Binding{}
}

// Source is what Run runs.
type Source interface {
	Run(ctx context.Context, feed registry.Feed) error
}

// Run runs a source until the test ends, and returns its feed.
func Run(t *testing.T, s Source) *Feed {
	t.Helper()
	f := new(Feed)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, f) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run = %v, want the context's error", err)
		}
	})
	return f
}

// Eventually waits until cond returns nil.
func Eventually(t *testing.T, cond func() error) {
	t.Helper()
	wait.Until(t, "the source reports it", cond)
}

// ErrIf returns an error if bad.
func ErrIf(bad bool) error {
	if bad {
		return errors.New("not yet")
	}
	return nil
}

// WantKeys waits until a complete set was reported and has these keys.
func WantKeys(t *testing.T, f *Feed, keys ...string) {
	t.Helper()
	slices.Sort(keys)
	Eventually(t, func() error {
		got := f.Keys()
		f.Lock()
		defer f.Unlock()
		if f.Replaced == 0 || !slices.Equal(got, keys) {
			return fmt.Errorf("the set is %q, want %q (stale: %s)", got, keys, fmt.Sprint(f.Err))
		}
		return nil
	})
}

// WantStale waits until the source is stale for a reason with text in it.
func WantStale(t *testing.T, f *Feed, text string) {
	t.Helper()
	Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		if f.Err == nil || !strings.Contains(f.Err.Error(), text) {
			return fmt.Errorf("stale is %s, want %q in it", fmt.Sprint(f.Err), text)
		}
		return nil
	})
}

// WantWarning waits until the source warns with text.
func WantWarning(t *testing.T, f *Feed, text string) {
	t.Helper()
	Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		if !slices.ContainsFunc(f.Warnings, func(w string) bool { return strings.Contains(w, text) }) {
			return fmt.Errorf("warnings are %q, want %q among them", f.Warnings, text)
		}
		return nil
	})
}

// WantNoneRemoved checks that no key ever went.
func WantNoneRemoved(t *testing.T, f *Feed) {
	t.Helper()
	if gone := f.Removed(); len(gone) > 0 {
		t.Errorf("removed %q, want nothing", gone)
	}
}

// Restarts restarts an engine a hundred times. No goroutine and no memory may be
// left behind. restart returns when the source follows the engine again.
func Restarts(t *testing.T, restart func()) {
	t.Helper()
	const warmUp, spare = 10, 10
	var before, after runtime.MemStats
	goroutines := 0
	for i := range 100 + warmUp {
		if i == warmUp {
			runtime.GC()
			runtime.ReadMemStats(&before)
		}
		if i <= warmUp { // the most, as the source may be between two connections
			goroutines = max(goroutines, runtime.NumGoroutine())
		}
		restart()
	}
	Eventually(t, func() error {
		runtime.GC()
		runtime.ReadMemStats(&after)
		if n := runtime.NumGoroutine(); n > goroutines+spare {
			return fmt.Errorf("%d goroutines, had %d", n, goroutines)
		}
		if after.HeapInuse > before.HeapInuse+3<<20 {
			return fmt.Errorf("heap grew from %d to %d bytes", before.HeapInuse, after.HeapInuse)
		}
		return nil
	})
}

// ExpiredCertificate returns a self-signed certificate that has expired, and its
// key, both as PEM.
func ExpiredCertificate(t *testing.T) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "me"},
		NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(-time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
}
