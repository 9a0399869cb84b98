// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// reflectApart runs an echo server in a process of its own in the guest.
func (r *rig) reflectApart(addr string) {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), reflectVariable+"="+addr)
	cmd.Stderr = os.Stderr
	if err := r.guest.Start(cmd); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

// hashed sends n bytes that seed makes and returns their hash and that of what comes
// back. It calls pace, if not nil, before each read. It closes the connection when
// nothing comes within the limit.
func hashed(c net.Conn, seed uint64, n int64, pace func()) (sent, got [sha256.Size]byte, err error) {
	out, in := sha256.New(), sha256.New()
	done := make(chan error, 1)
	go func() {
		random := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), 1})
		_, err := io.CopyBuffer(io.MultiWriter(c, out), struct{ io.Reader }{io.LimitReader(random, n)}, make([]byte, 64<<10))
		done <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	b := make([]byte, 64<<10)
	for err == nil {
		if pace != nil {
			pace()
		}
		var k int
		_ = c.SetReadDeadline(time.Now().Add(wait.Limit()))
		k, err = c.Read(b)
		in.Write(b[:k])
	}
	if err == io.EOF {
		err = nil
	} else {
		_ = c.Close() // whoever still writes
	}
	err = errors.Join(err, <-done)
	return [sha256.Size]byte(out.Sum(nil)), [sha256.Size]byte(in.Sum(nil)), err
}

// A gibibyte is echoed on 199 flows while one more reads nothing until they are done:
// it delays none of them and loses no data itself.
func TestGibibyteBesideSlowReader(t *testing.T) {
	r := newRig(t).start()
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:7000"))
	r.wantState("tcp 127.0.0.1:7000", "active")
	const total, flows = 1 << 30, 199
	dial := func() net.Conn {
		c, err := r.outside.Dial("tcp", "127.0.0.1:7000")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	slow := dial()
	others := make(chan struct{})
	slowly := make(chan error, 1)
	go func() {
		sent, got, err := hashed(slow, 1<<15, 16<<20, func() { <-others })
		if err == nil && sent != got {
			err = errors.New("what came back is not what went")
		}
		slowly <- err
	}()
	var wg sync.WaitGroup
	for i := range flows {
		c := dial()
		wg.Go(func() {
			sent, got, err := hashed(c, uint64(i), total/flows, nil)
			if err != nil || sent != got {
				t.Errorf("flow %d: intact %t, %v", i, sent == got, err)
			}
		})
	}
	wg.Wait()
	select {
	case err := <-slowly:
		t.Errorf("the slow reader ended before it read: %v", err)
	default:
	}
	close(others)
	if err := <-slowly; err != nil {
		t.Errorf("the slow reader: %v", err)
	}
}

// openFDs counts the descriptors of a process.
func openFDs(t *testing.T, p *process) int {
	t.Helper()
	n, err := fds(p)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Ten thousand concurrent flows work, need a bounded amount of memory, and leave
// nothing behind.
func TestTenThousandFlowsAtOnce(t *testing.T) {
	const n = 10_000
	r := newRig(t).start()
	r.reflectApart("0.0.0.0:7000") // the descriptors of both ends are too many for one process
	r.wantState("tcp 0.0.0.0:7000", "active")
	agent, host := openFDs(t, r.agent), openFDs(t, r.host)
	conns := make([]net.Conn, 0, n)
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	// Each flow answers before the next one starts: those opened faster than a busy
	// machine can serve them are refused after some seconds.
	refused := 0
	err := r.outside.Do(func() error {
		for deadline := time.Now().Add(6 * wait.Limit()); len(conns) < n; {
			// One loopback address has 28,000 ports to come from, some of them in use.
			c, err := (&net.Dialer{Timeout: time.Minute}).Dial("tcp4", "127.0.0.1:7000")
			if err == nil {
				if err = roundTrip(c, fmt.Sprintf("%08d", len(conns))); err == nil {
					conns = append(conns, c)
					continue
				}
				_ = c.Close()
			}
			if refused++; refused > n/100 || time.Now().After(deadline) {
				return fmt.Errorf("connection %d, after %d that were refused: %w", len(conns), refused, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range conns { // all of them live
		if err := roundTrip(c, fmt.Sprintf("%08d", n-i)); err != nil {
			t.Fatalf("connection %d of %d: %v; the host carries %d, the agent has %d descriptors", i, n, err, openFDs(t, r.host), openFDs(t, r.agent))
		}
	}
	for name, p := range map[string]*process{"agent": r.agent, "host": r.host} {
		each := used(t, p).RSS / int64(n)
		t.Logf("the %s holds %d KiB for each of %d flows", name, each>>10, n)
		if limit := int64(48 << 10); each > limit {
			t.Errorf("the %s holds %d KiB for each flow that is idle, want at most %d", name, each>>10, limit>>10)
		}
	}
	for _, c := range conns {
		_ = c.Close()
	}
	wait.Until(t, "descriptors are back", func() error {
		if a, h := openFDs(t, r.agent), openFDs(t, r.host); a > agent || h > host {
			return fmt.Errorf("agent %d of %d, host %d of %d", a, agent, h, host)
		}
		return nil
	})
	_ = echoThrough(t, r, "127.0.0.1:7000")
}
