// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// What a client asks the server for by its first byte.
const (
	askSink   = 'S' // the server takes all, then answers with how much it was: 8 bytes
	askSource = 'R' // the server sends until it is closed
	askEcho   = 'E'
)

const (
	bulkBuffer = 256 << 10
	smallSize  = 64 // bytes of a small message
)

// startServer starts the server in the guest.
func startServer(in *netns.Space) (stop func()) {
	tcp := must(in.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", serverTCP)))
	udp := must(in.ListenPacket("udp4", fmt.Sprintf("0.0.0.0:%d", serverUDP)))
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { serveTCP(c) })
		}
	})
	wg.Go(func() {
		b := make([]byte, 2048)
		for {
			n, from, err := udp.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = udp.WriteTo(b[:n], from)
			}
		}
	})
	return func() {
		_, _ = tcp.Close(), udp.Close()
		wg.Wait()
	}
}

func serveTCP(c net.Conn) {
	defer func() { _ = c.Close() }()
	var ask [1]byte
	if _, err := io.ReadFull(c, ask[:]); err != nil {
		return
	}
	b := make([]byte, bulkBuffer)
	switch ask[0] {
	case askEcho:
		_, _ = io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{c}, b[:4<<10])
	case askSink:
		sum, _ := io.CopyBuffer(io.Discard, struct{ io.Reader }{c}, b)
		_, _ = c.Write(binary.BigEndian.AppendUint64(nil, uint64(sum)))
	case askSource:
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}
}

// load puts load on a way for about d.
type load func(ctx context.Context, w *way, m *meter, d time.Duration)

// meter measures a load from begin on.
type meter struct {
	w     *way
	begin time.Time
	used  time.Duration // CPU time of the relays before

	mu   sync.Mutex
	n    float64         // bytes, round trips, connections or datagrams
	each []time.Duration // how long each took, but for bytes
	lost int
}

// start begins to measure, when all is set up.
func (m *meter) start() { m.used, m.begin = m.w.cpu(), time.Now() }

// count counts one, which took d, or failed.
func (m *meter) count(d time.Duration, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.lost++
		return
	}
	m.n++
	m.each = append(m.each, d)
}

// record ends the measurement.
func (m *meter) record(b *bench, of measure) {
	took, cpu := time.Since(m.begin).Seconds(), (m.w.cpu() - m.used).Seconds()
	if m.n == 0 {
		check(fmt.Errorf("%s: nothing arrived", m.w.name))
	}
	extra := func(name string, v float64) { b.extra(of.name, m.w.name, 0, name, v) }
	v := m.n / took
	if n := len(m.each); n > 0 {
		slices.Sort(m.each)
		p50 := m.each[n/2].Seconds()
		extra("p99 µs", 1e6*m.each[n*99/100].Seconds())
		if of.unit == "s" {
			v = p50
		} else {
			extra("p50 µs", 1e6*p50)
			extra("lost %", 100*float64(m.lost)/(m.n+float64(m.lost)))
		}
	}
	b.add(of.name, m.w.name, 0, v)
	switch {
	case m.w.name == wayDirect: // nobody carries the bytes
	case of.unit == "B/s":
		extra("CPU ms for each MB", 1e9*cpu/m.n)
	default:
		extra("CPU µs for each", 1e6*cpu/m.n)
	}
}

// dial connects to the server, for d.
func (w *way) dial(d time.Duration) net.Conn {
	c := must(w.from.Dial("tcp4", w.tcp.String()))
	_ = c.SetDeadline(time.Now().Add(d + w.patience(30*time.Second)))
	return c
}

// throughput moves bytes on several flows.
func throughput(flows int, move func(c net.Conn, end time.Time) int64) load {
	return func(ctx context.Context, w *way, m *meter, d time.Duration) {
		var conns []net.Conn
		for range flows {
			conns = append(conns, w.dial(d))
		}
		m.start()
		together(ctx, conns, func(_ context.Context, c net.Conn) {
			defer func() { _ = c.Close() }()
			moved := move(c, m.begin.Add(d))
			m.mu.Lock()
			defer m.mu.Unlock()
			m.n += float64(moved)
		})
	}
}

// push sends until the end, and receives how much has arrived.
func push(c net.Conn, end time.Time) (sent int64) {
	must(c.Write([]byte{askSink}))
	for b := make([]byte, bulkBuffer); time.Now().Before(end); {
		sent += int64(must(c.Write(b)))
	}
	check(c.(*net.TCPConn).CloseWrite())
	var n [8]byte
	must(io.ReadFull(c, n[:]))
	if got := int64(binary.BigEndian.Uint64(n[:])); got != sent {
		check(fmt.Errorf("%d bytes arrived of %d", got, sent))
	}
	return sent
}

// pull receives until the end.
func pull(c net.Conn, end time.Time) (got int64) {
	must(c.Write([]byte{askSource}))
	for b := make([]byte, bulkBuffer); time.Now().Before(end); {
		got += int64(must(c.Read(b)))
	}
	return got
}

// roundTrips sends a small message there and back, one at a time.
func roundTrips(_ context.Context, w *way, m *meter, d time.Duration) {
	c := w.dial(d)
	defer func() { _ = c.Close() }()
	must(c.Write([]byte{askEcho}))
	m.start()
	for b := make([]byte, smallSize); time.Since(m.begin) < d; {
		begin := time.Now()
		must(c.Write(b))
		must(io.ReadFull(c, b))
		m.count(time.Since(begin), nil)
	}
}

// connections opens connections at a rate, whatever becomes of those before.
func connections(rate int) load {
	const workers = 50 // so many at a time: each has its time to finish
	return func(ctx context.Context, w *way, m *meter, d time.Duration) {
		m.start()
		each := time.Second * workers / time.Duration(rate)
		var starts []time.Time
		for i := range workers {
			starts = append(starts, m.begin.Add(each*time.Duration(i)/workers))
		}
		together(ctx, starts, func(ctx context.Context, next time.Time) {
			inside(w.from, func() {
				for ; next.Before(m.begin.Add(d)); next = next.Add(each) {
					check(schedule.Sleep(ctx, time.Until(next)))
					err := echo(w)
					m.count(time.Since(next), err) // from when it was due
				}
			})
		})
	}
}

// echo makes a connection and sends a small message there and back.
func echo(w *way) error {
	c, err := net.DialTimeout("tcp4", w.tcp.String(), w.patience(2*time.Second))
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(w.patience(2 * time.Second)))
	b := make([]byte, smallSize)
	b[0] = askEcho
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err = io.ReadFull(c, b[1:])
	return err
}

// echoes has 16 clients send one datagram after another.
func echoes(ctx context.Context, w *way, m *meter, d time.Duration) {
	var all []*echoer
	for range 16 {
		e := &echoer{conn: must(w.from.Dial("udp4", w.udp.String()))}
		defer func() { _ = e.conn.Close() }()
		_, _ = e.echo(0, w.patience(2*time.Second)) // to set up the flow is not measured
		all = append(all, e)
	}
	m.start()
	together(ctx, all, func(_ context.Context, e *echoer) {
		for n := uint64(1); time.Since(m.begin) < d; n++ {
			m.count(e.echo(n, w.patience(200*time.Millisecond)))
		}
	})
}

// echoer is a client of UDP.
type echoer struct {
	conn    net.Conn
	out, in [smallSize]byte
}

// echo sends datagram n, waits for it to come back, and returns how long that took.
func (e *echoer) echo(n uint64, patience time.Duration) (time.Duration, error) {
	binary.BigEndian.PutUint64(e.out[:], n)
	at := time.Now()
	_ = e.conn.SetReadDeadline(at.Add(patience))
	if _, err := e.conn.Write(e.out[:]); err != nil {
		return 0, err
	}
	for {
		if _, err := e.conn.Read(e.in[:]); err != nil {
			return 0, err
		}
		if binary.BigEndian.Uint64(e.in[:]) == n {
			return time.Since(at), nil
		}
	}
}
