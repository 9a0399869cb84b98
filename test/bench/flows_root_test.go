// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/kit/program"
)

const (
	serverTCP, serverUDP, splicePort = 7000, 7001, 7100
	bulkBuffer                       = 256 << 10
	smallSize                        = 64 // bytes of a small message
	patience                         = 2 * time.Second
)

// What a client asks the server for by its first byte.
const (
	askSink   = 'S' // the server takes all, then answers with how many bytes it was
	askSource = 'R' // the server sends until it is closed
	askEcho   = 'E'
)

// way is a way from a client to the server.
type way struct {
	from  *netns.Space
	port  int                // of TCP
	procs []*program.Process // that carry the bytes
}

func (w *way) cpu(b *testing.B) (sum time.Duration) {
	for _, p := range w.procs {
		sum += used(b, p).CPU
	}
	return sum
}

func (w *way) dial(network string, port int) (net.Conn, error) {
	return w.from.Dial(network, fmt.Sprint("127.0.0.1:", port))
}

// ways starts a server in a guest, and the ways to it: none (the client is in the guest), two relays
// that splice with a unix socket between, and the link.
func ways(b *testing.B) (direct, splice, link *way) {
	g := newGuest(b)
	tcp := must(g.space.Listen("tcp4", fmt.Sprint("0.0.0.0:", serverTCP)))(b)
	udp := must(g.space.ListenPacket("udp4", fmt.Sprint("0.0.0.0:", serverUDP)))(b)
	b.Cleanup(func() { _, _ = tcp.Close(), udp.Close() })
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
	go echo.ServePackets(udp)
	g.startAgent()
	g.startHost()
	direct = &way{from: g.space, port: serverTCP}
	splice = &way{from: g.outside, port: splicePort, procs: []*program.Process{
		g.become(g.space, fmt.Sprint("relay unix ", filepath.Join(g.dir, "splice"), " tcp 127.0.0.1:", serverTCP)),
		g.become(g.outside, fmt.Sprint("relay tcp 127.0.0.1:", splicePort, " unix ", filepath.Join(g.dir, "splice"))),
	}}
	link = &way{from: g.outside, port: serverTCP, procs: []*program.Process{g.agent, g.host}}
	for _, w := range []*way{direct, splice, link} {
		eventually(b, 20*time.Millisecond, func() error { return w.from.Do(w.echo) })
	}
	return direct, splice, link
}

// relay is a program that carries connections: spec is network and address to listen at, and to dial.
func relay(spec []string) error {
	// With them it could have more in pipes than a user may, as fairlead cannot.
	if err := privilege.Limit(0); err != nil {
		return err
	}
	l, err := net.Listen(spec[0], spec[1])
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			d, err := net.Dial(spec[2], spec[3])
			if err != nil {
				forward.Reset(c)
				return
			}
			_ = forward.Splice(context.Background(), c, d, nil)
		}()
	}
}

func serve(c net.Conn) {
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

// BenchmarkTCP measures the bytes a second through the link beside the splice, in turns of 4 s, as
// a flow becomes faster in its first second.
func BenchmarkTCP(b *testing.B) {
	_, splice, link := ways(b)
	for _, way := range []struct {
		name string
		move func(c net.Conn, end time.Time) (int64, error)
	}{{"to=guest", push}, {"to=host", pull}} {
		for _, flows := range []int{1, 64} {
			b.Run(fmt.Sprintf("%s/flows=%d", way.name, flows), func(b *testing.B) {
				s, l := splice.throughput(b, flows, way.move), link.throughput(b, flows, way.move)
				metrics(b, map[string]float64{"splice-B/s": s, "B/s": l, "link/splice": l / s})
			})
		}
	}
}

func (w *way) throughput(b *testing.B, flows int, move func(c net.Conn, end time.Time) (int64, error)) float64 {
	var conns []net.Conn
	for range flows {
		c := must(w.dial("tcp4", w.port))(b)
		defer func() { _ = c.Close() }()
		conns = append(conns, c)
	}
	var moved atomic.Int64
	var group errgroup.Group
	began := time.Now()
	for _, c := range conns {
		group.Go(func() error {
			n, err := move(c, began.Add(of(4*time.Second, 100*time.Millisecond)))
			moved.Add(n)
			return err
		})
	}
	check(b, group.Wait())
	return float64(moved.Load()) / time.Since(began).Seconds()
}

// push sends until the end, and receives how much has arrived.
func push(c net.Conn, end time.Time) (sent int64, err error) {
	_, err = c.Write([]byte{askSink})
	for b := make([]byte, bulkBuffer); err == nil && time.Now().Before(end); {
		var n int
		n, err = c.Write(b)
		sent += int64(n)
	}
	if err != nil {
		return sent, err
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return sent, err
	}
	got, err := io.ReadAll(c)
	if err == nil && string(got) != fmt.Sprint(sent) {
		err = fmt.Errorf("%s bytes arrived of %d", got, sent)
	}
	return sent, err
}

// pull receives until the end.
func pull(c net.Conn, end time.Time) (got int64, err error) {
	_, err = c.Write([]byte{askSource})
	for b := make([]byte, bulkBuffer); err == nil && time.Now().Before(end); {
		var n int
		n, err = c.Read(b)
		got += int64(n)
	}
	return got, err
}

// BenchmarkConnections opens 1,000 connections a second, whatever becomes of those before, and
// sends a small message there and back on each.
func BenchmarkConnections(b *testing.B) {
	_, splice, link := ways(b)
	_, price := splice.connections(b)
	done, cpu := link.connections(b)
	metrics(b, map[string]float64{"done/s": done, "CPU-sec/connection": cpu, "splice-CPU-sec/connection": price, "CPU/splice": cpu / price})
}

// connections returns how many were done a second, and the CPU time of each.
func (w *way) connections(b *testing.B) (done, cpu float64) {
	const workers = 50 // so many at a time: each has its time to finish
	const each = time.Second * workers / 1000
	lasts := of(3*time.Second, 200*time.Millisecond)
	var n atomic.Int64
	var group errgroup.Group
	before, began := w.cpu(b), time.Now()
	for i := range workers {
		group.Go(func() error {
			return w.from.Do(func() error {
				for next := began.Add(each * time.Duration(i) / workers); next.Before(began.Add(lasts)); next = next.Add(each) {
					time.Sleep(time.Until(next))
					if w.echo() == nil {
						n.Add(1)
					}
				}
				return nil
			})
		})
	}
	check(b, group.Wait())
	return float64(n.Load()) / max(lasts, time.Since(began)).Seconds(), (w.cpu(b) - before).Seconds() / float64(n.Load())
}

// echo makes a connection from this thread's namespace, and sends a small message there and back.
func (w *way) echo() error {
	c, err := net.DialTimeout("tcp4", fmt.Sprint("127.0.0.1:", w.port), patience)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(patience))
	message := make([]byte, smallSize)
	message[0] = askEcho
	if _, err := c.Write(message); err != nil {
		return err
	}
	_, err = io.ReadFull(c, message[1:])
	return err
}

// BenchmarkUDP has 16 clients send one datagram after another, through the link and without it.
func BenchmarkUDP(b *testing.B) {
	direct, _, link := ways(b)
	d, l := direct.echoes(b), link.echoes(b)
	metrics(b, map[string]float64{"echoes/s": l, "direct-echoes/s": d, "link/direct": l / d})
}

func (w *way) echoes(b *testing.B) float64 {
	var n atomic.Int64
	var group errgroup.Group
	lasts := of(3*time.Second, 100*time.Millisecond)
	var conns []net.Conn
	for range 16 {
		c := must(w.dial("udp4", serverUDP))(b)
		defer func() { _ = c.Close() }()
		eventually(b, time.Millisecond, func() error { return datagram(c, 1) }) // to set up the flow is not measured
		conns = append(conns, c)
	}
	began := time.Now()
	for _, c := range conns {
		group.Go(func() error {
			for i := uint64(2); time.Since(began) < lasts; i++ {
				if datagram(c, i) == nil {
					n.Add(1)
				}
			}
			return nil
		})
	}
	check(b, group.Wait())
	return float64(n.Load()) / time.Since(began).Seconds()
}

// datagram sends datagram n, which is not 0, and waits for it to come back.
func datagram(c net.Conn, n uint64) error {
	var out, in [smallSize]byte
	binary.BigEndian.PutUint64(out[:], n)
	_ = c.SetReadDeadline(time.Now().Add(patience / 10))
	_, err := c.Write(out[:])
	for err == nil && in != out {
		_, err = c.Read(in[:])
	}
	return err
}
