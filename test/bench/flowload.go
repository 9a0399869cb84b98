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
	"net/netip"
	"sync"
	"time"

	"github.com/aclements/go-moremath/stats"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// What a client asks the server for by its first byte.
const (
	askSink   = 'S' // the server takes all, then answers with how many bytes it was
	askSource = 'R' // the server sends until it is closed
	askEcho   = 'E'
)

const (
	bulkBuffer = 256 << 10
	smallSize  = 64 // bytes of a small message
)

const serverTCP, serverUDP = 7000, 7001

func at(port uint16) netip.AddrPort { return tcpKey(port).AddrPort() }

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
	wg.Go(func() { serveUDP(udp) })
	return func() {
		_, _ = tcp.Close(), udp.Close()
		wg.Wait()
	}
}

func serveTCP(c net.Conn) {
	defer func() { _ = c.Close() }()
	b := make([]byte, bulkBuffer)
	_, err := io.ReadFull(c, b[:1])
	switch b[0] {
	case askEcho:
		_, _ = io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{c}, b[:4<<10])
	case askSink:
		sum, _ := io.CopyBuffer(io.Discard, struct{ io.Reader }{c}, b)
		_, _ = fmt.Fprint(c, sum)
	case askSource:
		for err == nil {
			_, err = c.Write(b)
		}
	}
}

func serveUDP(c net.PacketConn) {
	b := make([]byte, 2048)
	for {
		n, from, err := c.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = c.WriteTo(b[:n], from)
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
	n    float64   // bytes, round trips, connections or datagrams
	each []float64 // seconds that each took, but for bytes
	lost float64
}

// start begins to measure, when all is set up.
func (m *meter) start() { m.used, m.begin = m.w.cpu(), time.Now() }

// count counts one that began then, and is done now or has failed.
func (m *meter) count(began time.Time, err error) {
	took := time.Since(began).Seconds()
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.lost++
		return
	}
	m.n++
	m.each = append(m.each, took)
}

// values ends the measurement and returns it. All but bytes are also timed one by one.
func (m *meter) values(unit string) values {
	took, cpu := time.Since(m.begin).Seconds(), (m.w.cpu() - m.used).Seconds()
	if m.n == 0 {
		check(fmt.Errorf("%s: nothing arrived", m.w.name))
	}
	vs := values{"B/s": m.n / took}
	perUnit := "CPU-sec/GB"
	if unit == "B/s" {
		cpu *= 1e9
	} else {
		each := stats.Sample{Xs: m.each}
		vs = values{"1/s": m.n / took, "p50-sec": each.Quantile(0.5), "p99-sec": each.Quantile(0.99), "lost-%": 100 * m.lost / (m.n + m.lost)}
		perUnit = "CPU-sec"
	}
	if len(m.w.procs) > 0 { // nobody carries the bytes of the direct way
		vs[perUnit] = cpu / m.n
	}
	return vs
}

// dial connects to the server, for d.
func (w *way) dial(d time.Duration) net.Conn {
	c := must(w.from.Dial("tcp4", w.tcp.String()))
	_ = c.SetDeadline(time.Now().Add(d + time.Minute + w.patience))
	return c
}

// throughput moves bytes on several flows.
func throughput(flows int, move func(c net.Conn, end time.Time) int) load {
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
func push(c net.Conn, end time.Time) (sent int) {
	must(c.Write([]byte{askSink}))
	for b := make([]byte, bulkBuffer); time.Now().Before(end); {
		sent += must(c.Write(b))
	}
	check(c.(*net.TCPConn).CloseWrite())
	if got := string(must(io.ReadAll(c))); got != fmt.Sprint(sent) {
		check(fmt.Errorf("%s bytes arrived of %d", got, sent))
	}
	return sent
}

// pull receives until the end.
func pull(c net.Conn, end time.Time) (got int) {
	must(c.Write([]byte{askSource}))
	for b := make([]byte, bulkBuffer); time.Now().Before(end); {
		got += must(c.Read(b))
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
		began := time.Now()
		must(c.Write(b))
		must(io.ReadFull(c, b))
		m.count(began, nil)
	}
}

// connections opens connections at a rate, whatever becomes of those before.
func connections(rate int) load {
	const workers = 50 // so many at a time: each has its time to finish
	each := time.Second * workers / time.Duration(rate)
	return func(ctx context.Context, w *way, m *meter, d time.Duration) {
		m.start()
		var starts []time.Time
		for i := range workers {
			starts = append(starts, m.begin.Add(each*time.Duration(i)/workers))
		}
		together(ctx, starts, func(ctx context.Context, next time.Time) {
			inside(w.from, func() {
				for ; next.Before(m.begin.Add(d)); next = next.Add(each) {
					check(schedule.Sleep(ctx, time.Until(next)))
					m.count(next, echo(w)) // from when it was due
				}
			})
		})
	}
}

// echo makes a connection and sends a small message there and back.
func echo(w *way) error {
	c, err := net.DialTimeout("tcp4", w.tcp.String(), w.patience)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(w.patience))
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
	var conns []net.Conn
	for range 16 {
		c := must(w.from.Dial("udp4", w.udp.String()))
		defer func() { _ = c.Close() }()
		_ = echoDatagram(c, 1, w.patience) // to set up the flow is not measured
		conns = append(conns, c)
	}
	m.start()
	together(ctx, conns, func(_ context.Context, c net.Conn) {
		for n := uint64(2); time.Since(m.begin) < d; n++ {
			began := time.Now()
			m.count(began, echoDatagram(c, n, w.patience/10))
		}
	})
}

// echoDatagram sends datagram n, which is not 0, and waits for it to come back.
func echoDatagram(c net.Conn, n uint64, patience time.Duration) error {
	var out, in [smallSize]byte
	binary.BigEndian.PutUint64(out[:], n)
	_ = c.SetReadDeadline(time.Now().Add(patience))
	_, err := c.Write(out[:])
	for err == nil && in != out {
		_, err = c.Read(in[:])
	}
	return err
}
