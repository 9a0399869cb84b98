// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"bufio"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// secrets is a key log that keeps the first traffic secret of one side.
type secrets struct {
	mu     sync.Mutex
	of     string // CLIENT or SERVER
	secret []byte
}

func (s *secrets) get() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.secret
}

func (s *secrets) Write(line []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := strings.Fields(string(line)); len(f) == 3 && f[0] == s.of+"_TRAFFIC_SECRET_0" {
		s.secret, _ = hex.DecodeString(f[2])
	}
	return len(line), nil
}

// flooder is a side of TLS that requests key updates and reads no answer.
type flooder struct {
	secret   []byte
	sequence uint64
}

// expand is HKDF-Expand-Label (RFC 8446, section 7.1), without context.
func expand(secret []byte, label string, n int) []byte {
	label = "tls13 " + label
	info := binary.BigEndian.AppendUint16(nil, uint16(n))
	info = append(append(append(info, byte(len(label))), label...), 0)
	key, err := hkdf.Expand(sha256.New, secret, string(info), n)
	if err != nil {
		panic(err)
	}
	return key
}

// seal returns one record, with the type of its content.
func (f *flooder) seal(kind byte, content []byte) []byte {
	block, err := aes.NewCipher(expand(f.secret, "key", 16))
	if err != nil {
		panic(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	nonce := expand(f.secret, "iv", 12)
	binary.BigEndian.PutUint64(nonce[4:], binary.BigEndian.Uint64(nonce[4:])^f.sequence)
	f.sequence++
	header := []byte{23, 3, 3, 0, 0}
	binary.BigEndian.PutUint16(header[3:], uint16(len(content)+1+aead.Overhead()))
	return aead.Seal(header, nonce, append(content[:len(content):len(content)], kind), header)
}

// updates returns records that request n key updates. A byte of data is before some of them,
// because a server allows 16 records in a row without.
func (f *flooder) updates(n int) (b []byte) {
	for i := range n {
		if i%8 == 0 {
			b = append(b, f.seal(23, []byte("x"))...)
		}
		b = append(b, f.seal(22, []byte{24, 0, 0, 1, 1})...)
		f.secret, f.sequence = expand(f.secret, "traffic upd", 32), 0
	}
	return b
}

// flood connects, sends begin, and requests key updates until the server takes no more: it
// is then stuck in the answer to one of them, as the client reads none.
func flood(t *testing.T, r *rig, begin string) net.Conn {
	t.Helper()
	raw, err := net.Dial("tcp", r.ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = raw.Close() })
	log := &secrets{of: "CLIENT"}
	c := tls.Client(raw, &tls.Config{
		ServerName: "localhost", RootCAs: poolOf(readBundle(t, r.ca)), MinVersion: tls.VersionTLS13, KeyLogWriter: log,
	})
	if err := c.HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := floodFrom(raw, c, log, begin); err != nil {
		t.Fatal(err)
	}
	return raw
}

// floodFrom sends begin and then key updates below c, until raw is closed.
func floodFrom(raw net.Conn, c *tls.Conn, log *secrets, begin string) error {
	if suite := c.ConnectionState().CipherSuite; suite != tls.TLS_AES_128_GCM_SHA256 {
		return fmt.Errorf("cipher suite %s", tls.CipherSuiteName(suite))
	}
	f := &flooder{secret: log.get()}
	if _, err := raw.Write(f.seal(23, []byte(begin))); err != nil {
		return err
	}
	go func() { _, _ = io.Copy(io.Discard, raw) }()
	go func() {
		for range 100 {
			if _, err := raw.Write(f.updates(8)); err != nil {
				return
			}
		}
	}()
	return nil
}

// stalling is a listener whose connections take few writes.
type stalling struct {
	net.Listener
	stuck chan struct{} // receives once for each connection on which a write is stuck
}

func (l stalling) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return newStalled(c, l.stuck), nil
}

// stalledConn is a connection to a peer that reads nothing, as if its window were full after
// some writes. Writes are then stuck until it is closed.
type stalledConn struct {
	net.Conn
	stuck  chan struct{}
	writes atomic.Int64
	once   sync.Once
	closed chan struct{}
}

func newStalled(c net.Conn, stuck chan struct{}) *stalledConn {
	return &stalledConn{Conn: c, stuck: stuck, closed: make(chan struct{})}
}

func (c *stalledConn) Write(b []byte) (int, error) {
	if n := c.writes.Add(1); n > 300 {
		if n == 301 {
			c.stuck <- struct{}{}
		}
		<-c.closed
		return 0, net.ErrClosed
	}
	return c.Conn.Write(b)
}

func (c *stalledConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// serveStalling runs another server of r at a listener whose connections take few writes.
func (r *rig) serveStalling(t *testing.T, change func(*ServerOptions)) (stuck chan struct{}) {
	t.Helper()
	o := r.server.o
	change(&o)
	s, err := NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.server, stuck = s, make(chan struct{}, 100)
	r.serveAt(stalling{ln, stuck})
	return stuck
}

// Peers that read nothing and have the server answer key updates hold up neither others nor
// the server's end.
func TestStuckPeersHoldUpNobody(t *testing.T) {
	link := "GET " + pathLink + "a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" +
		"Sec-WebSocket-Protocol: " + protocol + "\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OTAxMjM0NQ==\r\n\r\n" +
		"\x82\xff\x00\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00" + // of a long message, which is not masked
		wire.Magic + "\x00\x00\x0f\x00" // a hello of 3,840 bytes
	for name, begin := range map[string]string{
		"in a header":    "GET / HTTP/1.1\r\nX: ",
		"in a handshake": link,
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, newAuthority(t, "test"), nil)
			r.stop()
			stuck := r.serveStalling(t, func(o *ServerOptions) { o.maxUnproved = 2 })
			for range 2 {
				flood(t, r, begin)
				wait.For(t, "a write is stuck", stuck)
			}
			for range 2 { // in place of these
				host, agent := r.connect(r.dialer(nil))
				carry(t, host, agent, []byte("hello"))
				_, _ = agent.Close(), host.Close()
			}
			flood(t, r, begin)
			wait.For(t, "a write is stuck", stuck)
			r.stop()
		})
	}
}

// A server that nobody verified yet, and that does the same, does not hold up an agent: the
// end of an attempt ends its connections.
func TestStuckServerHoldsUpNoAgent(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	certFile, keyFile := r.ca.issue(t, localhost())
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	stuck := make(chan struct{}, 1)
	go func() {
		raw, err := ln.Accept()
		if err != nil {
			return
		}
		t.Cleanup(func() { _ = raw.Close() })
		log := &secrets{of: "SERVER"}
		c := tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{pair}, SessionTicketsDisabled: true, KeyLogWriter: log})
		// An answer before its request would end the connection.
		if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
			t.Errorf("request: %v", err)
			return
		}
		if err := floodFrom(raw, c, log, "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"); err != nil {
			t.Error(err)
		}
	}()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := r.dialer(func(o *DialOptions) {
			o.Server = "localhost:" + port
			o.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				c, err := new(net.Dialer).DialContext(ctx, network, address)
				if err != nil {
					return nil, err
				}
				return newStalled(c, stuck), nil
			}
		}).Dial(ctx)
		done <- err
	}()
	wait.For(t, "a write is stuck", stuck)
	cancel()
	if err := wait.For(t, "end of the attempt", done); err == nil {
		t.Error("connected")
	}
}
