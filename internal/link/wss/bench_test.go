// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"crypto/tls"
	"io"
	"net"
	"testing"

	"github.com/fairlead/fairlead/internal/link"
)

const benchChunk = 64 << 10

// BenchmarkThroughput moves bytes from agent to host and from host to agent, over plain
// TLS and over a flow of a link. The ratio is of the bytes per second.
func BenchmarkThroughput(b *testing.B) {
	for _, toHost := range []bool{true, false} {
		name := "ToGuest"
		if toHost {
			name = "ToHost"
		}
		b.Run(name, func(b *testing.B) {
			var rates [2]float64
			for i, open := range []func(*testing.B) (agent, host io.ReadWriter){plainTLS, flow} {
				agent, host := open(b)
				if toHost {
					rates[i] = move(b, agent, host)
				} else {
					rates[i] = move(b, host, agent)
				}
			}
			b.ReportMetric(rates[0]/1e6, "tls-MB/s")
			b.ReportMetric(rates[1]/1e6, "wss-MB/s")
			b.ReportMetric(rates[1]/rates[0], "ratio")
		})
	}
}

// move sends b.N chunks and returns the bytes per second.
func move(b *testing.B, from io.Writer, to io.Reader) float64 {
	b.Helper()
	chunk := make([]byte, benchChunk)
	go func() {
		for range b.N {
			if _, err := from.Write(chunk); err != nil {
				return
			}
		}
	}()
	before := b.Elapsed()
	if _, err := io.CopyN(io.Discard, to, int64(b.N)*benchChunk); err != nil {
		b.Fatal(err)
	}
	return float64(b.N) * benchChunk / (b.Elapsed() - before).Seconds()
}

func plainTLS(b *testing.B) (agent, host io.ReadWriter) {
	b.Helper()
	ca := newAuthority(b, "bench")
	certFile, keyFile := ca.issue(b, localhost())
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		b.Fatal(err)
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = ln.Close() })
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := ln.Accept()
		if err == nil {
			_ = c.(*tls.Conn).Handshake()
			accepted <- c
		}
	}()
	c, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{RootCAs: poolOf(readBundle(b, ca)), ServerName: "localhost", MinVersion: tls.VersionTLS13})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	far := <-accepted
	b.Cleanup(func() { _ = far.Close() })
	return c, far
}

func flow(b *testing.B) (agent, host io.ReadWriter) {
	b.Helper()
	r := start(b, newAuthority(b, "bench"), nil)
	hs, as := r.connect(r.dialer(nil))
	accepted := make(chan link.Stream, 1)
	go func() {
		st, err := as.Accept(b.Context())
		if err == nil {
			var first [1]byte
			_, _ = st.Read(first[:])
			accepted <- st
		}
	}()
	st, err := hs.Connect(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	if _, err := st.Write([]byte{0}); err != nil {
		b.Fatal(err)
	}
	return <-accepted, st
}
