// SPDX-License-Identifier: Apache-2.0

package replica

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// row is a row of the tables of these tests.
type row struct {
	Key  string `json:"key"`
	Text string `json:"text"`
}

type rowTable = table.Table[string, row]

func newTable() *rowTable { return table.New[string, row](strings.Compare) }

func kind(name string) Kind[string, row] {
	return Kind[string, row]{
		Name: name, Max: 2000, MaxBytes: 1 << 20, Acked: true,
		Check: func(r row) error {
			if strings.HasPrefix(r.Text, "bad") {
				return wire.Malformed("row %s is bad", r.Key)
			}
			return nil
		},
		CheckKey: func(string) error { return nil },
	}
}

func from(t *rowTable) From[string, row, string, row] {
	return From[string, row, string, row]{
		Table: t, Key: func(k string) string { return k }, Row: func(r row) row { return r },
	}
}

func put(t *rowTable, rows ...row) {
	t.Update(func(tx *table.Tx[string, row]) {
		for _, r := range rows {
			tx.Put(r.Key, r)
		}
	})
}

func remove(t *rowTable, keys ...string) {
	t.Update(func(tx *table.Tx[string, row]) {
		for _, k := range keys {
			tx.Delete(k)
		}
	})
}

func content(t *rowTable) map[string]string {
	m := make(map[string]string)
	for k, r := range t.View().All() {
		m[k] = r.Text
	}
	return m
}

// mirror is what a receiver has.
type mirror struct {
	mu      sync.Mutex
	has     map[string]string
	at      uint64
	partial []string
	omitted int
	steps   int
	whole   int
}

func (m *mirror) apply(s Step[string, row]) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.Whole {
		m.has = make(map[string]string)
		m.whole++
	}
	for _, k := range s.Removed {
		delete(m.has, k)
	}
	for _, r := range s.Put {
		m.has[r.Key] = r.Text
	}
	m.at, m.partial, m.omitted = s.Generation, s.Partial, s.Omitted
	m.steps++
	return nil
}

// left returns how many rows the sender left out.
func (m *mirror) left() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.omitted
}

func (m *mirror) equals(want map[string]string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Equal(m.has, want)
}

// pipe is one end of a connection in memory.
type pipe struct {
	in, out chan []byte
	cut     chan struct{}
	once    *sync.Once
	spoil   func([]byte) []byte // changes what is sent, or drops it (nil)
	full    bool                // Try takes nothing
}

var errCut = errors.New("cut")

// newPipe returns two ends, which hold size messages that nobody reads.
func newPipe(size int) (a, b *pipe) {
	x, y, cut, once := make(chan []byte, size), make(chan []byte, size), make(chan struct{}), new(sync.Once)
	return &pipe{in: x, out: y, cut: cut, once: once}, &pipe{in: y, out: x, cut: cut, once: once}
}

func (p *pipe) close() { p.once.Do(func() { close(p.cut) }) }

func (p *pipe) Read(ctx context.Context) ([]byte, error) {
	select {
	case b := <-p.in:
		return b, nil
	case <-p.cut: // maybe because the other end ended first
		return nil, cmp.Or(ctx.Err(), errCut)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *pipe) body(frame []byte) []byte {
	body := append([]byte(nil), frame[4:]...)
	if int(binary.BigEndian.Uint32(frame)) != len(body) {
		panic("the header is wrong")
	}
	if p.spoil != nil {
		body = p.spoil(body)
	}
	return body
}

func (p *pipe) Write(ctx context.Context, frame []byte) error {
	body := p.body(frame)
	if body == nil {
		return nil
	}
	select {
	case p.out <- body:
		return nil
	case <-p.cut:
		return cmp.Or(ctx.Err(), errCut)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *pipe) Try(frame []byte) []byte {
	if p.full || len(p.out) == cap(p.out) {
		return frame
	}
	body := p.body(frame)
	if body == nil {
		return nil
	}
	select {
	case p.out <- body:
		return nil
	default:
		panic("two writers")
	}
}

// run runs both ends until the test ends, or stop is called. It returns their errors.
func run(t *testing.T, pa, pb *pipe, a, b *Session) (stop func() (error, error)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var ea, eb error
	var wg sync.WaitGroup
	wg.Go(func() { ea = a.Run(ctx); pa.close() })
	wg.Go(func() { eb = b.Run(ctx); pb.close() })
	stop = func() (error, error) {
		cancel()
		wg.Wait()
		return ea, eb
	}
	t.Cleanup(func() { _, _ = stop() })
	return stop
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 20_000 {
		if f() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal(what)
}
