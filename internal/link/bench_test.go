// SPDX-License-Identifier: Apache-2.0

package link

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
)

// BenchmarkThroughput moves 64 KiB per operation from host to agent.
func BenchmarkThroughput(b *testing.B) {
	b.Run("link", func(b *testing.B) {
		agent, host := sessions(b)
		g, h := flow(b, agent, host)
		throughput(b, h, g)
	})
	b.Run("plain", func(b *testing.B) {
		x, y := sockets(b)
		defer func() { _, _ = x.Close(), y.Close() }()
		throughput(b, x, y)
	})
}

func throughput(b *testing.B, from io.Writer, to io.Reader) {
	buf := make([]byte, 64<<10)
	b.SetBytes(int64(len(buf)))
	done := make(chan error, 1)
	b.ResetTimer()
	go func() {
		_, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{io.LimitReader(to, int64(b.N)*int64(len(buf)))}, make([]byte, 64<<10))
		done <- err
	}()
	for range b.N {
		if _, err := from.Write(buf); err != nil {
			b.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}

// BenchmarkRoundTrip sends 300 bytes there and back: a small control message
// and its acknowledgement.
func BenchmarkRoundTrip(b *testing.B) {
	run := func(b *testing.B, near, far net.Conn) {
		msg := make([]byte, 300)
		go func() {
			buf := make([]byte, 300)
			for {
				if _, err := io.ReadFull(far, buf); err != nil {
					return
				}
				if _, err := far.Write(buf); err != nil {
					return
				}
			}
		}()
		b.ResetTimer()
		var worst time.Duration
		for range b.N {
			begin := time.Now()
			if _, err := near.Write(msg); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(near, msg); err != nil {
				b.Fatal(err)
			}
			worst = max(worst, time.Since(begin))
		}
		b.ReportMetric(float64(worst.Microseconds()), "worst-µs")
	}
	b.Run("plain", func(b *testing.B) {
		x, y := sockets(b)
		run(b, x, y)
		_, _ = x.Close(), y.Close()
	})
	b.Run("idle", func(b *testing.B) {
		agent, host := sessions(b)
		controlled(b, agent, host)
	})
	b.Run("beside bulk", func(b *testing.B) {
		agent, host := sessions(b)
		g, h := flow(b, agent, host)
		go func() { _, _ = io.Copy(g, zeroReader{}) }() // agent to host, as the messages go
		go func() { _, _ = io.Copy(io.Discard, h) }()
		controlled(b, agent, host)
		_ = g.Reset()
	})
}

// controlled sends control messages and waits for their answers.
func controlled(b *testing.B, near, far Session) {
	frame, err := wire.EncodeFrame(&wire.Frame{Table: "word"})
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		for {
			if _, err := far.Control().Read(b.Context()); err != nil {
				return
			}
			if rest := far.Control().Try(frame); len(rest) > 0 {
				_ = far.Control().Write(b.Context(), rest)
			}
		}
	}()
	b.ResetTimer()
	var worst time.Duration
	for range b.N {
		begin := time.Now()
		if rest := near.Control().Try(frame); len(rest) > 0 {
			if err := near.Control().Write(b.Context(), rest); err != nil {
				b.Fatal(err)
			}
		}
		if _, err := near.Control().Read(b.Context()); err != nil {
			b.Fatal(err)
		}
		worst = max(worst, time.Since(begin))
	}
	b.ReportMetric(float64(worst.Microseconds()), "worst-µs")
}

func BenchmarkOpen(b *testing.B) {
	agent, host := sessions(b)
	go func() {
		for {
			st, err := agent.Accept(b.Context())
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(io.Discard, st)
				_ = st.Close()
			}()
		}
	}()
	b.ResetTimer()
	for range b.N {
		st, err := host.Open(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		_ = st.CloseWrite()
		if _, err := st.Read(make([]byte, 1)); err != io.EOF {
			b.Fatal(err)
		}
		_ = st.Close()
	}
}
