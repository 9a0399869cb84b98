// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// churn opens and closes sockets of all kinds at random in a namespace.
type churn struct {
	stop chan struct{}
	wg   sync.WaitGroup
	mu   sync.Mutex
	fds  []int // open when it was stopped

	changes atomic.Int64
}

// startChurn runs workers until quiet. base is the first of 100 ports for each.
func startChurn(t testing.TB, s *space, seed uint64, workers, base int, pause time.Duration) *churn {
	c := &churn{stop: make(chan struct{})}
	for w := range workers {
		rng := rand.New(rand.NewPCG(seed, uint64(w)))
		c.wg.Go(func() {
			err := s.Do(func() error {
				open := map[int]int{}
				for {
					select {
					case <-c.stop:
						c.mu.Lock()
						defer c.mu.Unlock()
						for _, fd := range open {
							c.fds = append(c.fds, fd)
						}
						return nil
					default:
					}
					p := base + 100*w + rng.IntN(40)
					if fd, ok := open[p]; ok {
						_ = unix.Close(fd)
						delete(open, p)
					} else if fd, err := randomSocket(rng, p); err == nil {
						open[p] = fd
					}
					c.changes.Add(1)
					if pause > 0 {
						time.Sleep(time.Duration(rng.Int64N(int64(pause))))
					}
				}
			})
			if err != nil {
				t.Error("churn:", err)
			}
		})
	}
	t.Cleanup(func() { c.close() })
	return c
}

// passes waits until n more sockets were opened or closed.
func (c *churn) passes(t testing.TB, n int64) {
	t.Helper()
	want := c.changes.Load() + n
	wait.Until(t, "the churn goes on", func() error {
		if got := c.changes.Load(); got < want {
			return fmt.Errorf("%d changes, want %d", got, want)
		}
		return nil
	})
}

// quiet ends the churn and leaves open what is open.
func (c *churn) quiet() {
	select {
	case <-c.stop:
	default:
		close(c.stop)
	}
	c.wg.Wait()
}

func (c *churn) close() {
	c.quiet()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, fd := range c.fds {
		_ = unix.Close(fd)
	}
	c.fds = nil
}

func randomSocket(rng *rand.Rand, port int) (fd int, err error) {
	udp, v6 := rng.IntN(3) == 0, rng.IntN(2) == 0
	kind := unix.SOCK_STREAM | unix.SOCK_CLOEXEC
	if udp {
		kind = unix.SOCK_DGRAM | unix.SOCK_CLOEXEC
	}
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	protocol := 0
	if !udp && rng.IntN(4) == 0 {
		protocol = kernels.MPTCP()
	}
	if fd, err = unix.Socket(family, kind, protocol); err != nil {
		return -1, err
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	if !udp {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	var sa unix.Sockaddr
	if v6 {
		a := &unix.SockaddrInet6{Port: port}
		if rng.IntN(2) == 0 {
			a.Addr[15] = 1
		} else if rng.IntN(2) == 0 {
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
		}
		sa = a
	} else {
		a := &unix.SockaddrInet4{Port: port}
		if rng.IntN(2) == 0 {
			a.Addr = [4]byte{127, 0, 0, byte(1 + rng.IntN(3))}
		}
		sa = a
	}
	if err = unix.Bind(fd, sa); err != nil {
		return fd, err
	}
	if !udp && rng.IntN(8) > 0 { // now and then it is bound only
		err = unix.Listen(fd, 8)
	}
	return fd, err
}

// agree waits until what the agent shows is what ss says.
func (r *rig) agree() {
	r.t.Helper()
	r.eventually("ls and ss agree", func() error {
		truth, err := r.guest.truth()
		if err != nil {
			return err
		}
		l, err := r.list()
		if err != nil {
			return err
		}
		if !l.Ready() {
			return fmt.Errorf("the agent is not ready")
		}
		if got := shown(l); !slices.Equal(truth, got) {
			return fmt.Errorf("ss: %q\nls: %q", truth, got)
		}
		return nil
	})
}

func TestStartUnderChurn(t *testing.T) {
	r := newRig(t)
	n := rounds.Of(t, "FAIRLEAD_STARTS", 200)
	for i := range n {
		c := startChurn(t, r.guest, uint64(i), 3, 20000, 0)
		time.Sleep(time.Duration(i%10) * time.Millisecond)
		r.startAgent()
		r.eventually("the agent answers", func() error { _, err := r.list(); return err })
		c.quiet()
		r.agree()
		c.close()
		r.agree()
		r.agent.Kill()
		if t.Failed() {
			t.Fatalf("start %d of %d", i+1, n)
		}
	}
}
