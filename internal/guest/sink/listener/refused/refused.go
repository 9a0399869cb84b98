// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package refused reports who is refused a port because the listener sink holds
// it with a placeholder.
package refused

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
)

// Capability is what a Watcher observes, as kernel.Method names it.
const Capability = "refused-port"

// Bind is an attempt to bind a socket to a watched port.
type Bind struct {
	Cookie   uint64 // of the socket
	Protocol port.Protocol
	Address  netip.AddrPort // that was asked for
	V6Only   bool           // for the IPv6 wildcard: IPv4 was not asked for
	PID      uint32         // 0 if not visible in the agent's pid namespace
	Comm     string         // name of the task, as it chose it: data to be quoted
}

// Watcher reports attempts in one network namespace to bind to ports that are
// watched: they are refused as long as another socket has the address.
type Watcher struct {
	method kernel.Method
	object *kernel.Object
	reader *kernel.Reader

	mu    sync.Mutex
	words map[uint32]uint32 // content of the map of ports
}

func capability() kernel.Capability {
	return kernel.Capability{Name: Capability, Choices: []kernel.Choice{
		{Name: kernel.MethodFentry, Hooks: []string{bpf.RefusedProgTcpRefused, bpf.RefusedProgUdpRefused}},
		{
			Name: kernel.MethodCgroup, Lost: "an attempt is reported before it is refused, and might not be refused",
			Hooks: []string{bpf.RefusedProgBind4Attempt, bpf.RefusedProgBind6Attempt},
		},
	}}
}

// Open attaches, for the network namespace of the calling thread, the first of the
// methods that works (none named: of all), or returns why none does. The caller
// calls Run or Close.
func Open(methods ...string) (*Watcher, error) {
	w := &Watcher{words: make(map[uint32]uint32)}
	if err := w.open(methods); err != nil {
		return nil, fmt.Errorf("observe refused ports: %w", errors.Join(err, w.Close()))
	}
	return w, nil
}

func (w *Watcher) open(methods []string) error {
	netns, err := kernel.NamespaceInode("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	pidns, err := kernel.PIDNamespace()
	if err != nil {
		return err
	}
	w.object, err = kernel.Open(nil, kernel.Config{
		Files:     []kernel.File{bpf.LoadRefused},
		Constants: map[string]any{bpf.RefusedVarNetworkNamespace: netns, bpf.RefusedVarPidNamespace: pidns},
		Maps:      []string{bpf.RefusedMapEvents, bpf.RefusedMapPlaceholders},
		Sizes:     map[string]uint32{bpf.RefusedMapEvents: 64 << 10},
	})
	if err != nil {
		return err
	}
	defer w.object.FinishAttach()
	if w.reader, err = w.object.Reader(bpf.RefusedMapEvents); err != nil {
		return err
	}
	w.method, err = capability().Attach(w.object.Attach, nil, methods)
	return err
}

// Method is the mechanism in use.
func (w *Watcher) Method() kernel.Method { return w.method }

// Watch begins or ends to watch a port. It may be called from any goroutine.
func (w *Watcher) Watch(p uint16, on bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	word, bit := uint32(p/32), uint32(1)<<(p%32)
	bits := w.words[word] &^ bit
	if on {
		bits |= bit
	}
	if err := w.object.Map(bpf.RefusedMapPlaceholders).Put(word, bits); err != nil {
		return fmt.Errorf("watch port %d: %w", p, err)
	}
	w.words[word] = bits
	return nil
}

// Run calls f with each attempt to bind to a watched port. f must not block. Run
// ends with ctx, and returns nil then. It detaches.
func (w *Watcher) Run(ctx context.Context, f func(Bind)) error {
	stop := context.AfterFunc(ctx, func() { _ = w.Close() })
	defer stop()
	for {
		sample, err := w.reader.Read()
		if errors.Is(err, os.ErrClosed) {
			return w.Close()
		}
		var b Bind
		if err == nil {
			b, err = decode(sample)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("observe refused ports: %w", err), w.Close())
		}
		f(b)
	}
}

func decode(sample []byte) (Bind, error) {
	var e bpf.SockEvent
	if err := kernel.DecodeEvent(sample, &e); err != nil {
		return Bind{}, err
	}
	address, err := kernel.Address(e.Family, e.Address)
	if err != nil {
		return Bind{}, fmt.Errorf("event: %w", err)
	}
	return Bind{
		Cookie:   e.Cookie,
		Protocol: port.Protocol(e.Protocol),
		Address:  netip.AddrPortFrom(address, e.Port),
		V6Only:   e.V6only != 0 && address == netip.IPv6Unspecified(),
		PID:      e.Pid,
		Comm:     kernel.Comm(e.Comm),
	}, nil
}

// Close detaches and ends Run. It may be called more than once.
func (w *Watcher) Close() error {
	if w.object == nil {
		return nil
	}
	return w.object.Close()
}
