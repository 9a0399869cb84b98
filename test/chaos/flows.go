// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/test/kit/netns"
)

// server sends each client a length, so many bytes and their checksum.
type server struct{ net.Listener }

func newServer(in *netns.Space, at netip.AddrPort) (*server, error) {
	network := "tcp4"
	if at.Addr().Is6() {
		network = "tcp6"
	}
	l, err := in.Listen(network, at.String())
	if err != nil {
		return nil, err
	}
	s := &server{l}
	go s.serve()
	return s, nil
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
	body := make([]byte, 1+rand.IntN(1<<18))
	for i := range body {
		body[i] = byte(rand.Uint32())
	}
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

func (s *server) close() { _ = s.Close() }

// flows are clients outside that connect to what the host shows, all the time.
type flows struct {
	outside            *netns.Space
	done               chan struct{}
	wg                 sync.WaitGroup
	complete, cut, bad atomic.Int64
}

func newFlows(outside *netns.Space) *flows {
	return &flows{outside: outside, done: make(chan struct{})}
}

func (f *flows) start(map[netip.AddrPort]*server) {
	for range 4 {
		f.wg.Go(func() {
			for {
				select {
				case <-f.done:
					return
				case <-time.After(10 * time.Millisecond):
				}
				f.one()
			}
		})
	}
}

func (f *flows) stop() {
	close(f.done)
	f.wg.Wait()
}

// one makes a flow to a random port that is shown.
func (f *flows) one() {
	shown, err := listening(f.outside)
	if err != nil || len(shown) == 0 {
		return
	}
	var at netip.AddrPort
	for at = range shown {
		break
	}
	c, err := f.outside.Dial("tcp", at.String())
	if err != nil {
		return // it has gone
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	switch err := receive(c); {
	case err == nil:
		f.complete.Add(1)
	case errors.Is(err, errWrong), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, os.ErrDeadlineExceeded):
		f.bad.Add(1)
		fmt.Fprintf(os.Stderr, "flow of %s: %v\n", at, err)
	default:
		f.cut.Add(1)
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

// listening reads from the kernel which TCP addresses of a namespace listen, as far as
// they are those of this test.
func listening(in *netns.Space) (map[netip.AddrPort]bool, error) {
	out := map[netip.AddrPort]bool{}
	err := in.Do(func() error {
		for _, file := range []string{"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"} {
			b, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			for _, line := range strings.Split(string(b), "\n")[1:] {
				if f := strings.Fields(line); len(f) > 3 && f[3] == "0A" {
					if a, ok := parse(f[1]); ok && a.Port() >= firstPort && a.Port() < firstPort+2000 {
						out[a] = true
					}
				}
			}
		}
		return nil
	})
	return out, err
}

// parse reads an address of /proc/net/tcp: words of the machine's order, in hexadecimal.
func parse(s string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	n, err2 := strconv.ParseUint(port, 16, 16)
	if err != nil || err2 != nil {
		return netip.AddrPort{}, false
	}
	for i := 0; i+4 <= len(b); i += 4 {
		slices.Reverse(b[i : i+4])
	}
	a, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a, uint16(n)), ok
}
