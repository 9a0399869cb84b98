// SPDX-License-Identifier: Apache-2.0

package peertest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// Receiver is a peer of the vtunnel sink. It decodes messages as the real peers do,
// and keeps one listener for each protocol and port, as wsl-proxy does.
type Receiver struct {
	t                testing.TB
	network, address string
	listen           func(network, address string) (net.Listener, error)

	mu    sync.Mutex
	l     net.Listener
	conns map[net.Conn]struct{}
	raw   []string // messages in the order in which they were done
	open  map[string]string
	lost  []string // listeners that were replaced: nobody can close them any more
	deaf  bool
	slow  time.Duration
	wg    sync.WaitGroup
}

// PortMapping is a message. It has the fields by which the peers decode, with the keys of Docker's
// types, which match in any case; ours must be exact.
type PortMapping struct {
	Remove       bool                     `json:"remove"`
	Ports        map[string][]PortBinding `json:"ports"`
	ConnectAddrs []struct {
		Network string `json:"network"`
		Addr    string `json:"addr"`
	} `json:"connectAddrs"`
}

// PortBinding is a host address of a PortMapping.
type PortBinding struct {
	HostIP   string `json:"HostIp"`
	HostPort string `json:"HostPort"`
}

// NewReceiver starts a receiver at an address; listen is net.Listen or another
// namespace's. It ends with the test.
func NewReceiver(t testing.TB, network, address string, listen func(network, address string) (net.Listener, error)) *Receiver {
	t.Helper()
	r := &Receiver{t: t, network: network, address: address, listen: listen}
	r.Start()
	t.Cleanup(r.Stop)
	return r
}

// URL is the sink's URL of the receiver.
func (r *Receiver) URL() string {
	if r.network == "unix" {
		return "unix://" + r.address
	}
	return "tcp://" + r.address
}

// Start starts the receiver without any entry.
func (r *Receiver) Start() {
	l, err := r.listen(r.network, r.address)
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.l, r.address = l, l.Addr().String()
	r.open, r.conns, r.raw, r.lost = make(map[string]string), make(map[net.Conn]struct{}), nil, nil
	r.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			if r.l != l {
				_ = c.Close()
			} else {
				r.conns[c] = struct{}{}
				r.wg.Go(func() { r.handle(c) })
			}
			r.mu.Unlock()
		}
	})
}

// Stop ends the receiver as the end of its process does.
func (r *Receiver) Stop() {
	r.mu.Lock()
	if r.l != nil {
		_ = r.l.Close()
		r.l = nil
	}
	for c := range r.conns {
		_ = c.Close()
	}
	r.mu.Unlock()
	r.wg.Wait()
}

func (r *Receiver) handle(c net.Conn) {
	r.mu.Lock()
	deaf := r.deaf
	r.mu.Unlock()
	if deaf {
		return // open until Stop
	}
	defer func() {
		r.mu.Lock()
		delete(r.conns, c)
		r.mu.Unlock()
		_ = c.Close()
	}()
	var raw bytes.Buffer
	var m PortMapping
	d := json.NewDecoder(io.TeeReader(c, &raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
			r.t.Errorf("received %q: %v", raw.String(), err)
		}
		return
	}
	r.mu.Lock()
	slow := r.slow
	r.mu.Unlock()
	time.Sleep(slow)
	r.Exec(raw.String(), m)
}

// Slow makes each message take a time, as netsh does.
func (r *Receiver) Slow(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slow = d
}

// Exec carries a message out.
func (r *Receiver) Exec(raw string, m PortMapping) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.raw = append(r.raw, raw)
	for key, bindings := range m.Ports {
		_, protocol, ok := strings.Cut(key, "/")
		if !ok || protocol != "tcp" && protocol != "udp" {
			r.t.Errorf("port %q in %s", key, raw)
		}
		for _, b := range bindings {
			n, err := strconv.ParseUint(b.HostPort, 10, 16)
			ip, aerr := netip.ParseAddr(b.HostIP)
			if err != nil || aerr != nil {
				r.t.Errorf("binding %+v in %s", b, raw)
				continue
			}
			to := "upstream"
			if m.ConnectAddrs != nil {
				to = ""
				for _, a := range m.ConnectAddrs {
					// The first of the binding's family, at the host's port.
					if cidr, _, err := net.ParseCIDR(a.Addr); err != nil || a.Network != "ip+net" {
						r.t.Errorf("connect address %+v in %s", a, raw)
					} else if (cidr.To4() != nil) == ip.Is4() && to == "" {
						to = net.JoinHostPort(cidr.String(), b.HostPort)
					}
				}
			}
			slot := fmt.Sprintf("%d/%s", n, protocol)
			if m.Remove {
				delete(r.open, slot)
				continue
			}
			value := b.HostIP + " to " + to
			if old, ok := r.open[slot]; ok && old != value {
				r.lost = append(r.lost, slot+" "+old)
			}
			r.open[slot] = value
		}
	}
}

// State returns what is open, sorted, and then the listeners that were lost.
func (r *Receiver) State() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := []string{}
	for k, v := range r.open {
		all = append(all, k+" "+v)
	}
	slices.Sort(all)
	return append(all, r.lost...)
}

// Messages returns the messages since the start, as they came.
func (r *Receiver) Messages() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.raw)
}

// Deafen makes the receiver accept connections and read nothing, or ends that.
func (r *Receiver) Deafen(deaf bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deaf = deaf
}

// Hangup closes the connections that are open, and returns how many there were.
func (r *Receiver) Hangup() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		_ = c.Close()
	}
	return len(r.conns)
}

// Want waits until the state is this.
func (r *Receiver) Want(want ...string) {
	r.t.Helper()
	wait.Until(r.t, fmt.Sprintf("the peer has %q", want), func() error {
		if got := r.State(); !slices.Equal(got, want) {
			return fmt.Errorf("it has %q", got)
		}
		return nil
	})
}
