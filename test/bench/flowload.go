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

	"golang.org/x/sync/errgroup"

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
func startServer(in *netns.Space) (stop func(), err error) {
	tcp, err := in.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", serverTCP))
	if err != nil {
		return nil, err
	}
	udp, err := in.ListenPacket("udp4", fmt.Sprintf("0.0.0.0:%d", serverUDP))
	if err != nil {
		return nil, errors.Join(err, tcp.Close())
	}
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
	}, nil
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
type load func(ctx context.Context, w *way, d time.Duration) (flowSample, error)

// flowSample is what a load measured.
type flowSample struct {
	n        float64 // bytes, round trips, connections or datagrams
	took     time.Duration
	p50, p99 time.Duration // of each, but for bytes
	cpu      time.Duration // of the relays
	lost     float64       // share
}

// meter measures a load from begin on.
type meter struct {
	w     *way
	begin time.Time
	used  time.Duration

	mu   sync.Mutex
	n    float64
	each []time.Duration
	lost int
}

func (w *way) meter() *meter { return &meter{w: w, used: w.cpu(), begin: time.Now()} }

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

func (m *meter) sample(err error) (flowSample, error) {
	s := flowSample{n: m.n, took: time.Since(m.begin), cpu: m.w.cpu() - m.used, lost: float64(m.lost) / (m.n + float64(m.lost))}
	if n := len(m.each); n > 0 {
		slices.Sort(m.each)
		s.p50, s.p99 = m.each[n/2], m.each[n*99/100]
	}
	if err == nil && m.n == 0 {
		err = errors.New("nothing arrived")
	}
	return s, err
}

// throughput moves bytes on several flows.
func throughput(flows int, move func(c net.Conn, end time.Time) (int64, error)) load {
	return func(_ context.Context, w *way, d time.Duration) (flowSample, error) {
		conns := make([]net.Conn, flows)
		for i := range conns {
			c, err := w.from.Dial("tcp4", w.tcp.String())
			if err != nil {
				return flowSample{}, err
			}
			defer func() { _ = c.Close() }()
			_ = c.SetDeadline(time.Now().Add(d + w.patience(30*time.Second)))
			conns[i] = c
		}
		m := w.meter()
		var group errgroup.Group
		for _, c := range conns {
			group.Go(func() error {
				moved, err := move(c, m.begin.Add(d))
				m.mu.Lock()
				defer m.mu.Unlock()
				m.n += float64(moved)
				return err
			})
		}
		return m.sample(group.Wait())
	}
}

// push sends until the end, and receives how much has arrived.
func push(c net.Conn, end time.Time) (sent int64, err error) {
	if _, err := c.Write([]byte{askSink}); err != nil {
		return 0, err
	}
	for b := make([]byte, bulkBuffer); time.Now().Before(end); {
		n, err := c.Write(b)
		if err != nil {
			return 0, err
		}
		sent += int64(n)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return 0, err
	}
	var n [8]byte
	if _, err := io.ReadFull(c, n[:]); err != nil {
		return 0, err
	}
	if got := int64(binary.BigEndian.Uint64(n[:])); got != sent {
		return 0, fmt.Errorf("%d bytes arrived of %d", got, sent)
	}
	return sent, nil
}

// pull receives until the end.
func pull(c net.Conn, end time.Time) (got int64, err error) {
	if _, err := c.Write([]byte{askSource}); err != nil {
		return 0, err
	}
	for b := make([]byte, bulkBuffer); time.Now().Before(end); {
		n, err := c.Read(b)
		if err != nil {
			return 0, err
		}
		got += int64(n)
	}
	return got, c.Close()
}

// roundTrips sends a small message there and back, one at a time.
func roundTrips(_ context.Context, w *way, d time.Duration) (flowSample, error) {
	c, err := w.from.Dial("tcp4", w.tcp.String())
	if err != nil {
		return flowSample{}, err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(d + w.patience(10*time.Second)))
	if _, err := c.Write([]byte{askEcho}); err != nil {
		return flowSample{}, err
	}
	m := w.meter()
	for b := make([]byte, smallSize); time.Since(m.begin) < d; {
		begin := time.Now()
		if _, err := c.Write(b); err != nil {
			return flowSample{}, err
		}
		if _, err := io.ReadFull(c, b); err != nil {
			return flowSample{}, err
		}
		m.count(time.Since(begin), nil)
	}
	return m.sample(nil)
}

// connections opens connections at a rate, whatever becomes of those before.
func connections(rate int) load {
	const workers = 50 // so many at a time: each has its time to finish
	return func(ctx context.Context, w *way, d time.Duration) (flowSample, error) {
		m := w.meter()
		each := time.Second * workers / time.Duration(rate)
		var group errgroup.Group
		for i := range workers {
			group.Go(func() error {
				return w.from.Do(func() error {
					for next := m.begin.Add(each * time.Duration(i) / workers); next.Before(m.begin.Add(d)) && ctx.Err() == nil; next = next.Add(each) {
						time.Sleep(time.Until(next))
						err := echo(w)
						m.count(time.Since(next), err) // from when it was due
					}
					return nil
				})
			})
		}
		return m.sample(group.Wait())
	}
}

// oneConnection is echo in the namespace of the client.
func oneConnection(w *way) error { return w.from.Do(func() error { return echo(w) }) }

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
func echoes(_ context.Context, w *way, d time.Duration) (flowSample, error) {
	all := make([]*echoer, 16)
	for i := range all {
		c, err := w.from.Dial("udp4", w.udp.String())
		if err != nil {
			return flowSample{}, err
		}
		defer func() { _ = c.Close() }()
		all[i] = &echoer{conn: c}
		_, _ = all[i].echo(0, w.patience(2*time.Second)) // to set up the flow is not measured
	}
	m := w.meter()
	var wg sync.WaitGroup
	for _, e := range all {
		wg.Go(func() {
			for n := uint64(1); time.Since(m.begin) < d; n++ {
				m.count(e.echo(n, w.patience(200*time.Millisecond)))
			}
		})
	}
	wg.Wait()
	return m.sample(nil)
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
