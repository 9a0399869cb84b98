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
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/test/kit/netns"
)

// What a client asks the server for by its first byte.
const (
	askSink   = 'S' // takes all, then answers with how much it was: 8 bytes
	askSource = 'R' // 8 bytes say how much to send
	askEcho   = 'E'
)

const (
	bulkBuffer = 256 << 10
	smallSize  = 64 // bytes of a small message
)

// flowServer is the server in the guest.
type flowServer struct {
	tcp net.Listener
	udp net.PacketConn
	wg  sync.WaitGroup
}

func startServer(in *netns.Space) (*flowServer, error) {
	s := &flowServer{}
	var err error
	if s.tcp, err = in.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", serverTCP)); err != nil {
		return nil, err
	}
	if s.udp, err = in.ListenPacket("udp4", fmt.Sprintf("0.0.0.0:%d", serverUDP)); err != nil {
		return nil, errors.Join(err, s.tcp.Close())
	}
	s.wg.Go(func() {
		for {
			c, err := s.tcp.Accept()
			if err != nil {
				return
			}
			s.wg.Go(func() { serveTCP(c) })
		}
	})
	s.wg.Go(func() {
		b := make([]byte, 2048)
		for {
			n, from, err := s.udp.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = s.udp.WriteTo(b[:n], from)
			}
		}
	})
	return s, nil
}

func (s *flowServer) close() {
	_, _ = s.tcp.Close(), s.udp.Close()
	s.wg.Wait()
}

func serveTCP(c net.Conn) {
	defer func() { _ = c.Close() }()
	var ask [1]byte
	if _, err := io.ReadFull(c, ask[:]); err != nil {
		return
	}
	var n [8]byte
	switch ask[0] {
	case askEcho:
		b := make([]byte, 4<<10)
		_, _ = io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{c}, b)
	case askSink:
		b := make([]byte, bulkBuffer)
		sum, _ := io.CopyBuffer(io.Discard, struct{ io.Reader }{c}, b)
		binary.BigEndian.PutUint64(n[:], uint64(sum))
		_, _ = c.Write(n[:])
	case askSource:
		if _, err := io.ReadFull(c, n[:]); err != nil {
			return
		}
		b := make([]byte, bulkBuffer)
		for rest := binary.BigEndian.Uint64(n[:]); rest > 0; {
			w, err := c.Write(b[:min(rest, uint64(len(b)))])
			if err != nil {
				return
			}
			rest -= uint64(w)
		}
	}
}

// throughput moves bytes on several flows for about d.
func throughput(ctx context.Context, w *way, d time.Duration, n int, toClient bool) (flowSample, error) {
	var sum atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, n)
	conns := make([]net.Conn, n)
	for i := range conns {
		c, err := w.from.Dial("tcp4", w.tcp.String())
		if err != nil {
			return flowSample{}, err
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(d + w.patience(30*time.Second)))
		conns[i] = c
	}
	used, begin := w.cpu(), time.Now()
	for i, c := range conns {
		wg.Go(func() {
			move := push
			if toClient {
				move = pull
			}
			moved, err := move(ctx, c, begin.Add(d))
			sum.Add(moved)
			errs[i] = err
		})
	}
	wg.Wait()
	took, used := time.Since(begin), w.cpu()-used
	bytes := float64(sum.Load())
	return flowSample{value: bytes / took.Seconds(), cpu: time.Duration(float64(used) / (bytes / 1e6))}, errors.Join(errs...)
}

// push sends until the end, and hears how much has arrived.
func push(ctx context.Context, c net.Conn, end time.Time) (int64, error) {
	b := make([]byte, bulkBuffer)
	if _, err := c.Write([]byte{askSink}); err != nil {
		return 0, err
	}
	sent := int64(0)
	for time.Now().Before(end) && ctx.Err() == nil {
		n, err := c.Write(b)
		sent += int64(n)
		if err != nil {
			return 0, err
		}
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return 0, err
	}
	var n [8]byte
	if _, err := io.ReadFull(c, n[:]); err != nil {
		return 0, fmt.Errorf("after %d bytes: %w", sent, err)
	}
	if got := int64(binary.BigEndian.Uint64(n[:])); got != sent {
		return 0, fmt.Errorf("%d bytes arrived of %d", got, sent)
	}
	return sent, nil
}

// pull receives until the end.
func pull(ctx context.Context, c net.Conn, end time.Time) (int64, error) {
	ask := binary.BigEndian.AppendUint64([]byte{askSource}, 1<<62)
	if _, err := c.Write(ask); err != nil {
		return 0, err
	}
	b := make([]byte, bulkBuffer)
	got := int64(0)
	for time.Now().Before(end) && ctx.Err() == nil {
		n, err := c.Read(b)
		got += int64(n)
		if err != nil {
			return 0, err
		}
	}
	return got, c.Close()
}

// roundTrips sends a small message there and back, one at a time.
func roundTrips(ctx context.Context, w *way, d time.Duration) (flowSample, error) {
	c, err := w.from.Dial("tcp4", w.tcp.String())
	if err != nil {
		return flowSample{}, err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(d + w.patience(10*time.Second)))
	if _, err := c.Write([]byte{askEcho}); err != nil {
		return flowSample{}, err
	}
	b := make([]byte, smallSize)
	var took []time.Duration
	used := w.cpu()
	for end := time.Now().Add(d); time.Now().Before(end) && ctx.Err() == nil; {
		begin := time.Now()
		if _, err := c.Write(b); err != nil {
			return flowSample{}, err
		}
		if _, err := io.ReadFull(c, b); err != nil {
			return flowSample{}, err
		}
		took = append(took, time.Since(begin))
	}
	return summary(took, d, w.cpu()-used, 0), nil
}

// summary makes a sample of how long each of many took.
func summary(took []time.Duration, d, used time.Duration, lost float64) flowSample {
	if len(took) == 0 {
		return flowSample{lost: lost}
	}
	slices.Sort(took)
	return flowSample{
		value: float64(len(took)) / d.Seconds(), p50: took[len(took)/2], p99: took[len(took)*99/100],
		cpu: used * 1000 / time.Duration(len(took)), lost: lost,
	}
}

// connections opens connections at a rate, whatever becomes of those before.
func connections(ctx context.Context, w *way, d time.Duration, rate int) (flowSample, error) {
	const workers = 50 // one in the way of none: each has its time to finish
	var mu sync.Mutex
	var took []time.Duration
	var failed int
	var last error
	used, begin := w.cpu(), time.Now()
	each := time.Second * workers / time.Duration(rate)
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			_ = w.from.Do(func() error {
				for next := begin.Add(each * time.Duration(i) / workers); next.Before(begin.Add(d)) && ctx.Err() == nil; next = next.Add(each) {
					time.Sleep(time.Until(next))
					err := oneConnection(w)
					mu.Lock()
					if err != nil {
						failed, last = failed+1, err
					} else {
						took = append(took, time.Since(next)) // from when it was due
					}
					mu.Unlock()
				}
				return nil
			})
		})
	}
	wg.Wait()
	if len(took) == 0 {
		return flowSample{}, fmt.Errorf("every connection failed: %w", last)
	}
	return summary(took, time.Since(begin), w.cpu()-used, float64(failed)/float64(failed+len(took))), nil
}

func oneConnection(w *way) error {
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

// echoes has clients send one datagram after another.
func echoes(ctx context.Context, w *way, d time.Duration) (flowSample, error) {
	const clients = 16
	var mu sync.Mutex
	var took []time.Duration
	var lost, sent int
	all := make([]echoer, clients)
	for i := range all {
		c, err := w.from.Dial("udp4", w.udp.String())
		if err != nil {
			return flowSample{}, err
		}
		defer func() { _ = c.Close() }()
		all[i].conn = c
	}
	// What counts is the datagrams of clients that have their flows.
	errs := make([]error, clients)
	var first sync.WaitGroup
	for i := range all {
		first.Go(func() { _, errs[i] = all[i].echo(0, w.patience(2*time.Second)) })
	}
	first.Wait()
	used, begin := w.cpu(), time.Now()
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() {
			var mine []time.Duration
			missed, n := 0, uint64(0)
			for time.Since(begin) < d && ctx.Err() == nil {
				n++
				if t, err := all[i].echo(n, w.patience(200*time.Millisecond)); err != nil {
					missed++
				} else {
					mine = append(mine, t)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			took, lost, sent = append(took, mine...), lost+missed, sent+int(n)
		})
	}
	wg.Wait()
	if len(took) == 0 {
		return flowSample{}, fmt.Errorf("no datagram came back: %w", errors.Join(errs...))
	}
	return summary(took, time.Since(begin), w.cpu()-used, float64(lost)/float64(max(sent, 1))), nil
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
