// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// server sends each client a length, so many bytes and their checksum.
type server struct{ net.Listener }

// packetServer answers each datagram, which it repeats, with so many bytes and a checksum.
type packetServer struct{ net.PacketConn }

// serve starts a server in the guest.
func serve(in *netns.Space, e endpoint) (io.Closer, error) {
	family := "4"
	if e.Addr().Is6() {
		family = "6"
	}
	if e.network == "udp" {
		c, err := in.ListenPacket("udp"+family, e.AddrPort.String())
		if err != nil {
			return nil, err
		}
		s := &packetServer{c}
		go s.serve()
		return s, nil
	}
	l, err := in.Listen("tcp"+family, e.AddrPort.String())
	if err != nil {
		return nil, err
	}
	s := &server{l}
	go s.serve()
	return s, nil
}

func (s *packetServer) serve() {
	b := make([]byte, 1500)
	for {
		n, from, err := s.ReadFrom(b)
		if err != nil {
			return
		}
		body := append(slices.Clone(b[:n]), random(rand.IntN(4096))...)
		_, _ = s.WriteTo(binary.BigEndian.AppendUint32(body, crc32.ChecksumIEEE(body)), from)
	}
}

func random(n int) []byte {
	var seed [32]byte
	binary.BigEndian.PutUint64(seed[:], rand.Uint64())
	b := make([]byte, n)
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
	return b
}

func (s *server) serve() {
	for {
		c, err := s.Accept()
		if err != nil {
			return
		}
		go send(c)
	}
}

// send sends one message in pieces, so that faults meet it half-way. A server that fails
// resets its client.
func send(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0)
	body := random(1 + rand.IntN(1<<18))
	m := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	m = append(m, body...)
	m = binary.BigEndian.AppendUint32(m, crc32.ChecksumIEEE(body))
	for piece := range slices.Chunk(m, 1<<14) {
		if _, err := c.Write(piece); err != nil {
			_ = c.Close()
			return
		}
		time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
	}
	_ = c.(*net.TCPConn).SetLinger(-1)
	_ = c.(*net.TCPConn).CloseWrite()
	_, _ = io.Copy(io.Discard, c)
	_ = c.Close()
}

// flows are clients outside that connect to what the host shows, all the time.
type flows struct {
	outside  *netns.Space
	patience time.Duration
	done     chan struct{}
	wg       sync.WaitGroup
	mu       sync.Mutex
	tallies  map[string]*tally // by network
}

func newFlows() *flows {
	return &flows{done: make(chan struct{}), tallies: map[string]*tally{"tcp": {}, "udp": {}}}
}

func (f *flows) start() {
	for range 4 {
		f.wg.Go(func() {
			for {
				select {
				case <-f.done:
					return
				case <-time.After(10 * time.Millisecond):
				}
				began := time.Now()
				shown, err := listening(f.outside)
				rest(began)
				if err == nil {
					f.one(shown)
				}
			}
		})
	}
}

// stop ends the clients and returns what they met.
func (f *flows) stop() (tcp, udp tally) {
	close(f.done)
	f.wg.Wait()
	return *f.tallies["tcp"], *f.tallies["udp"]
}

// one makes a flow to a random port that is shown and that no engine has.
func (f *flows) one(shown endpoints) {
	var e endpoint
	for e = range shown {
		if e.Port() < enginePort || e.Port() >= rulePort {
			break
		}
		e = endpoint{}
	}
	if e.network == "" {
		return
	}
	c, err := f.outside.Dial(e.network, e.AddrPort.String())
	if err != nil {
		return // it has gone
	}
	defer func() { _ = c.Close() }()
	if e.network == "udp" {
		err = ask(c)
	} else {
		_ = c.SetDeadline(time.Now().Add(f.patience))
		err = receive(c)
	}
	f.count(e, err)
}

func (f *flows) count(e endpoint, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.tallies[e.network]
	wrong := errors.Is(err, errWrong)
	if e.network == "tcp" {
		wrong = wrong || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, os.ErrDeadlineExceeded)
	}
	switch {
	case err == nil:
		t.Complete++
	case wrong:
		t.Wrong++
		fmt.Fprintf(os.Stderr, "%s flow of %s: %v\n", time.Now().Format("15:04:05.000"), e, err)
	default:
		t.Cut++
	}
}

// ask sends a datagram and reads its answer. Those of an earlier client that had the same
// port are passed over.
func ask(c net.Conn) error {
	question := binary.BigEndian.AppendUint64(nil, rand.Uint64())
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write(question); err != nil {
		return err
	}
	b := make([]byte, 1<<16)
	for {
		n, err := c.Read(b)
		if err != nil {
			return err
		}
		end := n - crc32.Size
		if end < len(question) || binary.BigEndian.Uint32(b[end:n]) != crc32.ChecksumIEEE(b[:end]) {
			return errWrong
		}
		if bytes.HasPrefix(b, question) {
			return nil
		}
	}
}

var errWrong = errors.New("wrong checksum, or more than was sent")

// receive reads one message to its end.
func receive(c io.Reader) error {
	r := bufio.NewReader(c)
	var n [4]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return err
	}
	body := make([]byte, binary.BigEndian.Uint32(n[:]))
	if _, err := io.ReadFull(r, body); err != nil {
		return err
	}
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return err
	}
	if binary.BigEndian.Uint32(n[:]) != crc32.ChecksumIEEE(body) {
		return errWrong
	}
	switch _, err := r.ReadByte(); {
	case errors.Is(err, io.EOF):
		return nil
	case err == nil:
		return errWrong
	default:
		return err
	}
}
