// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wss"
)

// The ways from an agent that dials its server; TLS, with a connection for each flow, is the
// baseline.
const (
	wayTLS   = "tls"
	wayQueue = "one-queue" // see queue
)

// lateBytes are sent on a flow whose reader is late.
const lateBytes = 64 << 20

func tunnelPart() part {
	modes := []string{wayTLS, wayLink, wayQueue}
	return part{"tunnel", "tunnel", []measure{
		{name: "Tunnel", title: "from the agent to its server, 1 flow", unit: "B/s", modes: modes},
		{name: "Tunnel64", title: "from the agent to its server, 64 flows", unit: "B/s", modes: modes},
		{name: "TunnelLate", title: "round trips of 64 bytes beside a flow of 64 MiB that nobody reads", unit: "1/s", modes: modes},
	}, func(ctx context.Context, b *bench) {
		d := b.lasting(2*time.Second, time.Second, 200*time.Millisecond)
		key, cert := b.certificate()
		for range b.of(3, 1, 1) {
			for _, mode := range modes {
				b.progress("%s", mode)
				for _, flows := range []int{1, 64} {
					name := map[int]string{1: "Tunnel", 64: "Tunnel64"}[flows]
					b.add(name, mode, 0, values{"B/s": b.throughTunnel(ctx, mode, key, cert, flows, d)})
				}
				b.add("TunnelLate", mode, 0, values{"1/s": b.besideLate(ctx, mode, key, cert, d)})
			}
		}
	}}
}

// tunnel opens flows between an agent and its server.
type tunnel struct {
	open func() (agent, server io.ReadWriteCloser)
	end  func()
}

func (b *bench) tunnel(ctx context.Context, mode, key, cert string) tunnel {
	switch mode {
	case wayTLS:
		return plainTunnel(key, cert)
	case wayQueue:
		return queueTunnel(key, cert)
	}
	return linkTunnel(ctx, key, cert)
}

// throughTunnel returns the bytes a second that flows carry at the same time.
func (b *bench) throughTunnel(ctx context.Context, mode, key, cert string, flows int, d time.Duration) float64 {
	t := b.tunnel(ctx, mode, key, cert)
	defer t.end()
	var arrived atomic.Int64
	for range flows {
		agent, server := t.open()
		go send(agent, math.MaxInt64)
		go func() { // until the end of the tunnel
			for buf := make([]byte, bulkBuffer); ; {
				n, err := server.Read(buf)
				arrived.Add(int64(n))
				if err != nil {
					return
				}
			}
		}()
	}
	return rate(&arrived, d)
}

// besideLate returns the round trips a second of one flow, while nobody reads another.
func (b *bench) besideLate(ctx context.Context, mode, key, cert string, d time.Duration) float64 {
	t := b.tunnel(ctx, mode, key, cert)
	defer t.end()
	late, _ := t.open()
	agent, server := t.open()
	go send(late, lateBytes)
	time.Sleep(d) // until it has filled what there is to fill
	go func() { _, _ = io.Copy(server, server) }()
	var trips atomic.Int64
	go func() {
		for buf := make([]byte, smallSize); ; trips.Add(1) {
			if _, err := agent.Write(buf); err != nil {
				return
			}
			if _, err := io.ReadFull(agent, buf); err != nil {
				return
			}
		}
	}()
	return rate(&trips, d)
}

// send writes so many bytes, or fewer if the tunnel ends.
func send(to io.Writer, n int64) {
	for chunk := make([]byte, bulkBuffer); n > 0; n -= int64(len(chunk)) {
		if _, err := to.Write(chunk); err != nil {
			return
		}
	}
}

// rate returns by how much a counter grows in a second.
func rate(n *atomic.Int64, d time.Duration) float64 {
	before, begin := n.Load(), time.Now()
	time.Sleep(d)
	return float64(n.Load()-before) / time.Since(begin).Seconds()
}

// plainTunnel has a TLS connection for each flow.
func plainTunnel(key, cert string) tunnel {
	ln := must(tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{must(tls.LoadX509KeyPair(cert, key))}, MinVersion: tls.VersionTLS13}))
	closers := []io.Closer{ln}
	return tunnel{
		open: func() (agent, server io.ReadWriteCloser) {
			accepted := make(chan *tls.Conn, 1)
			go func() {
				c, err := ln.Accept()
				if err != nil {
					close(accepted)
					return
				}
				server := c.(*tls.Conn)
				_ = server.Handshake() // the client has its error, too
				accepted <- server
			}()
			c := must(tls.Dial("tcp", ln.Addr().String(), &tls.Config{RootCAs: pool(cert), ServerName: "localhost", MinVersion: tls.VersionTLS13}))
			far := <-accepted
			closers = append(closers, c.NetConn(), far.NetConn()) // that of TLS waits for a peer that does not read
			return c, far
		},
		end: func() { closeAll(closers) },
	}
}

func pool(cert string) *x509.CertPool {
	p := x509.NewCertPool()
	p.AppendCertsFromPEM(must(os.ReadFile(cert)))
	return p
}

func closeAll(all []io.Closer) {
	for _, c := range all {
		_ = c.Close()
	}
}

// linkTunnel is a wss link of fairlead.
func linkTunnel(ctx context.Context, key, cert string) tunnel {
	ctx, cancel := context.WithCancel(ctx)
	options := func(role link.Role) link.Options {
		return link.Options{Role: role, Identity: link.NewIdentity(), Name: string(role), Logger: slog.New(slog.DiscardHandler)}
	}
	secret := must(link.NewToken(strings.Repeat("bench", 8)))
	s := must(wss.NewServer(wss.ServerOptions{
		Link: options(link.RoleHost), Guests: []string{"a"}, CertFile: cert, KeyFile: key, BundleFile: cert,
		Token: func(string) (link.Token, error) { return secret, nil },
	}))
	ln := must(net.Listen("tcp", "127.0.0.1:0"))
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(ctx, ln)
	}()
	o := wss.DialOptions{
		Link: options(link.RoleAgent), Server: fmt.Sprintf("localhost:%d", ln.Addr().(*net.TCPAddr).Port), Name: "a", Pin: s.Pin(),
		Proxy: func(*url.URL) (*url.URL, error) { return nil, nil },
	}
	o.Link.Token = secret
	agent := must(wss.NewDialer(o).Dial(ctx))
	host := must(s.Session(ctx, "a"))
	return tunnel{
		open: func() (io.ReadWriteCloser, io.ReadWriteCloser) {
			near := must(host.Connect(ctx))
			must(near.Write([]byte{0})) // the first byte opens it
			far := must(agent.Accept(ctx))
			must(io.ReadFull(far, make([]byte, 1)))
			return far, near
		},
		end: func() {
			closeAll([]io.Closer{agent, host})
			cancel()
			<-served
		},
	}
}

// queue is one end of a tunnel as an older library had it: one connection with all flows, and one
// goroutine that hands each message to the reader of its flow before it reads the next. Nothing
// tells the sender of a flow to wait.
type queue struct {
	conn  io.ReadWriteCloser
	write sync.Mutex
	mu    sync.Mutex
	flows map[uint32]*io.PipeWriter
}

// A message of a queue has the number of its flow and its length before it, in so many bytes.
const headerSize = 8

func newQueue(conn io.ReadWriteCloser) *queue {
	q := &queue{conn: conn, flows: make(map[uint32]*io.PipeWriter)}
	go q.run()
	return q
}

func (q *queue) run() {
	for header, buf := make([]byte, headerSize), make([]byte, bulkBuffer); ; {
		if _, err := io.ReadFull(q.conn, header); err != nil {
			return
		}
		message := buf[:binary.BigEndian.Uint32(header[4:])]
		if _, err := io.ReadFull(q.conn, message); err != nil {
			return
		}
		q.mu.Lock()
		to := q.flows[binary.BigEndian.Uint32(header)]
		q.mu.Unlock()
		if _, err := to.Write(message); err != nil {
			return
		}
	}
}

func (q *queue) close() {
	_ = q.conn.Close()
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, to := range q.flows {
		_ = to.Close()
	}
}

// queueFlow is a flow of a queue.
type queueFlow struct {
	*io.PipeReader

	q  *queue
	id uint32
}

func (q *queue) flow(id uint32) queueFlow {
	r, w := io.Pipe()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.flows[id] = w
	return queueFlow{r, q, id}
}

// Write sends at most bulkBuffer bytes.
func (f queueFlow) Write(b []byte) (int, error) {
	header := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, f.id), uint32(len(b)))
	f.q.write.Lock()
	defer f.q.write.Unlock()
	_, err := f.q.conn.Write(append(header, b...))
	return len(b), err
}

func queueTunnel(key, cert string) tunnel {
	plain := plainTunnel(key, cert)
	near, far := plain.open()
	agent, server, next := newQueue(near), newQueue(far), uint32(0)
	return tunnel{
		open: func() (io.ReadWriteCloser, io.ReadWriteCloser) {
			next++
			return agent.flow(next), server.flow(next)
		},
		end: func() {
			plain.end()
			agent.close()
			server.close()
		},
	}
}

// certificate makes a certificate for localhost that signs itself, and returns the files with its
// key and with it.
func (b *bench) certificate() (key, cert string) {
	secret := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	dir := b.tempDir()
	key, cert = filepath.Join(dir, "key.pem"), filepath.Join(dir, "cert.pem")
	for file, block := range map[string]pem.Block{
		key:  {Type: "PRIVATE KEY", Bytes: must(x509.MarshalPKCS8PrivateKey(secret))},
		cert: {Type: "CERTIFICATE", Bytes: must(x509.CreateCertificate(rand.Reader, template, template, &secret.PublicKey, secret))},
	} {
		check(os.WriteFile(file, pem.EncodeToMemory(&block), 0o600))
	}
	return key, cert
}
