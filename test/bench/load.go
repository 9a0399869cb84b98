// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// sockets are open in a namespace until they are closed.
type sockets []int

func (s sockets) close() {
	for _, fd := range s {
		_ = unix.Close(fd)
	}
}

// firstPort is the first that fill takes.
const firstPort = 10000

// fill opens n TCP listeners as fast as one thread can, at 127.0.0.1 and ports
// from first on; in this process's own namespace where s is nil. It says when the last call returned.
func fill(s *netns.Space, n int, first uint16) (fds sockets, ended time.Time, err error) {
	do := func(f func() error) error { return f() }
	if s != nil {
		do = s.Do
	}
	err = do(func() error {
		for i := range n {
			fd, err := listener(first + uint16(i))
			if err != nil {
				return err
			}
			fds = append(fds, fd)
		}
		ended = time.Now()
		return nil
	})
	if err != nil {
		fds.close()
		return nil, ended, fmt.Errorf("listener %d of %d: %w", len(fds), n, err)
	}
	return fds, ended, nil
}

// listener opens a listener in the namespace of the thread.
func listener(p uint16) (fd int, err error) {
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, err
	}
	if err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(p), Addr: [4]byte{127, 0, 0, 1}}); err == nil {
		err = unix.Listen(fd, 1)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("port %d: %w", p, err)
	}
	return fd, nil
}

// tcpKey is the key of a listener that fill opens.
func tcpKey(p uint16) port.Key {
	return port.Key{Protocol: port.TCP, Address: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Port: p}
}

// settled waits until n publications stand at the other end of the link.
func (p *peer) settled(ctx context.Context, n int) (last time.Time, err error) {
	for end := time.Now().Add(readyWithin); ; {
		var has int
		if has, last = p.standing(); has == n {
			return last, nil
		}
		select {
		case err := <-p.lost:
			p.lost <- err
			return last, err
		case <-ctx.Done():
			return last, ctx.Err()
		case <-time.After(time.Millisecond):
		}
		if time.Now().After(end) {
			return last, fmt.Errorf("%d publications stand where %d should, after %v", has, n, readyWithin)
		}
	}
}

// usage is what a process has used so far, and has now.
type usage struct {
	cpu      time.Duration
	switches int // context switches of all threads
	rss      int // bytes
	own      int // of them, what no file backs
	at       time.Time
}

// used reads what a guest's agent has used.
func (g *guest) used() (u usage, err error) {
	pid := g.agent.Process.Pid
	u.at = time.Now()
	if u.cpu, err = processCPU(pid); err != nil {
		return u, err
	}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(tasks) == 0 {
		return u, errors.Join(fmt.Errorf("no tasks of process %d", pid), err)
	}
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			continue // a thread that ended
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 2 {
				continue
			}
			v, _ := strconv.Atoi(f[1])
			switch f[0] {
			case "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:":
				u.switches += v
			case "VmRSS:":
				u.rss = v << 10
			case "RssAnon:":
				u.own = v << 10
			}
		}
	}
	return u, nil
}

// core is the share of a core that was used since before, in percent.
func (u usage) core(before usage) float64 {
	return 100 * (u.cpu - before.cpu).Seconds() / u.at.Sub(before.at).Seconds()
}
